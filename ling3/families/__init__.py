"""Which architectures there are, and which one a checkpoint is: `register_family` takes one from outside."""

import os
from typing import Any

import jax.numpy as jnp
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import ling3, llama, mistral, qwen2, qwen3, qwen3_moe
from ling3.families.config_fields import read_json
from ling3.families.family import Family
from ling3.layers.scope import with_names
from ling3.model import CausalLM

__all__ = ["Family", "family_of", "init", "read_config", "register_family"]

_FAMILIES: list[Family] = []


def register_family(family: Family) -> None:
    """From now on checkpoints of this family load, and its configs `init`.

    A family whose config class has the same module and name is replaced, so a notebook's cell may run again. ValueError
    where another family answers to one of its architectures or model types already.
    """
    others = [known for known in _FAMILIES if _class_name(known) != _class_name(family)]
    for known in others:
        if taken := {*known.architectures, *known.model_types} & {*family.architectures, *family.model_types}:
            raise ValueError(
                f"family {family.name}: {', '.join(sorted(taken))} is {known.name}'s already: give names of its own"
            )
    _FAMILIES[:] = [*others, family]


def _class_name(family: Family) -> tuple[str, str]:
    return family.config.__module__, family.config.__qualname__


def family_of(config: Any) -> Family:
    """The family that a config is of. TypeError for one of none."""
    for family in _FAMILIES:
        if isinstance(config, family.config):
            return family
    raise TypeError(f"config is a {type(config).__name__}, expected one of a registered family (ling3.register_family)")


def init(config: Any, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> CausalLM:
    """A model of random weights for a config of any family: matrices in `dtype`, norms and the like in float32.

    Under `eqx.filter_eval_shape` this is the model's structure, and nothing is allocated.
    """
    return with_names(family_of(config).init(config, key=key, dtype=dtype))


def read_config(path: str | os.PathLike[str]) -> Any:
    """The config in `path`, a `config.json` or a directory that holds one, of the family that its file names.

    `architectures` decides, and `model_type` where there are none. Raises ConfigError.
    """
    raw, source = read_json(path)
    return _named(raw).read(raw, source)


def _named(raw: Any) -> Family:
    """The family that a `config.json` names; Ling-3, which says what it misses, where it names none of them."""
    fields = raw if isinstance(raw, dict) else {}
    names = fields.get("architectures") or [fields.get("model_type")]
    for family in _FAMILIES:
        answers_to = family.architectures if fields.get("architectures") else family.model_types
        if isinstance(names, list) and all(name in answers_to for name in names):
            return family
    return ling3.FAMILY


for _module in (ling3, llama, mistral, qwen2, qwen3, qwen3_moe):
    register_family(_module.FAMILY)
