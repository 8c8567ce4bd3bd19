"""A fleet of engines: Ray starts the replicas, here prompts are handed out to them and answers are collected.

All of Ray is in this file. Each replica is an actor; one that dies is replaced, here or on another node, as soon as Ray
finds room for it, and what it had not answered goes to others.
"""

# pyright: reportMissingImports=false
# Ray is an extra, and types are checked without it too.

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from ling3.engine.intake import Intake, Truncate, listed
from ling3.engine.outputs import Delta, RequestOutput, Stats
from ling3.engine.request import Request
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings, changed
from ling3.execution import Execution
from ling3.fleet.replica import Answer, Card, Checkpoint, Job, Plan, Process, Replica, Source
from ling3.fleet.work import BATCH, FleetError, Work
from ling3.mesh import Rules
from ling3.runtime.progress import progress
from ling3.runtime.quoting import shown

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds without news after which a fleet without any replica says what it waits for."""
MOST_LOSSES = 5
"""A replica that dies so often before it can answer is not replaced any more."""
OBJECTS = 2**27
"""Bytes of Ray's object store on this machine: answers are small."""
SAME = ("JAX_", "XLA_", "LING3_")
"""Replicas have the caller's environment variables that begin so: the bits of an answer may depend on them."""
QUIETLY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray prints to stdout what becomes of processes; the fleet says it itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Its own choice is 15: a replica would wait for whatever else the machine does.
    "RAY_worker_niceness": "0",
}
"""For Ray, unless the environment says otherwise: it reports to nobody and prints nothing."""


@dataclasses.dataclass(eq=False)
class _Place:
    """One replica of the fleet, and after its death the next in its place."""

    number: int
    actor: Any = None
    process: Process | None = None
    """None until Ray has found room for it."""
    card: Card | None = None
    """None until it can answer."""
    losses: int = 0
    """Deaths since one could answer."""
    error: Exception | None = None
    """Why there will be no further replica here."""


class Fleet:
    """Engines in processes of their own, which answer as one: same results, in the same order, with the same bits.

    `path`, `dtype`, `settings`, `revision`, `execution` and `changes` are those of `Engine.from_pretrained`, for every
    replica; a `Source` may stand in for the path. A replica with a `mesh` spans data × tensor devices, by `rules`
    (`ling3.mesh`). Replicas have devices of their own where the cluster has GPUs or TPUs; on CPUs each has `cpus` cores
    (by default as many as let all replicas run at once), works with as many threads, and `mem_fraction` is the share of
    all together.

    `address` is that of a Ray cluster (`"auto"` for the one of this machine, or `"host:port"`), whose nodes have this
    version of ling3 and the checkpoint under the same path; without it Ray runs on this machine alone, until this
    process ends.

    The constructor returns as soon as one replica can answer. One that dies, or whose node does, loses no answer and
    doubles none: its prompts go to others, and Ray puts another in its place where there is room, on a new node too.

    Raises ValueError where Ray is not installed, and what loading and the engine raise; FleetError for a prompt of
    which replica after replica dies, and where none stays alive.
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
        self._ray = _ray()
        _connect(self._ray, address, replicas * (cpus or 1))
        plan = Plan(source, settings, execution, mesh, rules, replicas, os.getcwd())  # noqa: PTH109
        self._plan = self._ray.put(plan)
        self._actor = self._ray.remote(concurrency_groups={"beside": 2})(Replica).options(
            **_resources(self._ray, replicas, mesh, cpus),
            max_concurrency=min(settings.max_running_requests, 1000) + BATCH,
        )
        self._card: Card | None = None
        self._pending: dict[Any, _Place] = {}
        """What Ray will answer, and whose answer it is."""
        self._warmup: dict[str, bool] | None = None
        self._ids, self._runs, self._running = itertools.count(), itertools.count(), False
        self._places = [_Place(number) for number in range(replicas)]
        for place in self._places:
            self._launch(place)
        while self._card is None:
            self._wait()

    # What an engine has too

    @property
    def settings(self) -> EngineSettings:
        """What each replica runs with, every None replaced by its number."""
        return self._first.settings

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""
        return self._first.intake.room

    @property
    def device_kind(self) -> str:
        """What the replicas run on, as JAX names it."""
        return self._first.facts["device"]

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return self._first.parameters

    @property
    def dtype(self) -> str:
        """Of the model."""
        return self._first.dtype

    @property
    def platform(self) -> str:
        """The replicas' JAX backend."""
        return self._first.platform

    @property
    def fingerprint(self) -> str:
        """A short hash that identifies the model, as `ling3.evals.predictions.fingerprint` gives it."""
        return self._first.facts["weights"]

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
    ) -> list[RequestOutput]:
        """The answers to prompts, in their order, as `Engine.generate` gives them."""
        requests = self._requests(listed(prompts), params, truncate)
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
        """The completions of many requests as they finish, each as one delta, with the index of its prompt.

        The arguments are those of `Engine.stream_all`. Leaving the iterator aborts what is unfinished. One run at a
        time: RuntimeError if there is another.
        """
        requests = self._requests(list(prompts), params, truncate)
        return (
            (i, _delta(output, completion.index))
            for i, output in self._answers(requests)
            for completion in output.outputs
        )

    def warmup(self, first_token: bool = False) -> None:
        """Has every replica compile, as `Engine.warmup` does, before its first batch from now on."""
        self._warmup = {"first_token": first_token}

    def stats(self) -> Stats:
        """The counts of all replicas that can answer now, added up, with the shortest time of compiling."""
        found = []
        for place in self._ready():
            try:
                found.append(self._ray.get(place.actor.stats.options(concurrency_group="beside").remote()))
            except self._ray.exceptions.RayError:
                continue  # it has died, which the next run notes
        return _total(found)

    def processes(self) -> list[Process]:
        """Where the replicas run, without those that wait for room."""
        return [place.process for place in self._places if place.process is not None]

    def close(self) -> None:
        """Ends the replicas."""
        self._pending.clear()
        for place in self._places:
            self._drop(place)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        size = "" if self._card is None else f"{self.parameters:,} parameters, "
        return f"<Fleet: {size}{len(self._ready())} of {len(self._places)} replicas ready>"

    # A run

    def _requests(
        self, prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None, truncate: Truncate
    ) -> list[Request]:
        """The checked requests, with the errors that an engine gives."""
        return self._intake.requests(self._ids, prompts, params, truncate)

    def _answers(self, requests: Sequence[Request]) -> Generator[tuple[int, RequestOutput], None, None]:
        """The answers as they come, each once."""
        if self._running:
            raise RuntimeError("the fleet is at work for another caller: let that finish, or close its iterator")
        self._running, run = True, next(self._runs)
        work = Work(len(requests))
        try:
            while work.left:
                self._hand_out(work, run, requests)
                place, news = self._wait()
                if isinstance(news, self._ray.exceptions.RayError):
                    work.lose(place.number)
                elif isinstance(news, Answer) and work.finish(place.number, news.index):
                    request = requests[news.index]
                    yield (
                        news.index,
                        dataclasses.replace(news.output, request_id=request.request_id, prompt=request.prompt),
                    )
        finally:
            self._running = False
            for place in self._ready():
                place.actor.leave.options(concurrency_group="beside").remote(run)
            self._pending = {ref: each for ref, each in self._pending.items() if isinstance(ref, self._ray.ObjectRef)}

    def _hand_out(self, work: Work, run: int, requests: Sequence[Request]) -> None:
        """Gives every replica that can answer what it has room for, batch by batch in turn."""
        places = self._ready()
        sharers = sum(place.card is not None or place.process is not None for place in self._places)
        while places:
            handed = []
            for place in places:
                batch = work.hand(place.number, self.settings.max_running_requests, sharers)
                if batch:
                    jobs = [_job(i, requests[i]) for i in batch]
                    answers = place.actor.answer.options(num_returns="streaming")
                    self._pending[answers.remote(run, jobs, self._warmup)] = place
                    handed.append(place)
            places = handed

    # Replicas

    @property
    def _first(self) -> Card:
        assert self._card is not None, "the constructor waits for it"
        return self._card

    @functools.cached_property
    def _intake(self) -> Intake:
        return dataclasses.replace(self._first.intake, tokenizer=self.tokenizer)

    def _ready(self) -> list[_Place]:
        return [place for place in self._places if place.card is not None]

    def _launch(self, place: _Place) -> None:
        """Asks Ray for a replica; until there is room for it, it waits."""
        place.actor = self._actor.remote()
        self._pending[place.actor.where.options(concurrency_group="beside").remote()] = place
        self._pending[place.actor.start.remote(self._plan)] = place

    def _drop(self, place: _Place) -> None:
        """Ends what there is of a replica."""
        self._pending = {ref: other for ref, other in self._pending.items() if other is not place}
        if place.actor is not None:
            self._ray.kill(place.actor)
        place.actor = place.process = place.card = None

    def _wait(self) -> tuple[_Place, Any]:
        """The next news: where a replica runs, its card, an answer, the end of a batch (None), or its death's error.

        Raises the error of the last replica if none is left to wait for, and what an engine has raised.
        """
        if all(place.error is not None for place in self._places):
            raise self._places[-1].error or AssertionError
        errors = self._ray.exceptions
        ready, _ = self._ray.wait(list(self._pending), timeout=PATIENCE)
        while not ready:
            self._say_what_is_missing()
            ready, _ = self._ray.wait(list(self._pending), timeout=PATIENCE)
        [coming] = ready
        place = self._pending[coming]
        try:
            if isinstance(coming, self._ray.ObjectRef):
                del self._pending[coming]
                news = self._ray.get(coming)
            else:
                news = self._ray.get(next(coming))
        except StopIteration:
            del self._pending[coming]
            return place, None
        except errors.RayTaskError as error:
            if place.card is not None:
                raise (error.cause or error) from None
            self._give_up(place, error.cause or error)
            return place, None
        except errors.RayError as error:
            self._lost(place, error)
            return place, error
        if isinstance(news, Process):
            place.process = news
        elif isinstance(news, Card):
            self._welcome(place, news)
        return place, news

    def _welcome(self, place: _Place, card: Card) -> None:
        """Takes a replica in, if it is as the others are."""
        self._card = card if self._card is None else self._card
        other = [name for name, fact in self._first.facts.items() if card.facts[name] != fact]
        if not other:
            place.card, place.losses = card, 0
            return
        told = "; ".join(f"{name}: {shown(card.facts[name])}, there {shown(self._first.facts[name])}" for name in other)
        self._give_up(place, FleetError(f"it differs from the first ({told}): its answers would have other bits"))

    def _lost(self, place: _Place, error: Exception) -> None:
        """Puts another replica in the place of one that has died."""
        place.losses += 1
        where = str(place.process or "not yet running")
        logger.warning("replica %d (%s) died; what it had not answered goes to others", place.number, where)
        if place.losses < MOST_LOSSES:
            self._drop(place)
            self._launch(place)
            return
        reason = " ".join(str(error).split())
        self._give_up(place, FleetError(f"it died {place.losses} times before it could answer: {reason}"))

    def _give_up(self, place: _Place, error: Exception) -> None:
        logger.warning("replica %d (%s) is left out: %s", place.number, place.process, error)
        self._drop(place)
        place.error = error

    def _say_what_is_missing(self) -> None:
        if not any(place.process for place in self._places):
            resources = self._ray.available_resources()
            free = {name: resources.get(name, 0) for name in ("CPU", "GPU", "TPU") if name in resources}
            logger.warning("no replica has room: of Ray's cluster only %s are free; waiting for more", free)


def _ray() -> Any:
    """The library; ValueError where it is not installed."""
    for name, value in QUIETLY.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # noqa: PLC0415 -- from an extra
    except ModuleNotFoundError as error:
        raise ValueError("a fleet needs Ray, which is not installed: pip install 'ling3[fleet]'") from error
    return ray


def _connect(ray: Any, address: str | None, cpus: int) -> None:
    """Joins the cluster at `address`, or starts one of this machine that has so many cores at least."""
    if ray.is_initialized():
        return
    own: dict[str, Any] = {"num_cpus": max(cpus, os.cpu_count() or 1), "object_store_memory": OBJECTS}
    ray.init(
        address=address or "local",
        include_dashboard=None if address else False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        **({} if address else own),
    )


def _resources(ray: Any, replicas: int, mesh: tuple[int, int] | None, cpus: int | None) -> dict[str, Any]:
    """What Ray reserves for a replica, and its environment."""
    devices = math.prod(mesh or (1,))
    # What reaches a replica has been checked here.
    unchecked = {"worker_process_setup_hook": "ling3.leave_types_unchecked"}
    environment = {name: value for name, value in os.environ.items() if name.startswith(SAME)}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any("GPU" in node for node in nodes):
        return {"num_gpus": devices, "runtime_env": {"env_vars": environment, **unchecked}}
    if any("TPU" in node for node in nodes):
        return {"resources": {"TPU": devices}, "runtime_env": {"env_vars": environment, **unchecked}}
    cpus = cpus or _cores_each([int(node.get("CPU", 0)) for node in nodes], replicas)
    environment["NPROC"] = str(cpus)  # the threads of XLA's pool
    if mesh is not None:
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    return {"num_cpus": cpus, "runtime_env": {"env_vars": environment, **unchecked}}


def _cores_each(nodes: Sequence[int], replicas: int) -> int:
    """The most cores that so many replicas can each have on nodes of so many."""
    fitting = (cores for cores in range(max(nodes, default=1), 0, -1) if sum(n // cores for n in nodes) >= replicas)
    return next(fitting, 1)


def _job(index: int, request: Request) -> Job:
    """The request for a replica, with a seed: asked again elsewhere, it is answered alike."""
    params = dataclasses.replace(request.params, seed=request.sequences[0].seed)
    return Job(index, request.prompt_ids, params)


def _delta(output: RequestOutput, index: int) -> Delta:
    """A whole completion as one delta."""
    whole = output.outputs[index]
    last = output if index == len(output.outputs) - 1 else None
    return Delta(output.request_id, index, whole.text, whole.token_ids, whole.logprobs, whole.finish_reason, last)


def _total(counts: Sequence[Stats]) -> Stats:
    """The sum of several engines' counts."""
    values = {field.name: [getattr(each, field.name) for each in counts] for field in dataclasses.fields(Stats)}
    finished = sum((Counter(each) for each in values.pop("finished")), Counter())
    page_size, compiling = (min(values.pop(name), default=0) for name in ("page_size", "compile_seconds"))
    totals = {name: sum(each) for name, each in values.items()}
    return Stats(**totals, finished=dict(finished), page_size=page_size, compile_seconds=float(compiling))
