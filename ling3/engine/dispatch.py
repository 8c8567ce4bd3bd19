"""What a turn dispatches: the chunks of prompts, the decode calls, and which sequences share a call."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, no_type_check

from ling3.engine import plans
from ling3.engine.calls import Call
from ling3.engine.request import TokenSequence
from ling3.engine.runner import Runner
from ling3.engine.sampling import Choice
from ling3.engine.scheduler import Scheduler
from ling3.engine.settings import DECODE_STEPS
from ling3.engine.shapes import smallest
from ling3.intervention import structure


# A part of every turn: checking types would take longer than it does.
@no_type_check
class Dispatcher:
    """Turns the running sequences of a scheduler into calls of a runner, and notes what is on its way to each of them.

    A prompt goes in by chunks of at most `chunk` tokens, and a decode call has at most `decode_steps` steps. `counts`
    are the loop's.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, chunk: int, decode_steps: int, counts: Counter[str]):
        self.runner, self.scheduler, self.counts = runner, scheduler, counts
        self.chunk, self.decode_steps = chunk, decode_steps

    def goal(self, sequence: TokenSequence) -> int:
        """Tokens that the sequence's caches may have to hold after the next decode call."""
        known = len(sequence.prompt) + len(sequence.token_ids) + sequence.ahead
        return known - 1 + max(min(self.decode_steps, sequence.left), 1)

    def fill(self, sequence: TokenSequence, known: int) -> None:
        """Fills a sequence's slot; of its prompt, so many tokens were in known prefixes before."""
        self.runner.swap_in(sequence)
        prefixes = self.scheduler.group_of(sequence).prefixes
        if prefixes is not None and sequence.cached > known:
            prefixes.settled(sequence)
            self.counts["cached_tokens"] += sequence.cached - known

    def first_tokens(self) -> list[Call]:
        """Those of sequences that go on right after a snapshot's prompt, whose logits are known."""
        calls = []
        for sequence in self.scheduler.running:
            if sequence.logits is not None and sequence.left > 0:
                choice, rows = self.runner.first_token(sequence)
                sequence.ahead += 1
                calls.append(Call(choice, [sequence], rows, [1]))
        return calls

    def prefill(self) -> list[Call]:
        """The next chunks, the oldest sequence's first, up to `chunk` padded tokens in all.

        Each group of devices has a row of a call: a chunk that is padded alike goes along with another group's.
        """
        calls, spent = [], 0
        while heads := self._next_in_groups():
            width = self._width(heads[0])
            spent += width
            if calls and spent > self.chunk:
                break
            calls += self._prefill_together([head for head in heads if self._width(head) == width])
        return calls

    def _next_in_groups(self) -> list[TokenSequence]:
        """The oldest sequence of each group whose prompt is not done, the oldest of all first."""
        found = {}
        for sequence in self.scheduler.running:
            if sequence.decoding or sequence.group in found:
                continue
            known, prefixes = sequence.cached, self.scheduler.group_of(sequence).prefixes
            # Prompts before it may have brought more of it since it was admitted.
            if prefixes is not None and not sequence.begun and prefixes.adopt(sequence):
                self.fill(sequence, known)
            if not sequence.decoding:
                found[sequence.group] = sequence
        return list(found.values())

    def _chunk(self, sequence: TokenSequence) -> int:
        """Tokens of the next chunk of a sequence's prompt."""
        return min(self.chunk - sequence.prefilled % self.chunk, sequence.prefill_end - sequence.prefilled)

    def _width(self, sequence: TokenSequence) -> int:
        """What that is padded to."""
        return smallest(self.runner.shapes.buckets, self._chunk(sequence))

    def _prefill_together(self, sequences: list[TokenSequence]) -> list[Call]:
        """The next chunks of sequences of different groups, in one call, and one more if any of them are scored."""
        chunks = []
        for sequence in sequences:
            reserved = self.scheduler.reserve(sequence, self.goal(sequence))
            assert reserved, "a sequence is admitted with the pages for any one of its chunks"
            chunks.append(sequence.prompt[sequence.prefilled : sequence.prefilled + self._chunk(sequence)])
        if sequences[0].watched is not None:
            return [self._watch(*each) for each in zip(sequences, chunks, strict=True)]
        calls, found = [], list(zip(sequences, chunks, strict=True))
        if scored := [(sequence, tokens) for sequence, tokens in found if sequence.scored]:
            some, own = map(list, zip(*scored, strict=True))
            choice, rows = self.runner.score(some, own)
            calls.append(Call(choice, some, rows, [0] * len(some), [len(tokens) for tokens in own]))
        if going_on := [(sequence, tokens) for sequence, tokens in found if not self._only_score(sequence, tokens)]:
            calls.append(self._fill_caches(*map(list, zip(*going_on, strict=True))))
        return calls

    def _watch(self, sequence: TokenSequence, tokens: Sequence[int]) -> Call:
        """The next chunk of a watcher."""
        seen, rows = self.runner.watch(sequence, tokens)
        sequence.prefilled += len(tokens)
        return Call(None, [sequence], rows, [0], [len(tokens)], seen)

    def _only_score(self, sequence: TokenSequence, tokens: Sequence[int]) -> bool:
        """True, and noted, if nothing is to follow a chunk: it need not be in the caches."""
        if sequence.params.max_tokens or sequence.remembers or sequence.prefilled + len(tokens) < len(sequence.prompt):
            return False
        sequence.prefilled, sequence.only_scored = len(sequence.prompt), len(tokens)
        self.counts["prompt_tokens"] += len(tokens)
        return True

    def _fill_caches(self, sequences: list[TokenSequence], chunks: list[Sequence[int]]) -> Call:
        """Those chunks, in one call."""
        ends = sequences[0].prefilled + len(chunks[0]) == len(sequences[0].prompt)
        if sequences[0].remembers and ends:  # and no other, as on a mesh there are no snapshots
            choice, rows = self.runner.prompt_end(sequences[0], chunks[0])
        else:
            choice, rows = self.runner.prefill(sequences, chunks)
        self.counts["prefill_calls"] += 1
        ended = []
        for sequence, tokens in zip(sequences, chunks, strict=True):
            sequence.prefilled += len(tokens)
            prefixes = self.scheduler.group_of(sequence).prefixes
            if prefixes is not None and prefixes.wants(sequence):
                prefixes.keep(sequence, self.runner.snapshot(sequence) if prefixes.grid.snapshot else None)
            self.counts["prompt_tokens"] += len(tokens)
            ended.append(int(sequence.prefilled == len(sequence.prompt)))
            sequence.ahead += ended[-1]
        return Call(choice, sequences, rows, ended)

    def constrained(self, sequences: Sequence[TokenSequence]) -> list[Call]:
        """The next tokens of sequences with grammars, of which no call is in flight."""
        calls = []
        for some in self._calls(sequences):
            steps = plans.common_steps(some, self.decode_steps)
            planned = [plans.planned(sequence, steps) for sequence in some]
            choice, places = self.runner.constrained(some, planned, steps)
            calls.append(self._decoding(choice, some, places, [plans.tokens(plan) for plan in planned]))
        return calls

    def decode(self, sequences: Sequence[TokenSequence], most_steps: int = DECODE_STEPS) -> list[Call]:
        """The next tokens of the sequences, in each call as many of a group as it has rows."""
        calls = []
        for some in self._calls(sequences):
            steps = min(self._steps(some), most_steps)
            most = [min(steps, sequence.left) for sequence in some]
            choice, places = self.runner.decode(some, steps)
            calls.append(self._decoding(choice, some, places, most))
        return calls

    def _calls(self, sequences: Sequence[TokenSequence]) -> Iterable[list[TokenSequence]]:
        """Those of each decode call: sequences with interventions go beside those that have the like alone."""
        alike: dict[Any, list[TokenSequence]] = {}
        for sequence in sequences:
            later = sequence.later
            alike.setdefault(structure(later) if later else None, []).append(sequence)
        return itertools.chain.from_iterable(map(self._dealt, alike.values()))

    def _dealt(self, sequences: Sequence[TokenSequence]) -> Iterable[list[TokenSequence]]:
        """Those of each decode call."""
        rows = self.runner.shapes.rows[-1]
        groups = [[each for each in sequences if each.group == group.number] for group in self.scheduler.groups]
        for start in range(0, max(map(len, groups)), rows):
            yield [sequence for group in groups for sequence in group[start : start + rows]]

    def _decoding(
        self, choice: Choice, sequences: Sequence[TokenSequence], rows: Sequence[int], most: Sequence[int]
    ) -> Call:
        """A decode call that is dispatched."""
        self.counts["decode_calls"] += 1
        for sequence, tokens in zip(sequences, most, strict=True):
            sequence.ahead += tokens
        return Call(choice, sequences, rows, most)

    def _steps(self, sequences: Sequence[TokenSequence]) -> int:
        """Steps of a decode call: as many as leave at most an eighth of its rows idle."""
        if not all(sequence.decoding for sequence in self.scheduler.running):
            return 1
        beside = any(sequence.constrained for sequence in self.scheduler.running)
        most = min(plans.BESIDE, self.decode_steps) if beside else self.decode_steps
        steps = min(most, max(sequence.left for sequence in sequences))
        ending = [sequence.left for sequence in sequences if sequence.left < steps]
        while 8 * sum(max(0, steps - left) for left in ending) > steps * len(sequences):
            steps -= 1
        return steps
