"""Ling-3's configuration: what the model *is*, read from a checkpoint's `config.json`."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from ling3.families import ling3_reader as config_reader
from ling3.families.ling3_fields import VARIANTS, ConfigError, check, normalized
from ling3.layers.gate import OutputGate
from ling3.runtime import strict_json

__all__ = ["ConfigError", "Ling3Config"]


@dataclasses.dataclass(frozen=True)
class Ling3Config:
    """The shape and the laws of a Ling-3 model (`BailingMoeV3ForCausalLM`), in the published field names.

    Defaults are those of the published Ling-3.0-tiny. Lengths are in tokens, sizes in channels. `kda_lower_bound` is
    None for the softplus law (the published `kda_safe_gate: false`); the two limit lists have one number per layer, 0
    for no clamp. Raises ConfigError, naming every field of the wrong type, out of range or at odds with the rest.
    """

    # The import hook's type check would come before `__post_init__`, with an error that names no field to correct.
    __no_type_check__ = True

    vocab_size: int = 157184
    hidden_size: int = 1536
    intermediate_size: int = 4608
    num_hidden_layers: int = 24
    layer_group_size: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 16
    head_dim: int = 128
    """KDA's key and value head size; MLA's are `qk_head_dim` and `v_head_dim`."""
    q_lora_rank: int | None = 256
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 6000000.0
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    short_conv_kernel_size: int = 4
    kda_lower_bound: float | None = -5.0
    num_experts: int = 128
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    moe_shared_expert_intermediate_size: int = 512
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    expert_swiglu_limit_list: tuple[float, ...] | None = None
    share_expert_swiglu_limit_list: tuple[float, ...] | None = None
    num_nextn_predict_layers: int | None = 0
    """Layers of multi-token prediction, whose weights are not loaded; None where config.json does not say."""
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = (156895,)
    pad_token_id: int | None = 156892
    attention: Literal["scheduled", "kda", "mla", "none"] = "scheduled"
    """`scheduled` by `layer_group_size`; or one kind in all layers; `none`: h = x."""
    kda_output_gate: OutputGate = "sigmoid"
    mla_output_gate: OutputGate = "sigmoid"
    kda_beta: float | None = None
    """A fixed writing strength b, instead of sigmoid(b_proj(x)) or twice that."""
    kda_allow_neg_eigval: bool = False
    """b = 2 sigmoid(b_proj(x)): the state's transition may have eigenvalues down to -1 (arXiv 2411.12537)."""
    kda_decay: bool = True
    """False: g = 0, the plain delta rule."""
    kda_short_conv: bool = True
    """False: q, k, v = silu(W x)."""
    mla_rope: bool = True
    """False, `use_mla_nope: true` in config.json: queries and keys keep their rotary channels, unrotated (NoPE).

    transformers 5.23 ignores that field, and rotates.
    """
    moe_router_enable_expert_bias: bool = True
    """False: c = s, the scores themselves choose."""
    layer_overrides: Mapping[int, Mapping[str, Any]] | tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = ()

    def __post_init__(self) -> None:
        values = normalized({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        if problems := check(values):
            raise ConfigError("Ling3Config", problems)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> "Ling3Config":
        """The configuration in `path`, a `config.json` or a directory that holds one. Raises ConfigError."""
        return Ling3Config.from_dict(*read_json(path))

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "Ling3Config":
        """The configuration in the JSON object `raw`, in Ling's names or transformers 5's; `source` is for errors.

        What would change the numbers and is not computed here is refused by name, and so is every other model, Ling 2.6
        included. Fields that cannot change them are accepted; `config_reader.read` has the rule. Raises ConfigError.
        """
        return Ling3Config(**config_reader.read(raw, source))

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`: `from_dict(config.to_dict()) == config`."""
        raw = dataclasses.asdict(self)
        raw = {name: value for name, value in raw.items() if name not in (*VARIANTS, "mla_rope")}
        variant = self.variant()
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            raw[name] = None if raw[name] is None else list(raw[name])
        eos = self.eos_token_id
        return {
            "architectures": [config_reader.ABLATED if variant else config_reader.ARCHITECTURES[0]],
            "model_type": config_reader.ABLATED_TYPE if variant else config_reader.MODEL_TYPE,
            **raw,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "gated_attention_proj_granularity_type": "head_wise",
            "hidden_act": "silu",
            "kda_safe_gate": self.kda_lower_bound is not None,
            "linear_attn_config": self.linear_attn_config,
            "moe_router_enable_expert_bias": True,
            "no_kda_lora": True,
            "num_key_value_heads": self.num_attention_heads,
            "rope_interleave": True,
            "rope_scaling": None,
            "router_dtype": "fp32",
            "score_function": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "use_mla_nope": not self.mla_rope,
            **variant,
        }

    @property
    def qk_head_dim(self) -> int:
        """MLA's query and key head size, qk_nope_head_dim + qk_rope_head_dim: 192 in the published models."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_entry_dim(self) -> int:
        """What MLA caches of a token, kv_lora_rank + qk_rope_head_dim numbers: 576 in the published models.

        It is the key head size of absorbed MLA, whose heads share one latent key.
        """
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def linear_attn_config(self) -> dict[str, Any]:
        """The layer schedule and KDA's sizes as Kimi-Linear's `config.json` has them; layers are 1-based."""
        return config_reader.linear_attn_config(vars(self))

    def variant(self) -> dict[str, Any]:
        """The fields in which this model differs from every published one, as `config.json` has them."""
        changed = {name: getattr(self, name) for name in VARIANTS}
        changed = {name: value for name, value in changed.items() if value != VARIANTS[name]}
        if "layer_overrides" in changed:
            pairs: Any = self.layer_overrides
            changed["layer_overrides"] = {str(layer): dict(fields) for layer, fields in pairs}
        return changed

    def at(self, layer: int) -> "Ling3Config":
        """This configuration with what `layer_overrides` says of 0-based `layer`."""
        fields = dict(dict(self.layer_overrides).get(layer, ()))
        return dataclasses.replace(self, layer_overrides=(), **fields) if fields else self

    def attention_kind(self, layer: int) -> Literal["kda", "mla", "none"]:
        """The attention of 0-based `layer`: MLA closes each group of `layer_group_size`, KDA fills the rest.

        So layers after the last full group are KDA, as in transformers; the published models have none. `attention`
        may say otherwise, for all layers or in `layer_overrides`.
        """
        return config_reader.attention_kind(vars(self), layer)

    def mlp_kind(self, layer: int) -> Literal["dense", "moe"]:
        """The feed-forward of 0-based `layer`: dense in the first `first_k_dense_replace`, then sparse experts."""
        return "dense" if layer < self.first_k_dense_replace else "moe"


def read_json(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """What a `config.json`, or that of a directory, holds, and the file's name for errors. Raises ConfigError."""
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        return strict_json.read(file), str(file)
    except OSError as error:
        raise ConfigError(str(file), [f"cannot be read ({error}); expected a checkpoint's config.json"]) from error
    except ValueError as error:
        raise ConfigError(str(file), [str(error).removeprefix(f"{file}: ")]) from error
