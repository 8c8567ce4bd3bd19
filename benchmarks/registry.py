"""The structure of a benchmark case, and the list of all cases.

A case is a function from a `Setting` to a `Trial`, whose sides are measured in turns. The first side is ling3's; the
others are peers, specifications, or ling3 in another form. Each side is checked against an oracle, and a side that
fails gets no number. A sweep is a trial whose sides have places `x` on an axis.
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
    """A side's answer is not the oracle's. The message says what was compared, how it differs, and what was allowed."""


class Absent(Exception):
    """Something that a case or a side needs is not on this machine. The message says what, and where to get it."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One thing that is measured. Less is better, except in a trial of `shares`."""

    name: str
    measure: Callable[[], float]
    """Makes one measurement, in the trial's unit."""
    check: Callable[[], str]
    """Checks the side against its oracle and returns the finding in words. Raises Wrong."""
    x: float | None = None
    """Its place on the axis of a sweep; the sides of one name form a line."""

    @property
    def key(self) -> str:
        """Its name, with its place in a sweep."""
        return self.name if self.x is None else f"{self.name} @ {self.x:g}"


@dataclasses.dataclass(frozen=True)
class Line:
    """The line on which the points of a sweep are expected: y = at_0 + slope · x, with the reason."""

    slope: float
    why: str
    at_0: float | None = None


@dataclasses.dataclass
class Trial:
    """The sides of a case, ready to be measured."""

    sides: Sequence[Side]
    unit: str = "ms"
    tokens: int | None = None
    """Tokens of one measurement, from which a rate is computed."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Sizes and settings, for the record."""
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Published values in the trial's unit, by author and conditions; they are not measured here."""
    axis: str | None = None
    """The meaning of `x` in a sweep; None for other trials."""
    predicted: Mapping[str, Line] = dataclasses.field(default_factory=dict)
    """Predicted lines of a sweep, by the name of their sides."""
    shares: bool = False
    """True for a sweep of percentages, of which more is better; no line is fitted to them."""
    warm: bool = True
    """Whether every side first runs once unmeasured. A fresh process has nothing to warm up."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A registered case of the suite."""

    name: str
    """group/name"""
    question: str
    build: Callable[["Setting"], Trial]
    wanted: float | Mapping[str, float] | None = None
    """How many times faster than the second side, or than the sides of these names, the first should be at least."""
    limit: float | None = None
    """The largest value that the first side should have, in the trial's unit."""
    rounds: int = 5
    always_measured: bool = False
    """Whether toy sizes get a verdict too."""

    @property
    def group(self) -> str:
        """The part before the slash."""
        return self.name.partition("/")[0]


CASES: dict[str, Case] = {}


def case(
    name: str, question: str, **facts: Any
) -> Callable[[Callable[["Setting"], Trial]], Callable[["Setting"], Trial]]:
    """Registers the decorated function as `group/name`. Raises ValueError for a name that is taken."""

    def register(build: Callable[[Setting], Trial]) -> Callable[[Setting], Trial]:
        if name in CASES:
            raise ValueError(f"there are two cases named {name}: give one of them another name")
        CASES[name] = Case(name, question, build, **facts)
        return build

    return register


def chosen(globs: Sequence[str]) -> list[Case]:
    """The cases whose names match a glob, in order of registration. Raises ValueError for a glob without a match."""
    for glob in globs:
        if not any(fnmatch.fnmatchcase(name, glob) for name in CASES):
            groups = ", ".join(sorted({f"'{each.group}/*'" for each in CASES.values()}))
            raise ValueError(f"no case is named {glob!r}: --list shows their names; the groups are {groups}")
    return [each for name, each in CASES.items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


class Setting:
    """The setting of a run: the scale, the backend, a directory for scratch files, and the peers' environments."""

    def __init__(
        self,
        scale: Scale,
        scratch: Path,
        vllm: Path | None = None,
        mlx: Path | None = None,
        llama_cpp: Path | None = None,
    ):
        self.scale: Scale = scale
        self.scratch, self.vllm, self.mlx, self.llama_cpp = scratch, vllm, mlx, llama_cpp
        self.backend = jax.default_backend()
        self._kept: tuple[Any, Any] | None = None
        self._found: dict[Any, Any] = {}

    def size(self, *, full: T, toy: T) -> T:
        """Returns `full` or `toy`, depending on the scale."""
        return full if self.scale == "full" else toy

    @property
    def gpu(self) -> bool:
        """Whether jax runs on a GPU here."""
        return self.backend == "gpu"

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """The cached result of `make` for this key. Only one key is cached: another's result is freed first."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            gc.collect()
            self._kept = key, make()
        return self._kept[1]

    def once(self, key: Any, find: Callable[[], T]) -> T:
        """The cached result of `find` for this key; if it raised an error, it is called again."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]


def milliseconds(run: Callable[[], Any], calls: int = 1) -> Callable[[], float]:
    """A function that measures milliseconds per call of `run`: `calls` are dispatched, and then the last is awaited."""

    def measure() -> float:
        result, begin = None, time.perf_counter()
        for _ in range(calls):
            result = run()
        await_arrays(result)
        return 1e3 * (time.perf_counter() - begin) / calls

    return measure


def await_arrays(result: Any) -> None:
    """Waits until jax or torch has computed `result`."""
    jax.block_until_ready(result)
    leaves = jax.tree.leaves(result)
    if leaves and type(leaves[0]).__module__.split(".")[0] == "torch" and leaves[0].is_cuda:
        import torch  # noqa: PLC0415 -- only where it is used already

        torch.cuda.synchronize()
