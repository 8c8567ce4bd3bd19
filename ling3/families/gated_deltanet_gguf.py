"""How GGUF files state and arrange Qwen's hybrids of Gated DeltaNet: `qwen3next`, `qwen35` and `qwen35moe`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from ling3.families.gguf import (
    AS_STORED,
    EXPERTS,
    GROUPED,
    Arrangement,
    Contents,
    GgufArchitecture,
    Keys,
    check_router,
    rope_scaling,
)
from ling3.runtime.quoting import shown

_SIZES = ("block_count", "attention.key_length", "rope.dimension_count", "ssm.inner_size", "ssm.time_step_rank")
"""The keys of numbers from which fields are computed."""
_LINEAR_LAYERS, _INTERVAL, _PREDICTED = "attention.recurrent_layers", "full_attention_interval", "nextn_predict_layers"
_FIELDS = {
    **GROUPED,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SPARSE = {**EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}


def _hybrid_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields that follow from tensors and from several keys."""
    check_router(keys, "softmax")
    found = [keys.get(key, 0 if key == _PREDICTED else None) for key in (*_SIZES, _PREDICTED)]
    if not all(type(value) is int for value in found) or min(found[:-1]) < 1 or found[3] % found[4]:
        raise ValueError(
            f"{', '.join(_SIZES)} and {_PREDICTED}: found {shown(found)}; expected whole numbers from 1 on, the fourth "
            "a multiple of the fifth, and the last, the layers of multi-token prediction, from 0 on"
        )
    blocks, head, rotated, values, value_heads, predicted = found
    layers, share = blocks - predicted, rotated / head
    if (linear := keys.get(_LINEAR_LAYERS)) is not None and len(linear) < layers:
        raise ValueError(f"{_LINEAR_LAYERS}: found {len(linear)} values; expected one for each of the {layers} layers")
    interval = keys.get(_INTERVAL, 4)
    return {
        "num_hidden_layers": layers,
        "linear_value_head_dim": values // value_heads,
        # The share is multiplied by the head's size again, and what is less than a channel is cut off.
        "partial_rotary_factor": share if int(head * share) == rotated else math.nextafter(share, 1.0),
        "full_attention_interval": interval if linear is None else None,
        "layer_types": linear and ["linear_attention" if own else "full_attention" for own in linear[:layers]],
        "attention_bias": any(name.endswith("attn_output.bias") for name in contents.tensors),
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "rope_scaling": rope_scaling(contents, keys),
    }


def architecture(
    name: str, predictors: str, *, sparse: bool, grouped: bool, more: Mapping[str, Any] | None = None
) -> GgufArchitecture:
    """The description of an architecture, `sparse` if its layers have experts.

    `predictors` is the config's field for the number of multi-token-prediction layers, `grouped` is as in
    `GatedDeltaNetConfig`, and `more` are fields that files do not state.
    """

    def fields(contents: Contents, keys: Keys) -> dict[str, Any]:
        return {**_hybrid_fields(contents, keys), predictors: keys.get(_PREDICTED, 0), **(more or {})}

    return GgufArchitecture(
        name,
        {**_FIELDS, **(_SPARSE if sparse else {})},
        fields,
        unused=frozenset(
            ("ssm.inner_size", "rope.dimension_sections", "expert_gating_func", _LINEAR_LAYERS, _INTERVAL, _PREDICTED)
        ),
        lists=frozenset((_LINEAR_LAYERS, "rope.dimension_sections")),
        arrangement=_in_groups if grouped else _tiled,
    )


def _norms(path: str) -> Arrangement:
    """Norms around 1, where the checkpoint has them around 0, all but Gated DeltaNet's own."""
    centred = path.endswith("norm.weight") and not path.endswith(".attention.norm.weight")
    return Arrangement(offset=-1.0) if centred else AS_STORED


def _in_groups(path: str, stored: Sequence[str], config: Any) -> Arrangement:
    """Qwen3-Next's: z, then q, k and v in the place of the matrix that has all four of them for one key head and then
    for the next. Old files have that matrix.
    """
    if not path.endswith(".in_proj_qkvz.weight") or len(stored) == 1:
        return _norms(path)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    z, q, k, v = np.split(np.arange(2 * values + 2 * keys), [values, values + keys, values + 2 * keys])
    parts = [own.reshape(config.linear_num_key_heads, -1) for own in (q, k, v, z)]
    return Arrangement(rows=np.concatenate(parts, axis=1).reshape(-1))


def _tiled(path: str, stored: Sequence[str], config: Any) -> Arrangement:
    """Qwen3.5's: the first head of values of each key head, then the second of each, and so on."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    own = path.rpartition(".attention.")[2]
    if heads == key_heads or own not in _BY_HEAD:
        return _norms(path)

    def order(size: int) -> Int[np.ndarray, " channels"]:
        return np.arange(heads * size).reshape(-1, key_heads, size).swapaxes(0, 1).reshape(-1)

    return _BY_HEAD[own](order, config.linear_value_head_dim, 2 * key_heads * config.linear_key_head_dim)


def _after_keys(order: Callable[[int], Int[np.ndarray, " channels"]], value: int, keys: int) -> Arrangement:
    """The rows of q and k as they are, and those of v by head."""
    return Arrangement(rows=np.concatenate([np.arange(keys), keys + order(value)]))


_BY_HEAD: dict[str, Callable[[Callable[[int], Int[np.ndarray, " channels"]], int, int], Arrangement]] = {
    "in_proj_qkv.weight": _after_keys,
    "conv1d.weight": _after_keys,
    "in_proj_z.weight": lambda order, value, keys: Arrangement(rows=order(value)),
    "out_proj.weight": lambda order, value, keys: Arrangement(columns=order(value)),
    **dict.fromkeys(
        ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"),
        lambda order, value, keys: Arrangement(rows=order(1)),
    ),
}
"""The arrays of Gated DeltaNet whose rows or columns are heads of values, `value` channels each."""
