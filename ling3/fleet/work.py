"""Who has which prompt: handed out in small batches, and to another replica when one dies."""

from collections import Counter, deque

BATCH = 8
"""The most prompts of a batch: a free slot of a replica soon has the next one, and a death costs few."""
IN_COMPANY, ALONE = 2, 3
"""After so many shared crashes a prompt runs alone; after so many crashes alone it fails."""


class FleetError(RuntimeError):
    """A prompt that ends its replica again and again, or replicas that cannot be kept alive."""


class Work:
    """Prompts 0 to `count` - 1 of one run: those that wait, and those that replicas hold. Each is answered once."""

    def __init__(self, count: int):
        self._waiting = deque(range(count))
        self._held: dict[int, set[int]] = {}
        self._deaths: Counter[int] = Counter()

    @property
    def left(self) -> int:
        """The number of prompts without an answer."""
        return len(self._waiting) + sum(map(len, self._held.values()))

    def hand(self, replica: int, slots: int, sharers: int) -> list[int]:
        """The next batch for a replica; empty if it has enough.

        It holds up to `slots` prompts, and a batch besides that is on its way; when few are left, no more than its
        share among so many `sharers`. A prompt with which `IN_COMPANY` replicas have died runs alone.
        """
        held = self._held.setdefault(replica, set())
        if not self._waiting or any(map(self._suspect, held)):
            return []
        if self._suspect(self._waiting[0]):
            batch = [] if held else [self._waiting.popleft()]
        else:
            most = min(BATCH, min(slots + BATCH, -(-self.left // sharers)) - len(held))
            batch = []
            while len(batch) < most and self._waiting and not self._suspect(self._waiting[0]):
                batch.append(self._waiting.popleft())
        held.update(batch)
        return batch

    def finish(self, replica: int, prompt: int) -> bool:
        """Notes an answer; False if the replica does not hold the prompt, so that the answer is not wanted."""
        held = self._held.get(replica, set())
        if prompt not in held:
            return False
        held.remove(prompt)
        return True

    def lose(self, replica: int) -> list[int]:
        """The prompts that a replica held when it died; they are handed out again, first of all.

        Raises FleetError for one that was alone with `ALONE` replicas that died.
        """
        lost = sorted(self._held.pop(replica, ()))
        self._deaths.update(lost)
        for prompt in lost:
            if self._deaths[prompt] == IN_COMPANY + ALONE:
                raise FleetError(
                    f"prompt {prompt} was alone with {ALONE} replicas, and each of them died: it takes more memory "
                    "than there is, or crashes a library; leave it out, or ask for less"
                )
        self._waiting.extendleft(reversed(lost))
        return lost

    def _suspect(self, prompt: int) -> bool:
        return self._deaths[prompt] >= IN_COMPANY
