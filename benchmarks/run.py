"""Runs one case: checks every side against its oracle, measures all sides in turns, and makes a record.

Ratios are taken within a round, so that other load on the machine affects both sides; a record has their median, least
and most, and every single measurement.
"""

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import spread, where
from benchmarks.registry import Absent, Case, Setting, Side, Trial, Wrong

Note = Callable[[str], None]


def run(case: Case, setting: Setting, rounds: int | None = None, note: Note = lambda _: None) -> dict[str, Any]:
    """Runs a case and returns its record, plain values for JSON. `note` is called with the current activity.

    `outcome` is "met" or "missed" for a case with goals, "measured" for others; "wrong" if the first side failed its
    check, "failed" if it raised an error, "absent" if it cannot run here.
    """
    record = {"name": case.name, "question": case.question, "scale": setting.scale, **where()}
    note("preparing")
    try:
        trial = case.build(setting)
    except Absent as error:
        return record | {"outcome": "absent", "why": str(error), "sides": []}
    except Exception as error:
        # An error in one case must not lose the results of the others.
        return record | {"outcome": "failed", "why": _told(error), "sides": []}
    checked = [_checked(side, note) for side in trial.sides]
    values = _measured(trial, checked, case.rounds if rounds is None else rounds, note)
    sides = [
        found | {"name": side.name, "x": side.x} | ({"values": spread(values[i])} if values[i] else {})
        for i, (side, found) in enumerate(zip(trial.sides, checked, strict=True))
    ]
    record |= {"unit": trial.unit, "tokens": trial.tokens, "about": dict(trial.about), "sides": sides}
    if trial.published:
        record["published_not_measured_here"] = dict(trial.published)
    if trial.axis is not None:
        record |= {"axis": trial.axis, "lines": _lines(trial, values)}
    else:
        record["times_faster_than"] = _ratios(trial, values)
    return record | _outcome(case, setting, trial, record)


def _checked(side: Side, note: Note) -> dict[str, Any]:
    """The result of a side's `check`, or the reason why the side gets no number."""
    note(f"checking {side.key}")
    try:
        return {"check": side.check()}
    except Wrong as error:
        return {"wrong": str(error)}
    except Absent as error:
        return {"absent": str(error)}
    except Exception as error:
        return {"failed": _told(error)}


def _measured(trial: Trial, checked: list[dict[str, Any]], rounds: int, note: Note) -> list[list[float]]:
    """Each side's measurements, round by round; empty for sides that failed their check or a measurement."""
    values: list[list[float]] = [[] for _ in trial.sides]
    for turn in range(0 if trial.warm else 1, rounds + 1):
        for side, found, seen in zip(trial.sides, checked, values, strict=True):
            if "check" not in found:
                continue
            note(f"round {turn} of {rounds}: {side.key}" if turn else f"warming {side.key}")
            try:
                value = side.measure()
            except Exception as error:
                found |= {"failed": _told(error)}
                del found["check"]
                seen.clear()
                continue
            if turn > 0:
                seen.append(value)
    return values


def _ratios(trial: Trial, values: list[list[float]]) -> dict[str, Any]:
    """Each other side's value divided by the first side's, round by round; left out if the first has a zero."""
    mine, *others = values
    return {
        side.name: spread([y / x for x, y in zip(mine, other, strict=True)])
        for side, other in zip(trial.sides[1:], others, strict=True)
        if mine and other and all(mine)
    }


def _lines(trial: Trial, values: list[list[float]]) -> dict[str, Any]:
    """The line fitted to each sweep's medians, minimising relative errors, beside the predicted one."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(side.name for side in trial.sides):
        points = [
            (side.x, float(np.median(seen)))
            for side, seen in zip(trial.sides, values, strict=True)
            if side.name == name and seen
        ]
        if len(points) < 2:
            continue
        if trial.shares:
            found[name] = {}
            continue
        x, y = np.asarray(points, np.float64).T
        slope, at_0 = np.polyfit(x, y, 1, w=1 / y)
        found[name] = {"slope": float(f"{slope:.4g}"), "at_0": float(f"{at_0:.4g}")}
        if name in trial.predicted:
            found[name]["predicted"] = dataclasses.asdict(trial.predicted[name])
    return found


def _outcome(case: Case, setting: Setting, trial: Trial, record: dict[str, Any]) -> dict[str, Any]:
    """The goals of the case, and whether they are met. There is no verdict at toy sizes or without a peer's number."""
    first = record["sides"][0]
    for kind in ("wrong", "failed", "absent"):
        if kind in first:
            return {"outcome": kind, "why": first[kind]}
    judged = setting.scale == "full" or case.always_measured
    faster = case.wanted
    if isinstance(faster, float | int):
        faster = {trial.sides[1].name: faster}
    wanted = {"times_faster": faster and dict(faster), "at_most": case.limit}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    verdicts = []
    for name, least in (faster or {}).items():
        ratio = record.get("times_faster_than", {}).get(name)
        if ratio is None:
            return {"outcome": "measured", "wanted": wanted, "why": f"{name} has no number"}
        verdicts.append(ratio["median"] >= least)
    if case.limit is not None:
        verdicts.append(first["values"]["median"] <= case.limit)
    outcome = ("met" if all(verdicts) else "missed") if judged and verdicts else "measured"
    return {"outcome": outcome} | ({"wanted": wanted} if wanted else {})


def _told(error: Exception) -> str:
    """An unexpected error and where it was raised, as text."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__} in {place.name}, line {place.lineno} of {place.filename.rpartition('/')[2]}: {error}"
    )
