"""Operators at Ling-3.0-tiny's sizes, float32, on jax's default backend."""

import jax.numpy as jnp

from benchmarks import operators
from benchmarks.registry import Setting, Trial, case

FULL = {"heads": 16, "width": 128}
TOY = {"heads": 2, "width": 32}


@case(
    "operators/kda-chunk",
    "KDA on a prompt of 2,048 tokens: as the layer runs it, the recurrence, torch.",
    wanted={"ling3, recurrent_kda": 2.0},
    rounds=3,
)
def kda_chunk(setting: Setting) -> Trial:
    """The prefill of one KDA layer."""
    return operators.kda_chunk(setting, 1, setting.size(full=2048, toy=80), **setting.size(full=FULL, toy=TOY))


@case("operators/kda-step-1", "One decode step of KDA, one row.")
def kda_step_1(setting: Setting) -> Trial:
    """The decode of one KDA layer."""
    return operators.kda_one_step(setting, 1, **setting.size(full=FULL, toy=TOY))


@case("operators/kda-step-8", "One decode step of KDA, eight rows.")
def kda_step_8(setting: Setting) -> Trial:
    """The decode of one KDA layer, for eight rows."""
    return operators.kda_one_step(setting, 8, **setting.size(full=FULL, toy=TOY))


def _latent(setting: Setting) -> dict[str, int]:
    return setting.size(full={"heads": 16, "latent": 512, "rope": 64}, toy={"heads": 2, "latent": 24, "rope": 8})


@case("operators/mla-prefill", "MLA on a prompt of 1,024 tokens over its pages, expansion included.", rounds=3)
def mla_prefill(setting: Setting) -> Trial:
    """The prefill of one MLA layer's attention."""
    seq, nope = setting.size(full=(1024, 128), toy=(300, 16))
    return operators.mla_prefill(setting, seq, nope=nope, dtype=jnp.float32, **_latent(setting))


@case(
    "operators/mla-decode-1",
    "One token's attention over 4,096 latents in pages.",
    wanted={"torch, scaled_dot_product_attention": 1.2},
)
def mla_decode_1(setting: Setting) -> Trial:
    """The decode of one MLA layer's attention."""
    return operators.mla_decode(setting, 1, setting.size(full=4096, toy=300), dtype=jnp.float32, **_latent(setting))


@case("operators/mla-decode-8", "The same for eight rows, whose pages lie mixed.")
def mla_decode_8(setting: Setting) -> Trial:
    """The decode of one MLA layer's attention, for eight rows."""
    return operators.mla_decode(setting, 8, setting.size(full=4096, toy=300), dtype=jnp.float32, **_latent(setting))


def _experts(setting: Setting, tokens: int) -> Trial:
    sizes = setting.size(
        full={"count": 128, "top_k": 8, "hidden": 1536, "intermediate": 512},
        toy={"count": 8, "top_k": 2, "hidden": 64, "intermediate": 32},
    )
    return operators.experts(setting, tokens, dtype=jnp.float32, **sizes)


@case("operators/experts-1", "One MoE layer's routed experts, one token.")
def experts_1(setting: Setting) -> Trial:
    """The experts of a decode step of one row."""
    return _experts(setting, 1)


@case("operators/experts-8", "The same, 8 tokens.")
def experts_8(setting: Setting) -> Trial:
    """The experts of a decode step of eight rows."""
    return _experts(setting, 8)


@case("operators/experts-32", "The same, 32 tokens.")
def experts_32(setting: Setting) -> Trial:
    """The experts of a decode step of thirty-two rows."""
    return _experts(setting, 32)


@case("operators/experts-512", "The same, 512 tokens.", rounds=3)
def experts_512(setting: Setting) -> Trial:
    """The experts of a prefill chunk."""
    return _experts(setting, setting.size(full=512, toy=40))


@case("operators/router-512", "The grouped choice of 8 among 128 experts, 512 tokens.")
def router_512(setting: Setting) -> Trial:
    """The router of one MoE layer."""
    sizes = setting.size(
        full={"tokens": 512, "count": 128, "top_k": 8, "groups": 8, "hidden": 1536},
        toy={"tokens": 40, "count": 8, "top_k": 2, "groups": 4, "hidden": 64},
    )
    return operators.router(setting, **sizes)
