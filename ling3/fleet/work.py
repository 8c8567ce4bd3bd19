"""The prompts of a run: handed out to replicas in small batches, and to another replica when one dies."""

from collections import Counter, deque

BATCH = 8
"""The most prompts of a batch: small, so that free slots are soon filled and few prompts are lost in a crash."""
IN_COMPANY, ALONE = 2, 3
"""After `IN_COMPANY` crashes among others a prompt runs alone; after `ALONE` more crashes it fails."""


class FleetError(RuntimeError):
    """Raised for a prompt that crashes its replica again and again, and if no replica can be kept alive."""


class Work:
    """Prompts 0 to `count` - 1 of one run: waiting, or held by a replica, until answered. Each is answered once."""

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

        A replica holds up to `slots` prompts and one more batch, which is on its way; when few are left, at most its
        share among `sharers` replicas. A prompt that `IN_COMPANY` replicas held when they died runs alone.
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
        """Records an answer; False if the replica does not hold the prompt, and the answer is to be ignored."""
        held = self._held.get(replica, set())
        if prompt not in held:
            return False
        held.remove(prompt)
        return True

    def lose(self, replica: int) -> list[int]:
        """Puts the prompts of a replica that died back at the front of the queue, and returns them.

        Raises FleetError for a prompt that was alone on `ALONE` replicas that died.
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
