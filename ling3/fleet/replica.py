"""The code of a replica's process: one engine, which may span several devices. It does not depend on Ray."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from ling3 import checkpoint
from ling3.checkpoint import hub
from ling3.engine.intake import Intake
from ling3.engine.outputs import RequestOutput, Stats
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.evals.predictions import fingerprint
from ling3.execution import Execution
from ling3.fleet.work import FleetError
from ling3.mesh import Rules
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.quoting import shown
from ling3.serve import Engine
from ling3.text.tokenizer import Tokenizer, load_tokenizer
from ling3.version import __version__

AXES = ("data", "tensor")
"""The axes of a replica's mesh."""


@runtime_checkable
class Source(Protocol):
    """A source of a model and its tokenizer, which is sent to every replica and loads them there."""

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer that belongs to the model."""
        ...

    def load(self, tokenizer: Tokenizer | None, mesh: Mesh | None, rules: Rules | None) -> CausalLM:
        """Loads the model, which has to fit the tokenizer; with a mesh, sharded over it by the rules."""
        ...


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory, a hub repository at a commit, or `"nano"`."""

    path: str
    dtype: Any
    revision: str | None

    @staticmethod
    def of(path: str | os.PathLike[str], dtype: Any, revision: str | None) -> "Checkpoint":
        """The checkpoint as it is now: a branch is pinned to its last commit."""
        return Checkpoint(os.fspath(path), dtype, hub.pin(path, revision))

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer. Raises FileNotFoundError if there is none."""
        return load_tokenizer(self.path, revision=self.revision)

    def load(self, tokenizer: Tokenizer | None, mesh: Mesh | None, rules: Rules | None) -> CausalLM:
        """Loads the model; with a mesh, only the parts for this process's devices are read."""
        return checkpoint.load(self.path, self.dtype, mesh=mesh, rules=rules, revision=self.revision)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The arguments that all replicas of a fleet share."""

    source: Source
    settings: EngineSettings
    execution: Execution | None
    mesh: tuple[int, int] | None
    """Devices along `AXES`; None for one device."""
    rules: Rules | None
    replicas: int
    directory: str
    """The caller's working directory, for relative paths."""
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The paths of LoRA adapters by their names."""


@dataclasses.dataclass(frozen=True)
class Process:
    """The node and the process in which a replica runs."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclasses.dataclass(frozen=True)
class Card:
    """A replica's message about itself, once it is ready."""

    settings: EngineSettings
    """Its engine's settings, except that `mem_fraction` is the fleet's."""
    intake: Intake
    """Its engine's intake, without the tokenizer."""
    facts: dict[str, Any]
    """Facts that must be equal in all replicas, so that their answers have the same bits."""

    def check_equals(self, first: "Card") -> None:
        """Raises FleetError if a fact of this replica differs from the first replica's."""
        other = [name for name, fact in first.facts.items() if self.facts[name] != fact]
        told = "; ".join(f"{name}: {shown(self.facts[name])}, there {shown(first.facts[name])}" for name in other)
        if other:
            raise FleetError(f"it differs from the first ({told}): its answers would have other bits")


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt of a run, checked and encoded."""

    index: int
    ids: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a prompt of a run."""

    index: int
    output: RequestOutput


class Replica:
    """One engine, called from other processes; each call runs in a different thread."""

    def __init__(self) -> None:
        self._left = -1
        self._warming = threading.Lock()
        self._warm: set[bool] = set()

    def where(self) -> Process:
        """The node and the process of this replica."""
        return Process(socket.gethostname(), os.getpid())

    def start(self, plan: Plan) -> Card:
        """Loads the model and creates the engine."""
        if pathlib.Path(plan.directory).is_dir():
            os.chdir(plan.directory)
        compilation_cache.switch_on()
        tokenizer = plan.source.tokenizer()
        mesh = None if plan.mesh is None else jax.make_mesh(plan.mesh, AXES)
        model = plan.source.load(tokenizer, mesh, plan.rules)
        own = plan.settings
        if jax.default_backend() == "cpu":  # replicas of one host share its memory
            own = dataclasses.replace(own, mem_fraction=own.mem_fraction / plan.replicas)
        self.engine = Engine(model, tokenizer, own, execution=plan.execution, adapters=plan.adapters)
        settings = dataclasses.replace(self.engine.settings, mem_fraction=plan.settings.mem_fraction)
        facts = {
            "version": __version__,
            "weights": fingerprint(model),
            "parameters": model.parameters,
            "dtype": model.dtype.name,
            "platform": jax.default_backend(),
            "device": self.engine.device_kind,
            "settings": dataclasses.replace(settings, num_pages=None),
        }
        return Card(settings, self.engine.intake.portable(), facts)

    def warm(self, first_token: bool) -> None:
        """Compiles the engine's programs, once for each value of `first_token`."""
        with self._warming:
            if first_token not in self._warm:
                self.engine.warmup(first_token)
                self._warm.add(first_token)

    def answer(self, run: int, jobs: Sequence[Job], first_token: bool | None) -> Iterator[Answer]:
        """Yields answers as they finish, until the run is left; first compiles as by `warm`, unless for None."""
        if first_token is not None:
            self.warm(first_token)
        prompts, params = [job.ids for job in jobs], [job.params for job in jobs]
        with contextlib.closing(self.engine.stream_all(prompts, params)) as deltas:
            for i, delta in deltas:
                if run <= self._left:
                    break
                if delta.output is not None:
                    yield Answer(jobs[i].index, delta.output)

    def leave(self, run: int) -> None:
        """Aborts the unfinished requests of this run and of earlier ones."""
        self._left = max(self._left, run)

    def stats(self) -> Stats:
        """The counts of the replica's engine."""
        return self.engine.stats()
