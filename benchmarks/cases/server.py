"""The server: streams over HTTP, against streams of the same engine in the client's process."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks import serving
from benchmarks.models import DENSE_TOY, LLAMA, MID, TOY, checkpoint
from benchmarks.oracles import is_peer
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from ling3.bench.measure import random_requests
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

STREAMS = (1, 16, 64)
ENGINE = ("--dtype", "float32", "--max-model-len", 512, "--no-prefix-cache")
"""Options of the engine; it has no prefix cache, because rounds repeat the prompts."""
CHECKED = 8
"""The number of answers that are compared with the engine's."""

Model = Literal["nano", "114m"]
Quantity = Literal["requests", "tokens"]


def _race(setting: Setting, model: Model, streams: int, quantity: Quantity) -> Trial:
    """Each side runs `ling3 bench`, against `ling3 serve` or with an engine in process: 128 tokens in, 64 out."""
    if importlib.util.find_spec("uvicorn") is None:
        raise Absent("uvicorn (pip install 'ling3[serve]')")
    path = "nano" if model == "nano" else _directory(setting.size(full=MID, toy=TOY), setting)
    slots = ("--max-running-requests", streams)
    stack = contextlib.ExitStack()
    url = stack.enter_context(
        serving.served(*serving.ling3("serve", path, *ENGINE, *slots, "--served-model-name", "m"))
    )
    # At any size, outputs take several decode calls, because the tokens of one call arrive together.
    lengths = setting.size(full=(128, 64), toy=(8, 64))
    # Several requests for each stream, because at the end some streams have nothing left to do.
    workload = ("--num-prompts", setting.size(full=max(16, 4 * streams), toy=2), "--concurrency", streams)
    workload = (*workload, "--input-len", lengths[0], "--output-len", lengths[1])
    shares: list[float] = []

    def value(report: dict[str, Any]) -> float:
        shares.extend([report["about"]["client_cpu"]] if "client_cpu" in report["about"] else [])
        return 1e3 / report["request_throughput"] if quantity == "requests" else report["tpot_ms"]["p50"]

    def over_http() -> float:
        return value(serving.bench(path, "--base-url", url, *workload))

    def in_process() -> float:
        return value(serving.bench(path, *ENGINE, *slots, *workload))

    sides = [
        Side("over HTTP", over_http, functools.partial(_same_answers, path, url, lengths)),
        Side("in process", in_process, lambda: "itself"),
    ]
    unit = "ms a request" if quantity == "requests" else "ms a token"
    about = {"streams": streams, "workload": list(map(str, workload)), "share of a core that the client takes": shares}
    trial = Trial(sides, unit=unit, about=about, warm=False)
    weakref.finalize(trial, stack.close)
    return trial


def _same_answers(path: str, url: str, lengths: tuple[int, int]) -> str:
    """Checks that concurrent answers over HTTP equal the engine's. Raises Wrong if one differs."""
    model, tokenizer = ling3.load(path, dtype=jnp.float32), ling3.load_tokenizer(path)
    engine = ling3.Engine(model, tokenizer, max_model_len=512, max_running_requests=CHECKED)
    requests = random_requests(CHECKED, model.config.vocab_size, (lengths[0], lengths[0]), (lengths[1], lengths[1]))
    prompts = [request.prompt for request in requests]
    params = ling3.SamplingParams(max_tokens=lengths[1], ignore_eos=True)
    expected = [output.text for output in engine.generate(prompts, params)]
    body = {"model": "m", "prompt": prompts, "max_tokens": lengths[1], "temperature": 0, "ignore_eos": True}
    answer = serving.posted(f"{url}/completions", body)
    if [choice["text"] for choice in answer["choices"]] != expected:
        raise Wrong("an answer over HTTP is not the engine's")
    return f"the engine's own {CHECKED} answers"


def _directory(config: Any, setting: Setting) -> str:
    """A checkpoint with random weights, and a tokenizer in which nearly every id has a text."""
    directory = checkpoint(config, setting.scratch)
    if not (directory / "tokenizer.json").exists():
        letters = np.random.default_rng(0).integers(97, 123, (20000, 6), np.uint8)
        words = " ".join(bytes(word).decode() for word in letters)
        write_tokenizer(train_tokenizer([words], config.vocab_size), directory, 512)
    return str(directory)


SMALL_LLAMA = dataclasses.replace(
    LLAMA,
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=2048,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rope_scaling=None,
    bos_token_id=None,
    eos_token_id=(2,),
)
"""Llama-3.2-1B's proportions at 17 million parameters."""


def _peers(setting: Setting, streams: int) -> Trial:
    """Milliseconds per token for greedy continuations of the same texts, by each server on the same weights.

    `transformers serve` takes no token ids and no `ignore_eos`, so all servers stop at end-of-sequence tokens.
    """
    for module in ("transformers", "fastapi", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise Absent(f"{module} (pip install 'ling3[serve]' 'transformers[serving]')")
    path = _directory(setting.size(full=SMALL_LLAMA, toy=DENSE_TOY), setting)
    words = np.random.default_rng(1).integers(97, 123, (64, 40, 5), np.uint8)
    texts = [" ".join(bytes(word).decode() for word in line) for line in words]
    (prompts := setting.scratch / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    tokens = setting.size(full=64, toy=4)
    ours = serving.ling3("serve", path, "--dtype", "float32", "--no-prefix-cache", "--max-model-len", 1024)
    theirs = [sys.executable, "-m", "transformers.cli.transformers", "serve", path, "--dtype", "float32"]
    stack = contextlib.ExitStack()

    @functools.cache
    def url(*command: str) -> str:
        return stack.enter_context(serving.served(*command, env=os.environ | {"HF_HUB_OFFLINE": "1"}))

    def said(command: Sequence[str], name: str) -> list[str]:
        bodies = [{"model": name, "prompt": text, "max_tokens": tokens, "temperature": 0} for text in texts[:10]]
        return [serving.posted(f"{url(*command)}/completions", body)["choices"][0]["text"] for body in bodies]

    def side(title: str, command: Sequence[str], name: str, check: Callable[[], str]) -> Side:
        def measure() -> float:
            count = setting.size(full=max(8, 2 * streams), toy=2)
            workload = ("--prompts", prompts, "--num-prompts", count, "--output-len", tokens)
            options = ("--served-model-name", name, "--concurrency", streams, "--stop-at-eos")
            report = serving.bench("--base-url", url(*command), *workload, *options)
            return 1e3 * report["duration_s"] / report["output_tokens"]

        return Side(title, measure, check)

    def same_texts() -> str:
        mine, expected = said([*ours, "--served-model-name", "m"], "m"), said(theirs, path)
        same = sum(a.strip() == b.strip() for a, b in zip(mine, expected, strict=True))
        if same < 0.9 * len(mine):
            raise Wrong(f"{same} of {len(mine)} texts are those of transformers")
        return f"{same} of {len(mine)} texts are those of transformers"

    sides = [
        side("ling3 serve", [*ours, "--served-model-name", "m"], "m", same_texts),
        side("transformers serve", theirs, path, is_peer),
        side("transformers serve, continuous batching", [*theirs, "--continuous-batching"], path, is_peer),
    ]
    trial = Trial(sides, unit="ms a token", about={"streams": streams, "tokens": tokens})
    weakref.finalize(trial, stack.close)
    return trial


for _streams in (1, 16):
    case(
        f"server/transformers-{_streams}",
        f"{_streams} streams of a small Llama: `ling3 serve` beside `transformers serve`, by one client.",
        wanted=1.0,
        rounds=3,
    )(functools.partial(_peers, streams=_streams))

for _model in ("nano", "114m"):
    for _streams in STREAMS:
        for _quantity, _wanted in (("requests", 0.95), ("tokens", 1 / 1.05)):
            case(
                f"server/{_model}-{_quantity}-{_streams}",
                f"{_streams} streams of {_model} over HTTP: {_quantity} per second against streams in process.",
                wanted=_wanted,
                rounds=7,
            )(functools.partial(_race, model=_model, streams=_streams, quantity=_quantity))
