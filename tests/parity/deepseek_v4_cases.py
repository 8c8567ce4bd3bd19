"""Random DeepSeek-V4 checkpoints with their truth in float64, transformers' model and ling3's."""

import contextlib
import copy
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from deepseek_v4_checkpoint import REAL_HEADS, SMALL, draw_well_posed, mtp, transformers_fields, write
from deepseek_v4_reference import Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import ling3

CASES: dict[str, Mapping[str, Any]] = {
    "small": SMALL,
    "other ratios": transformers_fields(SMALL)
    | {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8}},
    "large epsilons, three streams, two iterations, sigmoid": SMALL
    | {"hc_eps": 0.02, "hc_mult": 3, "hc_sinkhorn_iters": 2, "rms_norm_eps": 0.03, "scoring_func": "sigmoid"},
    "every entry, no limits, no YaRN": SMALL
    | {"compress_ratios": [4, 128, 0, 128], "index_topk": 512, "rope_scaling": None, "swiglu_limit": 100.0},
    "real head sizes": REAL_HEADS,
}
LENGTH = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint under release names in `directory`, and what reads it."""

    directory: pathlib.Path
    raw: Mapping[str, Any]
    tokens: list[int]
    truth: np.ndarray
    """The float64 logits of `tokens`; all is causal, so it begins with the truth of shorter sequences."""
    stages: dict[str, np.ndarray]
    theirs: transformers.PreTrainedModel

    @functools.cached_property
    def ours(self) -> ling3.CausalLM:
        return ling3.load(self.directory, jnp.float32)


def make(directory: pathlib.Path, raw: Mapping[str, Any] = SMALL, seed: int = 1, **changes: Any) -> Case:
    """The case of a config with `changes`, drawn from the first fair seed from `seed` on."""
    raw = {**raw, **changes}
    drawn = draw_well_posed(Config(raw), LENGTH, seed)
    write(directory, raw, drawn.weights | mtp(raw))
    return Case(directory, raw, drawn.tokens, drawn.logits, drawn.stages, open_theirs(directory))


def open_theirs(directory: pathlib.Path) -> transformers.PreTrainedModel:
    """transformers' model in float32; nothing is missing and nothing left over but multi-token prediction."""
    model, told = transformers.DeepseekV4ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    return model.eval().requires_grad_(False)


def stages_of(theirs: transformers.PreTrainedModel, ids: list[int]) -> dict[str, np.ndarray]:
    """The outputs of transformers' modules, as `deepseek_v4_reference.forward` names and shapes them."""
    stages, hooks = {}, []

    def keep(name, module, arguments, output):
        del module
        if name.endswith(".gate"):
            logits, weights, experts = output
            output = torch.zeros_like(logits).scatter(1, experts, weights)
        elif ".hc_" in name:
            post, c, _ = output
            output = torch.cat([post[0], c[0].flatten(1)], dim=1)
        elif name.endswith(".scorer"):  # the indexer does not return its entries
            name, output = name.replace(".scorer", ".compressor"), arguments[1][0]
        elif name.endswith(".indexer"):
            entries = len(ids) // theirs.config.compress_rates["compressed_sparse_attention"]
            places = output[0] % (entries + 1)  # an empty one, -1, becomes a last column
            output = torch.zeros(len(ids), entries + 1).scatter(1, places, 1.0)[:, :entries]
        elif name.endswith(".compressor"):
            output = output[0][0, 0]
        else:
            output = (output[0] if isinstance(output, tuple) else output)[0]
        stages[name] = output.numpy()

    for own_name, module in theirs.named_modules():
        name = functools.reduce(lambda name, pair: re.sub(*pair, name), MODULES, own_name)
        if re.fullmatch(r"embed|hc_head|norm|head|layers\.\d+(\.(attn|ffn|(hc_)?(attn|ffn)(_norm)?))?", name) or (
            re.fullmatch(r".*\.(gate|compressor|indexer|scorer)", name)
        ):
            hooks.append(module.register_forward_hook(functools.partial(keep, name)))
    theirs(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return stages


MODULES = (
    (r"^model\.", ""),
    (r"^embed_tokens$", "embed"),
    (r"^lm_head$", "head"),
    (r"\.self_attn\b", ".attn"),
    (r"\.mlp\b", ".ffn"),
    (r"\.(attn|ffn)_hc$", r".hc_\1"),
    (r"\.input_layernorm$", ".attn_norm"),
    (r"\.post_attention_layernorm$", ".ffn_norm"),
    (r"\.compressor\.indexer\b", ".indexer"),
)
"""transformers' modules to the names of stages, in this order."""


@contextlib.contextmanager
def float64_for_float32() -> Iterator[None]:
    """What torch's programs write float32 for is float64: transformers asks for float32 by name wherever it is wide."""
    with (
        mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def in_double(theirs: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A copy in float64, the rotary frequencies computed anew; it is right within `float64_for_float32`."""
    model = copy.deepcopy(theirs).double()
    model.set_experts_implementation("eager")
    with float64_for_float32():
        for module in model.modules():
            for kind, rope in getattr(module, "rope_type", {}).items():
                compute = ROPE_INIT_FUNCTIONS.get(rope, getattr(module, "compute_default_rope_parameters", None))
                setattr(module, f"{kind}_inv_freq", compute(model.config, None, layer_type=kind)[0])
    return model
