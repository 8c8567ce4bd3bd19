"""The picture of a group: how many times faster than whom, values beside their limits, and the lines of its sweeps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ling3.runtime.plots import BLACK, BLUE, GREEN, RED, SKY

LOOKS = ((BLACK, "o", "-"), (RED, "s", "--"), (BLUE, "^", ":"), (GREEN, "D", "-."))
ROW, SWEEP = 0.34, 3.6
"""Inches of a bar and of a sweep's panel."""
Record = dict[str, Any]


def draw(records: Sequence[Record]) -> Figure:
    """One panel of ratios, one of values without a peer, and one for each sweep; what has no number says so."""
    sweeps = [record for record in records if record.get("lines")]
    ratios = [record for record in records if record.get("times_faster_than")]
    lone = [record for record in records if _first(record) and record not in ratios and record not in sweeps]
    panels = [(_ratios, [ratios], ROW * sum(len(r["times_faster_than"]) for r in ratios))] if ratios else []
    panels += [(_values, [lone], ROW * len(lone))] if lone else []
    panels += [(_sweep, [sweep], SWEEP) for sweep in sweeps]
    if not panels:
        figure = Figure(figsize=(8, 1.5))
        figure.text(0.5, 0.5, "no case of this group has a number", ha="center")
        return figure
    heights = [height + 0.8 for _, _, height in panels]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(len(panels), 1, height_ratios=heights))
    for one, (panel, arguments, _) in zip(axes, panels, strict=True):
        panel(one, *arguments)
    if any(record["scale"] == "toy" and record["outcome"] == "measured" for record in records):
        figure.suptitle("toy sizes: that it runs, and nothing about speed", fontsize=9, color=RED)
    else:
        figure.suptitle(_title(records), fontsize=10)
    return figure


def _title(records: Sequence[Record]) -> str:
    """The group, and the machines that it was measured on."""
    machines = dict.fromkeys(_machine(record["machine"]) for record in records if record["sides"])
    return f"{records[0]['name'].partition('/')[0]}, on {'; '.join(machines)}"


def _machine(machine: Record) -> str:
    return machine["device"] if machine["backend"] != "cpu" else f"{machine['cpu']}, {machine['cores']} cores"


def _first(record: Record) -> dict[str, Any] | None:
    """The values of the first side."""
    return record["sides"][0].get("values") if record["sides"] else None


def times_faster(record: Record) -> dict[str, float]:
    """How many times faster than each of these sides the first one should be. Older records name none: the second."""
    wanted = record.get("wanted", {}).get("times_faster", {})
    return wanted if isinstance(wanted, dict) else {record["sides"][1]["name"]: wanted}


def _ratios(axes: Axes, records: Sequence[Record]) -> None:
    """How many times the first side's value each other's is: the median, the rounds, and a mark for what is wanted.

    Points and no bars: on a logarithmic scale a bar's length means nothing.
    """
    names, row = [], 0
    for record in records:
        wanted = times_faster(record)
        for i, (name, ratio) in enumerate(record["times_faster_than"].items()):
            axes.plot(ratio["all"], [row] * len(ratio["all"]), "-o", color="0.6", markersize=2.5, linewidth=1)
            axes.plot(ratio["median"], row, "o", color=BLUE if i == 0 else SKY, markersize=6)
            axes.text(max(ratio["all"]), row, f"  {ratio['median']:.2f} ×", va="center", fontsize=8)
            if name in wanted:
                axes.plot([wanted[name]] * 2, [row - 0.4, row + 0.4], color=RED, linewidth=2)
            unit = "" if _is_time(record) else f", {record['unit']}"
            names.append(f"{record['name']} against {name}{unit}")
            row += 1
    most = max(ratio["most"] for record in records for ratio in record["times_faster_than"].values())
    most = max(most, *(least for record in records for least in times_faster(record).values()), 0)
    if most > 10:
        axes.set_xscale("log")
        axes.set_xlim(right=3 * most)
        axes.xaxis.set_major_formatter(_plain)
    else:
        axes.set_xlim(0, 1.15 * most)
    axes.axvline(1, color=BLACK, linestyle="--", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(row), names, fontsize=7.5)
    axes.invert_yaxis()
    what = "time" if all(map(_is_time, records)) else "time, or what is named,"
    axes.set_xlabel(f"the other's {what} over ling3's: more is better (grey: rounds; red: wanted)", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _values(axes: Axes, records: Sequence[Record]) -> None:
    """Bars of the values that have a limit, as shares of it; of others the value alone."""
    shares = [0.0]
    for row, record in enumerate(records):
        values, limit = _first(record) or {}, record.get("wanted", {}).get("at_most")
        share = 100 * values["median"] / limit if limit else 0.0
        shares.append(share)
        axes.barh(row, share, height=0.6, color=BLUE)
        told = f"  {values['median']:,.4g} {record['unit']}" + (f", at most {limit:g} wanted" if limit else "")
        axes.text(share, row, told, va="center", fontsize=8, backgroundcolor="white", zorder=0.9)
    if any(shares):
        axes.axvline(100, color=RED, linestyle="--", linewidth=1, zorder=0.5)
        axes.set_xlabel("% of the limit", fontsize=8)
    else:
        axes.set_xticks([])
    axes.set_xlim(0, 1.6 * max(100.0, *shares))
    axes.set_yticks(range(len(records)), [record["name"] for record in records], fontsize=7.5)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def _sweep(axes: Axes, record: Record) -> None:
    """Medians with least and most; where a line was predicted, the fitted one, and in grey the predicted one.

    Shares, which have no line, are drawn from 0 to 100.
    """
    for (name, line), (colour, marker, dashes) in zip(record["lines"].items(), LOOKS, strict=False):
        points = [side for side in record["sides"] if side["name"] == name and "values" in side]
        x = np.asarray([point["x"] for point in points], np.float64)
        medians, least, most = (
            np.asarray([point["values"][key] for point in points]) for key in ("median", "least", "most")
        )
        label, y = name, medians
        if "predicted" in line:
            predicted = line["predicted"]
            start = line["at_0"] if line["at_0"] > 0.01 * medians.min() else 0.0
            label += f": {_plain(start)} {record['unit']}, {_slope(line['slope'], x, line['at_0'])}"
            label += f" (predicted: {_slope(predicted['slope'], x, line['at_0'])})"
            start = line["at_0"] if predicted["at_0"] is None else predicted["at_0"]
            axes.plot(x, start + predicted["slope"] * x, color="0.8", linewidth=4, zorder=0)
            y = line["at_0"] + line["slope"] * x
        axes.plot(x, y, dashes, color=colour, linewidth=1.2)
        axes.errorbar(x, medians, (medians - least, most - medians), fmt=marker, color=colour, ms=4, lw=1, label=label)
    axes.set_xscale("log", base=2)
    shares = not any(record["lines"].values())
    if shares:
        axes.set_ylim(0, 105)
        axes.set_xticks(sorted({side["x"] for side in record["sides"]}))
        axes.minorticks_off()
    else:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.45)  # room for the legend
        axes.yaxis.set_minor_formatter(NullFormatter() if np.ptp(np.log10(axes.get_ylim())) > 1 else _plain)
    axes.xaxis.set_major_formatter(_plain)
    axes.yaxis.set_major_formatter(_plain)
    axes.set_xlabel(record["axis"], fontsize=8)
    axes.set_ylabel(record["unit"], fontsize=8)
    told = "" if shares else " (dots: median, least and most; grey: predicted)"
    axes.set_title(f"{record['name']}{told}", fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7.5, loc="lower right" if shares else "upper left")


def _is_time(record: Record) -> bool:
    """True if a record's values are times, of which less is faster."""
    return record["unit"].split(" ")[0].split("/")[0] in ("s", "ms", "µs", "ns")


def _slope(slope: float, x: Float[np.ndarray, " points"], at_0: float) -> str:
    """A line's growth over all points, in words and per thousand of the axis."""
    if abs(slope) * (x.max() - x.min()) < 0.01 * abs(at_0):
        return "flat"
    return f"{'-' if slope < 0 else '+'}{_plain(1000 * abs(slope))} for each 1,000"


def _plain(value: float, _: int | None = None) -> str:
    """A tick's number as it is written."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
