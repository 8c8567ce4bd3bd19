"""Ablations: a trained model with one mechanism left out or its law changed, which stays a model.

Each function returns a new model that shares every weight it keeps, and whose `config` says what is different (but for
`drop_experts`, which changes a weight). So an ablated model runs, traces, serves, saves and loads as any other, and
`ling3.init(ablated.config, key=...)` is the same architecture with fresh weights, to be trained from scratch. `layers`
are 0-based; None means all of that kind. Formulas are in the symbols of `ling3.layers`. The output gate and the short
convolution are left out of models in training in Kimi Linear (arXiv 2510.26692), Table 1.

    model = ling3.load("nano", dtype=jnp.float32)
    without = ling3.ablate.no_output_gate(model, "kda", layers=[0])

All of them raise ValueError for a layer that is not there or of another kind, and TypeError for a model of another
family; what is cut already stays as it is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ling3.checkpoint.names import leaves, structure
from ling3.families.ling3_config import Ling3Config
from ling3.interpret.trace import trace
from ling3.model import CausalLM

Kind = Literal["kda", "mla"]
Part = Literal["kda", "mla", "attention", "experts"]
Layers = Sequence[int] | None

NAMES: dict[Part, str] = {"kda": "KDA", "mla": "MLA", "attention": "attention", "experts": "a mixture of experts"}

DROPPED = -1e4
"""The routing bias of a dropped expert: below any score, and finite."""


def no_output_gate(model: CausalLM, kind: Kind | None = None, layers: Layers = None) -> CausalLM:
    """No output gate: KDA's y = o_proj(RMSNorm(o)), MLA's y = dense(o); of one `kind` of attention, or both."""
    return _gated(model, "none", kind, layers, {})


def mean_output_gate(
    model: CausalLM,
    tokens: Int[Array, "batch seq"],
    kind: Kind | None = None,
    layers: Layers = None,
    valid: Bool[Array, "batch seq"] | None = None,
) -> CausalLM:
    """Each gate held at its mean over `tokens`: sigmoid(g_proj(x)) becomes one number per channel (KDA) or head (MLA).

    The mean is over the `valid` tokens (all without it). The means are those of `model` as it is given, so the first
    ablated layer sees just what they were taken over. Raises ValueError where a gate is no sigmoid of `g_proj(x)`.
    """
    seen = trace(model, tokens, logit_lens=False)
    weights = jnp.ones(tokens.shape, jnp.float32) if valid is None else valid.astype(jnp.float32)
    fill = {}
    for i in _checked(model, kind or "attention", layers) or _having(model, kind or "attention"):
        law = getattr(model.config.at(i), f"{model.config.attention_kind(i)}_output_gate")
        gate = (seen.kda.get(i) or seen.mla[i]).gate
        if gate is None or law != "sigmoid":
            raise ValueError(f"layers: the output gate of layer {i} is {law!r}, expected 'sigmoid': give other layers")
        mean = jnp.tensordot(weights, gate.astype(jnp.float32), axes=2).reshape(-1) / jnp.sum(weights)
        mean = jnp.clip(mean, 1e-6, 1 - 1e-6)
        fill[f"model.layers.{i}.attention.g_proj.bias"] = jnp.log(mean) - jnp.log1p(-mean)
    return _gated(model, "constant", kind, layers, fill)


def lower_bound(model: CausalLM, bound: float | None, layers: Layers = None) -> CausalLM:
    """KDA's decay under another law, with the same weights.

    g = bound · sigmoid(exp(A_log) · (f + dt_bias)) for a number, so every log decay is scaled by bound / old bound;
    g = -exp(A_log) · softplus(f + dt_bias), Kimi-Linear's law, for None.
    """
    return variant(model, layers=_checked(model, "kda", layers), kda_lower_bound=bound)


def no_decay(model: CausalLM, layers: Layers = None) -> CausalLM:
    """g = 0 in KDA: the plain delta rule (arXiv 2406.06484), which forgets only what it overwrites."""
    return variant(model, layers=_checked(model, "kda", layers), kda_decay=False)


def fixed_beta(model: CausalLM, beta: float, layers: Layers = None) -> CausalLM:
    """b = `beta` in KDA for all tokens, instead of sigmoid(b_proj(x)): 1 replaces what a key held, 0 writes nothing."""
    return variant(model, layers=_checked(model, "kda", layers), kda_beta=float(beta))


def no_short_conv(model: CausalLM, layers: Layers = None) -> CausalLM:
    """q, k, v = silu(W x) in KDA: no convolution, so that keys see their own token alone."""
    return variant(model, layers=_checked(model, "kda", layers), kda_short_conv=False)


def no_rope(model: CausalLM, layers: Layers = None) -> CausalLM:
    """MLA's rotary channels as they are, unrotated: scores then know content and order of the mask, but no distance."""
    return variant(model, layers=_checked(model, "mla", layers), mla_rope=False)


def no_attention(model: CausalLM, layers: Sequence[int]) -> CausalLM:
    """h = x in these layers: neither attention nor memory, only the feed-forward."""
    return variant(model, layers=_checked(model, "attention", layers), attention="none")


def top_k(model: CausalLM, k: int, layers: Layers = None) -> CausalLM:
    """The best `k` experts for a token; with `norm_topk_prob` their weights are normalised over these."""
    return variant(model, layers=_checked(model, "experts", layers), num_experts_per_tok=k)


def no_routing_bias(model: CausalLM, layers: Layers = None) -> CausalLM:
    """c = s: the scores alone choose the experts. The weights, which never saw the bias, keep their formula.

    The bias is there to balance loads (arXiv 2408.15664). Experts that `drop_experts` has dropped come back.
    """
    return variant(model, layers=_checked(model, "experts", layers), moe_router_enable_expert_bias=False)


def no_shared_expert(model: CausalLM, layers: Layers = None) -> CausalLM:
    """y = Σ w_e · expert_e(x), without + shared_experts(x) (DeepSeekMoE, arXiv 2401.06066, §3)."""
    return variant(model, layers=_checked(model, "experts", layers), num_shared_experts=0)


def drop_experts(model: CausalLM, experts: Sequence[int], layers: Layers = None) -> CausalLM:
    """These experts are never chosen: their routing bias becomes -10,000, and others take their place.

    Raises ValueError if some choice of groups could leave a token with fewer experts than it takes.
    """
    config, layers = model.config, _checked(model, "experts", layers)
    which = _having(model, "experts") if layers is None else layers
    dropped = sorted(set(experts))
    if bad := [e for e in dropped if not 0 <= e < config.num_experts]:
        raise ValueError(f"experts: found {bad}; expected numbers from 0 to {config.num_experts - 1}")
    size = config.num_experts // config.n_group
    # A group is scored by its two best: those with two left go first, whatever the others in them.
    left = sorted(size - sum(e // size == group for e in dropped) for group in range(config.n_group))
    order = [n for n in left if n >= 2] + [n for n in left if n == 1] + [n for n in left if n == 0]
    most = max(config.at(i).num_experts_per_tok for i in which)
    if (size > 1 and sum(order[: config.topk_group]) < most) or config.num_experts - len(dropped) < most:
        raise ValueError(
            f"experts: without {dropped} the {config.topk_group} groups of {size} that a token is left with may hold "
            f"fewer than the {most} experts it takes: drop fewer, or spread them over the groups"
        )
    zeros = jnp.zeros(config.num_experts, jnp.float32)
    fill = {f"model.layers.{i}.mlp.gate.expert_bias": zeros for i in which}
    model = variant(model, layers=layers, fill=fill, moe_router_enable_expert_bias=True)
    rows = jnp.asarray(dropped, jnp.int32)

    def biases(m: CausalLM) -> list[Any]:
        return [m.model.layers[i].mlp.gate.expert_bias for i in which]  # pyright: ignore[reportAttributeAccessIssue]

    return eqx.tree_at(biases, model, replace_fn=lambda bias: bias.at[rows].set(DROPPED))


def variant(
    model: CausalLM,
    *,
    layers: Layers = None,
    fill: Mapping[str, Float[Array, "..."]] | None = None,
    **fields: Any,
) -> CausalLM:
    """The model with other values of its config's `fields`, in all layers or in some; what every ablation here is.

    The module tree of the new config is filled with the old model's arrays, path by path; what has no place there is
    left out. `fill` has arrays for paths that the old model lacks. Raises ValueError where one is still lacking, or
    has another shape: such a model has to be trained, not cut.
    """
    config = _changed(_config(model), layers, fields)
    have = {**(fill or {}), **{leaf.path: leaf.value for leaf in leaves(model)}}
    target = structure(config)
    wanted = list(leaves(target))
    lacking = [
        f"{leaf.path} {list(leaf.value.shape)}"
        for leaf in wanted
        if leaf.path not in have or have[leaf.path].shape != leaf.value.shape
    ]
    if lacking:
        raise ValueError(
            f"{fields}: the model has no {', '.join(lacking[:4])}{' …' if len(lacking) > 4 else ''}: a variant can "
            "leave weights out, not invent them; train it from `ling3.init(config)`"
        )
    return jax.tree.unflatten(jax.tree.structure(target), [have[leaf.path] for leaf in wanted])


def _changed(config: Ling3Config, layers: Layers, fields: Mapping[str, Any]) -> Ling3Config:
    """The config with `fields` in these layers, or in all, where they then overrule what single layers had."""
    pairs: Any = config.layer_overrides
    overrides = {layer: dict(own) for layer, own in pairs}
    if layers is None or set(layers) == set(range(config.num_hidden_layers)):
        kept = {layer: {n: v for n, v in own.items() if n not in fields} for layer, own in overrides.items()}
        return dataclasses.replace(config, layer_overrides={i: own for i, own in kept.items() if own}, **fields)
    for layer in layers:
        own = {**overrides.get(layer, {}), **fields}
        overrides[layer] = {name: value for name, value in own.items() if value != getattr(config, name)}
    return dataclasses.replace(config, layer_overrides=overrides)


def _config(model: CausalLM) -> Ling3Config:
    """The model's config, if it is a Ling-3's."""
    if not isinstance(model.config, Ling3Config):
        raise TypeError(f"model has a {type(model.config).__name__}, expected a Ling3Config: only Ling-3 is ablated")
    return model.config


def _gated(
    model: CausalLM, law: str, kind: Kind | None, layers: Layers, fill: Mapping[str, Float[Array, "..."]]
) -> CausalLM:
    """The model with this law for the output gates of one kind of attention, or of both."""
    if kind is not None:
        return variant(model, layers=_checked(model, kind, layers), fill=fill, **{f"{kind}_output_gate": law})
    chosen = _having(model, "attention") if layers is None else layers
    _checked(model, "attention", chosen)
    for each in ("kda", "mla"):
        if its := [i for i in chosen if i in _having(model, each)]:
            model = variant(model, layers=_checked(model, each, its), fill=fill, **{f"{each}_output_gate": law})
    return model


def _having(model: CausalLM, part: Part) -> list[int]:
    """The layers that have this part."""
    config = _config(model)
    kinds = {"kda": ("kda",), "mla": ("mla",), "attention": ("kda", "mla")}
    if part == "experts":
        return [i for i in range(config.num_hidden_layers) if config.mlp_kind(i) == "moe"]
    return [i for i in range(config.num_hidden_layers) if config.attention_kind(i) in kinds[part]]


def _checked(model: CausalLM, part: Part, layers: Layers) -> Layers:
    """`layers`, each of which has to have the part; None for all that have it, of which there has to be one."""
    having = _having(model, part)
    wrong = [] if layers is None else sorted(set(layers) - set(having))
    if wrong or not having:
        what = "no layer" if layers is None else f"layers {wrong}"
        raise ValueError(f"layers: {what} of this model with {NAMES[part]}; those that have it: {having or 'none'}")
    return None if layers is None or set(layers) == set(having) else sorted(set(layers))
