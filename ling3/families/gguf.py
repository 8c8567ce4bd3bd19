"""How the metadata of a GGUF file states a model: its keys as the fields of a `config.json`.

`GgufArchitecture` describes one `general.architecture`; a family lists those that it reads. The keys are those that
llama.cpp's converters write (gguf-py 0.19, `Keys`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int

from ling3.families.rope_scaling import RopeScaling
from ling3.runtime.quoting import shown


@runtime_checkable
class Contents(Protocol):
    """The contents of a GGUF file."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The values of the metadata by their keys."""
        ...

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, each with its `shape`, whose last axis is the innermost."""
        ...

    def numbers(self, name: str) -> Float32[np.ndarray, "..."]:
        """The numbers of a tensor, with blocks decoded."""
        ...


Keys = Mapping[str, Any]
"""The keys of an architecture without its prefix, and their values."""


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How the array of a checkpoint is made of the tensors that a file has for it, which are joined along their rows.

    Its row i is row `rows[i]` of the file and its column j is column `columns[j]`; None keeps the order. `offset` is
    added to the file's numbers.
    """

    rows: Int[np.ndarray, " rows"] | None = None
    columns: Int[np.ndarray, " columns"] | None = None
    offset: float = 0.0


AS_STORED = Arrangement()
"""The arrangement of an array that a file has as the checkpoint has it."""


@dataclasses.dataclass(frozen=True)
class GgufArchitecture:
    """A `general.architecture` of GGUF files, and how to read its metadata."""

    name: str
    fields: Mapping[str, str]
    """The config's field for each key, without the architecture's prefix."""
    more: Callable[[Contents, Keys], Mapping[str, Any]] = lambda contents, keys: {}
    """`more(contents, keys)`: the fields that do not follow from one key. Raises ValueError if they cannot be told."""
    unused: frozenset[str] = frozenset()
    """Keys that change no result."""
    lists: frozenset[str] = frozenset()
    """Keys whose values are lists, with an item for each layer."""
    arrangement: Callable[[str, Sequence[str], Any], Arrangement] = lambda path, stored, config: AS_STORED
    """`arrangement(path, stored, config)`: how the array at a path of the tree is made of these tensors of a file."""

    def raw(self, contents: Contents) -> dict[str, Any]:
        """The fields of the `config.json` that the file was made from.

        Raises ValueError, naming the key, for a key that may change results and is unknown or has an unknown value.
        """
        prefix, metadata = f"{self.name}.", contents.metadata
        keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        known = {*self.fields, *self.unused, *ROPE_KEYS, *UNUSED, "vocab_size"}
        for key, value in keys.items():
            if key not in known and value not in (None, False, 0, "", []):
                raise ValueError(f"{prefix}{key}: found {shown(value)}; unknown key, which may affect results")
            kind, name = (list, "a list") if key in self.lists else TEXTS.get(key, (int | float, "a number"))
            if key in known and not isinstance(value, kind):
                raise ValueError(f"{prefix}{key}: found {shown(value)}; expected {name}")
        if "token_embd.weight" not in contents.tensors:
            raise ValueError("tensor token_embd.weight: not in this file; expected the embedding; fetch the file again")
        raw = {field: keys[key] for key, field in self.fields.items() if key in keys}
        raw |= {"vocab_size": contents.tensors["token_embd.weight"].shape[0], **_token_ids(metadata)}
        raw |= self.more(contents, keys)
        if (said := keys.get("vocab_size", rows := raw["vocab_size"])) != rows:
            raise ValueError(f"{prefix}vocab_size: found {shown(said)}; expected {rows}, the rows of token_embd.weight")
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > rows:
            found = f"tokenizer.ggml.tokens: found {len(tokens):,} tokens"
            raise ValueError(f"{found}; expected at most {rows:,}, the rows of token_embd.weight; fetch the file again")
        return raw

    def key_of(self, field: str) -> str:
        """The key of a config's field, for messages; the field itself if no key states it."""
        return next((f"{self.name}.{key}" for key, own in self.fields.items() if own == field), field)


ATTENTION = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""The fields of every family with attention."""
GROUPED = {**ATTENTION, "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim"}
"""The fields of families with grouped-query attention."""
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""The fields that experts add."""
LATENT = {
    **EXPERTS,
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_shared_count": "num_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""The fields that models of MLA with experts add to `ATTENTION`."""
SCHEDULE = "attention.head_count_kv"
"""The key that says which layers have linear attention, in hybrids of KDA and MLA."""
LATENT_KEYS = frozenset((SCHEDULE, "attention.key_length", "attention.key_length_mla", "expert_gating_func"))
"""The further keys of such models, from which fields follow or whose values are fixed."""
ROPE_KEYS = frozenset(
    f"rope.{key}"
    for key in (
        *("scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned", "scale_linear"),
        *("scaling.attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow", "dimension_count"),
    )
)
"""The keys that `rope_scaling` reads, and the size of what is rotated."""
TEXTS = {"rope.scaling.type": (str, "a string")}
"""The keys whose values are strings, and how messages say so; other values are numbers."""
UNUSED = frozenset(("attention.value_length",))
"""Keys of any architecture that follow from the shapes of tensors."""


ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor that has a divisor for each of RoPE's frequencies (Llama 3)."""


def transformer_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of Llama and Qwen that follow from tensors and from several keys."""
    biases = {name for name in contents.tensors if name.startswith("blk.0.") and name.endswith(".bias")}
    head_dim = keys.get("attention.key_length") or _divided(keys)
    if (rotated := keys.get("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"rope.dimension_count: found {shown(rotated)}; expected {shown(head_dim)}, all of a head")
    return {
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "attention_bias": "blk.0.attn_output.bias" in biases,
        "mlp_bias": "blk.0.ffn_up.bias" in biases,
        "rope_scaling": rope_scaling(contents, keys),
    }


def _divided(keys: Keys) -> int | None:
    hidden, heads = keys.get("embedding_length"), keys.get("attention.head_count")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def rope_scaling(contents: Contents, keys: Keys) -> dict[str, Any] | None:
    """The `rope_scaling` of a `config.json`; None for RoPE's default kind.

    Llama 3's is only in the tensor `rope_freqs.weight`, which has a divisor for each frequency.
    """
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor")
    if (old := keys.get("rope.scale_linear")) not in (None, 1.0):
        kind, factor = "linear", old
    if ROPE_FREQUENCIES in contents.tensors:
        return _llama3(contents, keys)
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise ValueError(f"rope.scaling.type: found {shown(kind)}; expected none, linear or yarn")
    names = {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "attn_factor": "attention_factor",
    }
    return scaling | {f: keys[f"rope.scaling.{key}"] for key, f in names.items() if f"rope.scaling.{key}" in keys}


def check_router(keys: Keys, law: Literal["softmax", "sigmoid"]) -> None:
    """Raises ValueError if the router's scores follow another law."""
    known = {"softmax": 1, "sigmoid": 2}
    if (found := keys.get("expert_gating_func", known[law])) != known[law]:
        raise ValueError(f"expert_gating_func: found {shown(found)}; expected {known[law]}, the {law}")


def latent_fields(keys: Keys) -> dict[str, Any]:
    """The fields of a model with MLA that follow from several keys; its router's scores are sigmoids."""
    check_router(keys, "sigmoid")
    found = [keys.get("attention.key_length_mla"), keys.get("rope.dimension_count"), keys.get("block_count")]
    numbers = [value for value in (*found, keys.get("nextn_predict_layers", 0)) if type(value) is int]
    if len(numbers) < 4:
        names = "attention.key_length_mla, rope.dimension_count, block_count and nextn_predict_layers"
        raise ValueError(f"{names}: found {shown(found)}; expected whole numbers")
    head, rotated, blocks, predicted = numbers
    return {"qk_nope_head_dim": head - rotated, "num_hidden_layers": blocks - predicted}


def schedule(keys: Keys, layers: int) -> list[bool]:
    """For each of the layers, whether it has full attention: `attention.head_count_kv` is 0 for linear attention."""
    said = keys.get(SCHEDULE)
    if not isinstance(said, list) or len(said) < layers or not all(type(heads) is int for heads in said):
        raise ValueError(f"{SCHEDULE}: found {shown(said)}; expected a list of a number for each layer")
    return [heads > 0 for heads in said[:layers]]


def _llama3(contents: Contents, keys: Keys) -> dict[str, Any]:
    """Llama 3's scaling whose divisors are those of `rope_freqs.weight`, within a thousandth."""
    divisors = contents.numbers(ROPE_FREQUENCIES).reshape(-1)
    theta, size = keys.get("rope.freq_base", 10000.0), 2 * len(divisors)
    fixed = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = {**fixed, "factor": float(divisors.max()), "original_max_position_embeddings": 8192}
    if scaling["factor"] >= 1:
        plain = theta ** (-np.arange(0, size, 2) / size)
        expected = plain / np.asarray(RopeScaling(**scaling).rope(theta, size, 8192).frequencies)
        if np.allclose(divisors, expected, rtol=1e-3):
            return scaling
    raise ValueError(
        f"tensor rope_freqs.weight: found divisors from {divisors.min():g} to {divisors.max():g}, which are not "
        "those of Llama 3.1 or 3.2 (frequency factors 1 and 4, an original context of 8,192); ling3 reads no others"
    )


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of the tokens that begin and end a text, and of padding."""
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    if wrong := {name: value for name, value in ids.items() if value is not None and type(value) is not int}:
        name, value = next(iter(wrong.items()))
        raise ValueError(f"tokenizer.ggml.{name}_token_id: found {shown(value)}; expected the id of a token")
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    named = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    return {"eos_token_id": ends, **{name: own for name, own in named.items() if own is not None}}
