"""Reports the form, kernel or plain, in which each operator of a model runs, and why: `ling3 inspect --kernels`."""

import collections
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ling3.cache import map_slots
from ling3.engine.pool import cache_dtype
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.ops.forms import LOG, RUNS

CALLS = {"decode": (16, 1), "prefill": (1, 512)}
"""The calls that are traced, with the rows and tokens of an engine's calls by default."""


@dataclasses.dataclass(frozen=True)
class FormRow:
    """How often an operator of one call runs in a form, and why: it runs a kernel, or a kernel did not suit it."""

    operator: str
    call: str
    form: str
    why: str
    times: int


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """The forms of a model's operators under an `Execution`; `print` it with rich, or take `to_dict()`."""

    source: str
    rows: tuple[FormRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        return dataclasses.asdict(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        table = Table("operator", "call", "form", "why", "times", box=None, padding=(0, 2, 0, 0))
        for row in self.rows:
            table.add_row(row.operator, row.call, row.form, row.why, str(row.times or ""))
        yield Text(f"{self.source}: {', '.join(f'{name} of {b} x {n}' for name, (b, n) in CALLS.items())}\n")
        yield table


class _Noting(logging.Handler):
    """Counts the (operator, reason) pairs that `ling3.ops.forms` logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: collections.Counter[tuple[str, str]] = collections.Counter()

    def emit(self, record: logging.LogRecord) -> None:
        operator, why = record.args or ("", "")
        self.seen[str(operator), str(why)] += 1


def report(source: str, model: CausalLM, execution: Execution | None = None) -> KernelReport:
    """Reports the forms in which a model's operators run, by default on this machine.

    The calls are only traced, and no weight is read. C++ kernels are compiled for this if they are not yet.
    """
    execution = Execution.default() if execution is None else execution
    forms = {name: form for name, form in vars(execution).items() if callable(form)}
    rows = [
        FormRow(operator, call, _place(forms[operator]) if why == RUNS else "plain", why, times)
        for call, (batch, tokens) in CALLS.items()
        for (operator, why), times in sorted(_logged(model, execution, batch, tokens).items())
    ]
    silent = sorted(forms.keys() - {row.operator for row in rows})
    rows += [FormRow(name, "", _place(forms[name]), "has no other form here, or is not called", 0) for name in silent]
    return KernelReport(source, tuple(sorted(rows, key=lambda row: row.operator)))


def _logged(model: CausalLM, execution: Execution, batch: int, tokens: int) -> collections.Counter[tuple[str, str]]:
    def call(model: CausalLM) -> Any:
        rows = jnp.zeros(batch, jnp.int32)
        cache = model.init_cache(batch, tokens + 1, cache_dtype(model))
        layers = map_slots(lambda x: execution.take_rows(x, rows), cache.layers)
        cache = dataclasses.replace(cache, layers=layers)
        logits, _ = model.step(jnp.zeros((batch, tokens), jnp.int32), cache, rows, execution=execution)
        keys = jax.vmap(jax.random.key)(rows)
        some = jnp.ones(batch, jnp.float32)
        token = execution.draw(logits[:, -1], rows == 0, keys, some, rows, some, some)
        return token, execution.likeliest(logits[:, -1], rows == 0)

    noting, level = _Noting(), LOG.level
    LOG.addHandler(noting)
    LOG.setLevel(logging.DEBUG)
    try:
        jax.eval_shape(call, model)
    finally:
        LOG.setLevel(level)
        LOG.removeHandler(noting)
    return noting.seen


def _place(form: Any) -> str:
    """`cpu.kda` for a form in `ling3.ops.cpu.kda`, `plain` for a form directly in `ling3.ops`."""
    name = str(getattr(form, "__module__", type(form).__name__)).removeprefix("ling3.ops.")
    return name if "." in name else "plain"
