"""Qwen3.5-MoE's text models (`Qwen3_5MoeForConditionalGeneration`, `Qwen3_5MoeForCausalLM`): all layers are sparse."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import qwen3_5
from ling3.families.config_fields import Only
from ling3.families.family import Place
from ling3.families.gated_deltanet_gguf import architecture
from ling3.families.qwen3_5 import TextFields
from ling3.families.qwen3_moe import ExpertFields
from ling3.families.qwen3_next import HybridFields, predictor
from ling3.families.transformer import size
from ling3.layers.moe import MoE
from ling3.model import CausalLM
from ling3.mtp import MTP


@dataclasses.dataclass(frozen=True)
class Qwen35MoeConfig(TextFields, ExpertFields):
    """The config of a Qwen3.5-MoE. Raises ConfigError."""

    architecture = "Qwen3_5MoeForCausalLM"
    model_type = "qwen3_5_moe_text"
    only: ClassVar[Mapping[str, Only]] = {
        **TextFields.only,
        "norm_topk_prob": Only((True, None), "the weights of a token's experts sum to 1"),
    }

    shared_expert_intermediate_size: int = size()
    intermediate_size: int = size(absent=lambda values: values["moe_intermediate_size"])
    """Unused, as no layer is dense."""

    def mlp_kind(self, layer: int) -> str:
        """The feed-forward of any layer: `moe`."""
        return "moe"

    def experts(self, *, key: PRNGKeyArray, dtype: DTypeLike) -> MoE:
        """The mixture of any layer, with random weights."""
        return self.moe(key=key, dtype=dtype, normalize=True, shared=self.shared_expert_intermediate_size)

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        return [*ExpertFields.misfits(self), *HybridFields.misfits(self)]


def init(config: Qwen35MoeConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights, as of a Qwen3-Next; the weights of a token's experts always sum to 1."""
    return qwen3_5.build(config, lambda _, own: config.experts(key=own, dtype=dtype), key=key, dtype=dtype)


def mtp_layer(config: Qwen35MoeConfig, number: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> MTP:
    """The multi-token-prediction layer: a decoder layer of gated attention and experts."""
    return predictor(config, lambda own: config.experts(key=own, dtype=dtype), key=key, dtype=dtype)


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stacked(name: str, shape: tuple[int, ...], config: Qwen35MoeConfig) -> Place:
    """Where the published files in floats have a tensor: all experts of a layer are in one, with gates above ups.

    Experts of the multi-token-prediction layer are stored one by one.
    """
    if (found := _EXPERT.fullmatch(name)) is None or name.startswith("mtp."):
        return Place(name)
    (experts, number, part), (rows, columns) = found.groups(), shape
    if part == "down":
        return Place(f"{experts}.down_proj", (config.num_experts, rows, columns), int(number) * rows * columns)
    start = (2 * int(number) + (part == "up")) * rows * columns
    return Place(f"{experts}.gate_up_proj", (config.num_experts, 2 * rows, columns), start)


FAMILY = dataclasses.replace(
    qwen3_5.family("Qwen3.5-MoE", Qwen35MoeConfig, "Qwen3_5MoeForConditionalGeneration", init, mtp_layer, stacked),
    gguf=(architecture("qwen35moe", "mtp_num_hidden_layers", sparse=True, grouped=False),),
)
