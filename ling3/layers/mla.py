"""Gated multi-head latent attention: full attention whose cache is one low-rank latent per token."""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, DTypeLike, Float, Int32, PRNGKeyArray

from ling3.cache import CacheSpec, Paged, Span
from ling3.execution import PLAIN, Execution
from ling3.layers.draw import Draw
from ling3.layers.gate import OutputGate, gate_projection, output_gate
from ling3.layers.linear import Constant, LowRank, Matrix
from ling3.layers.norm import RMSNorm
from ling3.layers.rope import Rope
from ling3.ops.absorption import AdaptedLatents, LatentHalves, absorbed, adapted_queries, adapted_values
from ling3.ops.attention import BLOCK, Expansion
from ling3.ops.precision import Wide, wide


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """The sizes of an `MLA` layer. Queries and keys have nope + rope channels a head, values `value`."""

    hidden: int
    heads: int
    q_rank: int | None
    """The rank of the query projection (`q_lora_rank`); None: a single full matrix."""
    latent: int
    nope: int
    rope: int
    value: int
    eps: float
    std: float
    """Standard deviation of random matrices."""
    rotation: Rope | None = None
    """The rotation of the `rope` channels; None for no rotation."""
    gate_law: OutputGate = "sigmoid"
    score_factor: float = 1.0
    """A further factor of the scores before the softmax, as YaRN has it."""


class MLA(eqx.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1) with a head-wise output gate (Ling-3's config).

        q = q_b_proj(RMSNorm(q_a_proj(x)))  or  q_proj(x)             [heads, nope + rope]
        latent, k_rope = kv_a_proj_with_mqa(x);   latent = RMSNorm(latent)
        k_nope, v = kv_b_proj(latent)                                 [heads, nope], [heads, value]
        o = softmax((q_nope·k_nope + rope(q_rope)·rope(k_rope)) / sqrt(nope + rope)) v
        y = dense(sigmoid(g_proj(x)) · o)                             a gate per head, computed in float32

    Only `[latent | rope(k_rope)]` is cached. With several tokens, keys and values are expanded from it; with one token
    and a cache, `kv_b_proj` is absorbed into query and output instead (q_nope W_uk, then W_uv), which is mathematically
    the same.

    Without `g_proj` there is no output gate; with `rotation` None nothing is rotated, and positions only set the causal
    mask. Scores are multiplied by `score_factor`, which is 1 but for YaRN (arXiv 2309.00071, §3.4).
    """

    q_a_proj: Annotated[Matrix | None, "q_rank hidden"]  # these three with a q_lora_rank,
    q_a_layernorm: RMSNorm | None
    q_b_proj: Annotated[Matrix | None, "heads·(nope+rope) q_rank"]
    q_proj: Annotated[Matrix | None, "heads·(nope+rope) hidden"]  # this one without
    kv_a_proj_with_mqa: Annotated[Matrix, "latent+rope hidden"]
    kv_a_layernorm: RMSNorm
    kv_b_proj: Annotated[Matrix, "heads·(nope+value) latent"]
    g_proj: Annotated[Matrix | LowRank | Constant | None, "heads hidden"]
    dense: Annotated[Matrix, "hidden heads·value"]
    nope: int = eqx.field(static=True)
    rope: int = eqx.field(static=True)
    value: int = eqx.field(static=True)
    rotation: Rope | None = eqx.field(static=True)
    gate_law: OutputGate = eqx.field(static=True)
    score_factor: float = eqx.field(static=True)

    @staticmethod
    def init(config: MLAConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "MLA":
        """A layer with random weights from N(0, std²)."""
        draw, q_rank = Draw(MLA, vars(config), iter(jax.random.split(key, 6)), dtype, config.std), config.q_rank
        return MLA(
            q_a_proj=None if q_rank is None else draw("q_a_proj"),
            q_a_layernorm=None if q_rank is None else RMSNorm.init(q_rank, config.eps),
            q_b_proj=None if q_rank is None else draw("q_b_proj"),
            q_proj=draw("q_proj") if q_rank is None else None,
            kv_a_proj_with_mqa=draw("kv_a_proj_with_mqa"),
            kv_a_layernorm=RMSNorm.init(config.latent, config.eps),
            kv_b_proj=draw("kv_b_proj"),
            g_proj=gate_projection(config.gate_law, draw),
            dense=draw("dense"),
            nope=config.nope,
            rope=config.rope,
            value=config.value,
            rotation=config.rotation,
            gate_law=config.gate_law,
            score_factor=config.score_factor,
        )

    def empty_state(self, spec: CacheSpec) -> Paged:
        """Pages of latents, and nothing per slot."""
        return Paged.empty(spec, (self.entry,))

    @property
    def hidden(self) -> int:
        """The number of channels in the residual stream."""
        return self.kv_a_proj_with_mqa.in_features

    @property
    def heads(self) -> int:
        """The number of heads on this device."""
        return self.kv_b_proj.out_features // (self.nope + self.value)

    @property
    def latent(self) -> int:
        """Channels of the latent, from which the keys and values of all heads are expanded."""
        return self.kv_a_layernorm.weight.shape[0]

    @property
    def entry(self) -> int:
        """The size of a token's cache entry: latent + rope."""
        return self.latent + self.rope

    def __call__(
        self, x: Float[Array, "batch seq {self.hidden}"], state: Paged | None, span: Span
    ) -> tuple[Float[Array, "batch seq {self.hidden}"], Paged | None]:
        """The layer's output for each token, and the cache with the span's tokens in it.

        Without a cache, tokens attend causally within the span only, and the result is differentiable.
        """
        seq = x.shape[1]
        positions = span.positions(seq)
        q_nope, q_rope = self.queries(self.query_input(x, span.execution), positions, span.execution)
        entries = self.entries(x, positions, span.execution)
        state = None if state is None else state.append(entries, span)

        if state is not None and seq == 1:
            pre_o_proj = self._absorbed(q_nope, q_rope, positions, state, span)
        else:
            pre_o_proj = self._expanded(q_nope, q_rope, positions, entries if state is None else state, span)
        pre_o_proj, gate = span.cleared(pre_o_proj.astype(x.dtype)), self.output_gate(x, span.execution)
        gate = span.site("gate", gate)
        span.recorder(q_nope=q_nope, q_rope=q_rope, entries=entries, o=pre_o_proj)
        heads = span.site("heads", self.gated(pre_o_proj, gate))
        return self.projected(heads, span.execution), state

    def query_input(
        self, x: Float[Array, "batch seq {self.hidden}"], execution: Execution = PLAIN
    ) -> Float[Array, "batch seq {self.query_matrix.in_features}"]:
        """The input of `query_matrix`: the normed low-rank projection of x if there is one, else x itself."""
        if self.q_a_proj is None or self.q_a_layernorm is None:
            return x
        return self.q_a_layernorm(self.q_a_proj(x, execution))

    @property
    def query_matrix(self) -> Matrix:
        """The matrix that gives the queries of all heads: `q_b_proj`, or `q_proj` without a low rank."""
        matrix = self.q_proj if self.q_b_proj is None else self.q_b_proj
        assert matrix is not None, "an MLA layer has either q_a_proj, q_a_layernorm and q_b_proj, or q_proj"
        return matrix

    def queries(
        self,
        qa: Float[Array, "batch seq {self.query_matrix.in_features}"],
        positions: Int32[Array, "batch seq"],
        execution: Execution = PLAIN,
    ) -> tuple[
        Float[Array, "batch seq {self.heads} {self.nope}"],
        Float[Array, "batch seq {self.heads} {self.rope}"],
    ]:
        """q_nope and the rotated q_rope of a `query_input`, both times the softmax scale.

        The scale is (nope + rope)^-0.5 · `score_factor`.
        """
        q = rearrange(self.query_matrix(qa, execution), "b s (h d) -> b s h d", h=self.heads)
        q_nope, q_rope_raw = self._split_queries(q)
        q_rope = self._rotated(q_rope_raw, positions)
        scale = (self.nope + self.rope) ** -0.5 * self.score_factor
        return q_nope * scale, q_rope * scale

    def _split_queries(
        self, q: Float[Array, "batch seq {self.heads} {self.nope+self.rope}"]
    ) -> tuple[
        Float[Array, "batch seq {self.heads} {self.nope}"],
        Float[Array, "batch seq {self.heads} {self.rope}"],
    ]:
        """q_nope, and q_rope before its rotation."""
        return q[..., : self.nope], q[..., self.nope :]

    def entries(
        self,
        x: Float[Array, "batch seq {self.hidden}"],
        positions: Int32[Array, "batch seq"],
        execution: Execution = PLAIN,
    ) -> Float[Array, "batch seq {self.entry}"]:
        """The cache entry of each token: [normalised latent | rotated key shared by all heads]."""
        compressed = self.kv_a_proj_with_mqa(x, execution)
        compressed_kv, k_rope = self._compressed_kv(compressed), self._k_rope(compressed, positions)
        return jnp.concatenate([compressed_kv, k_rope[:, :, 0]], axis=-1)

    def _compressed_kv(
        self, compressed: Float[Array, "batch seq {self.entry}"]
    ) -> Float[Array, "batch seq {self.latent}"]:
        """The normalised latent."""
        return self.kv_a_layernorm(compressed[..., : self.latent])

    def _k_rope(
        self, compressed: Float[Array, "batch seq {self.entry}"], positions: Int32[Array, "batch seq"]
    ) -> Float[Array, "batch seq 1 {self.rope}"]:
        """The rotated key, one for all heads."""
        return self._rotated(compressed[..., None, self.latent :], positions)

    def _rotated(
        self, x: Float[Array, "batch seq heads {self.rope}"], positions: Int32[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads {self.rope}"]:
        return x if self.rotation is None else self.rotation(x, positions)

    def _expanded(
        self,
        q_nope: Float[Array, "batch seq {self.heads} {self.nope}"],
        q_rope: Float[Array, "batch seq {self.heads} {self.rope}"],
        positions: Int32[Array, "batch seq"],
        held: Paged | Float[Array, "batch seq {self.entry}"],
        span: Span,
    ) -> Wide[Array, "batch seq {self.heads} {self.value}"]:
        """Attention over keys and values of every head, expanded block by block from a cache or the span's entries."""
        q = rearrange(jnp.concatenate([q_nope, q_rope], axis=-1), "b s h d -> b h s d")
        execution, seq = span.execution, q.shape[2]
        expansion = Expansion(self.kv_b_proj.dense().astype(q.dtype), self.heads, self.nope, execution.times)
        if isinstance(held, Paged):
            assert span.table is not None, "a span over a paged array has a table"
            o = execution.paged_attention(q, positions, held.entries, span.table, span.seen, expansion)
        else:
            blocks = jnp.pad(held, ((0, 0), (0, -seq % BLOCK), (0, 0)))
            o = execution.block_attention(q, span.columns(positions), blocks, span.length, expansion, span.oldest(seq))
        return rearrange(o, "b h s v -> b s h v")

    def _absorbed(
        self,
        q_nope: Float[Array, "batch 1 {self.heads} {self.nope}"],
        q_rope: Float[Array, "batch 1 {self.heads} {self.rope}"],
        positions: Int32[Array, "batch 1"],
        state: Paged,
        span: Span,
    ) -> Wide[Array, "batch 1 {self.heads} {self.value}"]:
        """Attention over the latents themselves: all heads share each token's single key and value."""

        def attend(q: Array) -> Array:
            assert span.table is not None, "a span over a paged array has a table"
            length, row_positions = span.seen, jnp.repeat(positions, self.heads, axis=1)
            return span.execution.latent_attention(q, row_positions, state.entries, span.table, length)

        return self.over_latents(q_nope, q_rope, attend, span.execution)

    def over_latents(
        self,
        q_nope: Float[Array, "batch 1 {self.heads} {self.nope}"],
        q_rope: Float[Array, "batch 1 {self.heads} {self.rope}"],
        attend: Callable[[Array], Array],
        execution: Execution = PLAIN,
    ) -> Wide[Array, "batch 1 {self.heads} {self.value}"]:
        """Attention in the latent space: `attend` turns queries [batch, heads, entry] into weighted sums of entries."""
        weight = absorbed(self.kv_b_proj.operand, q_nope.dtype)
        summed = attend(self._absorbed_queries(q_nope, q_rope, weight, execution))
        o_latent = self._summed_latents(summed).astype(q_nope.dtype)
        form, sums = execution.latent_values, execution.sums
        return adapted_values(o_latent, weight, self.value, form, sums, execution.times)[:, None]

    def _absorbed_queries(
        self,
        q_nope: Float[Array, "batch 1 {self.heads} {self.nope}"],
        q_rope: Float[Array, "batch 1 {self.heads} {self.rope}"],
        weight: Float[Array, "{self.heads*(self.nope+self.value)} {self.latent}"] | LatentHalves | AdaptedLatents,
        execution: Execution = PLAIN,
    ) -> Float[Array, "batch {self.heads} {self.entry}"]:
        """[q_nope W_uk | q_rope] of each head, to be scored directly against the cache entries."""
        form, sums = execution.latent_queries, execution.sums
        q_latent = adapted_queries(q_nope[:, 0], weight, form, sums, execution.times).astype(q_nope.dtype)
        return jnp.concatenate([q_latent, q_rope[:, 0]], axis=-1)

    def _summed_latents(
        self, summed: Wide[Array, "batch {self.heads} {self.entry}"]
    ) -> Wide[Array, "batch {self.heads} {self.latent}"]:
        """Each head's weighted sum of latents: the weighted sum of entries without its last `rope` channels."""
        return summed[..., : self.latent]

    def output_gate(
        self, x: Float[Array, "batch seq {self.hidden}"], execution: Execution = PLAIN
    ) -> Wide[Array, "batch seq {self.heads}"] | None:
        """The factor of each head's output, in float32 or wider; None without a gate."""
        return None if self.g_proj is None else output_gate(self.gate_law, self.g_proj(x, execution, wide(x.dtype)))

    def gated(
        self,
        pre_o_proj: Float[Array, "batch seq {self.heads} {self.value}"],
        gate: Wide[Array, "batch seq {self.heads}"] | None,
    ) -> Float[Array, "batch seq {self.heads} {self.value}"]:
        """Multiplies each head's output by its gate, cast to the output's dtype; unchanged without a gate."""
        return pre_o_proj if gate is None else pre_o_proj * gate.astype(pre_o_proj.dtype)[..., None]

    def projected(
        self, heads: Float[Array, "batch seq {self.heads} {self.value}"], execution: Execution = PLAIN
    ) -> Float[Array, "batch seq {self.hidden}"]:
        """The output projection of all heads."""
        return self.dense(rearrange(heads, "b s h v -> b s (h v)"), execution)
