"""Kimi Delta Attention: linear attention whose memory is one matrix per head."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, DTypeLike, Float, Float32, Int32, PRNGKeyArray

from ling3.cache import CacheSpec, Drafted, KDAState, Span
from ling3.execution import PLAIN, Execution
from ling3.layers.conv import ShortConv
from ling3.layers.draw import Draw
from ling3.layers.gate import OutputGate, gate_projection, output_gate
from ling3.layers.linear import Constant, LowRank, Matrix
from ling3.layers.norm import GatedRMSNorm
from ling3.ops.kda import kda_gate, l2_normalize, state_norms
from ling3.ops.precision import Wide, wide
from ling3.ops.tails import continued


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """The sizes of a `KDA` layer. Keys and values have `head_dim` channels a head."""

    hidden: int
    heads: int
    head_dim: int
    eps: float
    std: float
    """Standard deviation of random matrices."""
    taps: int | None = 4
    """Taps of the convolutions; None for no convolutions."""
    lower_bound: float | None = -5.0
    """Lower bound of the log decay, in nats; None for Kimi-Linear's unbounded decay."""
    decays: bool = True
    """False for no decay: g = 0."""
    beta: float | None = None
    """A constant writing strength; None for a learned one."""
    neg_eigval: bool = False
    gate_law: OutputGate = "sigmoid"
    gate_rank: int | None = None
    """Rank of the projections of decay and output gate; None for full rank."""


class DraftedKDA(Drafted):
    """A KDA layer's state before some drafts, and what they would write into it."""

    before: KDAState
    k: Wide[Array, "sequences drafted heads key"]
    v: Wide[Array, "sequences drafted heads value"]
    g: Wide[Array, "sequences drafted heads #key"]
    beta: Wide[Array, "sequences drafted heads"]
    inputs: Float[Array, "sequences drafted channels"]  # of the convolutions
    execution: Execution = eqx.field(static=True)

    def kept(self, count: Int32[Array, " sequences"]) -> KDAState:
        """Takes the steps of the kept tokens again: a token whose g and beta are 0 leaves the state as it is."""
        real = jnp.arange(self.k.shape[1], dtype=jnp.int32)[None] < count[:, None]
        g, beta = jnp.where(real[..., None, None], self.g, 0.0), jnp.where(real[..., None], self.beta, 0.0)
        steps = jnp.zeros_like(self.k), self.k, self.v, g, beta
        _, recurrent = self.execution.kda_in_turn(*steps, self.before.recurrent)
        return KDAState(recurrent, continued(self.before.conv, self.inputs, count)[1])


def drafted_tails(
    tail: Float[Array, "sequences tail channels"], inputs: Float[Array, "rows 1 channels"], span: Span
) -> Float[Array, "rows tail channels"]:
    """The tail of each row of a span of drafts: the inputs of the rows before it, after the sequence's own tail."""
    own = span.by_sequence(inputs)
    joined, _ = continued(tail, own, jnp.zeros(tail.shape[0], jnp.int32))
    looks = [joined[:, i : i + tail.shape[1]] for i in range(span.rows_each)]
    return jnp.stack(looks, axis=1).reshape(-1, *tail.shape[1:])


def advanced(
    tokens: tuple[Wide[Array, "batch seq heads ..."], ...],
    state: KDAState,
    conv: Float[Array, "rows tail channels"],
    inputs: Float[Array, "batch seq channels"],
    span: Span,
    lower_bound: float | None,
) -> tuple[Wide[Array, "batch seq heads value"], KDAState | DraftedKDA]:
    """The recurrence over a span's q, k, v, g and beta: the outputs o, and the state after them.

    `conv` is the convolutions' tail after the span, and `inputs` what they took.
    """
    q, k, v, g, beta = tokens
    q, execution = span.cleared(q), span.execution
    if span.rows_each > 1:
        of = span.by_sequence
        drafts = of(q), of(k), of(v), of(g), of(beta)
        o = execution.kda_look(*drafts, state.recurrent)
        o = o.reshape(-1, 1, *o.shape[2:])
        _, k_, v_, g_, beta_ = drafts
        after = DraftedKDA(before=state, k=k_, v=v_, g=g_, beta=beta_, inputs=of(inputs), execution=execution)
    elif q.shape[1] == 1:
        token = q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0]
        o, recurrent = execution.kda_step(*token, state.recurrent)
        o, after = o[:, None], KDAState(recurrent, conv)
    else:
        how = {"lower_bound": lower_bound, "chunk_size": execution.chunk_size, "resets": span.text_starts is not None}
        o, recurrent = execution.chunk_kda(q, k, v, span.forgotten(g), beta, state.recurrent, **how)
        after = KDAState(recurrent, conv)
    span.recorder(q=q, k=k, v=v, o=o)
    if span.watched and span.rows_each == 1:
        span.recorder(state_norm=state_norms(q, k, v, g, beta, state.recurrent))
    return o, after


def bias_of_rate(
    rate: Float32[Array, " channels"], scale: Float32[Array, " channels"], bound: float | None
) -> Float32[Array, " channels"]:
    """The `dt_bias` with which a channel decays by `rate` nats per token where f_proj(x) is 0.

    dt_bias = ln(rate / (-bound - rate)) / scale with a bound, where `rate` must be below -bound; without one,
    ln(exp(rate / scale) - 1). These are `KDA`'s equations for g, solved for it. `scale` is exp(A_log).
    """
    if bound is None:
        return jnp.log(jnp.expm1(rate / scale))
    return jnp.log(rate / (-bound - rate)) / scale


class KDA(eqx.Module):
    """Kimi Delta Attention with Ling-3's bounded decay (Kimi Linear, arXiv 2510.26692, §3; the bound: Ling-3's config).

        q, k, v = silu(conv(W x));   q = q / |q| / sqrt(key);   k = k / |k|         per head
        g = lower_bound · sigmoid(exp(A_log) · (f_proj(x) + dt_bias))               log decay, nats per key channel
        b = sigmoid(b_proj(x))                                                      writing strength, per head
        S <- exp(g) S;   S <- S + k (b (v - Sᵀ k))ᵀ;   o = Sᵀ q                       the recurrence
        y = o_proj( RMSNorm(o) · o_norm.weight · sigmoid(g_proj(x)) )               output gate, per element

    With `lower_bound` None the decay is Kimi-Linear's g = -exp(A_log) · softplus(f_proj(x) + dt_bias).
    Everything between the projections is float32. Kimi-Linear's `f_proj` and `g_proj` have rank `head_dim`.

    Parts that are None are left out: without convolutions q, k, v = silu(W x); without `f_proj` g = 0; without `b_proj`
    b is the constant `beta`; without `g_proj` there is no output gate. With `neg_eigval` b = 2 sigmoid(b_proj(x)).
    """

    q_proj: Annotated[Matrix, "heads·head_dim hidden"]
    k_proj: Annotated[Matrix, "heads·head_dim hidden"]
    v_proj: Annotated[Matrix, "heads·head_dim hidden"]
    q_conv1d: ShortConv | None
    k_conv1d: ShortConv | None
    v_conv1d: ShortConv | None
    A_log: Float[Array, " heads"] | None
    dt_bias: Annotated[Float[Array, " channels"] | None, "heads·head_dim"]
    f_proj: Annotated[Matrix | LowRank | None, "heads·head_dim hidden"]  # decay gate
    b_proj: Annotated[Matrix | None, "heads hidden"]  # writing strength
    g_proj: Annotated[Matrix | LowRank | Constant | None, "heads·head_dim hidden"]  # output gate
    o_norm: GatedRMSNorm
    o_proj: Annotated[Matrix, "hidden heads·head_dim"]
    lower_bound: float | None = eqx.field(static=True)
    beta: float | None = eqx.field(static=True)
    neg_eigval: bool = eqx.field(static=True)
    gate_law: OutputGate = eqx.field(static=True)

    @staticmethod
    def init(config: KDAConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "KDA":
        """Random weights; initial decay rates -g are log-uniform in [0.001, 0.1] nats per token, bounded or not.

        If -lower_bound is below 0.2, the fastest rate is half of it instead, and the slowest a hundredth of that.
        """
        heads, inner, bound = config.heads, config.heads * config.head_dim, config.lower_bound
        keys = iter(jax.random.split(key, 12))
        draw = Draw(KDA, vars(config), keys, dtype, config.std)

        def conv() -> ShortConv | None:
            own = next(keys)
            return None if config.taps is None else ShortConv.init(inner, config.taps, key=own)

        fastest = 0.1 if bound is None else min(0.1, -bound / 2)
        rate = fastest * 100.0 ** -jax.random.uniform(next(keys), (inner,), jnp.float32)
        scale = jnp.ones(heads, jnp.float32)
        if bound is None:
            scale = jax.random.uniform(next(keys), (heads,), jnp.float32, minval=1.0, maxval=16.0)
        dt_bias = bias_of_rate(rate, jnp.repeat(scale, config.head_dim), bound)
        # Every part takes a key, needed or not, so that a variant shares its initial weights with Ling-3.
        q_proj, k_proj, v_proj = draw("q_proj"), draw("k_proj"), draw("v_proj")
        q_conv1d, k_conv1d, v_conv1d = conv(), conv(), conv()
        f_proj, b_proj = draw.low_rank("f_proj", config.gate_rank), draw("b_proj")
        return KDA(
            q_proj=q_proj,
            k_proj=k_proj,
            v_proj=v_proj,
            q_conv1d=q_conv1d,
            k_conv1d=k_conv1d,
            v_conv1d=v_conv1d,
            A_log=jnp.log(scale) if config.decays else None,
            dt_bias=dt_bias if config.decays else None,
            f_proj=f_proj if config.decays else None,
            b_proj=b_proj if config.beta is None else None,
            g_proj=gate_projection(config.gate_law, draw, config.gate_rank),
            o_norm=GatedRMSNorm.init(config.head_dim, config.eps),
            o_proj=draw("o_proj"),
            lower_bound=bound,
            beta=config.beta,
            neg_eigval=config.neg_eigval,
            gate_law=config.gate_law,
        )

    @property
    def heads(self) -> int:
        """The number of heads on this device."""
        return self.q_proj.out_features // self.o_norm.weight.shape[0]

    def empty_state(self, spec: CacheSpec) -> KDAState:
        """The state before the first token: zeros per slot, and nothing in pages."""
        heads, inner = self.heads, self.q_proj.out_features
        taps = 1 if self.q_conv1d is None else self.q_conv1d.weight.shape[1]
        recurrent = jnp.zeros((spec.slots, heads, inner // heads, inner // heads), wide(spec.dtype))
        return KDAState(recurrent, jnp.zeros((spec.slots, taps - 1, 3 * inner), spec.dtype))

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: KDAState | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], KDAState | DraftedKDA]:
        """The layer's output for each token, and its state after the span. Without a `state` it starts from zeros."""
        execution = span.execution
        state = self.empty_state(CacheSpec(x.shape[0], 0, 1, x.dtype)) if state is None else state
        projected = self.projections(x, execution)
        inputs = jnp.concatenate(projected, axis=-1)  # not computed unless tokens are drafts
        tail = state.conv if span.rows_each == 1 else drafted_tails(state.conv, inputs, span)
        q, k, v, conv = self._of_projections(projected, tail, span)
        gates = self.gates(x, span)
        g, beta = span.site("decay", gates[0]), span.site("beta", gates[1])
        bound = self.lower_bound if self.f_proj is not None else -1.0  # g = 0 satisfies any bound
        bound = bound if g is gates[0] else None  # an intervention may break the bound
        o, after = advanced((q, k, v, g, beta), state, conv, inputs, span, bound)
        gate = span.site("gate", self.output_gate(x, execution))
        heads = span.site("heads", self.gated(o, gate, x.dtype))
        return self.projected(heads, execution), after

    def projections(
        self, x: Float[Array, "batch seq hidden"], execution: Execution
    ) -> list[Float[Array, "batch seq _channels"]]:
        """The projections of x to q, k and v, which the convolutions take."""
        return [proj(x, execution) for proj in (self.q_proj, self.k_proj, self.v_proj)]

    def convolved(
        self, x: Float[Array, "batch seq hidden"], tail: Float[Array, "batch tail channels"], span: Span
    ) -> tuple[
        Wide[Array, "batch seq heads key"],
        Wide[Array, "batch seq heads key"],
        Wide[Array, "batch seq heads value"],
        Float[Array, "batch tail channels"],
    ]:
        """q (of length key^-0.5), k (of length 1), v, and the convolutions' new tail."""
        return self._of_projections(self.projections(x, span.execution), tail, span)

    def _of_projections(
        self, inputs: Sequence[Float[Array, "batch seq _"]], tail: Float[Array, "batch tail channels"], span: Span
    ) -> tuple[
        Wide[Array, "batch seq heads key"],
        Wide[Array, "batch seq heads key"],
        Wide[Array, "batch seq heads value"],
        Float[Array, "batch tail channels"],
    ]:
        outputs = []
        for i, (x, conv) in enumerate(zip(inputs, (self.q_conv1d, self.k_conv1d, self.v_conv1d), strict=True)):
            if conv is None:
                y = jax.nn.silu(x.astype(wide(x.dtype)))
            else:
                y, tail = conv(x, tail, span, i * x.shape[-1])
            outputs.append(self._heads(y))
        q, k, v = outputs
        return l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k), v, tail

    def gates(
        self, x: Float[Array, "batch seq hidden"], span: Span
    ) -> tuple[Wide[Array, "batch seq heads key"], Wide[Array, "batch seq heads"]]:
        """The log decay g and the writing strength beta; both are 0 for padding, which leaves the state unchanged."""
        g, beta = self._decay(x, span.execution), self._strength(x, span.execution)
        valid = span.valid(x.shape[1])[:, :, None]
        return jnp.where(valid[..., None], g, 0.0), jnp.where(valid, beta, 0.0)

    def _decay(self, x: Float[Array, "batch seq hidden"], execution: Execution) -> Wide[Array, "batch seq heads key"]:
        dtype = wide(x.dtype)
        if self.f_proj is None or self.A_log is None or self.dt_bias is None:
            return self._heads(jnp.zeros((*x.shape[:2], self.q_proj.out_features), dtype))
        dt_bias = self.dt_bias.astype(dtype).reshape(self.heads, -1)
        return kda_gate(
            self._heads(self.f_proj(x, execution, dtype)), self.A_log.astype(dtype), dt_bias, self.lower_bound
        )

    def _strength(self, x: Float[Array, "batch seq hidden"], execution: Execution) -> Wide[Array, "batch seq heads"]:
        dtype = wide(x.dtype)
        if self.b_proj is None:
            return jnp.full((*x.shape[:2], self.heads), 1.0 if self.beta is None else self.beta, dtype)
        beta = jax.nn.sigmoid(self.b_proj(x, execution, dtype))
        return 2.0 * beta if self.neg_eigval else beta

    def output_gate(
        self, x: Float[Array, "batch seq hidden"], execution: Execution = PLAIN
    ) -> Wide[Array, "batch seq heads value"] | None:
        """The factor of the normed output, in float32 or wider; None without a gate."""
        if self.g_proj is None:
            return None
        return output_gate(self.gate_law, self._heads(self.g_proj(x, execution)).astype(wide(x.dtype)))

    def gated(
        self,
        o: Wide[Array, "batch seq heads value"],
        gate: Wide[Array, "batch seq heads value"] | None,
        dtype: DTypeLike,
    ) -> Float[Array, "batch seq heads value"]:
        """Applies norm and output gate: each head's input to the output projection, in `dtype`."""
        return self.o_norm(o, gate).astype(dtype)

    def projected(
        self, heads: Float[Array, "batch seq heads value"], execution: Execution = PLAIN
    ) -> Float[Array, "batch seq hidden"]:
        """The output projection of all heads."""
        return self.o_proj(rearrange(heads, "b s h v -> b s (h v)"), execution)

    def _heads(self, y: Float[Array, "batch seq channels"]) -> Float[Array, "batch seq heads key"]:
        return rearrange(y, "b s (h k) -> b s h k", h=self.heads)
