"""How many bits of memorised facts a parameter holds: models of nano's pattern in worlds of several sizes.

    python -m experiments.nano_capacity

A person is worth 24 bits (`ling3.train.nano.skills.facts`). What a model knows of an attribute is 6 bits minus its loss
on the value, in bits; a world's bits are the sum over its people, or 0 if that is negative. Each person is in about
`exposures` training texts, so the result is what this many exposures leave, a lower bound on what the parameters could
hold: Allen-Zhu and Li, "Physics of Language Models: Part 3.3" (arXiv 2404.05405), report 2 bits per parameter after
1,000 exposures and 1 bit after 100. Each run is a line of `results/nano_capacity.jsonl`; the plot is written to
`docs/capacity.png`.
"""

import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float
from tokenizers import Tokenizer, models, pre_tokenizers

from experiments.__main__ import DOCS, RESULTS, append, stored
from ling3.bench.report import machine
from ling3.families import init
from ling3.model import CausalLM
from ling3.train.loop import Batch, Optimization, token_losses, train
from ling3.train.nano.problems import PEOPLE
from ling3.train.nano.recipe import NANO, Recipe, quieted
from ling3.train.nano.skills.facts import ATTRIBUTES, facts, subjects, tell
from ling3.train.nano.skills.skill import encode
from ling3.train.nano.skills.words import KEYS, VALUES
from ling3.train.tokenizer import END_OF_TEXT, END_OF_TURN

ROWS, TEXTS = 8, 8
"""Rows of a batch, and texts in each row."""

BITS = math.log2(len(VALUES))


def config(hidden: int) -> Mapping[str, Any]:
    """Changes to nano's config for `hidden` channels: heads of 8 channels, and 8 experts a layer, 2 of them chosen."""
    return {
        "hidden_size": hidden,
        "num_attention_heads": hidden // 8,
        "head_dim": 8,
        "q_lora_rank": None,
        "kv_lora_rank": hidden // 2,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": hidden // 2,
        "moe_shared_expert_intermediate_size": hidden // 2,
        "initializer_range": 0.8 / math.sqrt(hidden),
    }


def word_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each word of the largest world and hardly any others, so no embedding is wasted."""
    words = ["About", ":", *ATTRIBUTES, *(name for name, _ in PEOPLE), *KEYS, *VALUES]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([END_OF_TEXT, END_OF_TURN])
    return tokenizer


def batches(tokenizer: Tokenizer, people: int, seed: int) -> Iterator[Batch]:
    """Batches of a world's training texts, `TEXTS` to a row; all texts have one length."""
    texts = facts(people).texts(seed, "train")
    while True:
        rows = [encode(tokenizer, text.segments) for text in itertools.islice(texts, ROWS * TEXTS)]
        tokens, weights = (np.array([row[i] for row in rows]).reshape(ROWS, -1) for i in range(2))
        yield Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(weights, jnp.float32))


@eqx.filter_jit
def _losses(model: CausalLM, batch: Batch) -> Float[Array, " batch"]:
    """The loss of each row in nats, summed over its learned tokens."""
    return jnp.sum(token_losses(model, batch) * batch.weights[:, 1:], axis=1)


def known(model: CausalLM, tokenizer: Tokenizer, people: int) -> float:
    """Bits of the world that the model knows; each attribute is asked as the first of its text."""
    bits = 0.0
    for attribute in ATTRIBUTES:
        rows = [encode(tokenizer, tell(subject, [attribute]).segments) for subject in subjects(people)]
        tokens, weights = (np.array([row[i] for row in rows]) for i in range(2))
        batch = Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(weights, jnp.float32))
        bits += float(jnp.sum(BITS - _losses(model, batch) / math.log(2)))
    return max(bits, 0.0)


def run(hidden: int, people: int, exposures: int, seed: int) -> dict[str, Any]:
    """Trains one model in one world and returns what it knows."""
    start = time.monotonic()
    tokenizer = word_tokenizer()
    recipe = Recipe(seed=seed, changes=config(hidden))
    model = quieted(init(recipe.config(tokenizer), key=jax.random.key(seed)))
    steps = -(-people * exposures // (ROWS * TEXTS))
    optimization = Optimization(
        steps, learning_rate=NANO.learning_rate, weight_decay=0.0, warmup=min(NANO.warmup, steps // 4)
    )
    model = train(model, batches(tokenizer, people, seed), optimization, every=steps)
    bits = known(model, tokenizer, people)
    return {
        "hidden": hidden,
        "people": people,
        "exposures": exposures,
        "seed": seed,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))),
        "bits": round(bits),
        "of": round(people * len(ATTRIBUTES) * BITS),
        "minutes": round((time.monotonic() - start) / 60, 2),
    }


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plots the bits known against the world's bits, both per parameter, with a line for each model size."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

    axes = (figure := Figure(figsize=(6.4, 4.2), layout="constrained")).subplots()
    most = max(run["of"] / run["parameters"] for run in runs)
    axes.plot([0, most], [0, most], color="0.7", linewidth=1, label="all there is")
    for hidden, marker in zip(sorted({run["hidden"] for run in runs}), "os^Dv"):
        own = sorted((run for run in runs if run["hidden"] == hidden), key=lambda run: run["of"])
        x, y = ([run[key] / run["parameters"] for run in own] for key in ("of", "bits"))
        axes.plot(x, y, marker=marker, label=f"{own[0]['parameters']:,} parameters")
    axes.set(xlabel="bits in the world, per parameter", ylabel="bits known, per parameter", ylim=(0, None))
    axes.set_title(f"Facts after {runs[0]['exposures']} exposures", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


def main(
    hidden: tuple[int, ...] = (16, 24, 32),
    people: tuple[int, ...] = (480, 960, 1920, 3840),
    exposures: int = 100,
    seed: int = 0,
    file: Path = RESULTS / "nano_capacity.jsonl",
    out: Path = DOCS / "capacity.png",
) -> None:
    """Train the models that are not stored yet, and plot all.

    Args:
        hidden: channels of the models.
        people: sizes of the worlds.
        exposures: training texts about each person, on average.
        seed: seed of weights and texts.
        file: file where runs are stored.
        out: file for the plot.
    """
    runs = stored(file)
    for size, world in itertools.product(hidden, people):
        own = {"hidden": size, "people": world, "exposures": exposures, "seed": seed}
        if any(own.items() <= run.items() for run in runs):
            continue
        runs.append(run(size, world, exposures, seed) | {"machine": machine()})
        append(file, runs[-1])
        print({name: value for name, value in runs[-1].items() if name != "machine"}, file=sys.stderr)
    draw([run for run in runs if run["exposures"] == exposures and run["seed"] == seed], out)


if __name__ == "__main__":
    tyro.cli(main)
