"""The methods of an engine that the server calls: of one in its process, or of several in others (`ling3.fleet`)."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ling3.engine.outputs import Delta, Stats
from ling3.engine.sampling_params import SamplingParams

Deltas = AsyncGenerator[tuple[int, Delta], None]
"""The deltas of several prompts, each with the index of its prompt."""


class Answering(Protocol):
    """Answers prompts of token ids in streams. `ling3.Engine` does, and `ling3.fleet.replicas.Replicas`."""

    max_model_len: int
    adapters: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """True while it can take requests."""
        ...

    def left(self, tokens: int) -> int:
        """The largest `max_tokens` for a prompt of `tokens` tokens; less than 1 if the prompt is too long."""
        ...

    def astream_all(self, prompts: Sequence[list[int]], params: SamplingParams, *, name: str) -> Deltas:
        """Yields the deltas of the answers as they come; leaving the iterator aborts unfinished requests.

        The first `anext` raises ParameterError for a request that can never be answered, with a message that calls the
        prompt by its `name`, formatted with its index; and QueueFull if there is no room for one of the requests.
        """
        ...

    async def astats(self) -> Stats:
        """The counts at the time of the call."""
        ...
