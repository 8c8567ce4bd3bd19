"""Engines for tests: one set of shapes, so that a process compiles their programs once, and models that they serve."""

import dataclasses
import functools
import json
import pathlib
import tempfile

import equinox as eqx
import jax.numpy as jnp
from tiny import TINY, open_model

import ling3
from ling3.engine.forward import Programs
from ling3.engine.scheduler import Scheduler
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

CONFIG = dataclasses.replace(TINY, vocab_size=400, max_position_embeddings=256, eos_token_id=(5,))
# As published vocabularies are, a multiple of 128: each token has a bit of a mask's words, and none is left over.
ALIGNED = dataclasses.replace(CONFIG, vocab_size=384)
# Four requests of 256 tokens would take 64 pages: long ones are preempted.
SETTINGS = {
    "max_running_requests": 4,
    "num_pages": 20,
    "page_size": 16,
    "chunked_prefill_size": 32,
    "token_paddings": (16, 32),
    "decode_rows": 4,
    "decode_steps": 4,
}
PAGES, SLOTS = SETTINGS["num_pages"], SETTINGS["max_running_requests"]
# The model's, and of the tokenizer's directory config.json's, generation_config.json's two, and the tokenizer's own.
ENDS = (5, 4, 0, 351, 1)
LONG = ling3.SamplingParams(max_tokens=100, ignore_eos=True, logprobs=1)
SHORT = ling3.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[7, 8, 9], list(range(20, 65)), [11], list(range(100, 140)), [12, 13], [14]]


class Fault(RuntimeError):
    """A fault of the device, raised by a test."""


@functools.cache
def model():
    """Random, with open gates."""
    return open_model(CONFIG)


@functools.cache
def aligned_model():
    """The same with a vocabulary that is a multiple of 128."""
    return open_model(ALIGNED)


@functools.cache
def tokenizer():
    """Every byte a token, numbers, control tokens; the model has ids beyond."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        write_tokenizer(train_tokenizer([], 352), path, 256)
        (path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 351], "pad_token_id": 0}))
        return ling3.load_tokenizer(path)


def engine(served=None, text=True, **changes):
    """An engine of the shapes above; `changes` to page or slot counts compile anew."""
    served = model() if served is None else served
    return ling3.Engine(served, tokenizer() if text else None, **{**SETTINGS, **changes})


def crowd(served, **changes):
    """Gives an engine an empty scheduler of other sizes than its pool's; it keeps prefixes only if given a grid."""
    shapes = served._loop.runner.shapes
    served._loop.scheduler = Scheduler(dataclasses.replace(shapes, **{"grid": None, **changes}))


def without(*parts):
    """An engine of programs that take no such parts of a batch."""
    return engine(programs=Programs(parts=Programs().parts - {*parts}))


def reciter(*scripts):
    """A model that says what it was taught: after a token of a script, the next one. No token may stand there twice."""
    told = [token for script in scripts for token in script]
    assert len(set(told)) == len(told)
    unit = model().model.word_embeddings.weight
    unit = unit / jnp.linalg.norm(unit, axis=1, keepdims=True)
    head = jnp.zeros_like(unit)
    for script in scripts:
        head = head.at[jnp.asarray(script[1:])].set(unit[jnp.asarray(script[:-1])])
    # The layers add little to a residual so large.
    return eqx.tree_at(lambda m: (m.model.word_embeddings.weight, m.lm_head.weight), model(), (1e4 * unit, head))


def answer(completion):
    """All of a completion that does not depend on the clock; floats compare bit for bit."""
    return tuple(completion.token_ids), completion.text, completion.logprobs, completion.finish_reason


def answers(outputs):
    """The same of all completions of some requests."""
    return [[answer(completion) for completion in output.outputs] for output in outputs]


def idle(engine):
    """True if nothing waits or runs, no delta is left, and everything is free, once the last calls are read."""
    for _ in range(3):
        assert not engine.step()
    stats = engine.stats()
    engine._loop.scheduler.check()
    return not engine.has_work and balanced(stats) and (stats.free_slots, stats.free_pages) == (SLOTS, PAGES)


def balanced(stats):
    """True if every completion is waiting, running or finished, and every slot free or in use."""
    accounted = stats.waiting + stats.running + sum(stats.finished.values())
    return stats.submitted == accounted and stats.running == stats.slots - stats.free_slots
