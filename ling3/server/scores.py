"""Tokens and their log-probabilities as clients get them."""

from collections.abc import Iterable, Sequence
from typing import Any

from ling3.engine.outputs import Logprob
from ling3.text.detokenizer import StreamDecoder
from ling3.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for smaller ones, which JSON has no number for."""


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or `bytes:\\xe4\\xbd` for one that is no text by itself."""
    own = tokenizer.token_bytes(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def of_chat(tokenizer: Tokenizer, logprobs: Iterable[Logprob]) -> dict[str, Any]:
    """A chat's `logprobs`: each token with its own bytes, which joined are those of the text."""

    def shown(token: int, value: float) -> dict[str, Any]:
        own = list(tokenizer.token_bytes(token))
        return {"token": name_of(tokenizer, token), "logprob": max(value, LEAST_LOGPROB), "bytes": own}

    def entry(one: Logprob) -> dict[str, Any]:
        top = [shown(token, value) for token, value in one.top.items()]
        return {**shown(one.token_id, one.logprob), "top_logprobs": top}

    return {"content": [entry(one) for one in logprobs], "refusal": None}


class Scores:
    """A completion's `logprobs`, piece by piece, with the place of each token in the text.

    A token begins where the characters of those before it end, so that all parts of a character have its place.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echoed: str):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._decoder, self._place = tokenizer.stream(prompt), len(echoed)

    def of_prompt(self, scores: Sequence[Logprob | None]) -> dict[str, Any]:
        """The scores of the prompt, with which the text begins."""
        decoder = self._tokenizer.stream((), skip_special_tokens=False)
        return self._said(zip(self._prompt, scores, strict=True), decoder, 0)[0]

    def of_answer(self, scores: Iterable[Logprob]) -> dict[str, Any]:
        """The scores of the next tokens."""
        said, self._place = self._said(((score.token_id, score) for score in scores), self._decoder, self._place)
        return said

    def _said(
        self, scored: Iterable[tuple[int, Logprob | None]], decoder: StreamDecoder, place: int
    ) -> tuple[dict[str, list[Any]], int]:
        """The entries of tokens whose text begins at a place, and where it ends."""
        said: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in scored:
            top: dict[str, float] = {}
            # Several tokens may have one text, of which the likeliest counts, and the one chosen before it.
            for other, value in [(token, score.logprob), *score.top.items()] if score is not None else ():
                top.setdefault(name_of(self._tokenizer, other), max(value, LEAST_LOGPROB))
            name = name_of(self._tokenizer, token)
            said["tokens"].append(name)
            said["token_logprobs"].append(None if score is None else top[name])
            said["top_logprobs"].append(None if score is None else top)
            said["text_offset"].append(place)
            place += len(decoder.feed([token]))
        return said, place


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Joins the scores of two pieces of text."""
    return {name: [*first[name], *second[name]] for name in first}
