"""Writes the tables of docs/mesh.md: `python docs/plan.py` compiles the published models for 16 devices.

`python docs/plan.py --from-json` only writes docs/plan.json's numbers into the page.
"""

import json
import pathlib
import runpy
import subprocess
import sys
import tempfile
from typing import Any

HERE = pathlib.Path(__file__).parent
PAGE, NUMBERS = HERE / "mesh.md", HERE / "plan.json"
BEGIN, END = "<!-- by docs/plan.py -->", "<!-- to here -->"


def megabytes(size: float) -> str:
    """A size in MB, with two digits at least."""
    return f"{size / 1e6:,.0f}" if size >= 1e8 else f"{size / 1e6:,.1f}" if size >= 1e6 else f"{size / 1e6:.2f}"


def rows(plan: dict[str, Any]) -> dict[str, str]:
    """One model's column of the first table."""
    devices = plan["sizes"]["data"]
    found = {
        "Weights, MB": megabytes(plan["weights"]),
        "… of them in matrices that every device has whole": megabytes(plan["whole"]),
        "KDA states and tails of 64 requests, MB": megabytes(plan["slots"]),
        "MLA latents of 64 requests of 8,192 tokens, MB": megabytes(plan["pages"]),
        "Logit biases and token counts of 64 requests, MB": megabytes(plan["adjustments"]),
    }
    for program, name in zip(plan["programs"], ("Decode step", "Prefill call"), strict=True):
        sent, count = program["sent"], sum(each["times"] for each in program["collectives"])
        found |= {
            f"{name}: collectives": str(count),
            f"{name}: sent by a device, MB": megabytes(sent),
            f"{name}: … for each token": megabytes(sent * devices / program["tokens"]),
            f"{name}: … for each layer": megabytes(sent / plan["layers"]),
            f"{name}: temporaries by XLA for CPUs, MB": megabytes(program["compiled"]["temporaries"]),
        }
        for chip, seconds in program["least_seconds"].items():
            parts = " + ".join(
                f"{1e3 * part:.2f}" for part in (max(seconds["memory"], seconds["products"]), seconds["links"])
            )
            found[f"{name}: at least, on {chip}, ms"] = f"{1e3 * seconds['all']:.2f} = {parts}"
    return found


def collectives(plan: dict[str, Any]) -> list[str]:
    """A model's table of what devices exchange in a decode step."""
    lines = ["| Collective | of | result | times | sent by a device, MB |", "|---|---|---|---:|---:|"]
    for each in plan["programs"][0]["collectives"]:
        sent = megabytes(each["times"] * each["sent"])
        lines.append(f"| {each['kind']} | `{each['source']}` | `{each['result']}` | {each['times']} | {sent} |")
    return lines


def tables(plans: dict[str, dict[str, Any]]) -> str:
    """The page's part that is made from numbers."""
    columns = {name: rows(plan) for name, plan in plans.items()}
    lines = [f"| On each of 16 devices, TP 16 | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in next(iter(columns.values())):
        lines.append(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")
    for name, plan in plans.items():
        lines += ["", f"What the devices of {name} exchange in a decode step of 64 requests:", "", *collectives(plan)]
    return "\n".join(lines)


def written(page: str, plans: dict[str, dict[str, Any]]) -> str:
    """The page with these numbers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(plans)}\n\n{END}{rest.partition(END)[2]}"


def configs() -> dict[str, dict[str, Any]]:
    """The published configurations."""
    found = runpy.run_path(str(HERE.parent / "tests" / "support" / "published_configs.py"))
    return {"Ling-3.0-tiny": found["TINY"], "Ling-3.0-flash": found["FLASH"]}


def main() -> None:
    """Compiles, or reads what was compiled, and writes the page."""
    if "--from-json" not in sys.argv:
        plans = {}
        with tempfile.TemporaryDirectory() as directory:
            for name, config in configs().items():
                path = pathlib.Path(directory, "config.json")
                path.write_text(json.dumps(config))
                command = [sys.executable, "-m", "ling3", "inspect", str(path), "--tp", "16", "--plan", "--json"]
                plans[name] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        NUMBERS.write_text(json.dumps(plans, indent=1) + "\n")
    page = written(PAGE.read_text(encoding="utf-8"), json.loads(NUMBERS.read_text()))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
