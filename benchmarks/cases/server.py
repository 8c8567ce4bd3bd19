"""The server: an engine's streams over HTTP against streams of the same engine in its client's process."""

import contextlib
import functools
import importlib.util
import weakref
from typing import Any, Literal

import httpx
import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks import serving
from benchmarks.models import MID, TOY, checkpoint
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from ling3.bench.measure import random_requests
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

STREAMS = (1, 16, 64)
ENGINE = ("--dtype", "float32", "--max-model-len", 512, "--no-prefix-cache")
"""Rounds repeat the prompts."""
CHECKED = 8
"""Answers that are held to the engine's."""

Model = Literal["nano", "114m"]
Quantity = Literal["requests", "tokens"]


def _race(setting: Setting, model: Model, streams: int, quantity: Quantity) -> Trial:
    """A side is `ling3 bench`, over HTTP at `ling3 serve` and with an engine of its own: 128 tokens in, 64 out."""
    if importlib.util.find_spec("uvicorn") is None:
        raise Absent("uvicorn (pip install 'ling3[serve]')")
    path = "nano" if model == "nano" else _directory(setting)
    slots = ("--max-running-requests", streams)
    stack = contextlib.ExitStack()
    url = stack.enter_context(
        serving.served(*serving.ling3("serve", path, *ENGINE, *slots, "--served-model-name", "m"))
    )
    lengths = setting.size(full=(128, 64), toy=(8, 4))
    # Three rounds of streams at least: at the end some have nothing left to do.
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
    """Raises Wrong unless answers over HTTP are the engine's, all of them under way at once."""
    model, tokenizer = ling3.load(path, dtype=jnp.float32), ling3.load_tokenizer(path)
    engine = ling3.Engine(model, tokenizer, max_model_len=512, max_running_requests=CHECKED)
    requests = random_requests(CHECKED, model.config.vocab_size, (lengths[0], lengths[0]), (lengths[1], lengths[1]))
    prompts = [request.prompt for request in requests]
    params = ling3.SamplingParams(max_tokens=lengths[1], ignore_eos=True)
    expected = [output.text for output in engine.generate(prompts, params)]
    body = {"model": "m", "prompt": prompts, "max_tokens": lengths[1], "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/completions", json=body, timeout=serving.PATIENCE).raise_for_status().json()
    if [choice["text"] for choice in answer["choices"]] != expected:
        raise Wrong("an answer over HTTP is not the engine's")
    return f"the engine's own {CHECKED} answers"


def _directory(setting: Setting) -> str:
    """114 million random parameters, and a tokenizer in which nearly every id has a text."""
    directory = checkpoint(config := setting.size(full=MID, toy=TOY), setting.scratch)
    if not (directory / "tokenizer.json").exists():
        letters = np.random.default_rng(0).integers(97, 123, (20000, 6), np.uint8)
        words = " ".join(bytes(word).decode() for word in letters)
        write_tokenizer(train_tokenizer([words], config.vocab_size), directory, 512)
    return str(directory)


for _model in ("nano", "114m"):
    for _streams in STREAMS:
        for _quantity, _wanted in (("requests", 0.95), ("tokens", 1 / 1.05)):
            case(
                f"server/{_model}-{_quantity}-{_streams}",
                f"{_streams} streams of {_model} over HTTP: {_quantity} per second against streams in process.",
                wanted=_wanted,
                rounds=7,
            )(functools.partial(_race, model=_model, streams=_streams, quantity=_quantity))
