"""The places of replicas that stream, and the requests that wait for their answers; all of it on one event loop."""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ling3.engine.outputs import Delta, Stats
from ling3.engine.sampling_params import SamplingParams
from ling3.fleet.replica import Card, Plan
from ling3.fleet.worker import COUNTS, Worker, work
from ling3.runtime.cores import cores

RUNS = 2
"""The most replicas that a request is given to, if they die before its first token."""
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclasses.dataclass(eq=False)
class Query:
    """A request: the prompt with this index, and where its answer goes."""

    index: int
    ids: list[int]
    params: SamplingParams
    put: Callable[[tuple[int, Any, bool]], object]
    """Called with the index, a delta or an exception, and whether it is the last."""
    runs: int = 1
    begun: bool = False

    def take(self, item: Any, last: bool) -> None:
        """Passes on a delta or an exception."""
        self.begun = True
        self.put((self.index, item, last))

    def may_run_again(self) -> bool:
        """Called when its replica has died. Unless it may run again, ends it in an error."""
        if not self.begun and self.runs < RUNS:
            self.runs += 1
            return True
        self.take(Delta(0, 0, "", [], None, "error", None), True)
        return False


@dataclasses.dataclass(eq=False)
class StreamingPlace:
    """The place of one replica, and after its death of the next one."""

    number: int
    process: BaseProcess | None = None
    pipe: Connection | None = None
    card: Card | None = None
    """None until the replica is ready."""
    losses: int = 0
    """Deaths since a replica here was last ready."""
    queries: dict[int, Query] = dataclasses.field(default_factory=dict)
    """The unfinished requests of the replica, by the keys in its messages."""
    stats: Stats | None = None
    """The replica's last counts."""
    _counting: "asyncio.Future[Stats | None] | None" = None

    @property
    def load(self) -> int:
        """The number of completions that the replica has not finished."""
        return sum(query.params.n for query in self.queries.values())

    def send(self, *message: Any) -> None:
        """Sends a message. If the replica has died, whoever reads its pipe will notice."""
        assert self.pipe is not None, "launched"
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def take(self, news: list[tuple[int, Any, bool]]) -> None:
        """Passes on a message of the replica."""
        for key, item, last in news:
            if key == COUNTS:
                self.stats = item
                self._answer_counts(item)
            elif (query := self.queries.pop(key, None) if last else self.queries.get(key)) is not None:
                query.take(item, last)

    def count(self) -> "asyncio.Future[Stats | None]":
        """Asks for the replica's counts; None if it dies instead."""
        if self._counting is None:
            self._counting = asyncio.get_running_loop().create_future()
            self.send(Worker.count)
        return self._counting

    def _answer_counts(self, stats: Stats | None) -> None:
        if self._counting is not None and not self._counting.done():
            self._counting.set_result(stats)
        self._counting = None

    def end(self) -> list[Query]:
        """Closes the pipe, which ends the replica after its turn, and returns the requests that it has not finished."""
        if self.pipe is not None:
            self.pipe.close()
        queries, self.queries = list(self.queries.values()), {}
        self.pipe = self.card = self.stats = None
        self._answer_counts(None)
        return queries

    def __str__(self) -> str:
        return f"replica {self.number} (process {self.process and self.process.pid})"


def launch(plan: Plan, number: int, devices: int) -> tuple[BaseProcess, Connection]:
    """Starts the process of a replica, on `devices` GPUs that no other replica has, or with its share of the cores."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, plan), name=f"ling3-replica-{number}", daemon=True)
    changes = {"JAXTYPING_DISABLE": "1"}  # the server's process has checked what it sends
    if plan.replicas > 1:
        changes["NPROC"] = str(max(1, cores() // plan.replicas))  # the threads of XLA's pool
        visible = [each for each in os.environ.get(GPUS, "").split(",") if each]
        each = visible or list(map(str, range(plan.replicas * devices)))
        changes[GPUS] = ",".join(each[number * devices :][:devices])
    with _environment(changes):
        process.start()
    theirs.close()
    return process, pipe


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Changes the environment variables that processes inherit."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
