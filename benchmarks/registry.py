"""What a case of the suite is, and the list of all of them.

A case is a function that gets a `Setting` and gives a `Trial`: sides that are measured in turns. The first side is
ling3's; the others are peers, specifications, or ling3 in another form. Each side has a check against an oracle, and a
side that fails it gets no number. A sweep is a trial whose sides have places `x` on an axis.
"""

import dataclasses
import fnmatch
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax

Scale = Literal["full", "toy"]
T = TypeVar("T")


class Wrong(Exception):
    """A side's answer is not the oracle's: what was compared, how far apart it lies, and what was allowed."""


class Absent(Exception):
    """Something that a case or a side needs is not on this machine: what, and where to get it."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One thing that is measured: less is better, whatever the unit."""

    name: str
    measure: Callable[[], float]
    """One measurement, in the trial's unit."""
    check: Callable[[], str]
    """Holds the side to its oracle: what was found, in words. Raises Wrong."""
    x: float | None = None
    """Its place on the axis of a sweep; sides of one name are then one line."""

    @property
    def key(self) -> str:
        """Its name, with its place in a sweep."""
        return self.name if self.x is None else f"{self.name} @ {self.x:g}"


@dataclasses.dataclass(frozen=True)
class Line:
    """What the points of a sweep are expected to lie on: y = at_0 + slope · x, with the reason."""

    slope: float
    why: str
    at_0: float | None = None


@dataclasses.dataclass
class Trial:
    """The sides of a case, ready to be measured."""

    sides: Sequence[Side]
    unit: str = "ms"
    tokens: int | None = None
    """How many tokens one measurement stands for, for a rate."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes and settings, for the record."""
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What others have published, in the trial's unit, by whose and where: not measured here."""
    axis: str | None = None
    """What `x` is, in a sweep."""
    predicted: Mapping[str, Line] = dataclasses.field(default_factory=dict)
    """For lines of a sweep."""
    shares: bool = False
    """For a sweep: the values are percentages, of which more is better; no line is fitted to them."""
    warm: bool = True
    """Whether every side goes once unmeasured. A fresh process has nothing to warm."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A registered case."""

    name: str
    """group/name"""
    question: str
    build: Callable[["Setting"], Trial]
    wanted: float | Mapping[str, float] | None = None
    """Times faster than the second side, at least; or than the sides of these names."""
    limit: float | None = None
    """The first side's value, at most, in the trial's unit."""
    rounds: int = 5
    always_measured: bool = False
    """Whether toy sizes have numbers worth a verdict too."""

    @property
    def group(self) -> str:
        """The part before the slash."""
        return self.name.partition("/")[0]


CASES: dict[str, Case] = {}


def case(
    name: str, question: str, **facts: Any
) -> Callable[[Callable[["Setting"], Trial]], Callable[["Setting"], Trial]]:
    """Registers the function below it under `group/name`. ValueError for a name that is taken."""

    def register(build: Callable[[Setting], Trial]) -> Callable[[Setting], Trial]:
        if name in CASES:
            raise ValueError(f"there are two cases named {name}: give one of them another name")
        CASES[name] = Case(name, question, build, **facts)
        return build

    return register


def chosen(globs: Sequence[str]) -> list[Case]:
    """The cases whose names match any of the globs, in the order of registration. ValueError for a glob without any."""
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in CASES):
            groups = ", ".join(sorted({f"'{each.group}/*'" for each in CASES.values()}))
            raise ValueError(f"no case is named {glob!r}: --list shows their names; the groups are {groups}")
    return [each for name, each in CASES.items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


class Setting:
    """Where a case runs: at which sizes, on which backend, with which room for scratch files."""

    def __init__(
        self,
        scale: Scale,
        scratch: Path,
        vllm: Path | None = None,
        mlx: Path | None = None,
    ):
        self.scale: Scale = scale
        self.scratch, self.vllm, self.mlx = scratch, vllm, mlx
        self.backend = jax.default_backend()
        self._kept: tuple[Any, Any] | None = None
        self._found: dict[Any, Any] = {}

    def size(self, *, full: T, toy: T) -> T:
        """The one of the two that is for this scale."""
        return full if self.scale == "full" else toy

    @property
    def gpu(self) -> bool:
        """Whether jax runs on one."""
        return self.backend == "gpu"

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` gave for this key the last time, or gives now; what was kept for another key is let go first."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            gc.collect()
            self._kept = key, make()
        return self._kept[1]

    def once(self, key: Any, find: Callable[[], T]) -> T:
        """What `find` found for this key, found once; an error is found again."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


def milliseconds(run: Callable[[], Any], calls: int = 1) -> Callable[[], float]:
    """Measures milliseconds per call of `run`, `calls` of them sent off one after the other and then awaited."""

    def measure() -> float:
        result, begin = None, time.perf_counter()
        for _ in range(calls):
            result = run()
        await_arrays(result)
        return 1e3 * (time.perf_counter() - begin) / calls

    return measure


def await_arrays(result: Any) -> None:
    """Waits for what jax or torch still computes."""
    jax.block_until_ready(result)
    leaves = jax.tree.leaves(result)
    if leaves and type(leaves[0]).__module__.split(".")[0] == "torch" and leaves[0].is_cuda:
        import torch  # noqa: PLC0415 -- only where it is used already

        torch.cuda.synchronize()
