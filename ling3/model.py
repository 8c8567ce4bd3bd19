"""The decoder: the checkpoint's tree of modules, and the one forward pass that every caller shares."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32

from ling3.cache import Cache, CacheSpec, Span, State, pages_of
from ling3.execution import PLAIN, Execution
from ling3.formats import weights_per_element
from ling3.intervention import Intervention, recorder, takes_interventions
from ling3.layers.hyper import HyperConnection, HyperHead, HyperMean, Streams
from ling3.layers.linear import Matrix
from ling3.layers.norm import RMSNorm
from ling3.ops.attention import BLOCK
from ling3.runtime.entry_checks import checks_ids, refuse_fork


@runtime_checkable
class Mixer(Protocol):
    """A sequence mixer: any kind of attention, with its state."""

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: State | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], State | None]:
        """Its output for each token, and its state after the span. Without a state nothing is cached.

        Texts that share a row (`span.text_starts`) do not see each other; a mixer that cannot tell them apart raises
        ValueError.
        """
        ...

    def empty_state(self, spec: CacheSpec) -> State:
        """Its state before the first token: arrays with a row per slot, and `Paged` arrays.

        Raises ValueError, with the reason, if `spec` does not suit this mixer.
        """
        ...


@runtime_checkable
class FeedForward(Protocol):
    """A layer that processes each token independently."""

    def __call__(self, x: Float[Array, "batch seq hidden"], span: Span) -> Float[Array, "batch seq hidden"]:
        """Its output for each token; for padding it is arbitrary."""
        ...


class DecoderLayer(eqx.Module):
    """h = x + attention(input_layernorm(x));   y = h + mlp(post_attention_layernorm(h)).

    Without attention h = x: the layer has no state, and input_layernorm is unused. With hyper-connections x has several
    streams, and `attn_hc` and `ffn_hc` mix these into a sublayer's input and add its output back to them.
    """

    input_layernorm: RMSNorm
    attention: Mixer | None
    post_attention_layernorm: RMSNorm
    mlp: FeedForward
    attn_hc: HyperConnection | None = None
    ffn_hc: HyperConnection | None = None

    def __call__(
        self, x: Float[Array, "batch seq *streams hidden"], state: State | None, span: Span
    ) -> tuple[Float[Array, "batch seq *streams hidden"], State | None]:
        """The residual stream (or streams) after this layer, and its attention's state after the span."""
        x, state = self.attend(x, state, span)
        normed, residual = self.read(x)
        with jax.named_scope("mlp"):
            added = self.mlp(normed, span.within("mlp"))
        return span.site("residual", residual + span.site("added", added)), state

    def attend(
        self, x: Float[Array, "batch seq *streams hidden"], state: State | None, span: Span
    ) -> tuple[Float[Array, "batch seq *streams hidden"], State | None]:
        """The residual stream (or streams) after attention, and attention's state after the span."""
        if self.attention is None:
            return x, state
        h, residual = (x, x) if self.attn_hc is None else self.attn_hc(x)
        normed = self.input_layernorm(h)
        with jax.named_scope("attention"):
            attended, state = self.attention(normed, state, span.within("attention"))
        return residual + span.site("attended", attended), state

    def read(
        self, x: Float[Array, "batch seq *streams hidden"]
    ) -> tuple[Float[Array, "batch seq hidden"], Float[Array, "batch seq hidden"] | Streams]:
        """The input of the feed-forward, and the residual (or `Streams`) that its output is added to."""
        h, residual = (x, x) if self.ffn_hc is None else self.ffn_hc(x)
        return self.post_attention_layernorm(h), residual


class Decoder(eqx.Module):
    """Embedding, decoder layers and final norm: tokens in, hidden states out."""

    word_embeddings: Matrix  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    hc_head: HyperHead | HyperMean | None = None  # joins the residual streams; None if there is only one

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        states: tuple[State | None, ...],
        span: Span,
    ) -> tuple[Float[Array, "batch seq hidden"], tuple[State | None, ...]]:
        """The normed hidden state of each token, and every attention's state after the span.

        Further `states` are returned as they are.
        """
        x = span.cleared(self.word_embeddings.embed(tokens, span.execution))
        span = dataclasses.replace(span, tokens=tokens)
        x = self.spread(span.site("embeddings", x))
        memory, after = iter(states), []
        for i, layer in enumerate(self.layers):
            has_memory = layer.attention is not None
            with jax.named_scope(f"layers.{i}"):
                x, state = layer(x, next(memory) if has_memory else None, span.within(f"layers.{i}"))
            after += [state] if has_memory else []
        hidden = self.normed(x)
        span.recorder(hidden=hidden)
        return hidden, (*after, *memory)

    def spread(self, x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq *streams hidden"]:
        """The initial residual stream; with hyper-connections all streams, each of which is the embedding."""
        if self.hc_head is None:
            return x
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.hc_head.streams, x.shape[2]))

    def normed(self, x: Float[Array, "batch seq *streams hidden"]) -> Float[Array, "batch seq hidden"]:
        """The normed hidden states that the head reads, from one residual stream or several."""
        return self.norm(x if self.hc_head is None else self.hc_head(x))

    @property
    def attentions(self) -> tuple[Mixer, ...]:
        """The layers' attentions, in order; `states` has one element for each of them."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The checkpoint that a model was loaded from: its path or hub id, and the revision there.

    All are equal: where a model came from makes no other tree of it, and no other programs.
    """

    path: str | None = None
    revision: str | None = None

    def __eq__(self, other: object) -> bool:
        """True for any other origin."""
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        """One number for all of them."""
        return hash(Origin)


class CausalLM(eqx.Module):
    """A causal language model: the published tree of a decoder, with `lm_head` on top.

    `model(tokens)` scores whole sequences; `model.step(tokens, cache)` continues cached ones, by one token or many.
    """

    model: Decoder
    lm_head: Matrix | None  # [vocab, hidden]; None: the word embeddings serve as head too
    mtp: tuple[Any, ...] = eqx.field(default=(), kw_only=True)  # `ling3.mtp.MTP`, which only `mtp_logits` runs
    config: Any = eqx.field(static=True)  # an instance of its family's config class
    origin: Origin = eqx.field(static=True, default=Origin())

    @checks_ids
    @takes_interventions
    @eqx.filter_jit
    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        execution: Execution | None = None,
        *,
        interventions: Sequence[Intervention] = (),
    ) -> Float32[Array, "batch seq {self.config.vocab_size}"]:
        """The logits after each token of each sequence, from position 0 on. Compiled once per shape.

        Differentiable in reverse mode (the experts' fast form has no forward mode).

        `execution` selects the operators' forms, by default the platform's. `interventions` hold for every row.

        Raises ValueError for empty `tokens`, interventions that do not fit the model, and ids outside [0, vocab).
        Inside `jax.jit` and other transformations ids are not checked, and a bad id silently reads another row.
        """
        batch, seq = tokens.shape
        if 0 in (batch, seq):
            raise ValueError(f"tokens has the shape {tokens.shape}, expected at least one row and one column")
        execution = Execution.default() if execution is None else execution
        return self.watched(tokens, Span.whole(batch, seq, execution, recorder(interventions)))

    def watched(
        self, tokens: Int[Array, "batch seq"], span: Span
    ) -> Float32[Array, "batch seq {self.config.vocab_size}"]:
        """`__call__` without its checks, over a span whose recorder can capture or change activations."""
        hidden, _ = self.model(tokens, (None,) * len(self.model.attentions), span)
        return self.logits(hidden, span.execution)

    def logits(
        self, hidden: Float[Array, "batch seq hidden"], execution: Execution = PLAIN
    ) -> Float32[Array, "batch seq {self.config.vocab_size}"]:
        """The logits of normed hidden states, in float32."""
        return self.head(hidden, execution, jnp.float32)[..., : self.config.vocab_size]  # a head may be padded

    @property
    def head(self) -> Matrix:
        """The matrix that gives the logits: `lm_head`, or the word embeddings."""
        return self.model.word_embeddings if self.lm_head is None else self.lm_head

    def __hash__(self) -> int:
        """Raises TypeError, like any module with arrays, saying what to use instead of `jax.jit(model)`."""
        try:
            return super().__hash__()
        except TypeError:
            raise TypeError(
                "a model has no hash, so that jax.jit(model) cannot take it: model(tokens) is compiled already; "
                "to compile a function of your own, give it the model as an argument, under equinox.filter_jit"
            ) from None

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weights, taken from the word embeddings."""
        return self.model.word_embeddings.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its arrays, in the order of `jax.tree.leaves`."""
        return tuple(leaf.shape for leaf in jax.tree.leaves(self))

    @property
    def parameters(self) -> int:
        """The number of weights. Quantized matrices count their unpacked weights, not their scales."""
        counts = weights_per_element(self)
        return int(sum(math.prod(shape) * count for shape, count in zip(self.shapes, counts, strict=True)))

    @property
    def page_multiple(self) -> int:
        """Page sizes must be multiples of this: the lcm of the tokens per cache entry over all paged arrays."""
        spec = CacheSpec(0, 0, 0, self.dtype)
        states = eqx.filter_eval_shape(lambda: [mixer.empty_state(spec) for mixer in self.model.attentions])
        return math.lcm(*(paged.tokens for paged in pages_of(states)))

    @property
    def page_size(self) -> int:
        """Tokens per page in `init_cache` and `generate`."""
        return math.lcm(BLOCK, self.page_multiple)

    @property
    def unpackable(self) -> str | None:
        """Why the paged caches cannot be packed, for the first layer where they cannot; None if they can.

        The packed formats are those of `ling3.ops.packed_kv`.
        """
        spec = CacheSpec(0, 0, 0, self.dtype, packed=True)
        mixers = ((i, layer.attention) for i, layer in enumerate(self.model.layers) if layer.attention is not None)
        for i, mixer in mixers:
            try:
                eqx.filter_eval_shape(mixer.empty_state, spec)
            except ValueError as error:
                return f"layer {i}: {error}"
        return None

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike | None = None, *, packed: bool = False) -> Cache:
        """An empty cache for `batch` rows of up to `max_length` tokens.

        Cache entries and conv tails have `dtype` (by default that of the weights), KDA's recurrent states float32. With
        `packed`, pages are bytes in the formats of `ling3.ops.packed_kv`. Raises ValueError for a `batch` or
        `max_length` below 1, and for `packed` if a layer's pages cannot be packed.
        """
        refuse_fork()
        if batch < 1 or max_length < 1:
            raise ValueError(f"batch is {batch} and max_length {max_length}, expected at least 1 of each")
        dtype = self.dtype if dtype is None else dtype
        columns = -(-max_length // (page_size := self.page_size))
        table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
        states = self.empty_states(CacheSpec(batch, batch * columns, page_size, dtype, packed))
        return Cache(states, jnp.zeros(batch, jnp.int32), table)

    def empty_states(self, spec: CacheSpec) -> tuple[State, ...]:
        """Every mixer's state before the first token, and then that of `spec.mtp` multi-token-prediction layers.

        Raises ValueError if a layer's pages cannot be packed.
        """
        if spec.packed and (why := self.unpackable) is not None:
            raise ValueError(f"the caches of this model cannot be packed, keep them in a floating dtype: {why}")
        further = (layer.attention for layer in self.mtp[: spec.mtp])
        return tuple(mixer.empty_state(spec) for mixer in (*self.model.attentions, *further))

    @checks_ids
    @takes_interventions
    @eqx.filter_jit
    def step(
        self,
        tokens: Int[Array, "batch seq"],
        cache: Cache,
        lengths: Int32[Array, " batch"] | None = None,
        *,
        last: bool = False,
        execution: Execution | None = None,
        interventions: Sequence[Intervention] = (),
    ) -> tuple[Float32[Array, "batch out {self.config.vocab_size}"], Cache]:
        """Continue each row of `cache` with its next tokens; returns their logits and the extended cache.

        `cache` itself stays unchanged, so any number of continuations may start from it.

        Row b has `lengths[b]` tokens (by default `seq`; 0 leaves the row unchanged) and then right padding, whose
        logits are meaningless. `last=True` computes only the logits after each row's last token (`out` = 1) instead of
        all (`out` = seq). A row that does not fit into the cache, or whose length is not in [0, seq], gets NaN logits.
        `interventions` hold for every row, at absolute positions. Raises ValueError for empty `tokens`, for another
        batch size than the cache's, and for invalid ids (padding is not checked) and interventions as in `__call__`.
        """
        batch, seq = tokens.shape
        if 0 in (batch, seq):
            raise ValueError(f"tokens has the shape {tokens.shape}, expected at least one row and one column")
        if batch != (rows := cache.length.shape[0]):
            raise ValueError(
                f"tokens has {batch} rows and the cache {rows}: give a row of tokens for each, or init_cache"
            )
        length = jnp.full(batch, seq, jnp.int32) if lengths is None else lengths
        execution = Execution.default() if execution is None else execution
        span = Span(cache.length, length, cache.table, execution, recorder(interventions))
        return self.continued(tokens, cache, span, last)

    def continued(
        self, tokens: Int[Array, "batch seq"], cache: Cache, span: Span, last: bool
    ) -> tuple[Float32[Array, "batch out {self.config.vocab_size}"], Cache]:
        """`step` over a span that continues the rows of `cache`."""
        seq, length = tokens.shape[1], span.length
        hidden, states = self.model(tokens, cache.layers, span)
        if last:
            hidden = jnp.take_along_axis(hidden, jnp.maximum(length - 1, 0)[:, None, None], axis=1)
        fits = (length >= 0) & (length <= seq) & (cache.length + length <= cache.capacity())
        # NaN in a hidden state makes all its logits NaN, and masking it touches fewer numbers than masking those.
        logits = self.logits(jnp.where(fits[:, None, None], hidden, jnp.nan), span.execution)
        return logits, Cache(states, cache.length + length, cache.table)
