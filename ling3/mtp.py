"""Multi-token prediction: layers after the decoder's that predict tokens beyond the next one."""

from collections.abc import Sequence
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from ling3.cache import Span, State
from ling3.execution import Execution
from ling3.layers.linear import Matrix
from ling3.layers.norm import RMSNorm
from ling3.mesh.sharded import Sharded
from ling3.model import CausalLM, DecoderLayer, FeedForward, Mixer
from ling3.runtime.entry_checks import checks_ids


class MTP(eqx.Module):
    """A multi-token-prediction layer (DeepSeek-V3, arXiv 2412.19437, §2.2; names and order from Ling-3's checkpoints).

        x = eh_proj([enorm(e_{t+1}), hnorm(h_t)])
        y = final_layernorm(layer(x))                  layer: a decoder layer, of the fields that follow eh_proj

    e is the embedding of a token and h the decoder's normed hidden state. The model's head turns y_t into the logits of
    token t + 2; a further layer takes y_t in place of h_t, and e_{t+2}. Positions are those of the embedded tokens.
    """

    enorm: RMSNorm
    hnorm: RMSNorm
    eh_proj: Annotated[Matrix, "hidden hidden+hidden"]
    input_layernorm: RMSNorm
    attention: Mixer
    post_attention_layernorm: RMSNorm
    mlp: FeedForward
    final_layernorm: RMSNorm

    def __call__(
        self,
        embedded: Float[Array, "batch seq hidden"],
        hidden: Float[Array, "batch seq hidden"],
        state: State | None,
        span: Span,
    ) -> tuple[Float[Array, "batch seq hidden"], State | None]:
        """y for each token of `embedded`, given the hidden state before it, and attention's state after the span."""
        both = jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=-1)
        layer = DecoderLayer(self.input_layernorm, self.attention, self.post_attention_layernorm, self.mlp)
        x, state = layer(self.eh_proj(both, span.execution), state, span)
        return self.final_layernorm(x), state


@checks_ids
@eqx.filter_jit
def mtp_logits(
    model: CausalLM, tokens: Int[Array, "batch seq"], execution: Execution | None = None, *, layer: int = 0
) -> Float32[Array, "batch predicted {model.config.vocab_size}"]:
    """The logits of a multi-token-prediction layer: index t is of token t + 2 + layer, given those up to t + 1 + layer.

    There are seq - 1 - layer of them. A layer beyond the first takes the hidden states of the one before it, as in
    transformers' `MtpModel`. Compiled once per shape. `execution` selects the operators' forms, by default the
    platform's.

    Raises ValueError for a model without that layer (load it with `mtp=True`), for fewer than 2 + layer tokens, and for
    ids outside [0, vocab), as `model(tokens)` does.
    """
    batch, seq = tokens.shape
    if not 0 <= layer < len(model.mtp):
        raise ValueError(
            f"layer {layer}: the model has {len(model.mtp)} multi-token-prediction layers; load it with mtp=True, "
            "which keeps those of its checkpoint"
        )
    if batch < 1 or seq < 2 + layer:
        raise ValueError(
            f"tokens has the shape {tokens.shape}, expected at least one row and {2 + layer} columns: the first token "
            f"that is predicted follows {2 + layer} others"
        )
    execution = Execution.default() if execution is None else execution

    def predict(part, tokens):
        rows, seq = tokens.shape
        whole = Span.whole(rows, seq, execution)
        return part.logits(hidden_ahead(part, tokens, part.mtp[: layer + 1], whole)[layer], execution)

    if not isinstance(model, Sharded):
        return predict(model, tokens)
    where = PartitionSpec(model.placement.rows(batch))
    return model.placement.run(predict, (tokens,), (where,), where, model.part)


def hidden_ahead(
    model: CausalLM, tokens: Int[Array, "batch seq"], layers: Sequence[MTP], span: Span
) -> list[Float[Array, "batch _ hidden"]]:
    """The normed hidden states of multi-token-prediction layers, each of which takes those of the one before it.

    The states of layer i at index t are behind token t + 1 + i, and predict the next token. One layer may stand there
    several times, as in the engine, where it takes its own states. `span` is the span of the tokens, without a cache.
    If a row holds several texts, the columns of layer i that would be behind a text's first 1 + i tokens have no
    meaning, and no target should be predicted from them.
    """
    hidden, _ = model.model(tokens, (None,) * len(model.model.attentions), span)
    found = []
    for i, own in enumerate(layers):
        start = jnp.full(tokens.shape[0], i + 1, jnp.int32)
        # The columns are fewer by i + 1, and each text begins i + 1 tokens later: at the same column as before.
        starts = None if span.text_starts is None else span.text_starts[:, i + 1 :]
        further = Span(start, span.length - start, None, span.execution, tokens=tokens[:, i + 1 :], text_starts=starts)
        with jax.named_scope(f"mtp.{i}"):
            hidden, _ = predicted(model, own, hidden[:, :-1], None, further)
        found.append(hidden)
    return found


def predicted(
    model: CausalLM, layer: MTP, hidden: Float[Array, "batch seq hidden"], state: State | None, span: Span
) -> tuple[Float[Array, "batch seq hidden"], State | None]:
    """A layer's hidden states for the span's tokens, given those before each, and its attention's state after them."""
    assert span.tokens is not None, "which the layer embeds"
    embedded = model.model.word_embeddings.embed(span.tokens, span.execution)
    return layer(embedded, hidden, state, span)
