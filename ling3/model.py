"""Ling-3, whole: the checkpoint's own tree of modules, and the one forward pass that every caller shares."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32, PRNGKeyArray

from ling3.cache import Cache, KDAState, LatentCache, Span
from ling3.config import Ling3Config
from ling3.entry_checks import checks_ids, refuse_fork
from ling3.layers.kda import KDA
from ling3.layers.linear import Embedding, Linear
from ling3.layers.mla import MLA
from ling3.layers.mlp import MLP
from ling3.layers.moe import MoE
from ling3.layers.norm import RMSNorm


class DecoderLayer(eqx.Module):
    """h = x + attention(input_layernorm(x));   y = h + mlp(post_attention_layernorm(h)).

    No attention means h = x: the layer then has no memory either, and its norm is idle.
    """

    input_layernorm: RMSNorm
    attention: KDA | MLA | None
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE

    @staticmethod
    def init(config: Ling3Config, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> "DecoderLayer":
        """Random weights for 0-based `layer` of the config's schedule."""
        kind, config = config.attention_kind(layer), config.at(layer)
        attention_key, mlp_key = jax.random.split(key)
        hidden, eps, std = config.hidden_size, config.rms_norm_eps, config.initializer_range
        attention = {"kda": KDA, "mla": MLA, "none": None}[kind]
        if config.mlp_kind(layer) == "dense":
            mlp = MLP.init(hidden, config.intermediate_size, key=mlp_key, dtype=dtype, std=std)
        else:
            mlp = MoE.init(config, layer, key=mlp_key, dtype=dtype)
        return DecoderLayer(
            input_layernorm=RMSNorm.init(hidden, eps),
            attention=None if attention is None else attention.init(config, key=attention_key, dtype=dtype),
            post_attention_layernorm=RMSNorm.init(hidden, eps),
            mlp=mlp,
        )

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: KDAState | LatentCache | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], KDAState | LatentCache | None]:
        """The residual stream after this layer, and the layer's memory after the span."""
        h = x
        if self.attention is not None:
            attended, state = self.attention(
                self.input_layernorm(x),
                state,  # pyright: ignore[reportArgumentType] -- a layer is given back its own kind of memory
                span,
            )
            h = x + attended
        normed = self.post_attention_layernorm(h)
        y = self.mlp(normed, span.valid(x.shape[1])) if isinstance(self.mlp, MoE) else self.mlp(normed)
        return h + y, state


class Ling3Model(eqx.Module):
    """Embedding, decoder layers and final norm: tokens in, hidden states out."""

    word_embeddings: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm

    @staticmethod
    def init(config: Ling3Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> "Ling3Model":
        """Random weights."""
        embedding_key, layers_key = jax.random.split(key)
        keys = jax.random.split(layers_key, config.num_hidden_layers)
        std = config.initializer_range
        return Ling3Model(
            Embedding.init(config.vocab_size, config.hidden_size, key=embedding_key, dtype=dtype, std=std),
            tuple(DecoderLayer.init(config, i, key=k, dtype=dtype) for i, k in enumerate(keys)),
            RMSNorm.init(config.hidden_size, config.rms_norm_eps),
        )

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        states: tuple[KDAState | LatentCache | None, ...],
        span: Span,
    ) -> tuple[Float[Array, "batch seq hidden"], tuple[KDAState | LatentCache | None, ...]]:
        """The normed hidden state of each token, and every attention's memory after the span."""
        x = self.word_embeddings(tokens)
        memory, after = iter(states), []
        for layer in self.layers:
            if layer.attention is None:
                x, _ = layer(x, None, span)
            else:
                x, state = layer(x, next(memory), span)
                after.append(state)
        return self.norm(x), tuple(after)

    @property
    def attentions(self) -> tuple[KDA | MLA, ...]:
        """The layers' attentions, of which each has a memory: `states` has one for each of these."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)


class Ling3ForCausalLM(eqx.Module):
    """The language model (`BailingMoeV3ForCausalLM`): the published tree, with `lm_head` on top.

    `model(tokens)` scores whole sequences; `model.step(tokens, cache)` continues remembered ones, by one token or many.
    """

    model: Ling3Model
    lm_head: Linear  # [vocab, hidden]
    config: Ling3Config = eqx.field(static=True)

    @checks_ids
    @eqx.filter_jit
    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float32[Array, "batch seq vocab"]:
        """The logits after each token of each sequence, from position 0 on. Compiled once per shape.

        Differentiable in reverse mode (the experts' fast form has no forward mode).

        ValueError for no tokens, and for ids outside [0, vocab). Inside `jax.jit` and other transformations these are
        not checked, and JAX reads another row.
        """
        batch, seq = tokens.shape
        if 0 in (batch, seq):
            raise ValueError(f"tokens has the shape {tokens.shape}, expected at least one row and one column")
        span = Span(jnp.zeros(batch, jnp.int32), jnp.full(batch, seq, jnp.int32))
        hidden, _ = self.model(tokens, (None,) * len(self.model.attentions), span)
        return self.lm_head(hidden, jnp.float32)

    def init_cache(self, batch: int, max_length: int, dtype: DTypeLike | None = None) -> Cache:
        """An empty memory for `batch` rows of up to `max_length` tokens.

        Latents and conv tails have `dtype` (that of the weights without it), KDA's recurrent states float32.
        """
        refuse_fork()
        if batch < 1 or max_length < 1:
            raise ValueError(f"batch is {batch} and max_length {max_length}, expected at least 1 of each")
        dtype = self.model.word_embeddings.weight.dtype if dtype is None else dtype
        states = (
            attention.init_state(batch, dtype)
            if isinstance(attention, KDA)
            else attention.init_state(batch, max_length, dtype)
            for attention in self.model.attentions
        )
        return Cache(tuple(states), jnp.zeros(batch, jnp.int32))

    @checks_ids
    @eqx.filter_jit
    def step(
        self,
        tokens: Int[Array, "batch seq"],
        cache: Cache,
        lengths: Int32[Array, " batch"] | None = None,
        *,
        last: bool = False,
    ) -> tuple[Float32[Array, "batch out vocab"], Cache]:
        """Continue each row of `cache` with its next tokens; returns their logits and the cache with them in it.

        Row b brings `lengths[b]` tokens (all `seq` without `lengths`, 0 leaves the row untouched) and right padding
        after them, whose logits mean nothing. `last=True` computes the logits after each row's last token alone
        (`out` = 1) and not of all (`out` = seq). A row that the cache has no room for gets NaN logits, and so does one
        whose length is not in [0, seq]. ValueError for no tokens at all, and for ids as in `__call__`.
        """
        batch, seq = tokens.shape
        if 0 in (batch, seq):
            raise ValueError(f"tokens has the shape {tokens.shape}, expected at least one row and one column")
        length = jnp.full(batch, seq, jnp.int32) if lengths is None else lengths
        span = Span(cache.length, length)
        hidden, states = self.model(tokens, cache.layers, span)
        if last:
            hidden = jnp.take_along_axis(hidden, jnp.maximum(length - 1, 0)[:, None, None], axis=1)
        fits = (length >= 0) & (length <= seq) & (cache.length + length <= cache.capacity())
        # NaN in a hidden state makes all its logits NaN, and masking it touches fewer numbers than masking those.
        logits = self.lm_head(jnp.where(fits[:, None, None], hidden, jnp.nan), jnp.float32)
        return logits, Cache(tuple(state for state in states if state is not None), cache.length + length)


def init(config: Ling3Config, *, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Ling3ForCausalLM:
    """A model of random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases 0.

    Norms, convolutions, the router and KDA's `A_log` and `dt_bias` are float32 whatever the dtype. Under
    `eqx.filter_eval_shape` this is the model's structure, and nothing is allocated.
    """
    model_key, head_key = jax.random.split(key)
    model = Ling3Model.init(config, key=model_key, dtype=dtype)
    std = config.initializer_range
    return Ling3ForCausalLM(
        model, Linear.init(config.vocab_size, config.hidden_size, key=head_key, dtype=dtype, std=std), config
    )
