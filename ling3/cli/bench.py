"""`ling3 bench`: the engine's speed."""

import dataclasses
import math
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import tyro

from ling3.cli.options import Command, FileOption, Loading, Model, Output, WholeNumber
from ling3.engine.settings import EngineSettings

if TYPE_CHECKING:
    from ling3.bench.measure import SampleRequest
    from ling3.model import CausalLM
    from ling3.text.tokenizer import Tokenizer

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

REQUESTS = 64
# A workload is drawn before it is measured, and as many tokens take some 4 GB.
MOST_TOKENS = 10**8
LENGTH = tyro.conf.arg(metavar="TOKENS|FIRST:LAST")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(EngineSettings):
    """How the engine batches requests, and how much memory it takes."""

    max_model_len: WholeNumber = None
    num_pages: WholeNumber = None
    decode_rows: WholeNumber = None

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
    common: Loading = dataclasses.field(default_factory=Loading)
    num_prompts: WholeNumber = None
    """How many requests; 64 without it, or as many as --prompts has."""
    input_len: Annotated[str, LENGTH] = "128"
    """Tokens of each prompt; of a range, lengths are drawn evenly. Prompts are random token ids."""
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
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    output: Output = dataclasses.field(default_factory=Output)


def run(command: Bench) -> None:
    """Measures, and prints the table."""
    from ling3.bench import measure as bench
    from ling3.serve import Engine

    lengths = _bounds(command.input_len, "--input-len"), _bounds(command.output_len, "--output-len")
    command.output.check()
    settings = command.engine.settings()
    _check_sizes(command, *lengths)
    model, tokenizer = _load(command)
    requests = _requests(command, model.config.vocab_size, *lengths)
    report = bench.measure(
        Engine(model, tokenizer, settings),
        requests,
        request_rate=command.request_rate,
        seed=command.seed,
        ignore_eos=not command.stop_at_eos,
        temperature=command.temperature,
        about=_about(command, model),
    )
    command.output.write(report, 100)


def _check_sizes(command: Bench, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """ValueError for a workload that the model's context or memory has no room for, before any of it is drawn."""
    from ling3.bench import measure as bench
    from ling3.checkpoint import hub
    from ling3.families import read_config

    requests = REQUESTS if command.num_prompts is None else command.num_prompts
    if command.seed < 0:
        raise ValueError(f"--seed is {command.seed}, expected a whole number >= 0")
    bench.check_count(requests)
    bench.check_lengths("input_len", input_len)
    bench.check_lengths("output_len", output_len)
    model, given = command.model, pathlib.Path(command.model)
    config = read_config(given if _is_config(given) else hub.resolve(model, ("config.json",), command.common.revision))
    limit = command.engine.max_model_len
    context = config.max_position_embeddings if limit is None else limit
    longest = output_len[1] + (input_len[1] if command.prompts is None else 1)
    if longest > context:
        names = "--output-len and a prompt" if command.prompts is not None else "--input-len and --output-len"
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


def _load(command: Bench) -> "tuple[CausalLM, Tokenizer | None]":
    """The model, and its tokenizer if it has one, or has to have one for texts."""
    common = command.common
    if _is_config(pathlib.Path(command.model)):
        common = dataclasses.replace(common, random_weights=True)
    source = common.source(command.model)
    try:
        tokenizer = source.tokenizer()
    except FileNotFoundError:
        if command.prompts is not None:
            raise
        tokenizer = None
    return source.load(tokenizer), tokenizer


def _is_config(path: pathlib.Path) -> bool:
    return path.suffix == ".json" and path.is_file()


def _requests(
    command: Bench, vocab: int, input_len: tuple[int, int], output_len: tuple[int, int]
) -> "list[SampleRequest]":
    from ling3.bench import measure as bench

    if command.prompts is not None:
        return bench.read_requests(command.prompts, output_len, command.num_prompts, command.seed)
    requests = REQUESTS if command.num_prompts is None else command.num_prompts
    return bench.random_requests(requests, vocab, input_len, output_len, command.seed)


def _about(command: Bench, model: "CausalLM") -> dict[str, str | int]:
    import jax

    return {
        "model": command.model,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model)),
        "dtype": model.lm_head.weight.dtype.name,
        "command": shlex.join(["ling3", *sys.argv[1:]]),
    }


def _bounds(text: str, name: str) -> tuple[int, int]:
    """`128` or `16:256` as the first and the last length."""
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a number of tokens, or a range such as 16:256") from None
