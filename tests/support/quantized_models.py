"""Small models whose matrices are quantized, and the configs that say so."""

import dataclasses
import functools

import jax
from tiny import TINY

import ling3

FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
POWERS = FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}


def compressed(bits=4, group=32, kind="int", **changes):
    """A `quantization_config` as compressed-tensors writes it."""
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "observer": "minmax",
    }
    format = "pack-quantized" if kind == "int" else "mxfp4-pack-quantized"
    if kind == "float":
        weights["scale_dtype"] = "torch.uint8"
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group_0 | {"format": format}},
    } | changes


CONFIGS = {
    "fp8": FP8,
    "fp8-powers": POWERS,
    "int4": compressed(),
    "int8": compressed(8, None),
    "mxfp4": compressed(kind="float"),
}
SIZES = dataclasses.replace(
    TINY,
    hidden_size=64,
    intermediate_size=64,
    head_dim=32,
    q_lora_rank=32,
    kv_lora_rank=32,
    v_head_dim=32,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32,
)
"""With columns that divide into groups of 32."""


def config(name, **changes):
    return dataclasses.replace(SIZES, quantization_config=CONFIGS[name], **changes)


@functools.cache
def model(name, **changes):
    return ling3.init(config(name, **changes), key=jax.random.key(0))
