"""From logits to the next token: greedy, or drawn after temperature, top-k, top-p and min-p."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Key


class Sampling(eqx.Module):
    """How each row of a batch is sampled. A row's key is its own, so its draws do not depend on its neighbours."""

    temperature: Float32[Array, " batch"]  # 0: greedy
    top_k: Int32[Array, " batch"]  # keep the k likeliest; the vocabulary's size keeps all
    top_p: Float32[Array, " batch"]  # keep the likeliest that together reach p; 1 keeps all
    min_p: Float32[Array, " batch"]  # keep what is at least min_p times as likely as the likeliest; 0 keeps all
    key: Key[Array, " batch"]

    @staticmethod
    def uniform(
        batch: int, vocab: int, *, temperature: float, top_k: int | None, top_p: float, min_p: float, seed: int
    ) -> "Sampling":
        """The same parameters for every row; row b draws from seed + b. Raises ValueError on senseless values."""
        problems = [
            f"{name} is {value}, expected {expected}"
            for name, value, fine, expected in (
                ("temperature", temperature, math.isfinite(temperature) and temperature >= 0, "a finite number >= 0"),
                ("top_k", top_k, top_k is None or top_k >= 1, "a whole number >= 1, or None for no limit"),
                ("top_p", top_p, 0 < top_p <= 1, "a number in (0, 1]"),
                ("min_p", min_p, 0 <= min_p <= 1, "a number in [0, 1]"),
                ("seed", seed, 0 <= seed < 2**31 - batch, "a whole number in [0, 2³¹ - batch)"),
            )
            if not fine
        ]
        if problems:
            raise ValueError("sampling parameters: " + "; ".join(problems))
        keep = vocab if top_k is None else min(top_k, vocab)
        return Sampling(
            temperature=jnp.full(batch, temperature, jnp.float32),
            top_k=jnp.full(batch, keep, jnp.int32),
            top_p=jnp.full(batch, top_p, jnp.float32),
            min_p=jnp.full(batch, min_p, jnp.float32),
            key=jax.vmap(jax.random.key)(jnp.arange(seed, seed + batch, dtype=jnp.int32)),
        )


def sample(
    logits: Float32[Array, "batch vocab"], sampling: Sampling, positions: Int32[Array, " batch"]
) -> Int32[Array, " batch"]:
    """The next token of each row. `positions` counts the row's tokens so far: its draw is keyed by (row key, position).

    The filters apply in the order temperature, top-k, top-p, min-p, each to what the last one left.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn() -> Int32[Array, " batch"]:
        keys = jax.vmap(jax.random.fold_in)(sampling.key, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        noisy = filtered_logits(logits, sampling) + noise
        return jnp.where(sampling.temperature > 0, jnp.argmax(noisy, axis=-1).astype(jnp.int32), greedy)

    return lax.cond(jnp.any(sampling.temperature > 0), drawn, lambda: greedy)


def filtered_logits(logits: Float32[Array, "batch vocab"], sampling: Sampling) -> Float32[Array, "batch vocab"]:
    """Logits over temperature, with -inf for the tokens that top-k, top-p or min-p strike out."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    logits = logits / temperature[:, None]
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    ranked = jnp.where(rank < sampling.top_k[:, None], ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    top_p = sampling.top_p[:, None]
    ranked = jnp.where((before < top_p) | (top_p >= 1) | (rank == 0), ranked, -jnp.inf)
    floor = ranked[:, :1] + jnp.log(sampling.min_p)[:, None]
    ranked = jnp.where(ranked >= floor, ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
