"""The common parts of plain transformers: the usual config fields, and the module tree around the mixers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import Only, check, field, published, read, too_large
from ling3.families.family import Family
from ling3.families.gguf import GgufArchitecture
from ling3.families.quantization import Quantization
from ling3.families.rope_scaling import RopeScaling, read_scaling
from ling3.layers.draw import Draw
from ling3.layers.gqa import GQAConfig
from ling3.layers.linear import Linear
from ling3.layers.mlp import MLP
from ling3.layers.norm import RMSNorm
from ling3.layers.rope import Rope
from ling3.model import CausalLM, Decoder, DecoderLayer, FeedForward, Mixer
from ling3.mtp import MTP

_Config = TypeVar("_Config", bound="TransformerConfig")

size = functools.partial(field, ge=1, le=2**20)
count = functools.partial(field, ge=1, le=4096)


def _divided(hidden: int, heads: int) -> int | None:
    return None if hidden % heads else hidden // heads


ONLY = {
    "hidden_act": Only(("silu", "swish"), "every MLP is a SwiGLU", written=True),
    "partial_rotary_factor": Only((1.0, 1, None), "every channel of a head is rotated"),
}
"""Published fields of which ling3 computes only one value."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The fields of every family with grouped-query attention, under the published names. Sizes are in channels."""

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    only: ClassVar[Mapping[str, Only]] = ONLY
    """Published fields of which ling3 computes only some values."""
    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """Published fields that repeat others, as functions of the config."""
    harmless: ClassVar[tuple[str, ...]] = ()
    """Published fields that change nothing here."""

    vocab_size: int = field(ge=1, le=2**24)
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = field(ge=1, le=1000)
    num_attention_heads: int = count()
    num_key_value_heads: int = count(absent=lambda values: values["num_attention_heads"])
    head_dim: int = count(absent=lambda values: _divided(values["hidden_size"], values["num_attention_heads"]))
    max_position_embeddings: int = field(ge=1, le=2**31 - 1)
    rms_norm_eps: float = field(gt=0, lt=1, absent=1e-6)
    rope_theta: float = field(gt=1, absent=10000.0, aliases=("rope_parameters.rope_theta", "rope_scaling.rope_theta"))
    rope_scaling: RopeScaling | None = field(read=read_scaling, aliases=("rope_parameters",))
    tie_word_embeddings: bool = field(absent=False)
    initializer_range: float = field(gt=0, absent=0.02)
    bos_token_id: int | None = field(ge=0, le=2**31 - 1)
    eos_token_id: tuple[int, ...] = field(ge=0, le=2**31 - 1, single=True, absent=())
    quantization_config: Quantization | None = field(
        None,
        kw_only=True,
        convert=Quantization.read,
        expected="null, or an object with the quant_method fp8 or compressed-tensors",
    )

    def __post_init__(self) -> None:
        check(self, lambda: [*self.misfits(), *self._misfits()])

    def misfits(self) -> Iterable[str]:
        """Problems between the fields that a family adds."""
        return ()

    def _misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads % shared:
            yield f"num_key_value_heads: found {shared}; expected a divisor of num_attention_heads, {heads}; correct it"
        if self.head_dim % 2:
            yield f"head_dim: found {self.head_dim}; expected an even number, as RoPE rotates pairs of channels"
        attention = 2 * self.hidden_size * self.head_dim * (heads + shared)
        layers = self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)
        yield from too_large(2 * self.vocab_size * self.hidden_size + layers)

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated."""
        return self.head_dim

    @property
    def rope(self) -> Rope:
        """The rotary embedding of queries and keys."""
        if self.rope_scaling is None:
            return Rope.plain(self.rope_theta, self.rotary_dim)
        return self.rope_scaling.rope(self.rope_theta, self.rotary_dim, self.max_position_embeddings)

    @classmethod
    def from_dict(cls: type[_Config], raw: object, source: str = "config.json") -> _Config:
        """Reads the config from the JSON object `raw`, accounting for every field; errors name `source`."""
        return read(cls, raw, source, only=cls.only, derived=cls.derived, harmless=cls.harmless)

    def to_dict(self) -> dict[str, Any]:
        """The fields as the published `config.json` has them."""
        raw = {"architectures": [self.architecture], "model_type": self.model_type, **published(self, self.only)}
        scaling = self.rope_scaling
        return raw | {"rope_scaling": None if scaling is None else scaling.to_dict()}


@dataclasses.dataclass(frozen=True)
class WindowedConfig(TransformerConfig):
    """Qwen's sliding window: with `use_sliding_window`, all layers from `max_window_layers` on have it."""

    use_sliding_window: bool = field(absent=False)
    sliding_window: int | None = field(ge=1)
    max_window_layers: int = field(ge=0, absent=lambda values: values["num_hidden_layers"])

    # transformers 5 writes this field too.
    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "layer_types": lambda c: [
            "full_attention" if c.window(i) is None else "sliding_attention" for i in range(c.num_hidden_layers)
        ]
    }

    def window(self, layer: int) -> int | None:
        """The number of tokens that a query of 0-based `layer` attends to, its own included; None for no limit."""
        return self.sliding_window if self.use_sliding_window and layer >= self.max_window_layers else None


def routing_misfits(config: Any, experts: str, groups: str, chosen: str) -> Iterable[str]:
    """Problems of experts that are chosen in groups, of which `topk_group` stay; names of the config's other fields."""
    count, parts, top_groups, top_k = (getattr(config, name) for name in (experts, groups, "topk_group", chosen))
    if count % parts or (parts > 1 and count < 2 * parts):
        expected = f"a divisor of {experts}, {count}, for groups of two experts or more"
        yield f"{groups}: found {parts}; expected {expected}; correct one of them"
    elif top_groups > parts:
        yield f"topk_group: found {top_groups}; expected at most {groups}, {parts}; correct it"
    elif top_k > (most := top_groups * count // parts):
        yield f"{chosen}: found {top_k}; expected at most {most}; correct it"


def gqa_config(config: TransformerConfig, **options: Any) -> GQAConfig:
    """The settings of the config's grouped-query attention, with `options` that a family adds."""
    return GQAConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        std=config.initializer_range,
        rope=config.rope,
        **options,
    )


def build(
    config: Any,
    mixer: Callable[[int, PRNGKeyArray], Mixer],
    feed_forward: Callable[[int, PRNGKeyArray], FeedForward],
    *,
    key: PRNGKeyArray,
    dtype: DTypeLike,
    zero_centered: bool = False,
) -> CausalLM:
    """The model with `mixer(layer, key)` and `feed_forward(layer, key)` in each layer; no `lm_head` if it is tied.

    `zero_centered` is its norms'.
    """
    embedding, head, *keys = jax.random.split(key, 2 + config.num_hidden_layers)
    sizes = (config.vocab_size, config.hidden_size)
    options = {"dtype": dtype, "std": config.initializer_range, "axes": ("vocab", "hidden")}

    def norm() -> RMSNorm:
        return RMSNorm.init(config.hidden_size, config.rms_norm_eps, zero_centered)

    def layer(i: int, own: PRNGKeyArray) -> DecoderLayer:
        first, second = jax.random.split(own)
        return DecoderLayer(norm(), mixer(i, first), norm(), feed_forward(i, second))

    layers = tuple(layer(i, own) for i, own in enumerate(keys))
    model = Decoder(Linear.init(*sizes, key=embedding, **options), layers, norm())
    tied = config.tie_word_embeddings
    return CausalLM(model, None if tied else Linear.init(*sizes, key=head, **options), config)


def mtp_layer(
    config: Any,
    mixer: Callable[[PRNGKeyArray], Mixer],
    feed_forward: Callable[[PRNGKeyArray], FeedForward],
    *,
    key: PRNGKeyArray,
    dtype: DTypeLike,
    zero_centered: bool = False,
) -> MTP:
    """A multi-token-prediction layer around `mixer(key)` and `feed_forward(key)`; `zero_centered` is its norms'."""
    attention, mlp, projection = jax.random.split(key, 3)
    enorm, hnorm, before, between, last = (
        RMSNorm.init(config.hidden_size, config.rms_norm_eps, zero_centered) for _ in range(5)
    )
    draw = Draw(MTP, {"hidden": config.hidden_size}, iter([projection]), dtype, config.initializer_range)
    return MTP(enorm, hnorm, draw("eh_proj"), before, mixer(attention), between, feed_forward(mlp), last)


def dense_mlp(config: Any, key: PRNGKeyArray, dtype: DTypeLike, bias: bool = False) -> MLP:
    """A dense feed-forward of the config's size."""
    return MLP.init(
        config.hidden_size, config.intermediate_size, key=key, dtype=dtype, std=config.initializer_range, bias=bias
    )


def published_name(name: str, config: Any) -> str:
    """The published name, which is transformers', of the tensor at the path `name` of the module tree."""
    return name.replace("model.word_embeddings.", "model.embed_tokens.").replace(".attention.", ".self_attn.")


def tied_copy(name: str, config: Any) -> str | None:
    """The embedding's name for `lm_head`, which files of some tied models have as well (Qwen3-0.6B); else None."""
    return "model.embed_tokens.weight" if config.tie_word_embeddings and name == "lm_head.weight" else None


def family(
    name: str, config: type[TransformerConfig], init: Callable[..., CausalLM], *gguf: GgufArchitecture
) -> Family:
    """The record of a family whose config is a `TransformerConfig`; `init(config, *, key, dtype)` builds its tree."""
    return Family(
        name=name,
        architectures=(config.architecture,),
        model_types=(config.model_type,),
        config=config,
        read=config.from_dict,
        init=init,
        published=published_name,
        copies=tied_copy,
        gguf=gguf,
    )
