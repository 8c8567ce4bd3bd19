"""The sparse mixture of experts: a grouped router, routed experts and a shared one."""

import dataclasses
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, Int32, PRNGKeyArray

from ling3.cache import Span
from ling3.execution import PLAIN, Execution
from ling3.layers.draw import Draw
from ling3.layers.linear import Matrix, normal
from ling3.layers.mlp import MLP
from ling3.layers.scope import scoped
from ling3.ops.precision import Wide, wide
from ling3.ops.swiglu import SWIGLU, SwiGLU

NO_EXPERT = 2**31 - 1
"""The index that means no expert, in any layer."""
RouterScores = Literal["sigmoid", "softmax", "sqrtsoftplus"]
"""The function from logits to scores: sigmoid or sqrt(softplus) of each, or the softmax over all experts."""


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The sizes of a `MoE` layer. `shared` is the intermediate size of the shared expert, 0 for none."""

    hidden: int
    experts: int
    intermediate: int
    shared: int
    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    scaling: float
    std: float
    """Standard deviation of random matrices."""
    expert_bias: bool = True
    scores: RouterScores = "sigmoid"
    swiglu: SwiGLU = SWIGLU
    """The activation of the routed experts."""
    shared_swiglu: SwiGLU = SWIGLU
    shared_gate: bool = False
    """Whether the shared expert's output has a gate."""
    hashed: int | None = None
    """The number of token ids, if experts are looked up by token id; None if they are chosen by score."""


class Router(eqx.Module):
    """Bias-balanced grouped top-k routing (DeepSeek-V3, arXiv 2412.19437, §2.1.2), all of it in float32.

        s = sigmoid(x Wᵀ), softmax(x Wᵀ) or sqrt(softplus(x Wᵀ));   c = s + expert_bias         c chooses, s weighs
        group score = sum of the two best c of a group;  the best `top_groups` groups stay, the others' c become -inf
        chosen = the top_k best c;   weights = s[chosen] / (Σ s[chosen] + 1e-20) · scaling

    The division is left out without `normalize`. Groups are masked with -inf and not 0, since c can be negative. Ties
    go to the lower index. Without a bias, c = s.

    With `tid2eid` experts are looked up by token id instead, and the scores only weigh them (DeepSeek-V4's first
    layers, after Hash Layers, arXiv 2106.04426).
    """

    weight: Float[Array, "experts hidden"]
    expert_bias: Float[Array, " experts"] | None
    top_k: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    top_groups: int = eqx.field(static=True)
    normalize: bool = eqx.field(static=True)
    scaling: float = eqx.field(static=True)
    law: RouterScores = eqx.field(static=True, default="sigmoid")
    """The function from logits to the scores s."""
    tid2eid: Int32[Array, "vocab top_k"] | None = None
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(config: MoEConfig, *, key: PRNGKeyArray) -> "Router":
        """Random weights and a zero bias, float32; with `hashed`, random distinct experts for each token id."""
        table = None
        if config.hashed is not None:
            draws = jax.random.uniform(jax.random.fold_in(key, 1), (config.hashed, config.experts))
            table = lax.top_k(draws, config.top_k)[1].astype(jnp.int32)
        return Router(
            weight=normal(key, (config.experts, config.hidden), jnp.float32, config.std),
            expert_bias=jnp.zeros(config.experts, jnp.float32) if config.expert_bias and table is None else None,
            tid2eid=table,
            top_k=config.top_k,
            groups=config.groups,
            top_groups=config.top_groups,
            normalize=config.normalize,
            scaling=config.scaling,
            law=config.scores,
        )

    @scoped
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        ids: Int[Array, " tokens"] | None = None,
        execution: Execution = PLAIN,
    ) -> tuple[Int32[Array, "tokens {self.top_k}"], Wide[Array, "tokens {self.top_k}"]]:
        """The experts chosen for each token, best first, and their weights. `tid2eid` needs the token `ids`."""
        scores = self.scores(x, execution)
        chosen = self._best(scores) if self.tid2eid is None else self.tid2eid[ids][:, : self.top_k]
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if self.normalize:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * self.scaling

    def _best(self, scores: Wide[Array, "tokens experts"]) -> Int32[Array, "tokens {self.top_k}"]:
        choice = scores if self.expert_bias is None else scores + self.expert_bias.astype(scores.dtype)[None]
        grouped = choice.reshape(choice.shape[0], self.groups, -1)
        best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, kept = lax.top_k(best, self.top_groups)
        keep = jnp.any(kept[:, :, None] == jnp.arange(self.groups, dtype=kept.dtype)[None, None], axis=1)
        grouped = jnp.where(keep[..., None], grouped, -jnp.inf)
        return lax.top_k(grouped.reshape(choice.shape), self.top_k)[1]

    def scores(self, x: Float[Array, "tokens hidden"], execution: Execution = PLAIN) -> Wide[Array, "tokens experts"]:
        """s = sigmoid(x Wᵀ), or another `law`, in float32 or wider: each expert's affinity, before any bias."""
        dtype = wide(x.dtype)
        logits = execution.times(x.astype(dtype), self.weight.astype(dtype)).astype(dtype)
        if self.law == "sqrtsoftplus":
            return jnp.sqrt(jax.nn.softplus(logits))
        return jax.nn.softmax(logits, axis=-1) if self.law == "softmax" else jax.nn.sigmoid(logits)


class Experts(eqx.Module):
    """The routed experts' SwiGLU weights, stacked.

    expert_e(x) = down_proj_e(swiglu(gate_proj_e(x), up_proj_e(x))). The checkpoint has a tensor for each expert,
    `experts.{e}.gate_proj.weight` and so on.
    """

    gate_proj: Annotated[Matrix, "experts intermediate hidden"]
    up_proj: Annotated[Matrix, "experts intermediate hidden"]
    down_proj: Annotated[Matrix, "experts hidden intermediate"]
    swiglu: SwiGLU = eqx.field(static=True, default=SWIGLU)
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(config: MoEConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "Experts":
        """Experts with random weights from N(0, std²)."""
        draw = Draw(Experts, vars(config), iter(jax.random.split(key, 3)), dtype, config.std)
        return Experts(draw("gate_proj"), draw("up_proj"), draw("down_proj"), config.swiglu)

    @property
    def count(self) -> int:
        """The number of experts on this device."""
        return self.gate_proj.shape[0]

    @scoped
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        chosen: Int32[Array, "tokens top_k"],
        weights: Float[Array, "tokens top_k"],
        execution: Execution = PLAIN,
    ) -> Float[Array, "tokens hidden"]:
        """Σ_j weights_j · expert_{chosen_j}(x) in float32 or wider, summed in top-k order."""
        matrices = self.gate_proj.operand, self.up_proj.operand, self.down_proj.operand
        return execution.experts(x, chosen, weights, *matrices, self.swiglu, execution.times)


class MoE(eqx.Module):
    """y = Σ_e w_e · expert_e(x) + shared_experts(x).

    The weights w include the routed scaling factor, which does not apply to the shared expert (DeepSeekMoE, arXiv
    2401.06066, §3). With `shared_expert_gate`, a row, the shared expert's output is multiplied by sigmoid of that
    product (Qwen's).
    """

    gate: Router
    experts: Experts
    shared_experts: MLP | None
    shared_expert_gate: Annotated[Matrix | None, "gates hidden"] = None

    @staticmethod
    def init(config: MoEConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "MoE":
        """A layer with random weights from N(0, std²)."""
        gate, experts, own = jax.random.split(key, 3)
        shared, shared_gate = None, None
        if config.shared:
            unit = config.shared_swiglu
            shared = MLP.init(config.hidden, config.shared, key=own, dtype=dtype, std=config.std, swiglu=unit)
        if config.shared_gate:
            sizes = {"gates": 1, "hidden": config.hidden}
            shared_gate = Draw(MoE, sizes, iter([jax.random.fold_in(own, 1)]), dtype, config.std)("shared_expert_gate")
        return MoE(Router.init(config, key=gate), Experts.init(config, key=experts, dtype=dtype), shared, shared_gate)

    def __call__(self, x: Float[Array, "batch seq hidden"], span: Span) -> Float[Array, "batch seq hidden"]:
        """Each token's output: its routed experts and the shared one. Padding reads no routed expert."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.route(tokens, span, x.shape[1])
        y = self.experts(tokens, chosen, weights, span.execution).astype(x.dtype).reshape(x.shape)
        return y if self.shared_experts is None else y + self.shared(x, span)

    def route(
        self, tokens: Float[Array, "tokens hidden"], span: Span, seq: int
    ) -> tuple[Int32[Array, "tokens top_k"], Wide[Array, "tokens top_k"]]:
        """The experts and weights of a span's tokens, flattened from rows of `seq`; padding has NO_EXPERT."""
        ids = None if span.tokens is None else span.tokens.reshape(-1)
        chosen, weights = self.gate(tokens, ids, span.execution)
        chosen, weights = span.site("router", (chosen, weights))
        if span.watched:
            span.recorder(scores=self.gate.scores(tokens, span.execution))
        return jnp.where(span.valid(seq).reshape(-1, 1), chosen, NO_EXPERT), weights

    def shared(self, x: Float[Array, "batch seq hidden"], span: Span) -> Float[Array, "batch seq hidden"]:
        """The shared expert's output, where there is one."""
        assert self.shared_experts is not None, "asked of a layer that has one"
        with jax.named_scope("shared_experts"):
            y = self.shared_experts(x, span)
            if self.shared_expert_gate is None:
                return y
            gate = jax.nn.sigmoid(self.shared_expert_gate(x, span.execution, wide(x.dtype)))
            return y * gate.astype(y.dtype)
