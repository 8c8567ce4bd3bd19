"""`ling3 ablate`: a table of what each mechanism of a model is worth to it."""

import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from ling3.cli.options import (
    Dtype,
    FileOption,
    Model,
    Weights,
    WeightsOptions,
    check_directory,
    introduce,
    load,
    read_text,
)
from ling3.cli.terminal import print_json

if TYPE_CHECKING:
    from ling3.interpret.ablation_report import Row

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablate:
    """Cut mechanisms out of a model one at a time, and ask what is left.

    Measured are the perplexity of solutions, word problems of the kind that nano knows, asked alone, and the same at
    the end of a long context.

    ling3 ablate nano --suite gates --plot gates.png
    """

    model: Model
    """A checkpoint directory, a hub id, or "nano" for the checkpoint in the package."""
    suite: Literal["gates", "decay", "memory", "layers", "experts", "all"] = "all"
    """Output gates; KDA's decay; beta, convolutions and RoPE; attention layer by layer; experts; or all of them."""
    questions: int = 200
    """Held-out word problems to ask alone."""
    recalls: int = 50
    """How many of them to ask once more in a long context."""
    examples: int = 20
    """Worked examples that make up this context."""
    text: FileOption = None
    """Measure the perplexity of this text (UTF-8; - for standard input), instead of solutions."""
    dtype: Dtype = "float32"
    """The matrices' type; auto is as stored, and bfloat16 for random weights."""
    weights: WeightsOptions = dataclasses.field(default_factory=Weights)
    json: FileOption = None
    """Write the numbers there as JSON; - prints them instead of the table."""
    plot: FileOption = None
    """Draw the table there (PNG, PDF or SVG)."""
    debug: bool = False
    """Show the traceback of an error, and check the types of what functions are given."""


def run(command: Ablate) -> None:
    """Measures, and prints the table."""
    from ling3.bench.report import check_plot
    from ling3.interpret.ablate import inventory
    from ling3.interpret.ablations import ablations, compare

    _check(command)
    if command.plot is not None:
        check_plot(command.plot)
    text = None if command.text is None else read_text(command.text)
    console = Console(stderr=True)
    source = command.weights.of(command.model)
    tokenizer = source.tokenizer()
    model = load(source, command.dtype, tokenizer)
    introduce(source, model, console)
    chosen = ablations(model, command.suite)
    if not chosen:
        raise ValueError(f"--suite {command.suite}: nothing that can be cut; what can be: {inventory(model)}")
    report = compare(
        model,
        tokenizer,
        chosen,
        questions=command.questions,
        recalls=command.recalls,
        examples=command.examples,
        text=text,
        report=lambda row: console.print(_line(row), highlight=False, markup=False, soft_wrap=True),
    )
    settings = {name: getattr(command, name) for name in ("suite", "questions", "recalls", "examples", "text", "dtype")}
    report = dataclasses.replace(report, about={"model": command.model, "settings": settings})
    if command.json == "-":
        print_json(report.to_dict(), indent=1)
    else:
        # Rich would leave out columns where there is no room for them.
        Console(width=max(120, Console().width)).print(report)
    if command.json not in (None, "-"):
        numbers = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
        pathlib.Path(command.json).write_text(numbers + "\n", encoding="utf-8")
    if command.plot is not None:
        report.plot(command.plot)


def _line(row: "Row") -> str:
    """A row as it is measured: what an interrupted run leaves on the screen."""
    scores = [f"{score.right}/{score.total}" for score in (row.problems, row.recall) if score is not None]
    return f"{row.name}: perplexity {row.perplexity:.5g}, right {' and '.join(scores)}"


def _check(command: Ablate) -> None:
    """Before any work: ValueError for what would fail after it."""
    for name, least in (("questions", 1), ("recalls", 0), ("examples", 0)):
        value = getattr(command, name)
        if value < least:
            raise ValueError(f"--{name} is {value}, expected a whole number >= {least}")
    if command.recalls > command.questions:
        raise ValueError(f"--recalls is {command.recalls}, expected at most --questions, which is {command.questions}")
    if command.json not in (None, "-"):
        check_directory("--json", command.json)
        if command.plot is not None and pathlib.Path(command.plot).absolute() == pathlib.Path(command.json).absolute():
            raise ValueError(f"--json and --plot name the same file, {command.json}: give two")
