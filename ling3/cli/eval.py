"""`ling3 eval`: accuracy on questions, and perplexity on a text."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from ling3.cli.devices import Machines
from ling3.cli.files import check_directory, read_text
from ling3.cli.loading import Loading
from ling3.cli.options import Command, FileOption, Guessing, NamesOption, Sampling, Thinking, WholeNumber
from ling3.cli.serving import Serving
from ling3.cli.terminal import print_json

if TYPE_CHECKING:
    from ling3.evals.answers import Parser
    from ling3.evals.prompts import Question
    from ling3.evals.run import Score
    from ling3.model import CausalLM
    from ling3.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking(Command):
    """Options that both benchmarks of questions share."""

    common: Serving
    devices: Machines
    prompts: FileOption = None
    """Complete prompts: a JSON list of {"prompt": …, "answer": …}, or one object per line."""
    questions: FileOption = None
    """Instead, the questions of the public data set: Parquet, as on the hub, or JSONL. "Question:" is then a --stop."""
    examples: FileOption = None
    """With --questions: the data set's file of rows to show as worked examples."""
    shots: WholeNumber = None
    """With --questions: how many worked examples come before each question; by default 4."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """The file for the predictions, one JSON line each. An interrupted run is resumed."""
    limit: WholeNumber = None
    """Ask only this many questions, the first ones."""
    max_tokens: int = 2000
    """The most new tokens of an answer; fewer if the model's context has no room for them."""
    seed: int = 0
    """At a temperature above 0, question i samples with seed + i."""
    sampling: Sampling
    guessing: Guessing
    chat: bool = False
    """Put each prompt into the checkpoint's chat template, as a user message."""
    thinking: Thinking = "auto"
    """The template's thinking mode, with --chat; auto is the template's own choice."""
    max_running_requests: int = 64
    """How many questions are answered at once."""
    overlap: bool = False
    """Plan the next turn while the device works on this one: faster, with the same answers. By default the engine's
    settings are those of Ling-3's published evaluation."""
    json: bool = False
    """Print the result as one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gsm8k(Asking):
    """Ask word problems; the last number of an answer counts.

    ling3 eval gsm8k MODEL --prompts gsm_8k.json --out predictions.jsonl
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmluPro(Asking):
    """Ask questions of up to ten choices; the last choice of an answer counts.

    ling3 eval mmlu-pro MODEL --questions test.parquet --examples validation.parquet --out predictions.jsonl
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity(Command):
    """Measure how well the model predicts a text: each token once, from as much text before it as a window holds.

    ling3 eval perplexity MODEL TEXT
    """

    common: Loading
    devices: Machines
    text: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """A text file in UTF-8; - for standard input."""
    context: WholeNumber = None
    """Tokens of a window; by default 4096, or the model's context if that is less."""
    stride: WholeNumber = None
    """How far the window moves each time, and how many tokens it scores; by default half a window."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skills(Command):
    """Test nano's skills on held-out texts; an answer is right only if all of it is.

    ling3 eval skills nano --only recall,positions
    """

    common: Loading
    devices: Machines
    only: NamesOption = None
    """Comma-separated names of skills; by default, all."""
    questions: int = 500
    """How many held-out texts of each skill."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluate a model: word problems, multiple-choice questions, nano's skills, perplexity."""

    task: (
        Annotated[Gsm8k, tyro.conf.subcommand("gsm8k")]
        | Annotated[MmluPro, tyro.conf.subcommand("mmlu-pro")]
        | Annotated[Skills, tyro.conf.subcommand("skills")]
        | Annotated[Perplexity, tyro.conf.subcommand("perplexity")]
    )

    @property
    def common(self) -> Loading:
        """The options for loading the model."""
        return self.task.common

    @property
    def devices(self) -> Machines:
        """The options for the devices and processes."""
        return self.task.devices


def run(command: Eval) -> None:
    """Runs the evaluation and prints the result; the last line is the score."""
    task = command.task
    if isinstance(task, Perplexity):
        _perplexity(task)
        return
    if isinstance(task, Skills):
        _skills(task)
        return
    from ling3.evals import answers, public

    if isinstance(task, Gsm8k):
        _ask(task, answers.number, public.from_gsm8k)
    else:
        _ask(task, answers.choice, public.from_mmlu_pro)


def follow(command: Eval) -> None:
    """Runs the command in a process that is not the first. All processes compute perplexity and skills."""
    if isinstance(command.task, Perplexity):
        _perplexity(command.task, prints=False)
    elif isinstance(command.task, Skills):
        _skills(command.task, prints=False)
    else:
        from ling3.evals.predictions import fingerprint

        command.task.common.source(command.task.model, command.devices).follow(fingerprint)


def _ask(command: Asking, parse: "Parser", build: "Callable[..., list[Question]]") -> None:
    from ling3.evals.public import STOP
    from ling3.evals.run import PROTOCOL, check_seeds, evaluate, prepare

    _check(command)
    stop = (*command.sampling.stop, *(() if command.questions is None else STOP))
    params = command.sampling.params(max_tokens=command.max_tokens, seed=command.seed, stop=stop)
    own = {"max_running_requests": command.max_running_requests, "overlap": command.overlap}
    settings = dataclasses.replace(PROTOCOL, **own, **dataclasses.asdict(command.guessing))
    questions = _questions(command, parse, build)
    check_seeds(command.seed, len(questions[: command.limit]))
    source = command.common.source(command.model, command.devices, command.guessing.speculation)
    tokenizer = source.tokenizer()
    asked = prepare(tokenizer, questions, command.thinking if command.chat else None)
    console = Console(stderr=True, highlight=False)
    with command.common.serve(source, tokenizer, settings, console) as served, _bar(console) as shown:
        score = evaluate(
            served.server,
            asked,
            parse,
            command.out,
            params=params,
            settings={"weights": served.fingerprint()},
            limit=command.limit,
            on_start=shown,
            on_answer=shown,
        )
    if command.json:
        print_json({"model": source.name, "predictions": command.out, **_numbers(score)})
        return
    low, high = score.interval
    print(f"accuracy, 95 % (Wilson): {low:.4f} to {high:.4f}")
    print(score)


def _check(command: Asking) -> None:
    """Raises ValueError for invalid options, before any work."""
    if (command.prompts is None) == (command.questions is None):
        raise ValueError("give either --prompts, questions ready to be asked, or --questions, those of the data set")
    for name in ("examples", "shots"):
        if getattr(command, name) is not None and command.questions is None:
            raise ValueError(f"--{name} is for --questions: the prompts of --prompts have their examples in them")
    if command.shots is not None and command.shots < 0:
        raise ValueError(f"--shots is {command.shots}, expected at least 0")
    if command.limit is not None and command.limit < 1:
        raise ValueError(f"--limit is {command.limit}, expected at least 1")
    if command.thinking != "auto" and not command.chat:
        raise ValueError("--thinking is for --chat")
    check_directory("--out", command.out)


def _questions(command: Asking, parse: "Parser", build: "Callable[..., list[Question]]") -> "list[Question]":
    from ling3.evals.prompts import read
    from ling3.evals.public import SHOTS

    if command.prompts is not None:
        return read(command.prompts, parse)
    return build(command.questions, command.examples, SHOTS if command.shots is None else command.shots)


@contextlib.contextmanager
def _bar(console: Console) -> "Iterator[Callable[[Score, int], None]]":
    """A progress bar with the accuracy so far, on a terminal; yields a function to call with each score."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        *(TextColumn("answered"), BarColumn(), MofNCompleteColumn()),
        *(TextColumn("{task.fields[accuracy]}"), TimeRemainingColumn()),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("", total=None, accuracy="")

    def shown(score: "Score", total: int) -> None:
        accuracy = f"{score.accuracy:.4f} right" if score.total else ""
        bar.update(task, completed=score.total, total=total, accuracy=accuracy)
        bar.start()

    try:
        yield shown
    finally:
        bar.stop()


def _perplexity(command: Perplexity, prints: bool = True) -> None:
    from ling3.evals.perplexity import perplexity

    text = read_text(command.text)
    model, tokenizer = _loaded(command, prints)
    found = perplexity(model, tokenizer, text, command.context, command.stride)
    if not prints:
        return
    if command.json:
        names = ("nats_per_token", "bits_per_byte", "perplexity")
        print_json({**dataclasses.asdict(found), **{name: getattr(found, name) for name in names}})
        return
    print(f"{found.tokens} tokens, {found.nbytes} bytes")
    print(f"nats per token: {found.nats_per_token:.4f}")
    print(f"bits per byte: {found.bits_per_byte:.4f}")
    print(f"perplexity: {found.perplexity:.4f}")


def _skills(command: Skills, prints: bool = True) -> None:
    from ling3.evals.skills import check_skills, skill_scores
    from ling3.train.nano.skills import SKILLS

    names = list(SKILLS) if command.only is None else command.only.split(",")
    check_skills(names)
    if command.questions < 1:
        raise ValueError(f"--questions is {command.questions}, expected a whole number >= 1")
    found = skill_scores(*_loaded(command, prints), names, command.questions)
    if not prints:
        return
    if command.json:
        print_json({name: _numbers(score) for name, score in found.items()})
        return
    for name, score in found.items():
        low, high = score.interval
        print(f"{name}: {score.right}/{score.total} = {score.accuracy:.4f}, 95 % (Wilson): {low:.4f} to {high:.4f}")


def _loaded(command: Perplexity | Skills, introduces: bool) -> "tuple[CausalLM, Tokenizer]":
    """The command's model, of which it may print a line, and its tokenizer."""
    source = command.common.source(command.model, command.devices)
    tokenizer = source.tokenizer()
    model = source.load(tokenizer)
    if introduces:
        source.introduce(model, Console(stderr=True, highlight=False))
    return model, tokenizer


def _numbers(score: "Score") -> dict[str, Any]:
    """A score for JSON."""
    counts = {"right": score.right, "total": score.total, "accuracy": score.accuracy}
    return {**counts, "wilson_95": list(score.interval)}
