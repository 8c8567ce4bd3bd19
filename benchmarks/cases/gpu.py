"""One GPU in bfloat16: operators against flash-linear-attention and torch, and Ling-3.0-tiny with random weights.

Where jax has no GPU the same functions run at toy sizes on the CPU, only to show that they run; these results are
stored separately.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks import operators
from benchmarks.cases.model import per_step
from benchmarks.models import TINY, TOY, prompts
from benchmarks.oracles import as_near_to_exact
from benchmarks.registry import Setting, Side, Trial, case, milliseconds

PUBLISHED = "SGLang, one H200, Ling-3.0-tiny in bfloat16, 8,192 tokens in and 1,024 out"
GPU = ling3.Execution.default("gpu")
"""The execution for a GPU; elsewhere its kernels are interpreted."""
CALLS = 20
"""Calls of an operator that are dispatched before the last is awaited, so that the GPU does not wait for the host."""
NEW = 129
"""New tokens: one from the prefill and 128 decode steps."""


@case("gpu/kda-chunk-8x2048", "KDA on 8 prompts of 2,048 tokens, against fla's chunk_kda.", wanted=1.0)
def kda_chunk_short(setting: Setting) -> Trial:
    """Several sequences, with enough heads in all to fill the GPU."""
    sizes = setting.size(full=(8, 2048, 16, 128), toy=(2, 80, 2, 32))
    return operators.kda_chunk(setting, *sizes, calls=setting.size(full=CALLS, toy=1), execution=GPU)


@case("gpu/kda-chunk-1x16384", "KDA on one prompt of 16,384 tokens: 16 heads are all there is in parallel.", wanted=1.0)
def kda_chunk_long(setting: Setting) -> Trial:
    """One long sequence, whose heads alone run in parallel."""
    sizes = setting.size(full=(1, 16384, 16, 128), toy=(1, 160, 2, 32))
    return operators.kda_chunk(setting, *sizes, calls=setting.size(full=CALLS, toy=1), execution=GPU)


def _step(setting: Setting, batch: int) -> Trial:
    heads, width = setting.size(full=(16, 128), toy=(2, 32))
    return operators.kda_one_step(setting, batch, heads, width, calls=setting.size(full=CALLS, toy=1), execution=GPU)


@case("gpu/kda-step-1", "One decode step of KDA, one row, against fla's fused_recurrent_kda.", wanted=1.0)
def kda_step_1(setting: Setting) -> Trial:
    """The decode of one KDA layer for one request."""
    return _step(setting, 1)


@case("gpu/kda-step-128", "The same for 128 rows.", wanted=1.0)
def kda_step_128(setting: Setting) -> Trial:
    """The decode of one KDA layer for 128 requests."""
    return _step(setting, setting.size(full=128, toy=4))


def _latent(setting: Setting) -> dict[str, int]:
    return setting.size(full={"heads": 16, "latent": 512, "rope": 64}, toy={"heads": 2, "latent": 24, "rope": 8})


@case("gpu/mla-prefill-4096", "MLA on a prompt of 4,096 tokens over its pages, against torch's attention.")
def mla_prefill(setting: Setting) -> Trial:
    """Keys and values are expanded from the latents on both sides."""
    seq, nope = setting.size(full=(4096, 128), toy=(300, 16))
    return operators.mla_prefill(setting, seq, nope=nope, dtype=jnp.bfloat16, **_latent(setting))


@case("gpu/mla-decode-16", "One token of 16 rows over 8,192 latents each, against torch's attention.")
def mla_decode(setting: Setting) -> Trial:
    """ling3 reads the latents in pages, in the absorbed form; torch reads contiguous ones."""
    batch, context = setting.size(full=(16, 8192), toy=(2, 300))
    calls = setting.size(full=CALLS, toy=1)
    return operators.mla_decode(
        setting, batch, context, dtype=jnp.bfloat16, calls=calls, execution=GPU, **_latent(setting)
    )


def _experts(setting: Setting, tokens: int) -> Trial:
    sizes = setting.size(
        full={"count": 128, "top_k": 8, "hidden": 1536, "intermediate": 512},
        toy={"count": 8, "top_k": 2, "hidden": 64, "intermediate": 64},
    )
    return operators.experts(setting, tokens, dtype=jnp.bfloat16, execution=GPU, **sizes)


@case("gpu/experts-16", "One MoE layer's routed experts, 16 tokens, against torch's grouped matmul.")
def experts_16(setting: Setting) -> Trial:
    """The experts of a decode step of sixteen rows."""
    return _experts(setting, 16)


@case("gpu/experts-8192", "The same, 8,192 tokens.")
def experts_8192(setting: Setting) -> Trial:
    """The experts in the prefill of a long prompt."""
    return _experts(setting, setting.size(full=8192, toy=40))


def _model(setting: Setting) -> ling3.CausalLM:
    """Ling-3.0-tiny with 15.8 GB of random weights, drawn on the device."""
    config = setting.size(full=TINY, toy=TOY)
    return setting.keep("tiny, bfloat16", lambda: ling3.init(config, key=jax.random.key(0), dtype=jnp.bfloat16))


def _decode(setting: Setting, rows: int, context: int, published: dict[str, float] | None = None) -> Trial:
    model = _model(setting)
    batch = prompts(model.config, rows, setting.size(full=context, toy=32))
    new = setting.size(full=NEW, toy=9)
    side = Side("ling3.generate", per_step(_generate(setting), batch, new), _check(setting))
    about = {"rows": rows, "context": len(batch[0]), "new": new}
    return Trial([side], tokens=rows, about=about, published=published or {})


def _generate(setting: Setting) -> Callable[[list[list[int]], int], list[list[int]]]:
    model, options = _model(setting), {"ignore_eos": True, "execution": GPU}
    return lambda batch, count: ling3.generate(model, batch, max_tokens=count, **options)


def one_row(setting: Setting) -> Callable[[int], list[list[int]]]:
    """A function of the number of new tokens, which Ling-3.0-tiny gives one row after a prompt of 256."""
    batch = prompts(_model(setting).config, 1, setting.size(full=256, toy=32))
    return lambda count: _generate(setting)(batch, count)


CHECKED_ROWS, CHECKED_PROMPT, CHECKED_NEW = 16, 64, 8
"""Sizes of the check: rows, their prompt tokens, and their new tokens."""


def _check(setting: Setting) -> Callable[[], str]:
    """Checks cached prefill and decode against passes without a cache, in bfloat16 and float32, once for all cases."""

    def held() -> str:
        model = _model(setting)
        batch = prompts(model.config, CHECKED_ROWS, setting.size(full=CHECKED_PROMPT, toy=20))
        tokens = _generate(setting)(batch, CHECKED_NEW)
        seen = jnp.asarray([[*prompt, *row[:-1]] for prompt, row in zip(batch, tokens, strict=True)])
        # Autotuning takes a GPU's compiler minutes, and these two passes run only once.
        options = {"xla_gpu_autotune_level": 0}
        last = jax.jit(lambda model: model(seen)[:, -CHECKED_NEW:].astype(jnp.float32), compiler_options=options)
        return as_near_to_exact(tokens, *(np.asarray(last(each)) for each in (model, _widened(model))))

    return lambda: setting.once("tiny, checked", held)


def _widened(model: ling3.CausalLM) -> ling3.CausalLM:
    """The model with its weights in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf, model)


@case("gpu/prefill-8192", "Ling-3.0-tiny: a prompt of 8,192 tokens and one new token.", limit=50.0)
def prefill_8192(setting: Setting) -> Trial:
    """The time to the first token of a long prompt."""
    model = _model(setting)
    batch = prompts(model.config, 1, setting.size(full=8192, toy=80))
    side = Side("ling3.generate", milliseconds(lambda: _generate(setting)(batch, 1)), _check(setting))
    return Trial([side], tokens=len(batch[0]), about={"prompt": len(batch[0])}, published={f"{PUBLISHED}: TTFT": 70.0})


@case("gpu/decode-1-at-1024", "Ling-3.0-tiny: a decode step of one row at a context of 1,024.", limit=1.2)
def decode_1(setting: Setting) -> Trial:
    """One request with a short context."""
    return _decode(setting, 1, 1024)


@case("gpu/decode-16-at-1024", "The same for 16 rows.", limit=3.5)
def decode_16(setting: Setting) -> Trial:
    """Sixteen requests with a short context each."""
    return _decode(setting, setting.size(full=16, toy=4), 1024)


@case("gpu/decode-1-at-8192", "One row at a context of 8,192, as SGLang's figure.", limit=2.87)
def decode_1_long(setting: Setting) -> Trial:
    """One request with a long context."""
    return _decode(setting, 1, 8192, {f"{PUBLISHED}, 1 request: TPOT": 2.87})


@case("gpu/decode-16-at-8192", "16 rows at a context of 8,192, as SGLang's figure.", limit=5.96)
def decode_16_long(setting: Setting) -> Trial:
    """Sixteen requests with a long context each."""
    rows = setting.size(full=16, toy=4)
    return _decode(setting, rows, 8192, {f"{PUBLISHED}, 16 requests: TPOT": 5.96})
