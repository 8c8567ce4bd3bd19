"""Reports of the suite: a table in the terminal, and a JSON file and a plot for each group.

A group's JSON holds the newest record of each of its cases, each with the command, time, machine and versions of its
measurement, because the cases of a group may be measured separately.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.plots import draw, times_faster
from benchmarks.record import save

STYLES = {"met": "green", "missed": "yellow", "wrong": "bold red", "failed": "bold red", "absent": "dim"}
Record = dict[str, Any]


def keep(out: Path, record: Record) -> None:
    """Writes the record into its group's JSON, in place of an older one of the same case, and redraws the plot."""
    group = record["name"].partition("/")[0]
    records = read(out / f"{group}.json") | {record["name"]: record}
    save(out / f"{group}.json", records)
    draw(list(records.values())).savefig(out / f"{group}.png", dpi=150)


def read(path: Path) -> dict[str, Record]:
    """The records of a group by name; empty if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def table(records: Sequence[Record]) -> Table:
    """A table with a row for each side of a case, each line of a sweep, and each published value."""
    found = Table("case", "side", "median (least to most)", "tokens/s", "× faster is the first", "wanted", "check")
    for column in found.columns[2:6]:
        column.justify = "right"
    for record in records:
        found.add_section()
        outcome = f"[{STYLES.get(record['outcome'], 'default')}]{record['outcome']}[/]"
        rows = [*_rows(record)] or [("", "", "", "", escape(record["why"]))]
        for i, (side, value, rate, ratio, check) in enumerate(rows):
            case, hoped = (f"{record['name']}\n{outcome}", wanted(record)) if i == 0 else ("", "")
            found.add_row(case, escape(side), value, rate, ratio, hoped, check)
    return found


def wanted(record: Record) -> str:
    """The goals of a case, in words."""
    words = [f"≥ {least:.2f} ×" for least in times_faster(record).values()]
    limit = record.get("wanted", {}).get("at_most")
    return "\n".join([*words, *([] if limit is None else [f"≤ {limit:g} {record.get('unit', '')}"])])


def spread_text(values: dict[str, Any], unit: str = "") -> str:
    """A median with least and most, as text."""
    return f"{values['median']:,.4g} ({values['least']:,.4g} to {values['most']:,.4g}){unit and ' ' + unit}"


def why_no_number(side: Record) -> str:
    """Why a side has no number, or else what its check found."""
    for kind in ("wrong", "failed", "absent"):
        if kind in side:
            return f"{kind}: {side[kind]}"
    return side["check"]


def _rows(record: Record) -> Iterator[tuple[str, str, str, str, str]]:
    if "axis" in record:
        yield from _line_rows(record)
    else:
        for side in record["sides"]:
            values, ratios = side.get("values"), record["times_faster_than"]
            shown = spread_text(values, record["unit"]) if values else "no number"
            rate = f"{_per_second(record, values['median']):,.5g}" if values and record["tokens"] else ""
            ratio = spread_text(ratios[side["name"]]) if side["name"] in ratios else ""
            yield side["name"], shown, rate, ratio, escape(why_no_number(side))
    for whose, value in record.get("published_not_measured_here", {}).items():
        yield f"published, not measured here: {whose}", f"{value:g} {record['unit']}", "", "", ""


def _line_rows(record: Record) -> Iterator[tuple[str, str, str, str, str]]:
    """The first and last point of each line, and its slope beside the predicted one; for shares, every point."""
    for name in dict.fromkeys(side["name"] for side in record["sides"]):
        points = [side for side in record["sides"] if side["name"] == name]
        seen = [point for point in points if "values" in point]
        wrong = [why_no_number(point) for point in points if "values" not in point]
        line = record["lines"].get(name)
        told = seen if line == {} else seen[:1] + seen[1:][-1:]  # shares have no line between their ends
        ends = [f"{p['values']['median']:,.4g} {record['unit']} at {p['x']:,.6g}" for p in told]
        slope = ""
        if line:
            slope = f"slope {line['slope']:.3g}"
            if "predicted" in line:
                slope += f"\npredicted {line['predicted']['slope']:.3g}"
        check = wrong[0] if wrong else points[0]["check"]
        yield f"{name}, against {record['axis']}", "\n".join(ends) or "no number", "", slope, escape(check)


def _per_second(record: Record, value: float) -> float:
    return record["tokens"] / value * {"s": 1, "ms": 1e3}[record["unit"]]
