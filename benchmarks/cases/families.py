"""Llama's and Qwen3's shapes beside vLLM's CPU build and transformers, on the same weights, float32 and bfloat16.

transformers is the oracle: every greedy token of ling3 and of vLLM must be nearly as likely there as the best. Only its
prefill is timed, because its decoding in bfloat16 takes minutes. ling3 runs as in `model` and `engine`:
`ling3.generate` for one call, an engine for many requests.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks.cases.engine import seconds, together
from benchmarks.cases.model import NEW, PROMPT, TRIED, Generate, Tokens, per_step
from benchmarks.models import DENSE_TOY, LLAMA, QWEN3, checkpoint, prompts
from benchmarks.oracles import is_peer, likeliest
from benchmarks.peer_process import VLLM, PeerProcess
from benchmarks.registry import Absent, Setting, Side, Trial, case, milliseconds
from benchmarks.transformers_peer import Peer
from ling3.bench.measure import random_requests

VLLM_NAME, TRANSFORMERS = "vLLM, LLM.generate", "transformers, model.generate"
MODELS = {"llama-3.2-1b": LLAMA, "qwen3-0.6b": QWEN3}
TOLERANCE = {"float32": {}, "bfloat16": {"nats": 0.3, "share": 0.9}}
"""Arguments of `likeliest` by dtype; in bfloat16 transformers rounds as well."""
REQUESTS, SHORTEST, LONGEST = 48, 16, 128
"""Requests of an engine, and the fewest and most tokens of their prompts and of their answers."""


class Three:
    """ling3, vLLM and transformers with the same weights; vLLM may be absent."""

    def __init__(self, setting: Setting, config: Any, dtype: str):
        self.config, self.dtype = setting.size(full=config, toy=DENSE_TOY), dtype
        directory = checkpoint(self.config, setting.scratch)
        self.peer = Peer(directory, dtype)
        self.model = ling3.load(directory, dtype=getattr(jnp, dtype))
        self.vllm: PeerProcess | Absent
        try:
            self.vllm = PeerProcess(VLLM, setting.vllm, directory, dtype)
        except Absent as error:
            self.vllm = error

    def ours(self, batch: Tokens, new: int) -> Tokens:
        """The `new` greedy tokens of each prompt by ling3."""
        return ling3.generate(self.model, batch, max_tokens=new, ignore_eos=True)

    def theirs(self, batch: Tokens, new: int | list[int]) -> Tokens:
        """The `new` greedy tokens of each prompt by vLLM. Raises Absent without it."""
        if isinstance(self.vllm, Absent):
            raise self.vllm
        return self.vllm.generate(batch, new)

    @functools.cached_property
    def engine(self) -> ling3.Engine:
        """An engine with a slot per request and, like vLLM here, no prefix cache, since rounds repeat the prompts."""
        sizes = {"max_model_len": 512, "max_running_requests": REQUESTS, "decode_rows": REQUESTS}
        engine = ling3.Engine(self.model, **sizes, prefix_cache=False)
        engine.warmup()
        return engine


def _three(setting: Setting, name: str, dtype: str) -> Three:
    return setting.keep((name, dtype), lambda: Three(setting, MODELS[name], dtype))


def _trial(three: Three, batch: Tokens, new: int, timed: Callable[[Generate], Callable[[], float]]) -> list[Side]:
    """The sides of ling3 and of vLLM for one batch."""

    def check(generate: Generate) -> Callable[[], str]:
        def checked() -> str:
            tokens = generate(batch, new)
            return likeliest(tokens, lambda: three.peer.logits(batch, tokens), **TOLERANCE[three.dtype])

        return checked

    return [
        Side("ling3.generate", timed(three.ours), check(three.ours)),
        Side(VLLM_NAME, timed(three.theirs), check(three.theirs)),
    ]


def _prefill(setting: Setting, name: str, dtype: str) -> Trial:
    three = _three(setting, name, dtype)
    batch = prompts(three.config, 1, setting.size(full=512, toy=32))
    tried = three.peer.be_fastest([batch[0][: TRIED[0]]], 1)
    sides = _trial(three, batch, 1, lambda generate: milliseconds(lambda: generate(batch, 1)))
    sides.append(Side(TRANSFORMERS, milliseconds(lambda: three.peer.generate(batch, 1)), is_peer))
    return Trial(sides, tokens=len(batch[0]), about={"prompt": len(batch[0]), "implementations_tried_s": tried})


def _decode(setting: Setting, name: str, dtype: str, rows: int) -> Trial:
    three = _three(setting, name, dtype)
    batch = prompts(three.config, rows, PROMPT)
    sides = _trial(three, batch, NEW, lambda generate: per_step(generate, batch, NEW))
    return Trial(sides, tokens=rows, about={"rows": rows, "prompt": PROMPT, "new": NEW})


def _engine(setting: Setting, name: str, dtype: str) -> Trial:
    three = _three(setting, name, dtype)
    longest = setting.size(full=LONGEST, toy=24)
    count, lengths = setting.size(full=REQUESTS, toy=8), (SHORTEST, longest)
    requests = random_requests(count, three.config.vocab_size, lengths, lengths)
    given, new = [list(r.prompt) for r in requests], [r.max_tokens for r in requests]

    def check(answer: Callable[[], Tokens]) -> Callable[[], str]:
        """Checks the first SHORTEST tokens of each request; no request has fewer."""

        def checked() -> str:
            tokens = [row[:SHORTEST] for row in answer()]
            logits = [three.peer.logits([prompt], [row]) for prompt, row in zip(given, tokens, strict=True)]
            return likeliest(tokens, lambda: np.concatenate(logits), **TOLERANCE[dtype])

        return checked

    def ours() -> Tokens:
        return together(three.engine, requests)

    def theirs() -> Tokens:
        return three.theirs(given, new)

    sides = [Side("engine", seconds(ours), check(ours)), Side(VLLM_NAME, seconds(theirs), check(theirs))]
    return Trial(sides, unit="s", tokens=sum(new), about={"requests": len(requests), "output_tokens": sum(new)})


def _register(name: str, dtype: str) -> None:
    """Registers the cases of one model in one dtype, with the speed wanted of each."""
    faster, group = {VLLM_NAME: 1.0}, f"families/{name}-{dtype}"
    case(
        f"{group}-prefill-512",
        "A prompt of 512 tokens and one new token.",
        wanted=faster | {TRANSFORMERS: 1.5},
    )(lambda setting: _prefill(setting, name, dtype))
    for rows in (1, 8, 32):
        build = functools.partial(_decode, name=name, dtype=dtype, rows=rows)
        case(f"{group}-decode-{rows}", f"A decode step of {rows} rows.", wanted=faster)(build)
    case(f"{group}-engine", f"{REQUESTS} mixed requests, all at once.", wanted=faster, rounds=3)(
        lambda setting: _engine(setting, name, dtype)
    )


for _name in MODELS:
    for _dtype in TOLERANCE:
        _register(_name, _dtype)
