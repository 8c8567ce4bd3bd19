"""ling3 beside llama.cpp on the same weights, in bfloat16 and in 8 and 4 bits with a scale for 32 numbers.

Ling-3.0-tiny's full width with four layers, and SmolLM2-135M's shapes. In some cases both have one GGUF file, whose
blocks they keep as they are. ling3's activations are bfloat16, of a GGUF file float32, and it does not round them;
llama.cpp rounds them to 8 bits where weights have 8 or fewer. The oracle of ling3 is the same checkpoint dequantized to
float32. `llama-batched-bench` gives times and no tokens, so llama.cpp's answers are not checked here.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp

import ling3
from benchmarks import floors
from benchmarks.cases.formats import FLOOR, likely, quantized, step_bytes
from benchmarks.cases.model import Tokens, per_step
from benchmarks.llama_cpp import LlamaCpp
from benchmarks.models import FOUR_LAYERS, SMOLLM2, TOY, checkpoint, prompts
from benchmarks.registry import Setting, Side, Trial, case, milliseconds

PEER = "llama.cpp"
TOY_SIZES = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
"""SmolLM2's sizes to see that a case runs."""
MODELS = {
    "ling3": (FOUR_LAYERS, dataclasses.replace(TOY, kv_lora_rank=32)),
    "smollm2-135m": (SMOLLM2, dataclasses.replace(SMOLLM2, **TOY_SIZES)),
}
"""Configs at full and at toy size, by name."""
FORMS = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's format by ling3's. Other formats are GGUF's types, in which both have the same file."""
PROMPT, NEW = 64, 33
"""Tokens of a row's prompt for decode, and new tokens: one from the prefill, and 32 decode steps."""


class Pair:
    """ling3 and llama.cpp with the same weights; llama.cpp may be absent, unless it writes the file of both."""

    def __init__(self, setting: Setting, name: str, form: str):
        full, toy = MODELS[name]
        self.config = setting.size(full=full, toy=toy)
        source = checkpoint(self.config, setting.scratch)
        self._peer = functools.partial(LlamaCpp, setting.llama_cpp, source, FORMS.get(form, form))
        if form not in FORMS:
            self.directory = self.peer.file
        else:
            self.directory = source if form == "bfloat16" else quantized(self.config, setting.scratch, form)
        self.model = ling3.load(self.directory, dtype=jnp.bfloat16 if form in FORMS else None)

    @functools.cached_property
    def peer(self) -> LlamaCpp:
        """llama.cpp. Raises Absent without it."""
        return self._peer()

    def generate(self, batch: Tokens, new: int) -> Tokens:
        """The `new` greedy tokens of each prompt by ling3."""
        return ling3.generate(self.model, batch, max_tokens=new, ignore_eos=True)

    def check(self, batch: Tokens) -> str:
        """Holds NEW tokens of ling3 against the dequantized checkpoint; bfloat16 chooses other experts."""
        return likely(self.directory, batch, self.generate(batch, NEW), nats=0.3, share=0.9)

    def theirs(self, measure: Callable[[LlamaCpp], float]) -> Side:
        """llama.cpp's side. It is opened by its check."""
        return Side(PEER, lambda: measure(self.peer), lambda: f"{self.peer.form} of the same weights; answers unseen")


def _pair(setting: Setting, name: str, form: str) -> Pair:
    return setting.keep(("llama.cpp", name, form), lambda: Pair(setting, name, form))


def _prefill(setting: Setting, name: str, form: str) -> Trial:
    pair, length = _pair(setting, name, form), setting.size(full=512, toy=32)
    batch = prompts(pair.config, 1, length)
    sides = [
        Side(f"ling3, {form}", milliseconds(lambda: pair.generate(batch, 1)), lambda: pair.check(batch)),
        pair.theirs(lambda peer: peer.prefill(length)),
    ]
    return Trial(sides, tokens=length, about={"prompt": length})


def _decode(setting: Setting, name: str, form: str, rows: int) -> Trial:
    pair = _pair(setting, name, form)
    batch, read = prompts(pair.config, rows, PROMPT), step_bytes(pair.model)
    sides = [
        Side(f"ling3, {form}", per_step(pair.generate, batch, NEW), lambda: pair.check(batch)),
        pair.theirs(lambda peer: peer.step(rows, PROMPT, NEW - 1)),
    ]
    about = {"rows": rows, "prompt": PROMPT, "new": NEW}
    if rows == 1:
        about |= {"megabytes_read": round(read / 1e6)}
        sides.append(Side(FLOOR, lambda: 1e3 * read / floors.read_bandwidth(), lambda: "at this machine's bandwidth"))
    return Trial(sides, tokens=rows, about=about)


def _register(name: str, form: str, one: float) -> None:
    """Registers the cases of one model in one format; `one` is how much faster one row's decode step should be."""
    group = f"peers/llama.cpp-{name}-{form.lower()}"
    case(f"{group}-prefill-512", "A prompt of 512 tokens and one new token.", wanted={PEER: 1.0})(
        functools.partial(_prefill, name=name, form=form)
    )
    for rows, wanted in {1: one, 8: 1.5, 32: 1.5}.items():
        case(f"{group}-decode-{rows}", f"A decode step of {rows} rows.", wanted={PEER: wanted}, rounds=3)(
            functools.partial(_decode, name=name, form=form, rows=rows)
        )


_register("ling3", "bfloat16", 1.0)
_register("ling3", "int8", 1.2)
_register("ling3", "int4", 1.2)
_register("smollm2-135m", "bfloat16", 1.1)
for _type in ("Q4_1", "Q8_0", "Q4_K", "Q6_K"):
    _register("ling3", _type, 1.0)
