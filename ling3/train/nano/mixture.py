"""Packs texts of many skills into rows without padding: nano's training data.

A row has complete texts, each ended by its skill's control token, and equations of `drills` where no further text fits.
Shares are of tokens: the next text is from the skill that is furthest behind its share. The seed determines everything.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from ling3.train.loop import Batch
from ling3.train.nano.drills import drills, single_steps
from ling3.train.nano.problems import SYSTEM_TURN, ask, problems
from ling3.train.nano.skills import SKILLS, encode
from ling3.train.nano.skills.facts import facts
from ling3.train.nano.skills.recall import MANY
from ling3.train.nano.skills.skill import Row

TEXTS = {**SKILLS, "recall of many": MANY, "facts of 1024": facts(1024)}
"""Names that shares may use besides `DRILLS`: the skills, and two more for beginnings and smaller models."""
DRILLS = "drills"
"""The name of bare equations, which fill any remaining space."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The shape of a batch: `count` rows of `length` tokens, and each skill's share of the tokens."""

    count: int
    length: int
    shares: Mapping[str, float]


def encoded(tokenizer: Tokenizer, name: str, seed: int) -> Iterator[Row]:
    """A skill's tokenized training texts, each followed by its control token, which is learned too."""
    skill = TEXTS[name]
    for text in skill.texts(seed, "train"):
        yield encode(tokenizer, (*text.segments, (skill.end, True)))


def packed(tokenizer: Tokenizer, rows: BatchShape, seed: int) -> Iterator[Row]:
    """Rows of exactly `rows.length` tokens. Texts longer than a row are skipped."""
    rng, equations = np.random.default_rng(seed), single_steps(seed)
    shares = {name: share for name, share in rows.shares.items() if share > 0}
    streams = {
        name: (text for text in encoded(tokenizer, name, seed) if len(text[0]) <= rows.length)
        for name in shares
        if name != DRILLS
    }
    waiting, given = {name: next(stream) for name, stream in streams.items()}, dict.fromkeys(shares, 0)

    def behind(name: str) -> float:
        return given[name] / shares[name]

    while True:
        texts, room = [], rows.length
        while min(shares, key=behind) != DRILLS:
            fits = [name for name, (tokens, _) in waiting.items() if len(tokens) <= room]
            if not fits:
                break
            name = min(fits, key=behind)
            texts.append(waiting[name])
            size = len(waiting[name][0])
            given[name], room, waiting[name] = given[name] + size, room - size, next(streams[name])
        if room:
            texts.append(drills(tokenizer, equations, room))
            if DRILLS in given:
                given[DRILLS] += room
        order = rng.permutation(len(texts))
        yield [t for i in order for t in texts[i][0]], [w for i in order for w in texts[i][1]]


def batches(tokenizer: Tokenizer, cycle: Sequence[BatchShape], seed: int) -> Iterator[Batch]:
    """The endless training stream: one batch of each shape in `cycle`, in turn."""
    streams = [packed(tokenizer, rows, seed + i) for i, rows in enumerate(cycle)]
    for i in itertools.cycle(range(len(cycle))):
        tokens, weights = zip(*itertools.islice(streams[i], cycle[i].count), strict=True)
        yield Batch(jnp.array(tokens, jnp.int32), jnp.array(weights, jnp.float32))


def corpus(seed: int, size: int = 1000) -> Iterator[str]:
    """Texts to train the tokenizer on: `size` of each skill (a tenth if long), more problems, and a chat's turns."""
    for problem in itertools.islice(problems(seed, "train"), 5 * size):
        yield f"{ask(problem)} {problem.solution}\n\n"
    yield from [SYSTEM_TURN, "<role>HUMAN</role>", "<role>ASSISTANT</role>", "detailed thinking on"] * (size // 4)
    for skill in SKILLS.values():
        for text in itertools.islice(skill.texts(seed, "train"), size if skill.longest <= 256 else size // 10):
            yield text.prompt + text.answer
