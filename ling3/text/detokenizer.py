"""Streaming detokenization: token ids in, complete characters out, up to the first stop string."""

import itertools
from collections.abc import Sequence

import tokenizers

from ling3.text.byte_fallback import ByteFallback, ByteRun
from ling3.text.tokenizer_file import Reported, TokenizerError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# An unfinished character has at most three bytes, and each may be a token.
CHARACTER_REST = 3
# This many tokens without a complete character must contain invalid bytes.
MOST_HELD = 8


class StreamDecoder:
    """Decodes one sequence's tokens as they come, holding back a character whose last bytes are still to come.

    The texts of `feed` and `flush` together are what `Tokenizer.decode` adds to the prompt's text for these ids; this
    takes time linear in their number. So an answer that begins with a space keeps it, even if the tokenizer strips one
    at the beginning of a text. Ids without a token give no text, nor do special tokens unless `skip_special_tokens` is
    False. A character that the prompt only began is returned if the ids complete it, and no other text of the prompt.
    Raises TokenizerError, which names `source`, if the tokenizer fails.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        source: str = "the tokenizer",
        fallback: ByteFallback | None = None,
    ):
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._reported = Reported(source, "the tokenizer fails on these ids")
        self._skip = skip_special_tokens
        self._hidden = {token for token in added if skip_special_tokens and added[token].special}
        self._fallback = ByteFallback(tokenizer) if fallback is None else fallback
        self._run = ByteRun(self._fallback)
        # `_ids` are the last `_context` tokens whose text was returned, since a text may depend on what comes before
        # it, and the tokens held back. Of the text of all of them, `_returned` characters have been returned.
        shown = [*itertools.islice(filter(self._shows, reversed(prompt_ids[-64:])), MOST_HELD)][::-1]
        self._ids = [each for token in shown for group in self._run.feed(token) for each in group]
        with self._reported:
            text = self._decode(self._ids)
        # If the prompt ends inside a character: the number of its byte tokens, or the text that ends in its U+FFFD.
        self._begun = len(self._run.pending)
        unfinished = not self._fallback.bytes and text.endswith(REPLACEMENT)
        self._prompt = text if unfinished else None
        self._context = 0 if unfinished else len(self._ids)
        self._returned = len(text) - unfinished
        self._fed = False

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; it never ends inside a character."""
        shown = filter(self._shows, ids)
        try:
            with self._reported:
                return "".join([self._next(group) for token in shown for group in self._run.feed(token)])
        except TokenizerError:
            self._forget()  # the `flush` that follows must not fail on them again
            raise

    def flush(self) -> str:
        """The rest of the text, at the end; the bytes of an incomplete character become U+FFFD."""
        with self._reported:
            rest = "".join([self._next(group) for group in self._run.flush()])
            if self._fed:
                text = self._decode(self._ids)
                rest += text[self._seen(text) :]
        self._forget()
        return rest

    def _next(self, group: Sequence[int]) -> str:
        self._ids.extend(group)
        if self._begun and group is self._fallback.invalid:  # a byte of the prompt
            self._begun, self._context = self._begun - 1, len(self._ids)
            self._returned = len(self._decode(self._ids))
            return ""
        self._begun, self._fed = 0, True
        text, end = self._decode(self._ids), len(self._ids)
        parts = not self._fallback.bytes  # a token may be a part of a character
        if len(text) <= self._seen(text) or (parts and text.endswith(REPLACEMENT)):
            if end - self._context < MOST_HELD:
                return ""
            text, end = self._certain(text) if parts else (text, end)
            if len(text) < (self._returned if self._prompt is None else len(self._prompt)):  # text of the prompt
                return ""
        piece, context = text[self._seen(text) :], self._ids[self._context : end]
        self._ids, self._context, self._prompt = self._ids[self._context :], len(context), None
        self._returned = len(self._decode(context))
        return piece

    def _seen(self, text: str) -> int:
        """The number of characters of `text` that were returned or are the prompt's, with its U+FFFD if still there."""
        if self._prompt is not None and text.startswith(self._prompt):
            return len(self._prompt)
        return self._returned

    def _certain(self, whole: str) -> tuple[str, int]:
        """The text that no further byte can change, and its number of tokens: all except an incomplete character."""
        for end in range(len(self._ids) - CHARACTER_REST, len(self._ids)):
            text = self._decode(self._ids[:end])
            if text + self._decode(self._ids[end:]) == whole:
                return text, end
        return whole, len(self._ids)

    def _forget(self) -> None:
        self._ids, self._context, self._returned, self._fed = [], 0, 0, False
        self._run, self._begun, self._prompt = ByteRun(self._fallback), 0, None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)

    def _shows(self, token: int) -> bool:
        return token not in self._hidden and self._tokenizer.id_to_token(token) is not None


class StopStrings:
    """Cuts a stream of text before the first of `stops`, holding back an end that may be the beginning of one.

    The stop string that is complete first ends the text (of several, the one that began first), however the text is
    split into pieces. `stopped` is that one, and None before. Raises ValueError for an empty stop string, which every
    text would contain.
    """

    def __init__(self, stops: Sequence[str]):
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop: found {stops!r}, expected a list of strings that are not empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The part of the held text and `text` that is certainly before any stop string.

        Without `may_stop`, a stop string that is complete now counts as text.
        """
        if self.stopped is not None:
            return ""
        old, text = len(self._held), self._held + text
        ends = [(text.find(stop, max(old - len(stop) + 1, 0)), stop) for stop in self._stops] if may_stop else []
        found = [(begin + len(stop), begin, stop) for begin, stop in ends if begin >= 0]
        if found:
            (_, begin, self.stopped), self._held = min(found), ""
            return text[:begin]
        held = max((beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The text held back, at the end."""
        rest, self._held = self._held, ""
        return rest


def beginning(text: str, tag: str) -> int:
    """The number of characters at the end of `text` with which `tag` begins."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
