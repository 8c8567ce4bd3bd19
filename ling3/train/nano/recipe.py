"""How *nano* is made: its config, its training data, and the run that writes the checkpoint.

A short row holds documents of one problem each (`Question: … Answer: …`, or a chat turn); a long row is one document of
as many problems as fit, so that the model learns to use worked examples. Only solutions are learned: the tokens of
questions have weight 0. Drills, which are equations without a story, fill the rest of a row and half of the batches.
"""

import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

from ling3.checkpoint import load
from ling3.checkpoint.saving import save
from ling3.families import init
from ling3.families.ling3_config import Ling3Config
from ling3.model import CausalLM
from ling3.text.tokenizer import load_tokenizer
from ling3.train.loop import Batch, Optimization, Progress, train
from ling3.train.nano.exam import examine, solved
from ling3.train.nano.problems import SYSTEM_TURN, Problem, Step, ask, chat_prompt, exam, problems
from ling3.train.nano.skills.skill import Row, Segment, encode
from ling3.train.tokenizer import END_OF_TEXT, END_OF_TURN, train_tokenizer, write_tokenizer

TOKENS_PER_EQUATION = 6


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that determines nano; the defaults are those of the shipped checkpoint."""

    seed: int = 0
    steps: int = 1800
    learning_rate: float = 6e-3
    warmup: int = 50
    vocab_size: int = 704
    rows: int = 16
    row_length: int = 128
    long_rows: int = 4
    long_row_length: int = 512
    cycle: tuple[Literal["drills", "short", "long"], ...] = ("drills", "short", "drills", "long")
    """The kinds of batches, over and over."""

    def config(self, tokenizer: Tokenizer) -> Ling3Config:
        """Every mechanism of Ling-3 at a size that trains on two cores."""
        end_of_text, end_of_turn = tokenizer.encode(END_OF_TEXT + END_OF_TURN).ids
        return Ling3Config(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            layer_group_size=2,
            num_attention_heads=4,
            head_dim=32,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            rope_theta=10000.0,
            max_position_embeddings=2048,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=64,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            initializer_range=0.05,
            eos_token_id=(end_of_turn, end_of_text),
            pad_token_id=end_of_text,
        )


def raw(problem: Problem) -> list[Segment]:
    """The problem as plain text."""
    return [(ask(problem), False), (f" {problem.solution}", True), (END_OF_TEXT, True)]


def chat(problem: Problem) -> list[Segment]:
    """The problem as a chat turn and its reply."""
    return [(chat_prompt(problem), False), (problem.solution, True), (END_OF_TURN, True)]


def corpus(seed: int, size: int = 5000) -> Iterator[str]:
    """The text that the tokenizer is trained on."""
    for problem in itertools.islice(problems(seed, "train"), size):
        yield f"{ask(problem)} {problem.solution}\n\n"
    yield from [SYSTEM_TURN, "<role>HUMAN</role>", "<role>ASSISTANT</role>", "detailed thinking on"] * (size // 20)


def drills(tokenizer: Tokenizer, equations: Iterator[Step], room: int) -> Row:
    """`room` tokens of bare equations, `43 + 12 = 55. 9 - 2 = 7.`, of which the results are learned.

    The model learns to read long before it learns to add; drills are the cheapest practice in arithmetic.
    """
    text = " ".join(str(next(equations)) for _ in range(room // TOKENS_PER_EQUATION))
    tokens = tokenizer.encode(text).ids
    equals = tokenizer.encode("1 = 1").ids[1]
    weights = [float(place > 0 and tokens[place - 1] == equals) for place in range(len(tokens))]
    missing = room - len(tokens)
    return tokens + tokenizer.encode(END_OF_TEXT).ids * missing, weights + [0.0] * missing


def short_documents(tokenizer: Tokenizer, stream: Iterator[Problem], seed: int) -> Iterator[Row]:
    """Each problem as a document of its own: three in four as plain text, one as a chat turn."""
    rng = random.Random(seed)
    for problem in stream:
        yield encode(tokenizer, chat(problem) if rng.random() < 0.25 else raw(problem))


def packed(
    tokenizer: Tokenizer, documents: Iterator[Row], equations: Iterator[Step], length: int, between: list[int]
) -> Iterator[Row]:
    """Rows of `length` tokens: as many documents as fit, and drills after them.

    The tokens `between`, if any, stand between two documents in place of the first one's end-of-text token.
    """
    tokens, weights = [], []
    for more_tokens, more_weights in documents:
        if len(tokens) + len(more_tokens) > length:
            fill, fill_weights = drills(tokenizer, equations, length - len(tokens))
            yield tokens + fill, weights + fill_weights
            tokens, weights = [], []
        if tokens and between:
            tokens[-1:], weights[-1:] = between, [0.0] * len(between)
        tokens += more_tokens
        weights += more_weights


def single_steps(seed: int) -> Iterator[Step]:
    """The equations of training problems, without those that would by themselves be a held-out solution."""
    for problem in problems(seed, "train"):
        yield from (step for step in problem.steps if Problem("", (step,)).split == "train")


def batches(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Batch]:
    """The training stream: batches of one kind of row each, in the order of `recipe.cycle`."""
    stream, seed = problems(recipe.seed + 1, "train"), recipe.seed
    short, long = short_documents(tokenizer, stream, seed + 2), (encode(tokenizer, raw(p)) for p in stream)
    blank_line = tokenizer.encode("\n\n").ids
    drill = single_steps(seed + 5)
    rows = {
        "drills": (drills(tokenizer, drill, recipe.row_length) for _ in itertools.count()),
        "short": packed(tokenizer, short, single_steps(seed + 3), recipe.row_length, []),
        "long": packed(tokenizer, long, single_steps(seed + 4), recipe.long_row_length, blank_line),
    }
    for kind in itertools.cycle(recipe.cycle):
        count = recipe.long_rows if kind == "long" else recipe.rows
        tokens, weights = zip(*itertools.islice(rows[kind], count), strict=True)
        yield Batch(jnp.array(tokens, jnp.int32), jnp.array(weights, jnp.float32))


def as_stored(model: CausalLM) -> CausalLM:
    """The model in the dtypes of published checkpoints: matrices in bfloat16, norms and the like in float32."""
    stored = eqx.filter_eval_shape(init, model.config, key=jax.random.key(0), dtype=jnp.bfloat16)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), model, stored)


def make(out: Path, recipe: Recipe, questions: int = 500) -> dict:
    """Trains nano into the directory `out`, in the published layout, and returns its record (`training.json`).

    The checkpoint on disk is replaced every 200 steps. Progress goes to stderr.
    """
    start = time.monotonic()
    tokenizer = train_tokenizer(corpus(recipe.seed), recipe.vocab_size)
    model = init(recipe.config(tokenizer), key=jax.random.key(recipe.seed))
    rows = [encode(tokenizer, raw(problem)) for problem in exam(100)]
    padding = [0] * recipe.row_length
    unseen = Batch(
        jnp.array([(tokens + padding)[: recipe.row_length] for tokens, _ in rows], jnp.int32),
        jnp.array([(weights + padding)[: recipe.row_length] for _, weights in rows], jnp.float32),
    )
    record: dict = {"recipe": dataclasses.asdict(recipe), "curve": []}

    def report(progress: Progress, model: CausalLM) -> None:
        point = dataclasses.asdict(progress) | {"solved": float(jnp.mean(solved(model, unseen)))}
        record["curve"].append({name: round(value, 5) for name, value in point.items()})
        line = f"step {progress.step} of {recipe.steps}: loss {progress.loss:.4f}, {point['solved']:.0%} solved"
        print(line, file=sys.stderr)
        if progress.step % 200 == 0 or progress.step == recipe.steps:
            save(as_stored(model), out, overwrite=True)
            write_tokenizer(tokenizer, out, model.config.max_position_embeddings)
            (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    optimization = Optimization(recipe.steps, learning_rate=recipe.learning_rate, warmup=recipe.warmup)
    model = train(model, batches(recipe, tokenizer), optimization, every=50, report=report)
    record["minutes"] = round((time.monotonic() - start) / 60, 1)
    record["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    record["exact_answers"] = examine(load(out), load_tokenizer(out), questions)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record
