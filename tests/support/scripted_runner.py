"""An engine without a model and a compiler: its tokens follow a rule, and everything else is the engine's.

It checks what the loop does with memory: a page holds the ids of the tokens that are put into it, a slot counts and
hashes them, and a call fails unless it finds both as they were left.
"""

import dataclasses
import hashlib
import itertools
import time
import types
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from small_engine import CONFIG, SETTINGS, tokenizer

from ling3.engine.forward import Extension
from ling3.engine.front import Front
from ling3.engine.intake import Intake
from ling3.engine.masks import WORD
from ling3.engine.runner import Runner
from ling3.engine.sampling import Choice
from ling3.engine.sampling_params import MAX_LOGPROBS
from ling3.engine.settings import DECODE_STEPS, EngineSettings
from ling3.engine.shapes import Grid, Shapes
from ling3.serve import Loop

VOCAB = CONFIG.vocab_size
FIRST, PAST = 6, 350
"""The tokens of `by_hash` are at least FIRST and below PAST, and so none of the ends."""
STATE = 64
"""Bytes of a slot's hash."""
EMPTY = -1
"""The token id of a page's places that hold none."""

Rule = Callable[[np.ndarray, int], int]
"""The next token after some tokens, for a seed; the seed of a greedy request is 0."""


def by_hash(ids: np.ndarray, seed: int) -> int:
    """A token that follows from all tokens before it and from the seed."""
    return FIRST + _number(ids, seed) % (PAST - FIRST)


def after(*scripts: Sequence[int]) -> Rule:
    """A rule: after a token of a script comes the next one; after any other token, token 6."""
    following = {one: other for script in scripts for one, other in itertools.pairwise(script)}
    return lambda ids, seed: following.get(int(ids[-1]), FIRST)


@dataclasses.dataclass
class Slot:
    """What a slot holds: the tokens in its caches as a count and a hash, and how its sequence is sampled."""

    length: int
    state: "hashlib.blake2b"
    newest: int
    until: int
    seed: int
    ends: frozenset[int]
    least: int
    done: bool = False

    def permits(self, token: int) -> bool:
        """False for an end before `least` tokens."""
        return self.length >= self.least or token not in self.ends


@dataclasses.dataclass(frozen=True)
class Saved:
    """A sequence that was swapped out."""

    state: "hashlib.blake2b"
    pages: np.ndarray


class ScriptedRunner(Runner):
    """A runner whose next token is `rule(tokens so far, seed)`; each call takes `pace` seconds."""

    def __init__(self, shapes: Shapes, rule: Rule = by_hash, pace: float = 0.0):
        self.shapes, self.rule, self.pace, self.compile_seconds, self.adapters = shapes, rule, pace, 0.0, None
        self.model = types.SimpleNamespace(parameters=0)
        self.calls: list[tuple[str, list[int]]] = []  # each call's program, and how many tokens are put in or planned
        self.reset()

    def reset(self):
        """An empty pool."""
        self.pages = np.full((self.shapes.pages, self.shapes.page_size), EMPTY, np.int64)
        self.slots: list[Slot | None] = [None] * self.shapes.slots

    def swap_in(self, sequence):
        saved, states = sequence.memory.saved, sequence.memory.states
        for source, own in zip(sequence.memory.copied, sequence.memory.pages, strict=False):
            self.pages[own] = self.pages[source]
        if saved is not None:
            self.pages[sequence.memory.pages[: len(saved.pages)]] = saved.pages
        before = saved.state if saved is not None else hashlib.blake2b() if states is None else states
        params, sequence.memory.saved = sequence.params, None
        self.slots[sequence.memory.slot] = Slot(
            length=sequence.held,
            state=before.copy(),
            newest=(sequence.token_ids or sequence.prompt)[-1],
            until=len(sequence.prompt) + params.max_tokens,
            seed=sequence.seed if params.temperature else 0,
            ends=frozenset(sequence.ends),
            least=len(sequence.prompt) + params.min_tokens,
        )

    def swap_out(self, sequence):
        used = sequence.memory.pages[: -(-sequence.held // self.shapes.page_size)]
        return Saved(self.slots[sequence.memory.slot].state.copy(), self.pages[used])

    def copied(self, sequence):
        return self.swap_out(sequence)

    def state_of(self, sequence):
        return self.slots[sequence.memory.slot].state.copy()

    def scrub(self, slot, pages):
        self.pages[list(pages)], self.slots[slot] = EMPTY, None

    def extend(self, batch, rows, sequences):
        self._called("extend", batch.lengths[rows].tolist())
        for row, sequence in zip(rows, sequences, strict=True):
            self._check(batch, row, sequence)
            for token in batch.tokens[row, : batch.lengths[row]].tolist():
                self._put_in(sequence, token)
        return Extension(jax.device_put(batch.lengths), None, {})

    def decode(self, batch, rows, sequences):
        self._called("decode", batch.lengths[rows].tolist())
        shape = (len(batch.lengths), DECODE_STEPS)
        tokens, logprobs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for row, sequence in zip(rows, sequences, strict=True):
            self._check(batch, row, sequence)
            for step in range(batch.lengths[row]):
                if not self.slots[sequence.memory.slot].done:
                    forced = int(batch.tokens[row, step]) if batch.masks is not None else -1
                    mask = None if batch.masks is None else batch.masks[row]
                    tokens[row, step], logprobs[row, step] = self._next(sequence, forced if forced >= 0 else None, mask)
        ranks = np.arange(MAX_LOGPROBS, dtype=np.int32)
        top = (tokens[..., None] + ranks) % VOCAB, logprobs[..., None] - ranks.astype(np.float32)
        return Choice(*jax.device_put((tokens, logprobs, *top)))

    def _check(self, batch, row: int, sequence):
        """AssertionError unless a row has the sequence's slot and pages, at their columns."""
        slots, table = batch.rows.slots, batch.rows.table
        assert slots[row] == sequence.memory.slot and (not batch.rows.in_place or row == sequence.memory.slot)
        columns = slice(sequence.memory.first_page, sequence.memory.first_page + len(sequence.memory.pages))
        assert table[row, columns].tolist() == sequence.memory.pages
        assert (np.delete(table[row], np.r_[columns]) == self.shapes.pages).all()

    def warmup(self, first_token=False, *also):
        yield from ("extend", "decode")

    def warmup_size(self, first_token, also):
        return 2

    def _called(self, program: str, tokens: Iterable[int]):
        self.calls.append((program, list(tokens)))
        if self.pace:
            time.sleep(self.pace)

    def _put_in(self, sequence, token: int):
        """Puts a token into a sequence's caches."""
        slot, size = self.slots[sequence.memory.slot], self.shapes.page_size
        self.pages[sequence.memory.pages[slot.length // size], slot.length % size] = token
        slot.length += 1
        slot.state.update(np.int64(token).tobytes())

    def _next(self, sequence, forced: int | None, mask: np.ndarray | None) -> tuple[int, float]:
        """The next token of a sequence, after its newest was put into its caches, and its log-probability."""
        slot = self.slots[sequence.memory.slot]
        self._put_in(sequence, slot.newest)
        ids = self.pages[sequence.memory.pages].reshape(-1)[: slot.length]
        found = hashlib.blake2b(ids.tobytes()).digest()
        assert found == slot.state.digest(), "the pages of a sequence hold the tokens that its slot has seen"
        token = self.rule(ids, slot.seed) if forced is None else forced
        if forced is None:
            others = (token, *range(VOCAB))
            token = next(each for each in others if slot.permits(each) and _allowed(mask, each))
        slot.newest = token
        slot.done = token in slot.ends or slot.length + 1 >= slot.until
        return token, -(_number(ids, token) % 1000) / 1000


def _number(ids: np.ndarray, seed: int) -> int:
    """A number that follows from some tokens and a seed."""
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8, key=seed.to_bytes(8)).digest())


def _allowed(mask: np.ndarray | None, token: int) -> bool:
    """True if a grammar's mask permits a token."""
    return mask is None or bool(mask[token // WORD] >> np.uint32(token % WORD) & 1)


def scripted(rule: Rule = by_hash, pace: float = 0.0, text: bool = True, **changes) -> Front:
    """An engine of small_engine's settings, over a scripted runner; without `text` it has no tokenizer."""
    settings = EngineSettings(**SETTINGS | {"max_model_len": CONFIG.max_position_embeddings} | changes)
    shapes = Shapes(
        slots=settings.max_running_requests,
        pages=settings.num_pages,
        page_size=settings.page_size,
        columns=-(-settings.max_model_len // settings.page_size),
        buckets=settings.token_paddings,
        rows=(settings.decode_rows,),
        grid=Grid(settings.prefix_step, STATE, 2**20) if settings.prefix_cache else None,
    )
    decoder = tokenizer() if text else None
    intake = Intake(
        tokenizer=decoder,
        vocab=VOCAB,
        ends=sorted({*CONFIG.eos_token_id, *(decoder.eos_token_ids if decoder else ())}),
        settings=settings,
        shapes=shapes,
        parts=frozenset({"masks"}),
    )
    return Front(intake, Loop(ScriptedRunner(shapes, rule, pace), settings))
