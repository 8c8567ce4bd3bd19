"""All of Ling-3.0-tiny in INT4, in the published layout with random weights: from loading to the first word."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors

import ling3
from benchmarks import floors
from benchmarks.cases.formats import FLOOR, step_bytes
from benchmarks.cases.model import NEW, PROMPT, Tokens, per_step
from benchmarks.cases.start import QUESTION, first_word
from benchmarks.fresh import ask
from benchmarks.models import INT4_TINY, TOY, checkpoint, prompts
from benchmarks.oracles import likeliest
from benchmarks.registry import Setting, Side, Trial, Wrong, case, milliseconds

READING = "reading the file"
FASTEST_PREFILL = 60
"""The wanted prefill rate, in tokens per second; slower misses the goal."""


def _directory(setting: Setting) -> Path:
    # INT4 needs rows of a multiple of 32 numbers, and nano's tokenizer at least as many ids as it has.
    toy = dataclasses.replace(TOY, vocab_size=1280, kv_lora_rank=32, quantization_config=INT4_TINY.quantization_config)
    return checkpoint(setting.size(full=INT4_TINY, toy=toy), setting.scratch)


@case("whole/int4-load", "Load it.", wanted={READING: 1 / 1.15}, rounds=3)
def load(setting: Setting) -> Trial:
    """Seconds from the call until the last page is touched, in fresh processes; the file is in the page cache."""
    directory = _directory(setting)
    sides = [
        Side("ling3.load", lambda: ask("load-stored", directory)["seconds"], lambda: _same_sums(directory)),
        Side(READING, lambda: ask("read", directory / "model.safetensors")["seconds"], lambda: "every byte"),
    ]
    return Trial(sides, unit="s", about={"bytes_stored": _stored(directory)}, warm=False)


@case("whole/int4-memory", "The most memory that loading it ever takes, over its bytes.", limit=1.1, rounds=1)
def memory(setting: Setting) -> Trial:
    """The process's peak resident memory, interpreter and libraries included."""
    directory = _directory(setting)

    def measure() -> float:
        return ask("load-stored", directory)["peak_bytes"] / _stored(directory)

    return Trial([Side("ling3.load", measure, lambda: _same_sums(directory))], unit="× file", warm=False)


def _stored(directory: Path) -> int:
    return (directory / "model.safetensors").stat().st_size


def _same_sums(directory: Path) -> str:
    """Checks the sums of some tensors against the file, as another library reads it."""
    found = ask("load-stored", directory)["sums"]
    with safetensors.safe_open(directory / "model.safetensors", framework="numpy") as file:
        expected = {name: float(file.get_tensor(name).astype(np.float64).sum()) for name in found}
    if found != expected:
        raise Wrong(f"{found}, in the file {expected}")
    return f"the sums of {len(found)} tensors are the file's"


def _model(setting: Setting) -> ling3.CausalLM:
    return setting.keep("whole", lambda: ling3.load(_directory(setting), dtype=jnp.float32))


def _likely(model: ling3.CausalLM, batch: Tokens, tokens: Tokens) -> str:
    """Checks tokens by a pass without a cache; memory has no room for the dequantized model, used in `formats/*`."""
    seen = jnp.asarray([[*prompt, *row[:-1]] for prompt, row in zip(batch, tokens, strict=True)])
    return likeliest(tokens, lambda: np.asarray(model(seen)[:, -len(tokens[0]) :]))


@case("whole/int4-decode-1", "A decode step of one row.", wanted={FLOOR: 0.6})
def decode(setting: Setting) -> Trial:
    """Beside reading the bytes of a step, at the bandwidth that is measured in each round."""
    model = _model(setting)
    batch, read = prompts(model.config, 1, PROMPT), step_bytes(model)
    generate = functools.partial(_generate, model)
    sides = [
        Side("ling3.generate", per_step(generate, batch, NEW), lambda: _likely(model, batch, generate(batch, NEW))),
        Side(FLOOR, lambda: 1e3 * read / floors.read_bandwidth(), lambda: "at this machine's bandwidth"),
    ]
    return Trial(sides, tokens=1, about={"prompt": PROMPT, "new": NEW, "megabytes_read": round(read / 1e6)})


@case("whole/int4-prefill-512", "A prompt of 512 tokens.", limit=1e3 * 512 / FASTEST_PREFILL, rounds=3)
def prefill(setting: Setting) -> Trial:
    """Milliseconds from the prompt to the first new token."""
    model = _model(setting)
    batch = prompts(model.config, 1, setting.size(full=512, toy=32))
    generate = functools.partial(_generate, model)
    side = Side(
        "ling3.generate", milliseconds(lambda: generate(batch, 1)), lambda: _likely(model, batch, generate(batch, 1))
    )
    return Trial([side], tokens=len(batch[0]), about={"prompt": len(batch[0])})


def _generate(model: ling3.CausalLM, batch: Tokens, new: int) -> Tokens:
    return ling3.generate(model, batch, max_tokens=new, ignore_eos=True)


@case("whole/int4-first-word", "ling3 generate on it, from the shell to its first word.", limit=10.0, rounds=3)
def word(setting: Setting) -> Trial:
    """With a warm compilation cache, and the file in the page cache."""
    directory, cache = _directory(setting), (setting.scratch / "whole-cache").absolute()
    _name_tokens(directory)
    cache.mkdir(parents=True, mode=0o700, exist_ok=True)

    def measure() -> float:
        return first_word(cache, str(directory), "-p", QUESTION, "--max-tokens", "4", "--ignore-eos")[0]

    def check() -> str:
        measure()
        return "it says something, random as its weights are"

    return Trial([Side("ling3 generate", measure, check)], unit="s", warm=False)


def _name_tokens(directory: Path) -> None:
    """Writes nano's tokenizer to `directory`, with a name for every other id that the model has."""
    nano = Path(ling3.__file__).parent / "checkpoints" / "nano"
    tokenizer = json.loads((nano / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    named = {token["id"] for token in tokenizer["added_tokens"]} | set(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"] |= {f"word{i}": i for i in range(config["vocab_size"]) if i not in named}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copy(nano / "tokenizer_config.json", directory)
