"""Tokens and their log-probabilities in the formats of the protocols."""

from collections.abc import Iterable, Sequence
from typing import Any

from ling3.engine.outputs import Logprob
from ling3.text.detokenizer import StreamDecoder
from ling3.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Replaces smaller values, such as -inf, which JSON cannot represent."""


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or `bytes:\\xe4\\xbd` for a token that is not valid UTF-8 by itself."""
    own = tokenizer.token_bytes(token)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def of_chat(tokenizer: Tokenizer, logprobs: Iterable[Logprob]) -> dict[str, Any]:
    """A chat's `logprobs`: each token with its bytes, which joined are the bytes of the text."""

    def shown(token: int, value: float) -> dict[str, Any]:
        own = list(tokenizer.token_bytes(token))
        return {"token": name_of(tokenizer, token), "logprob": max(value, LEAST_LOGPROB), "bytes": own}

    def entry(one: Logprob) -> dict[str, Any]:
        top = [shown(token, value) for token, value in one.top.items()]
        return {**shown(one.token_id, one.logprob), "top_logprobs": top}

    return {"content": [entry(one) for one in logprobs], "refusal": None}


class Scores:
    """A completion's `logprobs`, piece by piece, with each token's offset in the text.

    A token's offset is the number of characters completed before it, so all tokens of one character have the same
    offset.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echoed: str):
        self._tokenizer, self._prompt = tokenizer, prompt
        self._decoder, self._place = tokenizer.stream(prompt), len(echoed)

    def of_prompt(self, scores: Sequence[Logprob | None]) -> dict[str, Any]:
        """The scores of the prompt, which is the beginning of the text."""
        decoder = self._tokenizer.stream((), skip_special_tokens=False)
        return self._said(zip(self._prompt, scores, strict=True), decoder, 0)[0]

    def of_answer(self, scores: Iterable[Logprob]) -> dict[str, Any]:
        """The scores of the answer's next tokens."""
        said, self._place = self._said(((score.token_id, score) for score in scores), self._decoder, self._place)
        return said

    def _said(
        self, scored: Iterable[tuple[int, Logprob | None]], decoder: StreamDecoder, place: int
    ) -> tuple[dict[str, list[Any]], int]:
        """The entries of tokens whose text begins at offset `place`, and the offset of its end."""
        said: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, score in scored:
            top: dict[str, float] = {}
            # Tokens may have the same text: the chosen one, which comes first, wins, then the likeliest.
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
    """Concatenates the scores of two pieces of text."""
    return {name: [*first[name], *second[name]] for name in first}
