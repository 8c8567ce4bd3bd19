"""A decode step with weights in every format, full width, four layers: beside float32, and beside reading the bytes.

All matrices are in the format, the head too; embedding, norms, convolutions and routers are unchanged. The oracle is
the same checkpoint dequantized to float32: each token must be nearly as likely there as the best.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks import floors
from benchmarks.cases.model import NEW, PROMPT, Tokens, per_step
from benchmarks.models import FOUR_LAYERS, TOY, checkpoint, prompts
from benchmarks.oracles import is_peer, likeliest
from benchmarks.peer_process import MLX, PeerProcess
from benchmarks.registry import Setting, Side, Trial, case
from ling3.families.quantization_methods import Scheme, as_compressed
from ling3.formats import Fp8Channels, Int8Channels, PackedIntegers

WIDE, FLOOR, PEER = "ling3, float32", "reading the step's bytes", "mlx-lm, as many bits"
PEER_PROMPT, PEER_NEW = 2, 4
"""Sizes for mlx, whose CPU products process one row after another: 16 prompt tokens take as long as 16 steps."""


def of_others(form: str, config: ling3.Ling3Config) -> Scheme | None:
    """A format that ling3 only reads (integers of AWQ and GPTQ, W8A8, FP8-dynamic), or None for others."""
    group = 128 if config.moe_intermediate_size % 128 == 0 else 32
    zeros = {"bits": 4, "group": group, "symmetric": False}
    return {
        "zeros4": Scheme(PackedIntegers, tuple(zeros.items())),
        "int8-rows": Scheme(Int8Channels),
        "fp8-rows": Scheme(Fp8Channels),
    }.get(form)


def quantized(config: ling3.Ling3Config, scratch: Path, form: str) -> Path:
    """The random checkpoint of a config with all its matrices in a format, written if it is not there yet."""
    source = checkpoint(config, scratch)
    out = source.with_name(f"{source.name}-{form}")
    if out.exists():
        return out
    if (scheme := of_others(form, config)) is None:
        ling3.quantize(source, out, form, keep=())
        return out
    raw = as_compressed(scheme, ["Linear"], [])
    model = ling3.init(dataclasses.replace(config, quantization_config=raw), key=jax.random.key(0), dtype=jnp.bfloat16)

    def with_half_scales(node: Any) -> Any:
        """AWQ and GPTQ have float16 scales."""
        return eqx.tree_at(lambda own: own.weight_scale, node, replace_fn=lambda scale: scale.astype(jnp.float16))

    integers = lambda node: isinstance(node, PackedIntegers)  # noqa: E731
    model = jax.tree.map(lambda node: with_half_scales(node) if integers(node) else node, model, is_leaf=integers)
    ling3.save(model, out, tokenizer_from=None)
    return out


def step_bytes(model: ling3.CausalLM) -> float:
    """Bytes of weights that a decode step of one row reads: all but the embedding and the experts not chosen."""
    total = 0.0
    for path, array in jax.tree_util.tree_leaves_with_path(model):
        name, config = jax.tree_util.keystr(path), model.config
        if "word_embeddings" not in name:
            total += array.nbytes * (config.num_experts_per_tok / config.num_experts if ".experts." in name else 1)
    return total


def likely(directory: Path, batch: Tokens, tokens: Tokens, **allowed: float) -> str:
    """Checks tokens against the checkpoint in a directory, dequantized to float32; it is loaded only for this check."""
    seen = jnp.asarray([[*prompt, *row[:-1]] for prompt, row in zip(batch, tokens, strict=True)])

    def logits() -> np.ndarray:
        oracle = ling3.load(directory, dtype=jnp.float32, dequantize=True)
        return np.asarray(oracle(seen)[:, -len(tokens[0]) :])

    return likeliest(tokens, logits, **allowed)


class Models:
    """A checkpoint in a format, and its source in float32."""

    def __init__(self, setting: Setting, form: str):
        config = setting.size(full=FOUR_LAYERS, toy=dataclasses.replace(TOY, kv_lora_rank=32))
        source = checkpoint(config, setting.scratch)
        self.form, self.source, self.mlx = form, source, setting.mlx
        self.directory = source if form == "bfloat16" else quantized(config, setting.scratch, form)
        self.own = ling3.load(self.directory, dtype=jnp.bfloat16 if form == "bfloat16" else jnp.float32)
        self.wide = ling3.load(source, dtype=jnp.float32)

    def peer(self, batch: Tokens) -> Side:
        """mlx-lm's side. It quantizes differently from ling3, so it is checked in float32."""

        def check() -> str:
            wide = PeerProcess(MLX, self.mlx, self.source, "32")
            tokens = wide.generate(batch, 2)
            wide.close()
            seen = jnp.asarray([[*prompt, *row[:-1]] for prompt, row in zip(batch, tokens, strict=True)])
            return "in float32, " + likeliest(tokens, lambda: np.asarray(self.wide(seen)[:, -2:]))

        @functools.cache
        def process() -> PeerProcess:
            return PeerProcess(MLX, self.mlx, self.source, self.form[3:])

        def measure() -> float:
            return per_step(lambda batch, new: process().generate(batch, new), batch, PEER_NEW)()

        return Side(PEER, measure, check)


def _decode(setting: Setting, form: str, rows: int) -> Trial:
    models = setting.keep(f"float32 and {form}", lambda: Models(setting, form))
    batch = prompts(models.wide.config, rows, PROMPT)

    def generate(model: ling3.CausalLM, batch: Tokens, new: int) -> Tokens:
        return ling3.generate(model, batch, max_tokens=new, ignore_eos=True)

    # bfloat16 activations choose other experts more often, as in `model/bfloat16-*`.
    allowed = {"nats": 0.3, "share": 0.9} if form == "bfloat16" else {}
    sides = [
        Side(
            f"ling3, {form}",
            per_step(functools.partial(generate, models.own), batch, NEW),
            lambda: likely(models.directory, batch, generate(models.own, batch, NEW), **allowed),
        ),
        Side(WIDE, per_step(functools.partial(generate, models.wide), batch, NEW), is_peer),
    ]
    if form in ("int4", "int8"):
        sides.append(models.peer([row[:PEER_PROMPT] for row in batch]))
    about = {"rows": rows, "prompt": PROMPT, "new": NEW}
    if rows == 1:
        read = step_bytes(models.own)
        about |= {"megabytes_read": round(read / 1e6)}
        sides.append(Side(FLOOR, lambda: 1e3 * read / floors.read_bandwidth(), lambda: "at this machine's bandwidth"))
    return Trial(sides, tokens=rows, about=about)


@case("formats/bfloat16-1", "A decode step of one row with weights in bfloat16.", wanted={WIDE: 1.8, FLOOR: 0.8})
def bfloat16_1(setting: Setting) -> Trial:
    """Half of float32's bytes, which are widened by a shift."""
    return _decode(setting, "bfloat16", 1)


@case("formats/fp8-1", "The same in FP8.", wanted={WIDE: 3.0, FLOOR: 0.8})
def fp8_1(setting: Setting) -> Trial:
    """A quarter of float32's bytes, with a scale for each block."""
    return _decode(setting, "fp8", 1)


@case("formats/int8-1", "The same in INT8.", wanted={WIDE: 3.0, FLOOR: 0.8, PEER: 1.5})
def int8_1(setting: Setting) -> Trial:
    """A quarter of the bytes; numbers are multiplied by their group's scale and rounded to bfloat16."""
    return _decode(setting, "int8", 1)


@case("formats/int4-1", "The same in INT4.", wanted={WIDE: 4.5, FLOOR: 0.65, PEER: 1.5})
def int4_1(setting: Setting) -> Trial:
    """A seventh of the bytes; numbers are looked up in a table."""
    return _decode(setting, "int4", 1)


@case("formats/mxfp4-1", "The same in MXFP4.", wanted={WIDE: 4.5, FLOOR: 0.65})
def mxfp4_1(setting: Setting) -> Trial:
    """A seventh of the bytes, with powers of two as scales."""
    return _decode(setting, "mxfp4", 1)


@case("formats/zeros4-1", "The same in AWQ's and GPTQ's integers.", wanted={WIDE: 4.5, FLOOR: 0.65})
def zeros4_1(setting: Setting) -> Trial:
    """An eighth of the bytes, with a scale in float16 and a zero point for each group of 128."""
    return _decode(setting, "zeros4", 1)


@case("formats/int8-rows-1", "The same in INT8 with a scale for each row.", wanted={WIDE: 3.0, FLOOR: 0.8})
def int8_rows_1(setting: Setting) -> Trial:
    """A quarter of the bytes, as in `int-quantized`."""
    return _decode(setting, "int8-rows", 1)


@case("formats/fp8-rows-1", "The same in FP8 with a scale for each row.", wanted={WIDE: 3.0, FLOOR: 0.8})
def fp8_rows_1(setting: Setting) -> Trial:
    """A quarter of the bytes, as in `float-quantized`."""
    return _decode(setting, "fp8-rows", 1)


@case("formats/int4-8", "A decode step of 8 rows in INT4, each another prompt.", wanted={PEER: 1.5}, rounds=3)
def int4_8(setting: Setting) -> Trial:
    """Eight answers at once: most chosen experts have one row."""
    return _decode(setting, "int4", 8)


@case("formats/int8-8", "The same in INT8.", wanted={PEER: 1.5}, rounds=3)
def int8_8(setting: Setting) -> Trial:
    """Eight answers at once, with weights of eight bits."""
    return _decode(setting, "int8", 8)
