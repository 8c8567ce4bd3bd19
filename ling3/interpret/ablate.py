"""Ablations: functions that leave out one mechanism of a trained model, or change its formula.

Each returns a new model that shares every weight it keeps. A mechanism is found by the field that a module has for it
(`MECHANISMS`) and can be left out if that field may be None, in any model family. `layers` are 0-based; None means
every layer with the mechanism. Formulas are in the symbols of `ling3.layers`. Kimi Linear (arXiv 2510.26692), Table 1,
trains models without output gates and without short convolutions.

    model = ling3.load("nano", dtype=jnp.float32)
    without = ling3.ablate.no_output_gate(model, "kda", layers=[0])

An ablated model runs, traces and serves like any other. If its family's config has a field for the mechanism, as
Ling-3's has for all of them, the new model's `config` records the change: then it can be saved and loaded, and
`ling3.init(ablated.config, key=...)` gives the same architecture with fresh weights, to train from scratch.
(`drop_experts` and `no_routed_experts` change only the model.)

All functions raise ValueError if the model or one of the layers does not have the mechanism, and list those that it
has. Repeating an ablation changes nothing.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ling3.adapters.adapter import scales
from ling3.checkpoint.names import structure
from ling3.families import family_of
from ling3.interpret.trace import trace
from ling3.layers.hyper import HyperConnection, HyperHead, HyperMean
from ling3.layers.linear import Constant
from ling3.leaves import array_leaves
from ling3.model import CausalLM

Layers = Sequence[int] | None

MECHANISMS = {
    "attention": "attention",
    "output gate": "g_proj",
    "decay": "A_log",
    "decay bound": "lower_bound",
    "writing strength": "b_proj",
    "short convolution": r"\w+_conv1d",
    "rotary embedding": "rotation",
    "norms of q and k": r"[qk]_norm",
    "attention sink": "attn_sink",
    "sliding window": "sliding_window",
    "compressed entries": "compressor|indexer",
    "experts per token": "top_k",
    "routing bias": "expert_bias",
    "shared expert": "shared_experts",
}
"""For each mechanism, a regular expression for the name of its field in a decoder layer, its attention, its mixture of
experts or its router."""

DROPPED = -1e4
"""The routing bias of a dropped expert: below any score, and finite."""


def having(model: CausalLM, mechanism: str, uncut: bool = False) -> dict[int, Any]:
    """For each layer with this mechanism, the module that has a field for it, which may be None or is an int.

    A module whose mechanism was cut is included too, unless `uncut`.
    """
    found = {}
    for i, layer in enumerate(model.model.layers):
        for module in (layer, layer.attention, layer.mlp, getattr(layer.mlp, "gate", None)):
            fields = _fields(module, MECHANISMS[mechanism])
            if fields and not (uncut and all(getattr(module, field) is None for field in fields)):
                found[i] = module
    return found


def _fields(module: Any, pattern: str) -> list[str]:
    """The fields of a module whose names match `pattern` and whose values may be None or are ints."""
    fields = dataclasses.fields(module) if isinstance(module, eqx.Module) else ()
    stated = {x.name: typing.get_args(x.type)[0] if hasattr(x.type, "__metadata__") else x.type for x in fields}
    optional = [name for name, kind in stated.items() if kind is int or types.NoneType in typing.get_args(kind)]
    return [name for name in optional if re.fullmatch(pattern, name)]


def inventory(model: CausalLM) -> str:
    """Lists the mechanisms that can be cut from this model, with their layers, as text."""
    found = {name: sorted(having(model, name)) for name in MECHANISMS}
    return "; ".join(f"{name} in layers {layers}" for name, layers in found.items() if layers)


def no_output_gate(model: CausalLM, kind: str | None = None, layers: Layers = None) -> CausalLM:
    """No output gate: KDA's y = o_proj(RMSNorm(o)), MLA's y = dense(o).

    `kind` is the class name of the attention, in upper or lower case, such as `"kda"`; None means all classes.
    """
    return _cut(model, "output gate", layers, "none", kind, g_proj=None, gate_law="none")


def mean_output_gate(
    model: CausalLM,
    tokens: Int[Array, "batch seq"],
    kind: str | None = None,
    layers: Layers = None,
    valid: Bool[Array, "batch seq"] | None = None,
) -> CausalLM:
    """Each gate fixed at its mean over `tokens`: sigmoid(g_proj(x)) becomes one number per channel (KDA) or head (MLA).

    The mean is over the `valid` tokens (by default all). It is taken in `model` as given, so only the first ablated
    layer sees the inputs that it was taken over. Raises ValueError if a gate is not sigmoid(g_proj(x)).
    """
    chosen = _chosen(model, "output gate", layers, kind)
    seen = trace(model, tokens, logit_lens=False)
    weights = jnp.ones(tokens.shape, jnp.float32) if valid is None else valid.astype(jnp.float32)
    edits = {}
    for i, mixer in chosen.items():
        law = getattr(mixer, "gate_law", None)
        if law != "sigmoid":
            raise ValueError(f"layers: the output gate of layer {i} is {law!r}, expected 'sigmoid': give other layers")
        inside: Any = seen.layers[i].attention
        gate = inside["gate"] if isinstance(inside, dict) else inside.gate
        mean = jnp.tensordot(weights, gate.astype(jnp.float32), axes=2).reshape(-1) / jnp.sum(weights)
        mean = jnp.clip(mean, 1e-6, 1 - 1e-6)
        edits[i] = {"g_proj": Constant(jnp.log(mean) - jnp.log1p(-mean)), "gate_law": "constant"}
    return _edited(model, "output gate", chosen, edits, "constant")


def lower_bound(model: CausalLM, bound: float | None, layers: Layers = None) -> CausalLM:
    """Changes the formula of KDA's decay, with the same weights.

    For a number, g = bound · sigmoid(exp(A_log) · (f + dt_bias)), which scales every log decay by bound / old bound.
    For None, g = -exp(A_log) · softplus(f + dt_bias), which is Kimi-Linear's formula.
    """
    bound = None if bound is None else float(bound)
    return _cut(model, "decay bound", layers, bound, lower_bound=bound)


def no_decay(model: CausalLM, layers: Layers = None) -> CausalLM:
    """g = 0 in KDA: the plain delta rule (arXiv 2406.06484), which forgets only what it overwrites."""
    return _cut(model, "decay", layers, False, A_log=None, dt_bias=None, f_proj=None)


def fixed_beta(model: CausalLM, beta: float, layers: Layers = None) -> CausalLM:
    """b = `beta` in KDA for all tokens, instead of sigmoid(b_proj(x)): 1 replaces a key's value, 0 writes nothing."""
    return _cut(model, "writing strength", layers, float(beta), beta=float(beta), b_proj=None)


def no_short_conv(model: CausalLM, layers: Layers = None) -> CausalLM:
    """q, k, v = silu(W x) in KDA: without the convolutions, a key depends only on x at its token."""
    return _cut(model, "short convolution", layers, False, **{MECHANISMS["short convolution"]: None})


def no_rope(model: CausalLM, layers: Layers = None) -> CausalLM:
    """Queries and keys are not rotated: scores depend on contents and on the mask, not on distance."""
    return _cut(model, "rotary embedding", layers, False, **{MECHANISMS["rotary embedding"]: None})


def no_qk_norm(model: CausalLM, layers: Layers = None) -> CausalLM:
    """Grouped-query attention without Qwen3's norms of each head's query and key."""
    return _cut(model, "norms of q and k", layers, False, **{MECHANISMS["norms of q and k"]: None})


def no_sink(model: CausalLM, layers: Layers = None) -> CausalLM:
    """No attention sink in DeepSeek-V4: a query's weights sum to 1 over the entries that it sees."""
    return _cut(model, "attention sink", layers, False, attn_sink=None)


def window_only(model: CausalLM, layers: Layers = None) -> CausalLM:
    """No compressed entries in DeepSeek-V4: a query sees only its sliding window."""
    return _cut(model, "compressed entries", layers, False, **{MECHANISMS["compressed entries"]: None})


def compressed_only(model: CausalLM, layers: Layers = None) -> CausalLM:
    """No sliding window in DeepSeek-V4: a query sees only compressed entries, and only complete ones.

    By default in all layers that have compressed entries.
    """
    having_both = sorted(having(model, "compressed entries", uncut=True))
    return _cut(model, "sliding window", having_both if layers is None else layers, None, sliding_window=None)


def one_stream(model: CausalLM) -> CausalLM:
    """One residual stream instead of several: h = x + f(norm(x)) in each sublayer, as in other models."""
    return _reconnected(model, lambda connection: None, None)


def sinkhorn_iterations(model: CausalLM, iterations: int) -> CausalLM:
    """Sets the Sinkhorn iterations of each hyper-connection; with fewer, matrices are less close to doubly stochastic.

    One iteration only divides the columns by their sums. Raises ValueError for fewer than one.
    """
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}, expected at least 1")
    return _reconnected(model, lambda own: dataclasses.replace(own, iterations=iterations), model.model.hc_head)


def _reconnected(
    model: CausalLM, change: Callable[[HyperConnection], HyperConnection | None], head: HyperHead | HyperMean | None
) -> CausalLM:
    """The model with changed hyper-connections in every layer, and `head` to merge the streams."""
    if model.model.hc_head is None:
        raise ValueError("this model has one residual stream: there are no hyper-connections that could be cut")

    def connections(model: CausalLM) -> list[Any]:
        return [model.model.hc_head, *(own for layer in model.model.layers for own in (layer.attn_hc, layer.ffn_hc))]

    new = [head, *(change(own) for own in connections(model)[1:])]
    return eqx.tree_at(connections, model, new, is_leaf=lambda node: node is None)


def no_attention(model: CausalLM, layers: Sequence[int]) -> CausalLM:
    """h = x in these layers: no attention and no memory, only the feed-forward."""
    return _cut(model, "attention", layers, "none", attention=None)


def top_k(model: CausalLM, k: int, layers: Layers = None) -> CausalLM:
    """The best `k` experts for a token; with `norm_topk_prob` their weights are normalised over these."""
    return _cut(model, "experts per token", layers, k, top_k=k)


def no_routing_bias(model: CausalLM, layers: Layers = None) -> CausalLM:
    """c = s: the scores alone choose the experts. The weights, which never saw the bias, keep their formula.

    The bias is there to balance loads (arXiv 2408.15664). Experts that `drop_experts` has dropped come back.
    """
    return _cut(model, "routing bias", layers, False, expert_bias=None)


def no_shared_expert(model: CausalLM, layers: Layers = None) -> CausalLM:
    """y = Σ w_e · expert_e(x), without + shared_experts(x) (DeepSeekMoE, arXiv 2401.06066, §3)."""
    return _cut(model, "shared expert", layers, 0, shared_experts=None)


def no_routed_experts(model: CausalLM, layers: Layers = None) -> CausalLM:
    """y = shared_experts(x), without Σ w_e · expert_e(x): the weights w of the chosen experts become 0.

    The model's config does not record this, because its routed scaling factor must be greater than 0.
    """
    chosen = _chosen(model, "experts per token", layers)
    silent = [dataclasses.replace(router, scaling=0.0) for router in chosen.values()]
    return eqx.tree_at(lambda m: [having(m, "experts per token")[i] for i in chosen], model, silent)


def drop_experts(model: CausalLM, experts: Sequence[int], layers: Layers = None) -> CausalLM:
    """These experts are never chosen: their routing bias becomes -10,000, so others take their place.

    Raises ValueError if a token could be left with fewer experts than it takes, for some choice of groups.
    """
    chosen, dropped, edits = _chosen(model, "routing bias", layers), sorted(set(experts)), {}
    for i, gate in chosen.items():
        count, size = gate.weight.shape[0], gate.weight.shape[0] // gate.groups
        if bad := [e for e in dropped if not 0 <= e < count]:
            raise ValueError(f"experts: found {bad}; expected numbers from 0 to {count - 1}")
        # A group is scored by its two best experts, so groups that have two left are chosen before those with one.
        left = sorted(size - sum(e // size == group for e in dropped) for group in range(gate.groups))
        order = [n for n in left if n >= 2] + [n for n in left if n == 1] + [n for n in left if n == 0]
        if (size > 1 and sum(order[: gate.top_groups]) < gate.top_k) or count - len(dropped) < gate.top_k:
            raise ValueError(
                f"experts: without {dropped} the {gate.top_groups} groups of {size} that a token is left with may hold "
                f"fewer than the {gate.top_k} experts it takes: drop fewer, or spread them over the groups"
            )
        bias = jnp.zeros(count, jnp.float32) if gate.expert_bias is None else gate.expert_bias
        edits[i] = {"expert_bias": bias.at[jnp.asarray(dropped, jnp.int32)].set(DROPPED)}
    return _edited(model, "routing bias", chosen, edits, True)


def variant(
    model: CausalLM,
    *,
    layers: Layers = None,
    fill: Mapping[str, Float[Array, "..."]] | None = None,
    **fields: Any,
) -> CausalLM:
    """The model with other values of its config's `fields`, in all layers or in `layers`.

    The module tree of the new config is filled with the old model's arrays of the same path and shape; its other arrays
    are dropped. `fill` has arrays for paths that the old model lacks, or has in another shape. Raises ValueError if an
    array is still missing: such a model has to be trained, not cut; and for a model with an adapter.
    """
    if adapted := scales(model):
        raise ValueError(f"the model has an adapter, in {adapted[0][0]} and others: merge it first (merge_adapter)")
    config = family_of(model.config).vary(model.config, layers, fields)
    target = dataclasses.replace(structure(config, model.dtype), origin=model.origin)
    wanted = {leaf.path: leaf.value.shape for leaf in array_leaves(target)}
    given = [*(fill or {}).items(), *((leaf.path, leaf.value) for leaf in array_leaves(model))]
    have = {path: value for path, value in given if value.shape == wanted.get(path)}
    lacking = [f"{path} {list(shape)}" for path, shape in wanted.items() if path not in have]
    if lacking:
        raise ValueError(
            f"{fields}: the model has no {', '.join(lacking[:4])}{' …' if len(lacking) > 4 else ''}: a variant can "
            "leave weights out, not invent them; train it from `ling3.init(config)`"
        )
    return jax.tree.unflatten(jax.tree.structure(target), [have[path] for path in wanted])


def _chosen(model: CausalLM, mechanism: str, layers: Layers, kind: str | None = None) -> dict[int, Any]:
    """The modules to change, by layer. Raises ValueError if one of `layers`, or the model, lacks the mechanism."""
    found, what = having(model, mechanism), mechanism
    if kind is not None:
        found = {i: module for i, module in found.items() if type(module).__name__.lower() == kind.lower()}
        what = f"{mechanism} in {kind.upper()}"
    if not found:
        raise ValueError(
            f"this model has no {what} that can be cut: no module of it has a field {MECHANISMS[mechanism]} that may "
            f"be None. What can be cut: {inventory(model)}"
        )
    if wrong := sorted(set(layers or ()) - set(found)):
        raise ValueError(f"layers: found {wrong}; the layers of this model with {what} are {sorted(found)}")
    return found if layers is None else {i: found[i] for i in sorted(set(layers))}


def _cut(
    model: CausalLM, mechanism: str, layers: Layers, value: Any, kind: str | None = None, **fields: Any
) -> CausalLM:
    """Sets these `fields` in the modules with the mechanism, and `value` for the mechanism in the config."""
    chosen = _chosen(model, mechanism, layers, kind)
    return _edited(model, mechanism, chosen, dict.fromkeys(chosen, fields), value)


def _edited(
    model: CausalLM, mechanism: str, chosen: Mapping[int, Any], edits: Mapping[int, Mapping[str, Any]], value: Any
) -> CausalLM:
    """Sets new fields in each chosen module, and the config field that the family has for the mechanism.

    Multi-token-prediction layers are dropped: they were trained on the hidden states of the whole model.
    """
    if not chosen:
        return model
    new = []
    for i, module in chosen.items():
        names = [field.name for field in dataclasses.fields(module)]
        fields = {n: x for pattern, x in edits[i].items() for n in names if re.fullmatch(pattern, n)}
        new.append(dataclasses.replace(module, **fields))
    config, family = model.config, family_of(model.config)
    for kind in dict.fromkeys(map(type, chosen.values())):
        if (word := family.ablations.get(kind, {}).get(mechanism)) is not None:
            its = [i for i, module in chosen.items() if type(module) is kind]
            every = [i for i, module in having(model, mechanism).items() if type(module) is kind]
            config = family.vary(config, None if its == every else its, {word: value})
    model = eqx.tree_at(lambda m: [having(m, mechanism)[i] for i in chosen], model, new)
    return dataclasses.replace(model, config=config, mtp=())
