"""nano in 8 and 4 bits: `python -m ling3.train.nano.formats` quantizes it, examines it, and prints a table."""

import argparse
import pathlib
import tempfile
from collections.abc import Sequence
from typing import get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ling3.checkpoint import load
from ling3.checkpoint.quantizing import Format, quantize
from ling3.model import CausalLM
from ling3.text.tokenizer import Tokenizer, load_tokenizer
from ling3.train.nano.exam import exact_answers
from ling3.train.nano.problems import Problem, ask, exam


@eqx.filter_jit
def _log_probabilities(model: CausalLM, tokens: Int32[Array, "batch seq"]) -> Float32[Array, "batch seq vocab"]:
    return jax.nn.log_softmax(model(tokens))


def divergence(reference: CausalLM, model: CausalLM, tokenizer: Tokenizer, problems: Sequence[Problem]) -> float:
    """The mean KL(reference ‖ model) of next-token distributions, over problems and solutions, in nats."""
    texts = [tokenizer.encode(f"{ask(problem)} {problem.solution}") for problem in problems]
    length, total, count = max(map(len, texts)), 0.0, 0
    for first in range(0, len(texts), 50):
        rows = texts[first : first + 50]
        tokens = jnp.asarray([row + [0] * (length - len(row)) for row in rows], jnp.int32)
        p, q = (np.asarray(_log_probabilities(own, tokens), np.float64) for own in (reference, model))
        each = np.sum(np.exp(p) * (p - q), axis=-1)
        total += sum(each[i, : len(row)].sum() for i, row in enumerate(rows))
        count += sum(map(len, rows))
    return total / count


def table(count: int) -> str:
    """A Markdown table: for each format, accuracy on `count` exam problems and divergence from bfloat16."""
    problems, tokenizer, reference = exam(count), load_tokenizer("nano"), load("nano", jnp.bfloat16)
    prompts, answers = [ask(problem) for problem in problems], [problem.answer for problem in problems]

    def line(name: str, model: CausalLM, nbytes: int) -> str:
        right = sum(exact_answers(model, tokenizer, prompts, answers))
        kl = divergence(reference, model, tokenizer, problems)
        return f"| {name} | {nbytes / 1e6:.2f} | {right / count:.3f} | {kl:.4f} |"

    def stored(model: CausalLM) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(model))

    lines = ["| nano in | MB | exact answers | KL divergence, nats |", "|---|---|---|---|"]
    lines.append(line("bfloat16", reference, stored(reference)))
    with tempfile.TemporaryDirectory() as scratch:
        for to in get_args(Format):
            out = pathlib.Path(scratch) / to
            quantize("nano", out, to)
            model = load(out, jnp.bfloat16)
            lines.append(line(to, model, stored(model)))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Nano in every format: accuracy and divergence from bfloat16.")
    parser.add_argument("--count", type=int, default=500, help="held-out problems, 500 by default")
    print(table(parser.parse_args().count))
