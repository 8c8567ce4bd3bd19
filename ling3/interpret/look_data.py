"""The data of the page of `ling3.look`: a forward pass as plain values."""

import base64
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from ling3.interpret.trace import KDATrace, LayerTrace, MLATrace, MoETrace, Trace, trace
from ling3.model import CausalLM, DecoderLayer
from ling3.version import __version__

LIKELIEST = 5  # tokens of the logit lens
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_VALUES = 64  # per token, in an array of another attention; for larger ones the page has norms


class Lens(eqx.Module):
    """The logit lens after a layer: the likeliest tokens, and the probability of the text's next token."""

    tokens: Int32[Array, "batch seq top_k"]
    likely: Float32[Array, "batch seq top_k"]
    next: Float32[Array, "batch predicted"]  # p(the token that follows in the text)


@eqx.filter_jit
def seen(model: CausalLM, tokens: Int[Array | np.ndarray, "batch seq"]) -> tuple[Trace, tuple[Lens, ...]]:
    """The trace, with a `Lens` for each layer in place of its logits, which would take too much memory."""
    whole = trace(model, tokens)
    layers, lenses = [], []
    for layer in whole.layers:
        assert layer.logits is not None, "the trace has the lens"
        lenses.append(_lens(layer.logits, jnp.asarray(tokens)))
        layers.append(dataclasses.replace(layer, logits=None))
    return dataclasses.replace(whole, layers=tuple(layers)), tuple(lenses)


def _lens(logits: Float32[Array, "batch seq vocab"], tokens: Int[Array, "batch seq"]) -> Lens:
    p = jax.nn.softmax(logits, axis=-1)
    likely, best = jax.lax.top_k(p, min(LIKELIEST, p.shape[-1]))
    following = jnp.take_along_axis(p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return Lens(best.astype(jnp.int32), likely, following)


def content(
    model: CausalLM, whole: Trace, lenses: tuple[Lens, ...], text: Callable[[int], str], prompt: int, title: str
) -> dict[str, Any]:
    """The page's data, for a batch of one sequence whose first `prompt` tokens are the prompt."""
    tokens = np.asarray(whole.tokens[0]).tolist()
    named = {int(token) for lens in lenses for token in np.unique(np.asarray(lens.tokens))}
    return {
        "title": title,
        "version": __version__,
        "prompt": prompt,
        "tokens": [{"id": token, "text": text(token)} for token in tokens],
        "texts": {str(token): text(token) for token in sorted(named)},
        "embedding": _rounded(whole.embedding_norm[0]),
        "layers": [
            _layer(layer, inside, lens)
            for layer, inside, lens in zip(model.model.layers, whole.layers, lenses, strict=True)
        ],
    }


def _layer(layer: DecoderLayer, inside: LayerTrace, lens: Lens) -> dict[str, Any]:
    return {
        "kind": "no attention" if layer.attention is None else type(layer.attention).__name__,
        "feedforward": type(layer.mlp).__name__,
        "attention": _attention(inside.attention, inside.residual_norm.shape[1]),
        "moe": None if inside.moe is None else _moe(inside.moe),
        "norms": {
            "attention": _rounded(inside.attention_norm[0]),
            "mlp": _rounded(inside.mlp_norm[0]),
            "residual": _rounded(inside.residual_norm[0]),
        },
        "lens": {
            "tokens": np.asarray(lens.tokens[0]).tolist(),
            "p": _rounded(lens.likely[0]),
            "next": [*_rounded(lens.next[0]), None],
        },
    }


def _attention(inside: KDATrace | MLATrace | dict[str, Array | None] | None, seq: int) -> dict[str, Any] | None:
    match inside:
        case KDATrace():
            rates = -np.asarray(inside.decay[0], np.float32)
            return {
                # Quartiles over channels, in nats per token; the half-lives ln 2 / rate have them in reverse order.
                "rate": _rounded(np.moveaxis(np.quantile(rates, QUARTILES, axis=-1, method="nearest"), 0, -1)),
                "beta": _rounded(inside.beta[0]),
                "gate": None if inside.gate is None else _rounded(jnp.mean(inside.gate[0], axis=-1)),
                "write": _rounded(inside.write_norm[0]),
                "state": _rounded(inside.state_norm[0]),
                "map": _triangle(inside.attention_map[0]),
            }
        case MLATrace():
            gate = None if inside.gate is None else _rounded(inside.gate[0])
            return {"gate": gate, "map": _triangle(inside.attention_map[0])}
        case dict():
            return {"arrays": [_array(name, x, seq) for name, x in inside.items() if x is not None]}
    return None


def _array(name: str, x: Array, seq: int) -> dict[str, Any]:
    """An array of any mixer: each token's values, or their norms over the last axis, or one norm per token.

    For an array without a token axis, only its shape.
    """
    if x.shape[:2] != (1, seq):
        return {"name": name, "shape": list(x.shape), "shown": "shape", "values": None}
    each = np.asarray(x[0].astype(jnp.float32))
    shown, values = "values", each
    if each[0].size > MOST_VALUES and each.ndim > 2:
        shown, values = "norms over the last axis", np.linalg.norm(each, axis=-1)
    if values[0].size > MOST_VALUES:
        shown, values = "norm", np.linalg.norm(each.reshape(seq, -1), axis=1)
    return {"name": name, "shape": list(each.shape[1:]), "shown": shown, "values": _rounded(values.reshape(seq, -1))}


def _moe(inside: MoETrace) -> dict[str, Any]:
    return {
        "scores": _packed(inside.scores[0]),
        "chosen": np.asarray(inside.chosen[0]).tolist(),
        "weights": _rounded(inside.weights[0]),
    }


def _triangle(attention_map: Float[Array, "heads seq seq"]) -> dict[str, Any]:
    """The map's rows, each up to its token. float16 has their range: |a_tj| <= beta / sqrt(key), or 1 for a softmax."""
    rows, columns = np.tril_indices(attention_map.shape[-1])
    return _packed(np.asarray(attention_map)[:, rows, columns])


def _packed(x: Array | np.ndarray) -> dict[str, Any]:
    """A large array as base64 of little-endian float16."""
    return {"shape": list(x.shape), "f16": base64.b64encode(np.asarray(x, "<f2").tobytes()).decode()}


def _rounded(x: Array | np.ndarray) -> Any:
    """Nested lists of numbers with 4 digits, and None for those that are not finite."""

    def each(value: Any) -> Any:
        if isinstance(value, list):
            return [each(inner) for inner in value]
        return float(f"{value:.4g}") if np.isfinite(value) else None

    return each(np.asarray(x, np.float32).tolist())
