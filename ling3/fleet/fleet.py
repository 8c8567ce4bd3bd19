"""A fleet of engines that answers as one: prompts are distributed over replicas, and answers collected."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from ling3.engine.intake import Truncate, listed
from ling3.engine.outputs import Delta, RequestOutput, Stats
from ling3.engine.request import Request
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings, changed
from ling3.execution import Execution
from ling3.fleet import cluster
from ling3.fleet.places import Lost, Places
from ling3.fleet.replica import Answer, Checkpoint, Job, Plan, Process, Source
from ling3.fleet.work import BATCH, Work
from ling3.mesh import Rules
from ling3.runtime.progress import progress


class Fleet:
    """Engines, one per process, that answer as one: same results, in the same order, with the same bits.

    `path`, `dtype`, `settings`, `revision`, `execution` and `changes` are those of `Engine.from_pretrained`, for every
    replica; a `Source` may be given instead of a path. A replica with a `mesh` of (data, tensor) devices is sharded by
    `rules` (`ling3.mesh`). If the cluster has GPUs or TPUs, replicas do not share them; on CPUs each replica has `cpus`
    cores (by default as many as let all replicas run at once) and as many threads, and `mem_fraction` is divided among
    the replicas.

    `address` is that of a Ray cluster (`"auto"` for this machine's, or `"host:port"`), whose nodes need this version of
    ling3 and the checkpoint under the same path; without it Ray runs only on this machine, until this process ends. A
    process that is connected to Ray already stays with its cluster.

    `settings`, `max_model_len` and `device_kind` are those of each replica's engine; `parameters` (how many numbers it
    has), `dtype` and `fingerprint` (`ling3.evals.predictions.fingerprint`) are the model's; `platform` is the JAX
    backend.

    The constructor returns as soon as one replica is ready. If a replica or its node dies, no answer is lost or
    repeated: its prompts go to other replicas, and Ray starts a new one where there is room, on a new node too.

    Raises ValueError if Ray is not installed, ConnectionError if there is no cluster at the address, and whatever
    loading and the engine raise; FleetError for a prompt that crashes replica after replica, and if no replica is left.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Source,
        replicas: int,
        dtype: Any = None,
        settings: EngineSettings | None = None,
        *,
        revision: str | None = None,
        mesh: tuple[int, int] | None = None,
        rules: Rules | None = None,
        execution: Execution | None = None,
        address: str | None = None,
        cpus: int | None = None,
        **changes: Any,
    ):
        for name, value in (("replicas", replicas), ("cpus", 1 if cpus is None else cpus)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        settings = changed(settings, changes)
        source = path if isinstance(path, Source) else Checkpoint.of(path, dtype, revision)
        self.tokenizer = source.tokenizer()
        ray = cluster.library()
        cluster.join_cluster(ray, address, replicas * (cpus or 1))
        options = cluster.reserved(ray, replicas, mesh, cpus)
        options["max_concurrency"] = min(settings.max_running_requests, 1000) + BATCH
        self._first_token: bool | None = None  # of the last `warmup`, if any
        self._ids, self._runs, self._running = itertools.count(), itertools.count(), False
        plan = Plan(source, settings, execution, mesh, rules, replicas, os.getcwd())  # noqa: PTH109
        self._places = Places(ray, plan, options)
        try:
            while (first := self._places.first) is None:
                self._places.wait()
        except BaseException:
            self.close()
            raise
        self.settings, self.max_model_len = first.settings, first.intake.room
        self.device_kind: str = first.facts["device"]
        self.fingerprint: str = first.facts["weights"]
        self.parameters: int = first.facts["parameters"]
        self.dtype: str = first.facts["dtype"]
        self.platform: str = first.facts["platform"]
        self._intake = dataclasses.replace(first.intake, tokenizer=self.tokenizer)

    # The interface of an engine

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
    ) -> list[RequestOutput]:
        """The answers to prompts, in the prompts' order, as `Engine.generate` returns them."""
        requests = self._intake.requests(self._ids, listed(prompts), params, truncate)
        outputs: dict[int, RequestOutput] = {}
        with progress("generating", len(requests)) as advance:
            for i, output in self._answers(requests):
                outputs[i] = output
                advance(1)
        return [outputs[i] for i in range(len(requests))]

    def stream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """Yields completions as they finish: the index of the prompt, and the entire completion as one delta.

        The arguments are those of `Engine.stream_all`. Closing the iterator aborts unfinished requests. Raises
        RuntimeError if another run is under way.
        """
        return self._deltas(self._intake.requests(self._ids, list(prompts), params, truncate))

    def warmup(self, first_token: bool = False) -> None:
        """Compiles as `Engine.warmup` does: in replicas that are ready now; in others before their first batch.

        Raises RuntimeError while a run is under way.
        """
        self._check_idle()
        self._first_token = first_token
        self._places.warm(first_token)

    def stats(self) -> Stats:
        """The sums of the counts of all replicas that are ready; `compile_seconds` is the shortest."""
        return Stats.total(self._places.stats())

    def processes(self) -> list[Process]:
        """Where the replicas run, without those that wait for resources."""
        return [place.process for place in self._places.running() if place.process is not None]

    def close(self) -> None:
        """Ends all replicas and their processes."""
        self._places.close()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ready = f"{len(self._places.ready())} of {len(self._places)} replicas ready"
        return f"<Fleet: {self.parameters:,} parameters, {ready}>"

    # A run

    def _deltas(self, requests: Sequence[Request]) -> Generator[tuple[int, Delta], None, None]:
        """The answers, one completion at a time."""
        with contextlib.closing(self._answers(requests)) as answers:
            for i, output in answers:
                for completion in output.outputs:
                    yield i, _delta(output, completion.index)

    def _answers(self, requests: Sequence[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
        """The answers as they come, each once."""
        self._check_idle()
        self._running, run = True, next(self._runs)
        work = Work(len(requests))
        try:
            while work.left:
                self._hand_out(work, run, requests)
                place, news = self._places.wait()
                if isinstance(news, Lost):
                    work.lose(place.number)
                elif isinstance(news, Answer) and work.finish(place.number, news.index):
                    request = requests[news.index]
                    own = {"request_id": request.request_id, "prompt": request.prompt}
                    yield news.index, dataclasses.replace(news.output, **own)
        finally:
            self._running = False
            self._places.leave(run)

    def _hand_out(self, work: Work, run: int, requests: Sequence[Request]) -> None:
        """Gives each replica that is ready as many prompts as it has room for, one batch each in turn."""
        places, sharers = self._places.ready(), len(self._places.running())
        while places:
            handed = []
            for place in places:
                batch = work.hand(place.number, self.settings.max_running_requests, sharers)
                if batch:
                    self._places.ask(place, run, [_job(i, requests[i]) for i in batch], self._first_token)
                    handed.append(place)
            places = handed

    def _check_idle(self) -> None:
        if self._running:
            raise RuntimeError("the fleet is at work for another caller: let that finish, or close its iterator")


def _job(index: int, request: Request) -> Job:
    """The request as a replica gets it, with a fixed seed, so that another replica gives the same answer."""
    params = dataclasses.replace(request.params, seed=request.sequences[0].seed)
    return Job(index, request.prompt_ids, params)


def _delta(output: RequestOutput, index: int) -> Delta:
    """A finished completion as one delta."""
    whole = output.outputs[index]
    last = output if index == len(output.outputs) - 1 else None
    return Delta(output.request_id, index, whole.text, whole.token_ids, whole.logprobs, whole.finish_reason, last)
