"""The model's public call beside that of transformers on the same weights: full width, four layers, float32.

A decode step's time is (T(n new tokens) - T(1)) / (n - 1), which excludes the prefill. transformers is the oracle too:
every greedy token of the measured call must be nearly as likely there as the best.
"""

import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks.models import FOUR_LAYERS, TOY, checkpoint, prompts
from benchmarks.oracles import is_peer, likeliest
from benchmarks.registry import Setting, Side, Trial, case, milliseconds
from benchmarks.transformers_peer import Peer

PROMPT = 16
"""Tokens of a row's prompt, for decode."""
NEW = 25
"""New tokens of a row: one from the prefill and 24 decode steps."""
TRIES = 9
"""The most attempts to measure a step's time, if it comes out negative."""
TRIED = 256, 3
"""Prompt tokens and new tokens on which transformers' implementations are compared."""

Tokens = list[list[int]]
Generate = Callable[[Tokens, int], Tokens]


class Pair:
    """ling3 and transformers with the same weights."""

    def __init__(self, setting: Setting):
        self.config = setting.size(full=FOUR_LAYERS, toy=TOY)
        self.directory = checkpoint(self.config, setting.scratch)
        self.peer = Peer(self.directory)
        self.model = ling3.load(self.directory, dtype=jnp.float32)

    def ours(self, batch: Tokens, new: int) -> Tokens:
        """The `new` greedy tokens of each prompt by ling3."""
        return ling3.generate(self.model, batch, max_tokens=new, ignore_eos=True)


def _pair(setting: Setting) -> Pair:
    return setting.keep("float32 pair", lambda: Pair(setting))


def _prefill(setting: Setting, length: int) -> Trial:
    pair = _pair(setting)
    length = setting.size(full=length, toy=length // 16)
    batch = prompts(pair.config, 1, length)
    tried = pair.peer.be_fastest([batch[0][: TRIED[0]]], 1)

    def check() -> str:
        new = pair.ours(batch, 1)
        return likeliest(new, lambda: pair.peer.logits(batch, new))

    sides = [
        Side("ling3.generate", milliseconds(lambda: pair.ours(batch, 1)), check),
        Side("transformers, model.generate", milliseconds(lambda: pair.peer.generate(batch, 1)), is_peer),
    ]
    return Trial(sides, tokens=length, about={"prompt": length, "new": 1, "implementations_tried_s": tried})


def _decode(setting: Setting, rows: int) -> Trial:
    pair = _pair(setting)
    batch = prompts(pair.config, rows, PROMPT)
    tried = pair.peer.be_fastest(batch, TRIED[1])

    def check() -> str:
        new = pair.ours(batch, NEW)
        return likeliest(new, lambda: pair.peer.logits(batch, new))

    sides = [
        Side("ling3.generate", per_step(pair.ours, batch, NEW), check),
        Side("transformers, model.generate", per_step(pair.peer.generate, batch, NEW), is_peer),
    ]
    about = {"rows": rows, "prompt": PROMPT, "new": NEW, "implementations_tried_s": tried}
    return Trial(sides, tokens=rows, about=about)


def per_step(generate: Generate, batch: Tokens, new: int) -> Callable[[], float]:
    """A function that measures a decode step in milliseconds.

    At toy sizes, a pause of the machine during the shorter call can make the difference negative: then it measures
    again. It raises RuntimeError after TRIES such attempts.
    """

    def measure() -> float:
        for _ in range(TRIES):
            seconds = []
            for count in (1, new):
                begin = time.perf_counter()
                generate(batch, count)
                seconds.append(time.perf_counter() - begin)
            if seconds[1] > seconds[0]:
                return 1e3 * (seconds[1] - seconds[0]) / (new - 1)
        raise RuntimeError(f"{TRIES} times {new} tokens took no longer than one: the machine is too busy to measure")

    return measure


@case("model/prefill-512", "A prompt of 512 tokens and one new token.", wanted=2.5)
def prefill_512(setting: Setting) -> Trial:
    """The first token after a page of text."""
    return _prefill(setting, 512)


@case("model/prefill-2048", "A prompt of 2,048 tokens and one new token.", wanted=3.5, rounds=3)
def prefill_2048(setting: Setting) -> Trial:
    """The first token after a long prompt."""
    return _prefill(setting, 2048)


@case("model/decode-1", "A decode step of one row.", wanted=1.6)
def decode_1(setting: Setting) -> Trial:
    """The decode step of a single request."""
    return _decode(setting, 1)


@case("model/decode-8", "A decode step of 8 rows, each another prompt.", wanted=2.3)
def decode_8(setting: Setting) -> Trial:
    """The decode step of eight requests."""
    return _decode(setting, 8)


@case("model/decode-32", "A decode step of 32 rows, each another prompt.", wanted=3.0, rounds=3)
def decode_32(setting: Setting) -> Trial:
    """The decode step of thirty-two requests."""
    return _decode(setting, 32)


class Widths:
    """A bfloat16 checkpoint, loaded as stored and widened to float32."""

    def __init__(self, setting: Setting):
        self.config = setting.size(full=FOUR_LAYERS, toy=TOY)
        directory = checkpoint(self.config, setting.scratch)
        self.narrow = ling3.load(directory, dtype=jnp.bfloat16)
        self.wide = ling3.load(directory, dtype=jnp.float32)


def _narrow(setting: Setting, rows: int, length: int, new: int) -> Trial:
    """bfloat16 weights against the same values in float32, which are the oracle too.

    bfloat16 activations choose other experts more often than float32's rounding does, and logits are off by a few
    hundredths: so a token may be 0.3 nats less likely than the best, and a tenth of them even less likely.
    """
    widths = setting.keep("both widths", lambda: Widths(setting))
    batch = prompts(widths.config, rows, setting.size(full=length, toy=max(16, length // 16)))

    def side(model: ling3.CausalLM) -> Callable[[], float]:
        def generate(batch: Tokens, count: int) -> Tokens:
            return ling3.generate(model, batch, max_tokens=count, ignore_eos=True)

        return milliseconds(lambda: generate(batch, 1)) if new == 1 else per_step(generate, batch, new)

    def check() -> str:
        tokens = ling3.generate(widths.narrow, batch, max_tokens=new, ignore_eos=True)
        seen = jnp.asarray([[*prompt, *row[:-1]] for prompt, row in zip(batch, tokens, strict=True)])
        return likeliest(tokens, lambda: np.asarray(widths.wide(seen)[:, -new:]), nats=0.3, share=0.9)

    sides = [
        Side("ling3, bfloat16", side(widths.narrow), check),
        Side("ling3, float32", side(widths.wide), is_peer),
    ]
    return Trial(sides, tokens=rows if new > 1 else len(batch[0]), about={"rows": rows, "prompt": len(batch[0])})


NO_CLIFF = 2 / 3
"""bfloat16 may take up to 1.5 times float32's time: it has half the bytes, but CPUs multiply float32."""


@case("model/bfloat16-prefill-512", "The same prompt with bfloat16 weights.", wanted=NO_CLIFF)
def bfloat16_prefill(setting: Setting) -> Trial:
    """Whether bfloat16 weights hit a slow path of XLA in prefill."""
    return _narrow(setting, 1, 512, 1)


@case("model/bfloat16-decode-1", "A decode step of one row with bfloat16 weights.", wanted=NO_CLIFF)
def bfloat16_decode_1(setting: Setting) -> Trial:
    """The same in decode, where a single row has a special kernel."""
    return _narrow(setting, 1, PROMPT, NEW)


@case("model/bfloat16-decode-8", "A decode step of 8 rows with bfloat16 weights.", wanted=NO_CLIFF)
def bfloat16_decode_8(setting: Setting) -> Trial:
    """The same in decode of several rows."""
    return _narrow(setting, 8, PROMPT, NEW)
