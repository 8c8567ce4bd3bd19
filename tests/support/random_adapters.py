"""Adapters with random numbers, for tests."""

import jax

import ling3


def random_adapter(model, size=0.3, rank=2, seed=1, but=()):
    """An adapter of every matrix, lm_head too, `but` those of such names, that changes logits by their size."""
    targets = rf"(?!.*({'|'.join(but) or '$^'})).*"
    adapter = ling3.new_adapter(model, rank=rank, key=jax.random.key(0), targets=targets, use_rslora=True)
    leaves, tree = jax.tree.flatten(adapter)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [size * jax.random.normal(key, x.shape) * x.shape[-1] ** -0.5 for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)
