"""DeepSeek-V4's attention: a single head is key and value, over a window and over compressed older tokens."""

import dataclasses
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, PRNGKeyArray

from ling3.cache import CacheSpec, Paged, Span
from ling3.layers.draw import Draw
from ling3.layers.linear import Matrix
from ling3.layers.norm import RMSNorm
from ling3.layers.rope import Rope
from ling3.ops import compressed_attention as ops
from ling3.ops.attention import finish
from ling3.ops.packed_kv import ENTRIES, KEYS, ROPE, Packing
from ling3.ops.precision import Wide, wide
from ling3.ops.tails import continued


@dataclasses.dataclass(frozen=True)
class CSAConfig:
    """The sizes of a `CSA` layer. Every head has `head_dim` channels, of which RoPE rotates the last."""

    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    groups: int
    """Groups of heads in the output projection."""
    o_rank: int
    """Channels that each group of heads is projected to."""
    window: int | None
    """Tokens that a query attends to uncompressed, its own included; None for no window."""
    eps: float
    std: float
    """Standard deviation of random matrices."""
    rope: Rope
    ratio: int | None = None
    """Tokens per compressed entry; None for attention to the window only."""
    overlaps: bool = False
    """True if an entry covers its `ratio` tokens and as many before them."""
    index_heads: int = 0
    """Heads of the indexer that chooses entries; 0 for attention to all entries."""
    index_dim: int = 0
    index_top: int = 0
    """The number of entries that the indexer chooses for a query."""
    sink: bool = True


class CompressorState(eqx.Module):
    """A compressor's state: the complete entries, and the last tokens' projections for those not yet complete."""

    tail: Float[Array, "batch tail channels"]  # [kv | gate] of the tokens that the next entry may need, float32
    entries: Paged


class Compressor(eqx.Module):
    """One entry per `ratio` = m tokens: a weighted mean without a query, with separate weights for each channel.

        kv, s = wkv(x), wgate(x)                          [width], or two of these where entries overlap
        entry_w = rope(norm(Σ softmax(s + ape) · kv), w·m)         over the tokens that the entry covers, per channel

    Entry w covers the block of tokens w·m … w·m + m - 1. Where entries overlap, it covers 2m tokens: the m before the
    block with the first half of the channels (none before the first block), and the block's with the second half. `ape`
    is indexed by a token's place in its block. Everything up to the norm is float32 or wider.
    """

    wkv: Annotated[Matrix, "channels hidden"]  # copies·width, with two copies where entries overlap, else one
    wgate: Annotated[Matrix, "channels hidden"]
    norm: RMSNorm
    ape: Float[Array, "ratio channels"]
    rotation: Rope = eqx.field(static=True)

    @staticmethod
    def init(config: CSAConfig, width: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> "Compressor":
        """Random weights, and a position bias `ape` of 0."""
        assert config.ratio is not None
        channels = (1 + config.overlaps) * width
        sizes = {"channels": channels, "hidden": config.hidden}
        draw = Draw(Compressor, sizes, iter(jax.random.split(key)), dtype, config.std)
        ape = jnp.zeros((config.ratio, channels), jnp.float32)
        return Compressor(draw("wkv"), draw("wgate"), RMSNorm.init(width, config.eps), ape, config.rope)

    @property
    def ratio(self) -> int:
        """The number of tokens in an entry."""
        return self.ape.shape[0]

    @property
    def width(self) -> int:
        """The number of channels in an entry."""
        return self.norm.weight.shape[0]

    @property
    def copies(self) -> int:
        """2 where entries overlap, else 1."""
        return self.ape.shape[1] // self.width

    @property
    def tail(self) -> int:
        """The number of earlier tokens that the next entry may need."""
        return self.copies * self.ratio - 1

    def empty_tail(self, slots: int, dtype: DTypeLike) -> Float[Array, "slots {self.tail} {2*self.ape.shape[1]}"]:
        """The tail before the first token: zeros."""
        return jnp.zeros((slots, self.tail, 2 * self.ape.shape[1]), wide(dtype))

    def empty_state(self, spec: CacheSpec, packing: Packing) -> CompressorState:
        """The state before the first token."""
        entries = Paged.empty(spec, (self.width,), tokens=self.ratio, packing=packing)
        return CompressorState(self.empty_tail(spec.slots, spec.dtype), entries)

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: CompressorState | None, span: Span
    ) -> tuple[Float[Array, "batch completed {self.width}"], CompressorState | None]:
        """The entries that the span completes, in the first columns of each row, and the state after the span."""
        sums = wide(x.dtype)
        projected = [matrix(x, span.execution, sums) for matrix in (self.wkv, self.wgate)]
        tail = self.empty_tail(x.shape[0], x.dtype) if state is None else state.tail
        joined, tail = continued(tail, jnp.concatenate(projected, axis=-1), span.length)
        summed, entry = ops.pooled(joined, span.start, self.ape, self.copies)
        new = rotate_last(self.rotation, self.norm(summed)[:, :, None], self.ratio * entry)[:, :, 0].astype(x.dtype)
        return new, None if state is None else CompressorState(tail, state.entries.append(new, span))


class Indexer(eqx.Module):
    """Chooses the compressed entries that a query attends to, by scores of separate query heads and keys.

    q = rope(wq_b(qa))  [heads, channels];   k_w = compressor(x);   a = weights_proj(x) · heads^-1/2
    score(w) = Σ_h a_h · relu(q_h · k_w) · channels^-1/2            chosen: the `top` highest visible entries
    """

    wq_b: Annotated[Matrix, "index_heads·index_dim q_rank"]
    weights_proj: Annotated[Matrix, "index_heads hidden"]
    compressor: Compressor
    top: int = eqx.field(static=True)

    @staticmethod
    def init(config: CSAConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "Indexer":
        """An indexer with random weights from N(0, std²)."""
        keys = iter(jax.random.split(key, 3))
        draw = Draw(Indexer, vars(config), keys, dtype, config.std)
        wq_b, weights_proj = draw("wq_b"), draw("weights_proj")
        compressor = Compressor.init(config, config.index_dim, key=next(keys), dtype=dtype)
        return Indexer(wq_b, weights_proj, compressor, config.index_top)

    @property
    def heads(self) -> int:
        """The number of the indexer's query heads."""
        return self.weights_proj.out_features

    def queries(
        self,
        x: Float[Array, "batch seq hidden"],
        qa: Float[Array, "batch seq q_rank"],
        positions: Int32[Array, "batch seq"],
        span: Span,
    ) -> tuple[Float[Array, "batch seq {self.heads} {self.compressor.width}"], Wide[Array, "batch seq {self.heads}"]]:
        """The rotated queries, and the weights of the heads, which include both scales."""
        q = rearrange(self.wq_b(qa, span.execution), "b s (h c) -> b s h c", h=self.heads)
        weights = self.weights_proj(x, span.execution, wide(x.dtype))
        scale = (self.heads * self.compressor.width) ** -0.5
        return rotate_last(self.compressor.rotation, q, positions), weights * scale


class CSAState(eqx.Module):
    """One layer's state: the entries of the last window - 1 tokens, and the compressors' states."""

    window: Float[Array, "batch tail channels"]
    compressor: CompressorState | None
    indexer: CompressorState | None


class CSA(eqx.Module):
    """Attention of many query heads to one key that is also the value (DeepSeek-V4).

        qa = RMSNorm(wq_a x);   q = rope(rms(wq_b qa))  [heads, head_dim];   kv = rope(RMSNorm(wkv x))  [head_dim]
        o = softmax([q·e / sqrt(head_dim) …, attn_sink]) e       over the entries e that a query sees; the sink's is 0
        y = wo_b · concat_g(wo_a[g] · rope⁻¹(o)[heads of group g])

    A query sees the `kv` of the last `sliding_window` tokens, and the complete entries of `compressor`, or those of
    them that `indexer` chooses. RoPE rotates the last channels of a head. As values are rotated like keys, the output
    is rotated back by the query's position, so that it depends on relative positions only.
    """

    wq_a: Annotated[Matrix, "q_rank hidden"]
    q_norm: RMSNorm
    wq_b: Annotated[Matrix, "heads·head_dim q_rank"]
    wkv: Annotated[Matrix, "head_dim hidden"]
    kv_norm: RMSNorm
    attn_sink: Float[Array, " heads"] | None
    compressor: Compressor | None
    indexer: Indexer | None
    wo_a: Annotated[Matrix, "groups o_rank heads·head_dim/groups"]
    wo_b: Annotated[Matrix, "hidden groups·o_rank"]
    sliding_window: int | None = eqx.field(static=True)
    rotation: Rope = eqx.field(static=True)

    @staticmethod
    def init(config: CSAConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "CSA":
        """Random weights, and sinks with logits of 0."""
        keys = iter(jax.random.split(key, 7))
        draw = Draw(CSA, vars(config), keys, dtype, config.std)
        compressor, indexer, own, chooser = None, None, next(keys), next(keys)
        if config.ratio is not None:
            compressor = Compressor.init(config, config.head_dim, key=own, dtype=dtype)
            indexer = Indexer.init(config, key=chooser, dtype=dtype) if config.index_heads else None
        return CSA(
            wq_a=draw("wq_a"),
            q_norm=RMSNorm.init(config.q_rank, config.eps),
            wq_b=draw("wq_b"),
            wkv=draw("wkv"),
            kv_norm=RMSNorm.init(config.head_dim, config.eps),
            attn_sink=jnp.zeros(config.heads, jnp.float32) if config.sink else None,
            compressor=compressor,
            indexer=indexer,
            wo_a=draw("wo_a"),
            wo_b=draw("wo_b"),
            sliding_window=config.window,
            rotation=config.rope,
        )

    @property
    def hidden(self) -> int:
        """The number of channels in the residual stream."""
        return self.wq_a.in_features

    @property
    def head_dim(self) -> int:
        """The number of channels in a head."""
        return self.wkv.out_features

    @property
    def heads(self) -> int:
        """The number of query heads on this device."""
        return self.wq_b.out_features // self.head_dim

    @property
    def kind(self) -> str:
        """SWA, CSA or HCA: beside the window it reads no entries, those that an indexer chooses, or all."""
        return "SWA" if self.compressor is None else "HCA" if self.indexer is None else "CSA"

    def empty_state(self, spec: CacheSpec) -> CSAState:
        """The state before the first token. Raises ValueError if `spec.packed` and sizes do not fit the format."""
        rotated = 2 * len(self.rotation.frequencies)
        if spec.packed and self.compressor is not None and rotated != ROPE:
            raise ValueError(f"RoPE turns {rotated} channels of its entries, and {ROPE} of packed ones")
        chooser = None if self.indexer is None else self.indexer.compressor
        parts = ((self.compressor, ENTRIES), (chooser, KEYS))
        states = (None if part is None else part.empty_state(spec, packing) for part, packing in parts)
        return CSAState(self._empty_window(spec.slots, spec.dtype), *states)

    def __call__(
        self, x: Float[Array, "batch seq {self.hidden}"], state: CSAState | None, span: Span
    ) -> tuple[Float[Array, "batch seq {self.hidden}"], CSAState | None]:
        """The layer's output for each token, and its state after the span.

        Without a state, tokens attend only within the span, and the result is differentiable.
        """
        if span.rows_each > 1:
            raise ValueError(f"{self.kind} attention keeps no state to go back to behind drafts")
        if span.text_starts is not None:
            raise ValueError(f"{self.kind} attention compresses a row's tokens together, so a row holds only one text")
        positions = span.positions(x.shape[1])
        qa = self.q_norm(self.wq_a(x, span.execution))
        q, kv = self.queries(qa, positions, span), self.entries(x, positions, span)
        tail = self._empty_window(x.shape[0], x.dtype) if state is None else state.window
        inputs, tail = continued(tail, kv, span.length)

        sums = ops.sink(q, self.attn_sink)
        if self.sliding_window is not None:
            sums = ops.over_window(sums, q, inputs, span.start)
        compressed = indexed = None
        if self.compressor is not None:
            new, compressed = self.compressor(x, None if state is None else state.compressor, span)
            # Padding has positions past the last token, where there are no entries.
            known = jnp.minimum(positions + 1, (span.start + span.length)[:, None])
            seen = known // self.compressor.ratio
            chosen = None
            if self.indexer is not None:
                keys, indexed = self.indexer.compressor(x, None if state is None else state.indexer, span)
                chosen = self._chosen(x, qa, positions, keys if indexed is None else indexed.entries, seen, span)
            sums = over_compressed(sums, q, new if compressed is None else compressed.entries, seen, chosen, span)
        o = rearrange(finish(sums), "b 1 (s h) c -> b s h c", h=self.heads).astype(x.dtype)
        o = rotate_last(self.rotation, o, -positions)
        span.recorder(q=q, kv=kv)
        return self.output(span.site("heads", o), span), None if state is None else CSAState(tail, compressed, indexed)

    def _empty_window(self, slots: int, dtype: DTypeLike) -> Float[Array, "slots tail {self.head_dim}"]:
        return jnp.zeros((slots, (self.sliding_window or 1) - 1, self.head_dim), dtype)

    def queries(
        self, qa: Float[Array, "batch seq q_rank"], positions: Int32[Array, "batch seq"], span: Span
    ) -> Float[Array, "batch seq {self.heads} {self.head_dim}"]:
        """The queries: normed per head without a weight, rotated, and times the softmax scale head_dim^-0.5."""
        q = rearrange(self.wq_b(qa, span.execution), "b s (h c) -> b s h c", h=self.heads).astype(wide(qa.dtype))
        q = q * lax.rsqrt(jnp.mean(q * q, axis=-1, keepdims=True) + self.q_norm.eps)
        return (rotate_last(self.rotation, q, positions) * self.head_dim**-0.5).astype(qa.dtype)

    def entries(
        self, x: Float[Array, "batch seq {self.hidden}"], positions: Int32[Array, "batch seq"], span: Span
    ) -> Float[Array, "batch seq {self.head_dim}"]:
        """The cache entry of each token: its normed and rotated key, which is also its value."""
        kv = self.kv_norm(self.wkv(x, span.execution))
        return rotate_last(self.rotation, kv[:, :, None], positions)[:, :, 0]

    def output(
        self, o: Float[Array, "batch seq {self.heads} {self.head_dim}"], span: Span
    ) -> Float[Array, "batch seq {self.hidden}"]:
        """Projects each group of heads separately, then all groups together to the output."""
        groups, batch = self.wo_a.shape[0], o.shape[0]
        rows = rearrange(o, "b s (g h) c -> g (b s) (h c)", g=groups)
        y = self.wo_a.product(rows, span.execution).astype(o.dtype)
        return self.wo_b(rearrange(y, "g (b s) r -> b s (g r)", b=batch), span.execution)

    def _chosen(
        self,
        x: Float[Array, "batch seq {self.hidden}"],
        qa: Float[Array, "batch seq q_rank"],
        positions: Int32[Array, "batch seq"],
        keys: Paged | Float[Array, "batch completed channels"],
        seen: Int32[Array, "batch seq"],
        span: Span,
    ) -> Bool[Array, "batch seq entries"] | Int32[Array, "batch top_k"] | None:
        """A mask of each token's entries; their indices if there is one token and a cache; None if all are used."""
        assert self.indexer is not None
        q, weights = self.indexer.queries(x, qa, positions, span)
        if not isinstance(keys, Paged):
            scores = ops.index_scores(q, weights, keys, seen)
        else:
            assert span.table is not None, "a span over a paged array has a table"
            if span.table.shape[1] * keys.page <= self.indexer.top:
                return None
            q = q if keys.packing is None else keys.packing.transform(q)
            scores = ops.index_scores_of_pages(q, weights, keys.entries, span.table, seen, keys.packing)
        top = min(self.indexer.top, scores.shape[2])
        span.recorder(index_scores=scores)
        if isinstance(keys, Paged) and x.shape[1] == 1:
            return lax.top_k(scores[:, 0], top)[1].astype(jnp.int32)
        return ops.highest(scores, top)


def over_compressed(
    sums: tuple[Array, Array, Array],
    q: Float[Array, "batch seq heads channels"],
    held: Paged | Float[Array, "batch completed channels"],
    seen: Int32[Array, "batch seq"],
    chosen: Bool[Array, "batch seq entries"] | Int32[Array, "batch top_k"] | None,
    span: Span,
) -> tuple[Array, Array, Array]:
    """Adds the compressed entries to the softmax's sums, whether paged or not and however they are chosen."""
    if not isinstance(held, Paged):
        return ops.over_entries(sums, q, held, seen, chosen)
    assert span.table is not None, "a span over a paged array has a table"
    if chosen is None or chosen.dtype == bool:
        return ops.over_pages(sums, q, held.entries, span.table, seen, chosen, held.packing)
    return ops.over_chosen(sums, q, held.entries, span.table, seen, chosen, held.packing)


def rotate_last(
    rope: Rope, x: Float[Array, "batch seq heads channels"], positions: Int32[Array, "batch seq"]
) -> Float[Array, "batch seq heads channels"]:
    """Rotates the last channels of each head by its position; -positions rotates them back."""
    rest, last = jnp.split(x, [x.shape[-1] - 2 * len(rope.frequencies)], axis=-1)
    return jnp.concatenate([rest, rope(last, positions)], axis=-1)
