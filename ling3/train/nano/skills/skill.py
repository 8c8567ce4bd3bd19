"""The structure of a skill: texts with learned pieces, and an exam that asks for the last piece."""

import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from ling3.train.nano.problems import HELD_OUT_SHARE, Split
from ling3.train.tokenizer import END_OF_TEXT

Segment = tuple[str, bool]
"""A piece of a text, and whether its tokens are learned."""

Row = tuple[list[int], list[float]]
"""Tokens, and their weights in the loss."""


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in pieces. The last piece is learned, and is the answer in an exam."""

    segments: tuple[Segment, ...]

    @property
    def prompt(self) -> str:
        """All pieces of the text but the answer."""
        return "".join(text for text, _ in self.segments[:-1])

    @property
    def answer(self) -> str:
        """The last piece of the text."""
        return self.segments[-1][0]


@dataclasses.dataclass(frozen=True)
class Skill:
    """A skill: how its texts are drawn, how long they are, and what is expected of an ablation.

    `draw(generator, split)` makes one text. An answer is right if it is the greedy continuation of its prompt, token by
    token. `longest` is the most tokens of a text. `pulls` names the mechanisms (of `ling3.interpret.ablate.MECHANISMS`)
    whose ablation is expected to lose at least a tenth of the answers.
    """

    name: str
    draw: Callable[[np.random.Generator, Split], Text]
    longest: int
    pulls: tuple[str, ...]
    end: str = END_OF_TEXT
    """The control token after a text."""

    def texts(self, seed: int, split: Split) -> Iterator[Text]:
        """An endless stream of texts of a split; a seed gives the same stream on every machine."""
        rng = np.random.default_rng([zlib.crc32(f"{self.name}, {split}".encode()), seed])
        while True:
            yield self.draw(rng, split)

    def exam(self, count: int, seed: int = 2026) -> list[Text]:
        """The first `count` of the held-out texts that nano is examined on."""
        return list(itertools.islice(self.texts(seed, "held_out"), count))


def encode(tokenizer: Tokenizer, segments: Sequence[Segment]) -> Row:
    """The tokens of a text and their weights in the loss."""
    encodings = tokenizer.encode_batch([text for text, _ in segments])
    tokens = [token for encoding in encodings for token in encoding.ids]
    weights = [float(learned) for encoding, (_, learned) in zip(encodings, segments, strict=True) for _ in encoding.ids]
    return tokens, weights


def rank(text: str) -> int:
    """A hash of a text, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(text: str) -> Split:
    """`held_out` for one text in `HELD_OUT_SHARE`, chosen by `rank`."""
    return "held_out" if rank(text) % HELD_OUT_SHARE == 0 else "train"


class Bindings:
    """Key-value pairs in two splits: for each key, one value in `HELD_OUT_SHARE` never occurs with it in training.

    A model cannot have memorised such a pair; it has to read it in the text.
    """

    def __init__(self, name: str, keys: Sequence[str], values: Sequence[str]):
        self.keys, self.values = tuple(keys), tuple(values)
        order = [sorted(range(len(values)), key=lambda i, key=key: rank(f"{name}: {key} {values[i]}")) for key in keys]
        held_out = len(values) // HELD_OUT_SHARE
        self._of = {"held_out": np.array(order)[:, :held_out], "train": np.array(order)[:, held_out:]}

    def draw(self, rng: np.random.Generator, keys: Int[np.ndarray, " pairs"], split: Split) -> list[str]:
        """For each key index, a random value that this key may have in this split."""
        allowed = self._of[split]
        return [self.values[i] for i in allowed[keys, rng.integers(allowed.shape[1], size=len(keys))]]

    def split(self, key: str, value: str) -> Split:
        """The split in whose texts the pair occurs."""
        value_index = self.values.index(value)
        return "held_out" if value_index in self._of["held_out"][self.keys.index(key)] else "train"
