"""`ling3 ablate`: a table of what each mechanism contributes to a model."""

import dataclasses
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from ling3.cli.files import Output, read_text
from ling3.cli.loading import Precise
from ling3.cli.options import Command, FileOption, NamesOption

if TYPE_CHECKING:
    from ling3.evals.ablations import AblationRow
    from ling3.evals.skill_table import SkillRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablate(Command):
    """Cut mechanisms out of a model one at a time, and measure what is left.

    The measures are the perplexity of solutions, and right answers to word problems of the kind that nano knows, alone
    and at the end of a long context.

    ling3 ablate nano --suite gates --plot gates.png
    """

    common: Precise
    suite: Literal["gates", "decay", "memory", "layers", "experts", "all"] = "all"
    """What to cut: output gates; KDA's decay; beta, convolutions and RoPE; attention layer by layer; experts; or
    all."""
    questions: int = 200
    """How many held-out word problems to ask alone."""
    recalls: int = 50
    """How many of them to ask again in a long context."""
    examples: int = 20
    """How many worked examples make up this context."""
    skills: NamesOption = None
    """Instead, test these skills of nano on held-out texts, a column each: comma-separated names, or all."""
    text: FileOption = None
    """Measure the perplexity of this text instead of solutions (UTF-8; - for standard input)."""
    output: Output


def run(command: Ablate) -> None:
    """Measures the ablations and prints their table."""
    from ling3.evals.ablations import ablations, compare
    from ling3.interpret.ablate import inventory

    _check(command)
    text = None if command.text is None else read_text(command.text)
    console = Console(stderr=True)
    source = command.common.source(command.model)
    tokenizer = source.tokenizer()
    model = source.load(tokenizer)
    source.introduce(model, console)
    chosen = ablations(model, command.suite)
    if not chosen:
        raise ValueError(f"--suite {command.suite}: nothing that can be cut; what can be: {inventory(model)}")
    settings = {
        name: getattr(command, name) for name in ("suite", "questions", "recalls", "examples", "text", "skills")
    }
    about = {"model": source.name, "settings": {**settings, "dtype": source.dtype}}
    if command.skills is not None:
        from ling3.evals.skill_table import compare_skills

        table = compare_skills(
            model,
            tokenizer,
            chosen,
            _names(command.skills),
            questions=command.questions,
            report=lambda row: console.print(_cells(row), highlight=False, markup=False, soft_wrap=True),
        )
        command.output.write(dataclasses.replace(table, about=about), 160)
        return
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
    command.output.write(dataclasses.replace(report, about=about), 120)


def _line(row: "AblationRow") -> str:
    """A row of the table, printed as soon as it is measured."""
    scores = [f"{score.right}/{score.total}" for score in (row.problems, row.recall) if score is not None]
    return f"{row.name}: perplexity {row.perplexity:.5g}, right {' and '.join(scores)}"


def _cells(row: "SkillRow") -> str:
    """A row of the table of skills, printed as soon as it is measured."""
    return f"{row.name}: " + ", ".join(f"{name} {score.right}/{score.total}" for name, score in row.scores.items())


def _names(skills: str) -> list[str]:
    """The names of the skills in the option."""
    from ling3.train.nano.skills import SKILLS

    return list(SKILLS) if skills == "all" else skills.split(",")


def _check(command: Ablate) -> None:
    """Raises ValueError for invalid options, before any work."""
    for name, least in (("questions", 1), ("recalls", 0), ("examples", 0)):
        value = getattr(command, name)
        if value < least:
            raise ValueError(f"--{name} is {value}, expected a whole number >= {least}")
    if command.recalls > command.questions:
        raise ValueError(f"--recalls is {command.recalls}, expected at most --questions, which is {command.questions}")
    if command.skills is not None:
        from ling3.evals.skills import check_skills

        if command.text is not None:
            raise ValueError("--text is for the perplexity, which --skills leaves out: give one of them")
        check_skills(_names(command.skills))
    command.output.check()
