"""Five tasks: four that test one mechanism each (keeping, finding, counting or forgetting), and a mixture.

A batch is a pure function of (task, seed, step), so all variants of a model see the same stream. `targets[b, t]` is the
answer expected after the tokens up to t; where the mask is False, none is expected.

| task | a row | asked |
|---|---|---|
| parity | random bits | at every bit, whether the ones so far are odd |
| mqar | key-value pairs, then some keys among blanks | the value of each key (Arora et al., arXiv 2312.04927) |
| segment_reset | segments of a reset, pairs and queries | the key's value in this segment, NULL for a stale key |
| palindrome | a string, a separator, the string backwards | its letters (Kimi Linear, arXiv 2510.26692, Figure 4) |
| text_and_recall | *nano*'s word problems, or names with things and then names | the next token, or the name's thing |
"""

import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int, Int32

import ling3
from ling3.train.nano.problems import OBJECTS, PEOPLE, Split, ask, problems

BLANK, RESET, SEPARATOR, NULL = 0, 0, 0, 1
"""Tokens that are not keys, values or letters, each of one task; NULL (segment_reset) is only a target."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """Rows of tokens, the expected token at each place, and the places where one is expected."""

    tokens: Int32[np.ndarray, "batch seq"]
    targets: Int32[np.ndarray, "batch seq"]
    mask: Bool[np.ndarray, "batch seq"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A generator of examples at fixed sizes, and its vocabulary size.

    A mixture has `parts`: held-out examples are drawn and measured for each of them.
    """

    name: str
    vocabulary: int
    draw: Callable[[np.random.Generator, int], Examples]
    parts: tuple["Task", ...] = ()

    def batch(self, seed: int, step: int, rows: int) -> Examples:
        """The `rows` examples that every model trained with `seed` sees at `step`."""
        return self.draw(np.random.default_rng([zlib.crc32(self.name.encode()), seed, step]), rows)


def parity(length: int = 40) -> Task:
    """Running parity: target_t = (token_0 + … + token_t) mod 2. A guess is right half the time."""

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        tokens = rng.integers(2, size=(rows, length))
        return _examples(tokens, np.cumsum(tokens, axis=1) % 2, np.ones(tokens.shape, bool))

    return Task("parity", 2, draw)


def mqar(length: int = 32, pairs: int = 6, keys: int = 32, values: int = 32) -> Task:
    """Multi-query associative recall: `pairs` distinct keys with values, then each key once, at random places.

    Keys are the tokens from 1 on, values follow them. A guess among the values of the row is right 1 / `pairs` of the
    time. Raises ValueError if the keys do not fit after the pairs, or if there are too few keys.
    """
    if 3 * pairs > length or pairs > keys:
        raise ValueError(f"{pairs} pairs take {pairs} keys and {3 * pairs} tokens, but there are {keys} and {length}")

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        key, value = 1 + _distinct(rng, rows, keys, pairs), 1 + keys + rng.integers(values, size=(rows, pairs))
        tokens, targets = (np.full((rows, length), BLANK) for _ in range(2))
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = key, value
        places = 2 * pairs + _distinct(rng, rows, length - 2 * pairs, pairs)
        np.put_along_axis(tokens, places, key, axis=1)
        np.put_along_axis(targets, places, value, axis=1)
        return _examples(tokens, targets, targets != BLANK)

    return Task("mqar", 1 + keys + values, draw)


def segment_reset(segments: int = 5, pairs: int = 5, queries: int = 6, keys: int = 16, values: int = 16) -> Task:
    """Recall that has to forget: each segment is a reset, `pairs` key-value pairs and `queries` keys.

    Half of the queries, in random order, are keys of this segment, and the answer is their value. The others are keys
    of earlier segments that this one does not have (in the first segment, any that it does not have), and the answer is
    NULL. So always NULL is right half the time. Keys are the tokens from 2 on, values follow them.
    """
    asked = queries // 2

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        seen, tokens, targets = np.zeros((rows, keys), bool), [], []
        for _ in range(segments):
            key, value = _distinct(rng, rows, keys, pairs), rng.integers(values, size=(rows, pairs))
            here = np.zeros((rows, keys), bool)
            np.put_along_axis(here, key, True, axis=1)
            # Stale keys first, in random order, then keys never seen; the segment's own keys last.
            order = np.argsort(rng.random((rows, keys)) + 2.0 * ~seen + 4.0 * here, axis=1)
            drawn = _distinct(rng, rows, pairs, asked)
            query = np.concatenate([np.take_along_axis(key, drawn, axis=1), order[:, : queries - asked]], axis=1)
            answer = np.full((rows, queries), NULL)
            answer[:, :asked] = 2 + keys + np.take_along_axis(value, drawn, axis=1)
            shuffle = _distinct(rng, rows, queries, queries)
            query, answer = (np.take_along_axis(x, shuffle, axis=1) for x in (query, answer))
            bound = np.stack([2 + key, 2 + keys + value], axis=-1).reshape(rows, 2 * pairs)
            tokens += [np.full((rows, 1), RESET), bound, 2 + query]
            targets += [np.full((rows, 1 + 2 * pairs), RESET), answer]
            seen |= here
        targets = np.concatenate(targets, axis=1)
        return _examples(np.concatenate(tokens, axis=1), targets, targets != RESET)

    return Task("segment_reset", 2 + keys + values, draw)


def palindrome(length: int = 40, letters: int = 16) -> Task:
    """A string of length / 2 random letters, a separator, and the string backwards without its last letter.

    From the separator on, the answers are the string backwards: each input is the answer at the place before.
    """
    half = length // 2

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        string = 1 + rng.integers(letters, size=(rows, half))
        backwards = string[:, ::-1]
        tokens = np.concatenate([string, np.full((rows, 1), SEPARATOR), backwards[:, :-1]], axis=1)
        targets = np.concatenate([np.zeros_like(string), backwards], axis=1)
        return _examples(tokens, targets, targets != SEPARATOR)

    return Task("palindrome", 1 + letters, draw)


@functools.cache
def tokenizer() -> ling3.Tokenizer:
    """The tokenizer of *nano*'s first edition, with 689 tokens, which the stored runs were made with."""
    return ling3.load_tokenizer(pathlib.Path(__file__).parent / "tokenizer")


def word_problems(split: Split, length: int = 128) -> Task:
    """Text: *nano*'s word problems with their solutions, one after the other; every next token is an answer.

    A row begins with a problem, and is cut off in the midst of one.
    """

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        stream, text = problems(int(rng.integers(2**32)), split), []
        for _ in range(rows):
            row: list[int] = []
            while len(row) <= length:
                problem = next(stream)
                row += tokenizer().encode(f"{ask(problem)} {problem.solution}\n\n")
            text.append(row[: length + 1])
        tokens = np.array(text).reshape(rows, length + 1)
        return _examples(tokens[:, :-1], tokens[:, 1:], np.ones((rows, length), bool))

    return Task("text", tokenizer().vocab_size, draw)


def word_recall(length: int = 128, pairs: int = 8) -> Task:
    """Associative recall in words: `pairs` names, each with a thing; then, over and over, one of the names at random.

    Names and things are those of the word problems, 20 each, all single tokens. A name is always followed by its thing,
    which is an answer from the name's second time on. A guess among the row's things is right 1 / `pairs` of the time.
    Raises ValueError if the pairs do not fit.
    """
    keys, values = (
        np.array([tokenizer().encode(f" {word}") for word in words]).reshape(len(words))
        for words in ([name for name, _ in PEOPLE], OBJECTS)
    )
    if length % 2 or 2 * pairs >= length or pairs > len(keys):
        raise ValueError(f"{pairs} pairs of {len(keys)} names and their queries do not fit in {length} tokens")

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        key, value = keys[_distinct(rng, rows, len(keys), pairs)], rng.choice(values, size=(rows, pairs))
        bound = np.broadcast_to(np.arange(pairs), (rows, pairs))
        order = np.concatenate([bound, rng.integers(pairs, size=(rows, length // 2 - pairs))], axis=1)
        tokens = np.stack([np.take_along_axis(x, order, axis=1) for x in (key, value)], axis=-1).reshape(rows, length)
        mask = np.broadcast_to((np.arange(length) >= 2 * pairs) & (np.arange(length) % 2 == 0), (rows, length))
        return _examples(tokens, np.where(mask, np.roll(tokens, -1, axis=1), 0), mask)

    return Task("recall", tokenizer().vocab_size, draw)


def text_and_recall(length: int = 128, pairs: int = 8) -> Task:
    """Batches whose rows are half text and half recall; no training problem has the solution of a held-out one."""
    recall = word_recall(length, pairs)

    def draw(rng: np.random.Generator, rows: int) -> Examples:
        text, recalled = word_problems("train", length).draw(rng, rows - rows // 2), recall.draw(rng, rows // 2)
        return _examples(
            np.concatenate([text.tokens, recalled.tokens]),
            np.concatenate([text.targets, recalled.targets]),
            np.concatenate([text.mask, recalled.mask]),
        )

    return Task("text_and_recall", recall.vocabulary, draw, parts=(word_problems("held_out", length), recall))


TASKS: dict[str, Callable[[], Task]] = {
    task.__name__: functools.cache(task) for task in (segment_reset, mqar, parity, palindrome, text_and_recall)
}
"""Each task at the size of the stored results."""


def _distinct(rng: np.random.Generator, rows: int, of: int, count: int) -> Int[np.ndarray, "rows count"]:
    """In each row `count` different numbers below `of`, in random order."""
    return np.argsort(rng.random((rows, of)), axis=1)[:, :count]


def _examples(
    tokens: Int[np.ndarray, "batch seq"], targets: Int[np.ndarray, "batch seq"], mask: Bool[np.ndarray, "batch seq"]
) -> Examples:
    return Examples(tokens.astype(np.int32), targets.astype(np.int32), mask)
