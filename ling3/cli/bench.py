"""`ling3 bench`: the engine's speed."""

import dataclasses
import math
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from ling3.cli.devices import Machines
from ling3.cli.files import Output
from ling3.cli.loading import Loading, Source
from ling3.cli.options import Command, FileOption, Model, WholeNumber
from ling3.engine.settings import EngineSettings

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

REQUESTS = 64
# A workload is drawn before it is measured, and as many tokens take some 4 GB.
MOST_TOKENS = 10**8
WIDTHS = tyro.conf.arg(metavar="[INT [INT ...]]", help_behavior_hint="")
LENGTH = tyro.conf.arg(metavar="TOKENS|FIRST:LAST")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSettings):
    """How the engine batches requests, and how much memory it takes."""

    max_model_len: WholeNumber = None
    num_pages: WholeNumber = None
    decode_rows: WholeNumber = None
    token_paddings: Annotated[Sequence[int] | None, WIDTHS] = None

    def __post_init__(self) -> None:
        """Leaves the check to `settings`, whose errors are those of a command and not of its parser."""

    def settings(self) -> EngineSettings:
        """The settings; ValueError for senseless ones."""
        return EngineSettings(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Command):
    """Measure the engine: throughput, and latency at a request rate.

    ling3 bench nano --input-len 16:256 --output-len 16:128 --request-rate 20 --plot nano.png
    """

    model: Model
    """A checkpoint directory, a hub id, "nano", or a config.json for a model of random weights."""
    common: Loading
    devices: Machines
    num_prompts: WholeNumber = None
    """How many requests; 64 without it, or as many as --prompts has."""
    input_len: Annotated[str, LENGTH] = "128"
    """Tokens of each prompt; of a range, lengths are drawn evenly. Prompts are random token ids."""
    shared_prefix: WholeNumber = None
    """Before these, as many random tokens that are the same in all prompts, as a long instruction is; 0 without it."""
    output_len: Annotated[str, LENGTH] = "128"
    """New tokens of each request, likewise."""
    prompts: FileOption = None
    """Real prompts instead: a text a line, or a *.jsonl with an object a line and "prompt" in it."""
    stop_at_eos: bool = False
    """End at the model's own ends too; without it each output has its full length."""
    request_rate: float = math.inf
    """Requests per second, as a Poisson process; inf sends all at once."""
    temperature: float = 0.0
    """0 takes the most likely token each time."""
    seed: int = 0
    """Draws prompts, lengths, arrivals and samples."""
    engine: EngineOptions
    output: Output


def run(command: Bench) -> None:
    """Measures, and prints the table."""

    from ling3.bench import measure as bench
    from ling3.serve import Engine

    if command.prompts is not None and command.shared_prefix is not None:
        raise ValueError("--shared-prefix is for random prompts, and --prompts gives real ones: leave out one of them")
    lengths = _bounds(command.input_len, "--input-len"), _bounds(command.output_len, "--output-len")
    command.output.check()
    settings = command.engine.settings()
    source = _source(command)
    _check_sizes(command, source.config().max_position_embeddings, *lengths)
    try:
        tokenizer = source.tokenizer()
    except FileNotFoundError:
        if command.prompts is not None:
            raise
        tokenizer = None
    model = source.load(tokenizer)
    if command.prompts is not None:
        requests = bench.read_requests(command.prompts, lengths[1], command.num_prompts, command.seed)
    else:
        requests = bench.random_requests(
            _count(command), model.config.vocab_size, *lengths, command.seed, command.shared_prefix or 0
        )
    report = bench.measure(
        Engine(model, tokenizer, settings),
        requests,
        request_rate=command.request_rate,
        seed=command.seed,
        ignore_eos=not command.stop_at_eos,
        temperature=command.temperature,
        about={
            "model": command.model,
            "parameters": model.parameters,
            "dtype": model.dtype.name,
            "command": shlex.join(["ling3", *sys.argv[1:]]),
        },
    )
    command.output.write(report, 100)


def follow(command: Bench) -> None:
    """The part of a process that is not the first."""
    _source(command).follow()


def _source(command: Bench) -> Source:
    common, path = command.common, pathlib.Path(command.model)
    if path.suffix == ".json" and path.is_file():
        common = dataclasses.replace(common, random_weights=True)
    return common.source(command.model, command.devices)


def _count(command: Bench) -> int:
    return REQUESTS if command.num_prompts is None else command.num_prompts


def _check_sizes(command: Bench, context: int, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """ValueError for a workload that context or memory has no room for, before any of it is drawn."""
    from ling3.bench import measure as bench

    if command.seed < 0:
        raise ValueError(f"--seed is {command.seed}, expected a whole number >= 0")
    requests = _count(command)
    bench.check_count(requests)
    bench.check_lengths("input_len", input_len)
    bench.check_lengths("output_len", output_len)
    limit = command.engine.max_model_len
    context = context if limit is None else limit
    prefix = command.shared_prefix or 0
    if prefix < 0:
        raise ValueError(f"--shared-prefix is {prefix}, expected a whole number >= 0")
    longest = output_len[1] + (prefix + input_len[1] if command.prompts is None else 1)
    if longest > context:
        names = "--output-len and a prompt" if command.prompts is not None else "--input-len and --output-len"
        names = f"--shared-prefix, {names}" if prefix else names
        raise ValueError(
            f"{names} are up to {longest:,} tokens together, but a request has room for {context:,} "
            "(the model's context, or a smaller --max-model-len): ask for fewer"
        )
    tokens = requests * longest
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"--num-prompts is {requests:,}, with up to {longest:,} tokens each: {tokens:,} tokens in all, expected at "
            f"most {MOST_TOKENS:,}"
        )


def _bounds(text: str, name: str) -> tuple[int, int]:
    """`128` or `16:256` as the first and the last length."""
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a number of tokens, or a range such as 16:256") from None
