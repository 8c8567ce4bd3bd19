"""Qwen3.5's text models (`Qwen3_5ForConditionalGeneration`, `Qwen3_5ForCausalLM`): Qwen3-Next's layers, dense MLPs."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import qwen3_next, transformer
from ling3.families.config_fields import ConfigError, Only, as_object, field, rules
from ling3.families.family import Family, Place
from ling3.families.gated_deltanet_gguf import architecture
from ling3.families.qwen3_next import HybridFields, predictor
from ling3.model import CausalLM, FeedForward
from ling3.mtp import MTP
from ling3.runtime.quoting import shown

NESTED = "model.language_model."
"""The prefix of the decoder's tensors, beside which `model.visual.` has those of the vision model."""
_UNUSED = (
    *("text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    "vision_end_token_id",
)
"""Fields of the whole model that say nothing of its text model."""


def text_of(raw: object, source: str, fields: Collection[str]) -> dict[str, Any]:
    """The config of the text model, from that of the whole model or from one of a text model alone.

    Raises ConfigError if the two levels of a file disagree in one of these `fields`.
    """
    whole = as_object(raw, source)
    if whole.get("text_config") is None:
        return whole
    text = as_object(whole["text_config"], f"{source}, text_config")
    top = {name: value for name, value in whole.items() if name not in _UNUSED}
    problems = [
        f"text_config.{name}: found {shown(text[name])}; expected {shown(top[name])}, as beside text_config; correct it"
        for name in sorted(top.keys() & text.keys())
        if name in fields and None not in (top[name], text[name]) and top[name] != text[name]
    ]
    if problems:
        raise ConfigError(source, problems)
    return {**text, **{name: value for name, value in top.items() if text.get(name) is None}}


@dataclasses.dataclass(frozen=True)
class TextFields(HybridFields):
    """The fields of Qwen3.5's text models."""

    only: ClassVar[Mapping[str, Only]] = {
        **HybridFields.only,
        "mamba_ssm_dtype": Only(("float32", None), "recurrent states are float32"),
        "mlp_only_layers": Only(([], None), "all layers have the same kind of feed-forward"),
        "output_gate_type": Only(("swish", None), "Gated DeltaNet's output gate is a SiLU"),
    }
    harmless = ("mtp_use_dedicated_embeddings",)

    mtp_num_hidden_layers: int = field(ge=0, le=1, absent=0)
    """The number of multi-token-prediction layers, which `load` skips by default."""


@dataclasses.dataclass(frozen=True)
class Qwen35Config(TextFields):
    """The config of a dense Qwen3.5. Raises ConfigError."""

    architecture = "Qwen3_5ForCausalLM"
    model_type = "qwen3_5_text"

    def mlp_kind(self, layer: int) -> str:
        """The feed-forward of any layer: `dense`."""
        return "dense"


def init(config: Qwen35Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights, as of a Qwen3-Next without experts."""
    return build(config, lambda _, own: transformer.dense_mlp(config, own, dtype), key=key, dtype=dtype)


def build(
    config: TextFields, feed_forward: Callable[[int, PRNGKeyArray], FeedForward], *, key: PRNGKeyArray, dtype: DTypeLike
) -> CausalLM:
    """The model with `feed_forward(layer, key)` in each layer."""
    return transformer.build(
        config,
        lambda i, own: config.mixer(i, key=own, dtype=dtype, grouped=False),
        feed_forward,
        key=key,
        dtype=dtype,
        zero_centered=True,
    )


def published_name(name: str, config: TextFields) -> str:
    """The checkpoint's name of the tensor at the path `name` of the module tree."""
    name = qwen3_next.published_name(name, config)
    return NESTED + name.removeprefix("model.") if name.startswith("model.") else name


def plainly(name: str, shape: tuple[int, ...], config: TextFields) -> Place:
    """Where a tensor is in files of transformers' text class that was not loaded from a whole model's."""
    return Place(name.replace(NESTED, "model.", 1))


def family(
    name: str,
    config: type[TextFields],
    whole: str,
    init: Callable[..., CausalLM],
    mtp: Callable[..., MTP],
    *layouts: Callable[[str, tuple[int, ...], Any], Place],
) -> Family:
    """The record of a family of Qwen3.5; `whole` is the architecture of the model that sees images too."""
    return Family(
        name=name,
        architectures=(whole, config.architecture),
        model_types=(config.model_type.removesuffix("_text"), config.model_type),
        config=config,
        read=lambda raw, source: config.from_dict(text_of(raw, source, rules(config)), source),
        init=init,
        published=published_name,
        module=lambda name, config: name.replace(NESTED, "model.", 1),
        skips=lambda name, config: name.startswith(("mtp.", "model.visual.")),
        copies=lambda name, config: (
            f"{NESTED}embed_tokens.weight" if config.tie_word_embeddings and name == "lm_head.weight" else None
        ),
        layouts=(plainly, *layouts),
        mtp=mtp,
        mtp_layers=lambda config: config.mtp_num_hidden_layers,
        with_mtp_layers=lambda config, count: dataclasses.replace(config, mtp_num_hidden_layers=count),
    )


def mtp_layer(config: Qwen35Config, number: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> MTP:
    """The multi-token-prediction layer: a decoder layer of gated attention and a dense MLP."""
    return predictor(config, lambda own: transformer.dense_mlp(config, own, dtype), key=key, dtype=dtype)


FAMILY = dataclasses.replace(
    family("Qwen3.5", Qwen35Config, "Qwen3_5ForConditionalGeneration", init, mtp_layer),
    gguf=(architecture("qwen35", "mtp_num_hidden_layers", sparse=False, grouped=False),),
)
