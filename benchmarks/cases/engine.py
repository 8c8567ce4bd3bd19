"""The engine: all requests at once, against one by one and against transformers, and at several arrival rates."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

import ling3
from benchmarks.models import FOUR_LAYERS, MID, TOY, checkpoint
from benchmarks.oracles import is_peer
from benchmarks.registry import Setting, Side, Trial, Wrong, case, milliseconds
from benchmarks.transformers_peer import Peer
from ling3.bench.measure import SampleRequest, measure, random_requests

BATCH = 16
"""Rows of transformers' batches."""
MAX_MODEL_LEN = 512
AGREEMENT = 0.9
"""The share of requests whose tokens must all equal the oracle's: with random weights, a few near-ties differ."""

Tokens = list[list[int]]


@case("engine/offline", "64 mixed requests on nano, all at once, against the ways to serve them one by one.", rounds=3)
def offline(setting: Setting) -> Trial:
    """Seconds for all requests. The engine's tokens must not depend on what else it serves."""
    model = ling3.load("nano", dtype=jnp.float32)
    longest = setting.size(full=256, toy=32)
    requests = random_requests(setting.size(full=64, toy=8), model.config.vocab_size, (16, longest), (16, longest))
    engine, lone = _engine(setting, model), _engine(setting, model, max_running_requests=1, decode_rows=2)
    expected = singly(engine, requests)

    sides = [
        Side("engine, all at once", seconds(lambda: together(engine, requests)), in_company(engine, requests)),
        Side(ALONE, seconds(lambda: singly(engine, requests)), is_peer),
        Side(
            "an engine for one request",
            seconds(lambda: singly(lone, requests)),
            lambda: agrees(singly(lone, requests), expected),
        ),
        Side(
            "ling3.generate, one by one",
            seconds(lambda: generated(model, requests)),
            lambda: agrees(generated(model, requests), expected),
        ),
    ]
    return Trial(sides, unit="s", tokens=sum(request.max_tokens for request in requests), about=_about(requests))


ALONE, GENERATE = "the same engine, one by one", "ling3.generate"


@case("engine/one-request", "One request in an engine of 16 rows, against ling3.generate.", wanted={GENERATE: 0.95})
def one_request(setting: Setting) -> Trial:
    """Ling-3.0-tiny's full width with four layers, float32: milliseconds for all tokens."""
    model = _full_width(setting)
    requests = random_requests(1, model.config.vocab_size, (16, 16), (64, 64))
    engine = _engine(setting, model)
    expected = generated(model, requests)
    sides = [
        Side(
            "engine", milliseconds(lambda: singly(engine, requests)), lambda: agrees(singly(engine, requests), expected)
        ),
        Side(GENERATE, milliseconds(lambda: generated(model, requests)), is_peer),
    ]
    return Trial(sides, tokens=requests[0].max_tokens, about=_about(requests))


@case("engine/full-width", "48 mixed requests at full width with four layers.", wanted={ALONE: 3.0}, rounds=2)
def full_width(setting: Setting) -> Trial:
    """Seconds for all requests at once, and one by one, in decode calls of the same number of rows."""
    model = _full_width(setting)
    longest = setting.size(full=64, toy=24)
    requests = random_requests(setting.size(full=48, toy=8), model.config.vocab_size, (16, longest), (16, longest))
    engine = _engine(setting, model)
    sides = [
        Side("engine, all at once", seconds(lambda: together(engine, requests)), in_company(engine, requests)),
        Side(ALONE, seconds(lambda: singly(engine, requests)), is_peer),
    ]
    return Trial(sides, unit="s", tokens=sum(request.max_tokens for request in requests), about=_about(requests))


def _full_width(setting: Setting) -> ling3.CausalLM:
    directory = checkpoint(setting.size(full=FOUR_LAYERS, toy=TOY), setting.scratch)
    return setting.keep("full width", lambda: ling3.load(directory, dtype=jnp.float32))


@case("engine/request-rate", "Latencies of requests that arrive at random, against their rate, on nano.", rounds=2)
def request_rate(setting: Setting) -> Trial:
    """Medians of the time from a request's due time to its first token, and of the time per token after that."""
    model = ling3.load("nano", dtype=jnp.float32)
    engine = _engine(setting, model)
    longest = setting.size(full=128, toy=16)
    requests = random_requests(setting.size(full=48, toy=6), model.config.vocab_size, (16, longest), (16, longest))
    seen: dict[float, dict[str, Any]] = {}

    def first_token(rate: float) -> float:
        seen[rate] = measure(engine, requests, request_rate=rate).to_dict()
        return seen[rate]["ttft_ms"]["p50"]

    @functools.cache
    def check() -> str:
        return agrees(together(engine, requests[:4]), generated(model, requests[:4]))

    sides = []
    for rate in setting.size(full=(2.0, 4.0, 8.0, 16.0), toy=(16.0, 64.0)):
        sides.append(Side("time to the first token, p50", lambda rate=rate: first_token(rate), check, x=rate))
        # From the run that the side above has just made.
        sides.append(Side("time per token, p50", lambda rate=rate: seen[rate]["tpot_ms"]["p50"], check, x=rate))
    return Trial(sides, axis="requests per second", about=_about(requests), warm=False)


@case(
    "engine/transformers", "48 mixed requests on 114 million parameters, against transformers' batches of 16.", rounds=3
)
def transformers(setting: Setting) -> Trial:
    """Seconds for all requests, float32. A batch runs as long as its longest row; only requested tokens count."""
    directory = checkpoint(setting.size(full=MID, toy=TOY), setting.scratch)
    peer, model = Peer(directory), ling3.load(directory, dtype=jnp.float32)
    longest = setting.size(full=128, toy=24)
    requests = random_requests(
        setting.size(full=3 * BATCH, toy=BATCH), model.config.vocab_size, (16, longest), (16, longest)
    )
    tried = peer.be_fastest([request.prompt for request in requests[:BATCH]], 8)
    engine = _engine(setting, model)
    sides = [
        Side(
            "engine, all at once",
            seconds(lambda: together(engine, requests)),
            lambda: agrees(together(engine, requests), peer.answer(requests, BATCH)),
        ),
        Side("transformers, batches of 16", seconds(lambda: peer.answer(requests, BATCH)), is_peer),
    ]
    about = _about(requests) | {"implementations_tried_s": tried}
    return Trial(sides, unit="s", tokens=sum(request.max_tokens for request in requests), about=about)


def together(engine: ling3.Engine | ling3.Fleet, requests: Sequence[SampleRequest]) -> Tokens:
    """The tokens of all requests, served at once."""
    outputs = engine.generate([request.prompt for request in requests], [_params(request) for request in requests])
    return [list(output.token_ids) for output in outputs]


def in_company(engine: ling3.Engine, requests: Sequence[SampleRequest]) -> Callable[[], str]:
    """A check that each request has the same tokens alone as beside the others."""

    def check() -> str:
        if together(engine, requests) != singly(engine, requests):
            raise Wrong("the engine's tokens depend on company")
        return "the same tokens in company and alone"

    return check


def singly(engine: ling3.Engine, requests: Sequence[SampleRequest]) -> Tokens:
    """The tokens of all requests, served one by one."""
    return [list(engine.generate([request.prompt], _params(request))[0].token_ids) for request in requests]


def generated(model: ling3.CausalLM, requests: Sequence[SampleRequest]) -> Tokens:
    """The tokens of all requests, one by one, without an engine."""
    return [
        ling3.generate(model, [request.prompt], max_tokens=request.max_tokens, ignore_eos=True)[0]
        for request in requests
    ]


def agrees(mine: Tokens, other: Tokens) -> str:
    """Says how many requests have equal tokens. Raises Wrong if their share is below AGREEMENT."""
    same = sum(a == b for a, b in zip(mine, other, strict=True))
    found = f"{same} of {len(mine)} requests have the oracle's tokens"
    if same < AGREEMENT * len(mine):
        raise Wrong(f"{found}; expected {100 * AGREEMENT:.0f} %")
    return found


def _engine(setting: Setting, model: ling3.CausalLM, **settings: Any) -> ling3.Engine:
    """An engine without a prefix cache, since rounds repeat the prompts; toy sizes compile fewer programs."""
    fewer = {"chunked_prefill_size": 32, "token_paddings": (32,)}
    settings |= {"max_model_len": MAX_MODEL_LEN, "prefix_cache": False} | setting.size(full={}, toy=fewer)
    engine = ling3.Engine(model, **settings)
    engine.warmup()
    return engine


def _params(request: SampleRequest) -> ling3.SamplingParams:
    return ling3.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)


def seconds(run: Callable[[], Any]) -> Callable[[], float]:
    """A function that measures `run` in seconds."""
    timed = milliseconds(run)
    return lambda: timed() / 1e3


def _about(requests: Sequence[SampleRequest]) -> dict[str, int]:
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
    }
