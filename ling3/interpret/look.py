"""A forward pass as a web page: the tokens in a row, and what each layer does at the token under the pointer.

The page is made from the template `look.html` and loads nothing: it has the data as JSON and a script that draws them.
"""

import base64
import dataclasses
import html
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from ling3.engine.sampling_params import check_prompt
from ling3.generate import generate
from ling3.interpret.trace import KDATrace, LayerTrace, MLATrace, MoETrace, Trace, trace
from ling3.model import CausalLM, DecoderLayer
from ling3.runtime.page_policy import content_policy
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole
from ling3.text.tokenizer import Tokenizer
from ling3.version import __version__

LONGEST = 256
HEIGHT = 860  # of the frame in a notebook, in CSS pixels
TEMPLATE = (pathlib.Path(__file__).parent / "look.html").read_text(encoding="utf-8")

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Int[np.ndarray, " tokens"] | Int[jax.Array, " tokens"]


@dataclasses.dataclass(frozen=True, eq=False)
class Look:
    """A page about one forward pass; a notebook displays it as the last value of a cell."""

    html: str
    """The complete page: it needs no other file and no network."""
    data: Mapping[str, Any]
    """The data that the page contains and shows: plain values, for JSON."""
    trace: Trace
    """The trace of the pass, with all digits, without the logit lens's logits."""

    def __repr__(self) -> str:
        tokens, layers = (len(self.data[name]) for name in ("tokens", "layers"))
        return f"<Look into {tokens} tokens and {layers} layers: a page of {len(self.html) / 1e3:,.0f} kB>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page to a file atomically, replacing an existing one."""
        path = pathlib.Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(self.html, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _repr_html_(self) -> str:
        """The page in an iframe, which isolates its styles."""
        style = f"width:100%;height:{HEIGHT}px;border:1px solid #8888;border-radius:6px;resize:vertical"
        page = html.escape(self.html)
        return f'<iframe title="ling3.look" sandbox="allow-scripts" style="{style}" srcdoc="{page}"></iframe>'


def look(
    model: CausalLM,
    tokenizer: Tokenizer | None,
    prompt: Prompt,
    *,
    new_tokens: int = 0,
    longest: int = LONGEST,
    title: str = "A forward pass",
) -> Look:
    """Makes a web page of one forward pass over `prompt`: a text, a chat (messages) or token ids.

    For each token and layer it shows KDA's half-lives ln 2 / -g per head, writing strength beta, |k uᵀ| (what was
    written), |S| and gates, the signed weights a_tj of what was read (for MLA the softmax weights), the experts' scores
    and the weights of the chosen ones, the logit lens's five likeliest tokens, and norms. For other attentions it shows
    the arrays of `trace`, by name. With `new_tokens` the model first generates that many, greedily, and the page covers
    its answer too. Without a tokenizer, tokens are shown as ids.

    Maps and router scores are rounded to float16, other numbers to 4 digits; `Look.trace` has all digits. A page takes
    about layers · heads · tokens · (1.4 tokens + 80) bytes, hence `longest`.

    Before any work, raises ValueError for an empty prompt, ids outside the vocabulary, text without a tokenizer, and
    more tokens than `longest` or the model's context. Raises FloatingPointError if the logits are NaN.
    """
    config = model.config
    ids = check_prompt(_ids(prompt, tokenizer), config.vocab_size)
    check_page_length(len(ids), new_tokens, longest, config.max_position_embeddings)
    after = len(ids)
    if new_tokens:
        ends = () if tokenizer is None else tokenizer.eos_token_ids
        ids = ids + generate(model, [ids], max_tokens=new_tokens, stop_token_ids=ends)[0]

    trace, lenses = seen(model, np.asarray([ids], np.int32))
    if np.isnan(np.asarray(trace.logits, np.float32)).any():
        raise FloatingPointError(
            "the logits are NaN: the weights may not be finite (ling3.load checks them by default), or their dtype too "
            "narrow (try dtype=jnp.float32)"
        )
    data = content(model, trace, lenses, lambda token: token_text(tokenizer, token), after, title)
    return Look(page(data), data, trace)


def page(data: Mapping[str, Any]) -> str:
    """The page that shows `data`. Texts in it cannot become HTML, and its security policy blocks all loading."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    before, after = TEMPLATE.split("{{data}}")
    title = html.escape(data["title"]).encode("utf-8", "replace").decode("utf-8")
    before = before.replace("{{policy}}", content_policy(TEMPLATE)).replace("{{title}}", title)
    # Without <, no text can close the element around it. Lone surrogates cannot be encoded in UTF-8.
    text = text.replace("<", "\\u003c").encode("utf-8", "backslashreplace").decode("utf-8")
    return f"{before}{text}{after}"


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text, with bytes of incomplete characters as `\\xe4`; `#5` for token 5 if it has no text."""
    text = b"" if tokenizer is None else tokenizer.token_bytes(token)
    return text.decode("utf-8", "backslashreplace") or f"#{token}"


def _ids(prompt: Any, tokenizer: Tokenizer | None) -> Any:
    chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not chat and not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise ValueError("the prompt is text, and there is no tokenizer: give one, or token ids")
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt)


def check_page_length(prompt: int, new_tokens: int, longest: int, context: int) -> None:
    """Raises ValueError if a page or the model's context has no room for all tokens, or if an argument is invalid."""
    for name, value, least in (("new_tokens", new_tokens, 0), ("longest", longest, 1)):
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} is {shown(value)}, expected a whole number >= {least}")
    total = prompt + new_tokens
    own = f"the prompt has {prompt:,} tokens" + (f" and new_tokens is {new_tokens:,}" if new_tokens else "")
    if total > context:
        raise ValueError(f"{own}, expected at most {context:,} together (the model's max_position_embeddings)")
    if total > longest:
        raise ValueError(
            f"{own}, expected at most {longest:,} together (longest): a page has tokens² numbers per head; shorten "
            f"the prompt, or raise longest to {total:,}"
        )


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
