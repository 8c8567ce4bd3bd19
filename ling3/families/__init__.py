"""The registry of architectures: finds the family of a checkpoint; `register_family` adds one from outside."""

import dataclasses
import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import (
    deepseek_v3,
    deepseek_v4,
    glm5_next,
    kimi_linear,
    ling3,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from ling3.families.config_fields import ConfigError, as_object, found, read_json
from ling3.families.family import Family, Place
from ling3.families.gguf import Contents, GgufArchitecture
from ling3.families.quantization import quantization_of, quantized
from ling3.layers.scope import with_names
from ling3.mesh.making import one_by_one
from ling3.mesh.rules import Rules
from ling3.mesh.sharding import check, plan
from ling3.model import CausalLM

__all__ = ["Family", "Place", "family_of", "init", "read_config", "register_family"]

_FAMILIES: list[Family] = []


def register_family(family: Family) -> None:
    """Registers a family, so that `load` reads its checkpoints and `init` takes its configs.

    A family whose config class has the same module and name is replaced, so a notebook's cell may run again. Raises
    ValueError if another family already has one of its architectures or model types.
    """
    others = [known for known in _FAMILIES if _class_name(known) != _class_name(family)]
    for known in others:
        if taken := {*known.architectures, *known.model_types} & {*family.architectures, *family.model_types}:
            raise ValueError(
                f"family {family.name}: {', '.join(sorted(taken))} is {known.name}'s already: give names of its own"
            )
    _FAMILIES[:] = [*others, family]


def gguf_config(contents: Contents, source: str) -> Any:
    """The config that the metadata of a GGUF file states. Raises ConfigError, which names `source` and the keys."""
    name = contents.metadata.get("general.architecture")
    known = {own.name: (own, family) for family in _FAMILIES for own in family.gguf}
    if not isinstance(name, str) or name not in known:
        these = ", ".join(known)
        problem = f"general.architecture: {found(name)}; ling3 reads {these}; use the safetensors files of this model"
        raise ConfigError(source, [problem])
    architecture, family = known[name]
    try:
        return family.read(
            {
                "architectures": [family.architectures[0]],
                "model_type": family.model_types[0],
                **architecture.raw(contents),
            },
            source,
        )
    except ConfigError as error:
        stated = (problem.partition(":") for problem in error.problems)
        raise ConfigError(source, [f"{architecture.key_of(field)}:{rest}" for field, _, rest in stated]) from error
    except ValueError as error:
        raise ConfigError(source, [str(error)]) from error


def gguf_architecture(contents: Contents) -> GgufArchitecture:
    """The architecture of a GGUF file whose config has been read."""
    name = contents.metadata["general.architecture"]
    return next(own for family in _FAMILIES for own in family.gguf if own.name == name)


def _class_name(family: Family) -> tuple[str, str]:
    return family.config.__module__, family.config.__qualname__


def family_of(config: Any) -> Family:
    """The family that a config belongs to. Raises TypeError if that is not registered."""
    for family in _FAMILIES:
        if isinstance(config, family.config):
            return family
    raise TypeError(f"config is a {type(config).__name__}, expected one of a registered family (ling3.register_family)")


def init(
    config: Any,
    *,
    key: PRNGKeyArray,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    mtp: bool = False,
) -> CausalLM:
    """A model with random weights for a config of any family: matrices in `dtype`, norms and the like in float32.

    Matrices that the config's `quantization_config` selects get random bits in their format. With `mtp`, the model has
    the config's multi-token-prediction layers too (`model.mtp`); its other weights stay the same.

    With a `mesh`, the model is sharded over it by `rules`, as in `ling3.mesh.place`. The weights are those of the
    unsharded model: each array in turn is made on one device, and each process keeps its shards of it.

    Under `eqx.filter_eval_shape`, the result is the model's structure, and nothing is allocated.

    Raises MeshError if the rules cannot shard the model, and ValueError for rules without a mesh, for a mesh without a
    device of this process, or for `mtp` if the config has no such layers.
    """
    check(mesh, rules)
    if mtp and (problem := without_mtp(config)):
        raise ValueError(problem)

    family, quantization = family_of(config), quantization_of(config)

    def build(key: PRNGKeyArray) -> CausalLM:
        model = family.init(config, key=key, dtype=dtype)
        if mtp and family.mtp is not None:
            keys = enumerate(jax.random.split(jax.random.fold_in(key, 2), family.mtp_layers(config)))
            layers = tuple(family.mtp(config, number, key=own, dtype=dtype) for number, own in keys)
            model = dataclasses.replace(model, mtp=layers)
        return in_formats(model, key)

    if mesh is None and (quantization is None or isinstance(key, Tracer)):
        return build(key)
    tree = eqx.filter_eval_shape(build, key)
    layout = None if mesh is None else plan(tree, mesh, rules)
    arrays: dict[int, jax.Array] = {}

    def take(i: int, value: Any) -> None:
        if layout is None:
            arrays[i] = jnp.asarray(value)
            return
        whole = np.asarray(value)
        arrays[i] = layout.array(i, whole.shape, lambda share, number: share.part(whole, number))

    one_by_one(lambda key: jax.tree.leaves(build(key)), key, take)
    made = [arrays[i] for i in range(len(arrays))]
    return jax.tree.unflatten(jax.tree.structure(tree), made) if layout is None else layout.model(tree, made)


def without_mtp(config: Any) -> str | None:
    """Why a model of this config has no multi-token-prediction layers that ling3 computes; None if it has some."""
    family = family_of(config)
    if family.mtp is None:
        able = ", ".join(known.name for known in _FAMILIES if known.mtp is not None)
        return f"mtp: ling3 computes no multi-token-prediction layers of {family.name}, only of {able}; leave mtp out"
    if not family.mtp_layers(config):
        return "mtp: num_nextn_predict_layers is 0: the model has no multi-token-prediction layers; leave mtp out"
    return None


def in_formats(model: CausalLM, key: PRNGKeyArray) -> CausalLM:
    """The model with random bits for each matrix that its config's `quantization_config` selects, and with names."""
    config, family = model.config, family_of(model.config)
    if (quantization := quantization_of(config)) is not None:
        own, std = jax.random.fold_in(key, 1), config.initializer_range
        model = quantized(model, quantization, lambda name: family.published(name, config), key=own, std=std)
    return with_names(model)


def read_config(path: str | os.PathLike[str]) -> Any:
    """Reads the config in `path`, a `config.json` or a directory that holds one, as its family does.

    The family is found by `architectures`, or by `model_type` if there are none. Raises ConfigError.
    """
    raw, source = read_json(path)
    return _named(as_object(raw, source), source).read(raw, source)


def _named(raw: dict[str, Any], source: str) -> Family:
    """The family that a `config.json` names."""
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    names = architectures or [model_type]
    for family in _FAMILIES:
        answers_to = family.architectures if architectures else family.model_types
        if isinstance(names, list) and all(name in answers_to for name in names):
            return family
    if model_type in ling3.FAMILY.model_types or any(name.startswith("kda_") for name in raw):
        return ling3.FAMILY  # its reader takes files without architectures, and refuses Ling 2.6 (same model_type)
    name = "model_type" if model_type and not architectures else "architectures"
    known = ", ".join(family.architectures[0] for family in _FAMILIES)
    problem = f"{name}: {found(raw.get(name))}; ling3 reads {known}; register others with ling3.register_family"
    raise ConfigError(source, [problem])


_HYBRIDS = (ling3, deepseek_v3, deepseek_v4, glm5_next, kimi_linear, qwen3_next, qwen3_5, qwen3_5_moe)
for _module in (*_HYBRIDS, llama, mistral, qwen2, qwen3, qwen3_moe):
    register_family(_module.FAMILY)
