"""Speculation: an engine that guesses tokens against the same engine without, which is the oracle of every answer."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks.cases.engine import seconds
from benchmarks.cases.formats import quantized
from benchmarks.models import FOUR_LAYERS, INT4_TINY, TOY, checkpoint
from benchmarks.oracles import is_peer
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from ling3.engine.speculation import Draft, check_drafts
from ling3.execution import Execution

SEQUENCES = (1, 4, 16)
"""How many requests run at once."""
WITHOUT = "without"

Answers = list[tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class _Work:
    """Requests with one prompt, each drawn with a seed of its own, or all greedy."""

    model: ling3.CausalLM
    prompt: list[int]
    count: int
    tokens: int
    temperature: float

    def engine(self, setting: Setting, **speculation: Any) -> ling3.Engine:
        """A warmed-up engine, without a prefix cache, since rounds repeat the prompts. Raises Absent if refused."""
        try:
            check_drafts(self.model, Execution.default(), mtp=False)
        except ValueError as error:
            raise Absent(str(error)) from None
        fewer = {"chunked_prefill_size": 32, "token_paddings": (32,)}
        sizes = {"max_model_len": len(self.prompt) + self.tokens, "max_running_requests": max(SEQUENCES)}
        own = ling3.Engine(self.model, prefix_cache=False, **sizes, **setting.size(full={}, toy=fewer), **speculation)
        own.warmup()
        return own

    def answers(self, engine: ling3.Engine) -> Answers:
        """The tokens and log-probabilities of all requests, served at once."""
        fixed = {"max_tokens": self.tokens, "temperature": self.temperature, "ignore_eos": True, "logprobs": 0}
        params = [ling3.SamplingParams(seed=i, **fixed) for i in range(self.count)]
        outputs = engine.generate([self.prompt] * self.count, params)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    def trial(self, setting: Setting, guesses: dict[str, str | Draft], expected: Answers, plain: ling3.Engine) -> Trial:
        """A side for each way to guess, and one without."""
        found: dict[str, str] = {}

        def side(name: str, draft: str | Draft) -> Side:
            engine = self.engine(setting, speculation=draft)

            def check() -> str:
                before = engine.stats()
                if self.answers(engine) != expected:
                    raise Wrong("guesses change tokens or log-probabilities")
                after = engine.stats()
                drafted, accepted = (
                    getattr(after, n) - getattr(before, n) for n in ("drafted_tokens", "accepted_tokens")
                )
                found[name] = f"{accepted} of {drafted} guesses right"
                return f"tokens and log-probabilities are those without, bit for bit; {found[name]}"

            return Side(name, seconds(lambda: self.answers(engine)), check)

        sides = [side(name, draft) for name, draft in guesses.items()]
        sides.append(Side(WITHOUT, seconds(lambda: self.answers(plain)), is_peer))
        about = {"requests": self.count, "prompt": len(self.prompt), "tokens": self.tokens, "guesses": found}
        return Trial(sides, unit="s", tokens=self.count * self.tokens, about=about)


def _of_nano(setting: Setting, count: int, temperature: float) -> Trial:
    model = ling3.load("nano", dtype=jnp.float32)
    work = _Work(model, list(range(10, 60)), count, setting.size(full=400, toy=24), temperature)
    plain = work.engine(setting)
    return work.trial(setting, {"lookup": "lookup"}, work.answers(plain), plain)


def _of_random(setting: Setting, count: int, config: ling3.Ling3Config, chances: Sequence[float]) -> Trial:
    """Guesses that are right with a known chance, since a random model's text has nothing to look up, in INT4."""
    toy = dataclasses.replace(TOY, kv_lora_rank=32, num_attention_heads=4, head_dim=32)
    config = setting.size(full=config, toy=toy)
    stored = config.quantization_config is not None
    directory = checkpoint(config, setting.scratch) if stored else quantized(config, setting.scratch, "int4")
    model = setting.keep(f"{config.num_hidden_layers} layers in INT4", lambda: ling3.load(directory))
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, setting.size(full=64, toy=16)).tolist()
    work = _Work(model, prompt, count, setting.size(full=96, toy=16), 1.0)
    plain = work.engine(setting)
    expected = work.answers(plain)
    whole = [[*prompt, *tokens] for tokens, _ in expected]
    return work.trial(setting, {f"{p:.0%} right": _knowing(whole, p) for p in chances}, expected, plain)


def _knowing(whole: Sequence[Sequence[int]], chance: float) -> Callable[[Sequence[int]], Sequence[int]]:
    """Guesses the tokens that will follow, each rightly with a chance."""

    def guess(tokens: Sequence[int]) -> Sequence[int]:
        after = next((each[len(tokens) :] for each in whole if list(each[: len(tokens)]) == list(tokens)), [])
        right = np.random.default_rng(len(tokens)).random(len(after)) < chance
        return [token if own else token ^ 1 for token, own in zip(after, right, strict=True)]

    return guess


def _register(count: int) -> None:
    one = "one request" if count == 1 else f"{count} requests"
    case(f"speculation/nano-repeats-{count}", f"Lookup for {one} of nano, greedy, whose text repeats itself.")(
        lambda setting: _of_nano(setting, count, 0.0)
    )
    case(f"speculation/nano-drawn-{count}", f"Lookup for {one} of nano, whose drawn text repeats little.", wanted=0.97)(
        lambda setting: _of_nano(setting, count, 1.0)
    )
    case(
        f"speculation/four-layers-{count}", f"Known guesses for {one} of four layers at full width in INT4.", rounds=3
    )(lambda setting: _of_random(setting, count, FOUR_LAYERS, (1.0, 0.8, 0.6, 0.0)))
    case(f"speculation/whole-{count}", f"Known guesses for {one} of all of Ling-3.0-tiny in INT4.", rounds=2)(
        lambda setting: _of_random(setting, count, INT4_TINY, (1.0, 0.6))
    )


for _count in SEQUENCES:
    _register(_count)
