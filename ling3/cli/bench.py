"""`ling3 bench`: measures the speed of the engine or of a server."""

import dataclasses
import functools
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from ling3.cli.devices import Machines
from ling3.cli.files import Output
from ling3.cli.loading import Loading, ModelSource
from ling3.cli.options import DirectoryOption, FileOption, GuesserOption, OptionalModel, TextOption, WholeNumber
from ling3.engine.settings import EngineSettings

if TYPE_CHECKING:
    from ling3.bench.measure import SampleRequest
    from ling3.bench.report import BenchReport

REQUESTS = 64
# A workload is drawn before it is measured, and this many tokens take some 4 GB.
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
    prefix_dir: DirectoryOption = None
    speculation: GuesserOption = None
    """Guess tokens, and check several in one pass, which changes no answer: lookup guesses what followed the same
    tokens before, mtp asks the checkpoint's multi-token-prediction layer."""

    def __post_init__(self) -> None:
        """Leaves the check to `settings`, so that errors come from the command and not from its parser."""

    def settings(self) -> EngineSettings:
        """The options as EngineSettings. Raises ParameterError for invalid values."""
        return EngineSettings(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the engine, or a server: throughput, and latency at a request rate.

    ling3 bench nano --input-len 16:256 --output-len 16:128 --request-rate 20 --plot nano.png

    ling3 bench nano --base-url http://127.0.0.1:8000/v1 --concurrency 1 16 64
    """

    model: OptionalModel = None
    """A checkpoint directory, a GGUF file, a hub id, "nano", or a config.json for a model of random weights. With
    --base-url it only gives the vocabulary that prompts are drawn from; without it, ids are below 256."""
    common: Loading
    devices: Machines
    num_prompts: WholeNumber = None
    """How many requests; by default 64, or as many as --prompts has."""
    input_len: Annotated[str, LENGTH] = "128"
    """Tokens of each prompt, which are random ids; from a range, lengths are drawn evenly."""
    shared_prefix: WholeNumber = None
    """Random tokens before these, the same in all prompts, as a long instruction would be; by default 0."""
    output_len: Annotated[str, LENGTH] = "128"
    """New tokens of each request, likewise."""
    prompts: FileOption = None
    """Real prompts instead: one text per line, or a *.jsonl with one object per line and "prompt" in it."""
    stop_at_eos: bool = False
    """End at the model's end tokens too; by default each output has its full length."""
    request_rate: float = math.inf
    """Requests per second, as a Poisson process; inf sends all at once."""
    temperature: float = 0.0
    """0 takes the most likely token each time."""
    seed: int = 0
    """The seed of prompts, lengths, arrivals and samples."""
    base_url: TextOption = None
    """Measure the server of OpenAI's protocol at this address, which ends in /v1, not an engine here (extra: serve)."""
    concurrency: Annotated[Sequence[int], WIDTHS] = ()
    """This many requests at a time, instead of --request-rate; several values are measured in turn, each with different
    random prompts."""
    chat: bool = False
    """With --base-url: send --prompts as conversations."""
    served_model_name: TextOption = None
    """With --base-url: the server's name for the model; by default, the first that it lists."""
    api_key: TextOption = None
    """With --base-url: the server's API key; by default OPENAI_API_KEY, which others on the machine cannot see."""
    engine: EngineOptions
    output: Output


def run(command: Bench) -> None:
    """Measures the engine or server and prints the table."""
    if command.prompts is not None and command.shared_prefix is not None:
        raise ValueError("--shared-prefix is for random prompts, and --prompts gives real ones: leave out one of them")
    if command.concurrency and not math.isinf(command.request_rate):
        raise ValueError("--concurrency and --request-rate exclude each other: leave out one of them")
    lengths = _bounds(command.input_len, "--input-len"), _bounds(command.output_len, "--output-len")
    command.output.check()
    settings = command.engine.settings()
    if command.base_url is not None:
        _ask_server(command, command.base_url, *lengths)
        return
    _refuse(command, ("chat", "served_model_name", "api_key"), "is for --base-url")
    from ling3.bench import measure as bench
    from ling3.serve import Engine

    source = _source(command)
    _check_sizes(command, source.config().max_position_embeddings, *lengths)
    tokenizer = source.tokenizer_if_any() if command.prompts is None else source.tokenizer()
    model = source.load(tokenizer)
    engine = Engine(model, tokenizer, settings)
    about = {
        "model": command.model,
        "parameters": model.parameters,
        "dtype": model.dtype.name,
        "command": shlex.join(["ling3", *sys.argv[1:]]),
    }
    _report(command, functools.partial(bench.measure, engine, about=about), model.config.vocab_size, *lengths)


def _report(
    command: Bench,
    measure: "Callable[..., BenchReport]",
    vocab: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
) -> None:
    """Measures at each concurrency, or once at the request rate, and prints the table."""
    from ling3.bench.levels import Levels

    reports = [
        measure(
            _requests(command, vocab, input_len, output_len, command.seed + i),
            concurrency=concurrency,
            request_rate=command.request_rate,
            seed=command.seed,
            ignore_eos=not command.stop_at_eos,
            temperature=command.temperature,
        )
        for i, concurrency in enumerate(command.concurrency or (None,))
    ]
    command.output.write(Levels(reports) if command.concurrency else reports[0], 100)


def _ask_server(command: Bench, base_url: str, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """Measures a server and prints the table. Raises ValueError if the extra `serve` is not installed."""
    try:
        from ling3.bench import remote
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing, which --base-url needs: pip install 'ling3[serve]'") from None

    _refuse(command, ("engine", "devices"), "is for an engine here, and --base-url names a server")
    config = None if command.model is None or command.prompts is not None else _source(command).config()
    vocab, context = (
        (remote.IDS, MOST_TOKENS) if config is None else (config.vocab_size, config.max_position_embeddings)
    )
    _check_sizes(command, context, input_len, output_len)
    key = os.environ.get("OPENAI_API_KEY") if command.api_key is None else command.api_key
    server = remote.RemoteServer(base_url, command.served_model_name, key, command.chat)
    # The report has the command line, which must not show the key.
    about = {"command": shlex.join(["ling3", *_without_key(sys.argv[1:])])}
    _report(command, functools.partial(remote.measure_server, server, about=about), vocab, input_len, output_len)


def _without_key(arguments: Sequence[str]) -> list[str]:
    shown, hidden = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_key = name.replace("_", "-") == "--api-key"
        shown.append("KEY" if hidden else f"{name}=KEY" if is_key and equals else argument)
        hidden = is_key and not equals
    return shown


def _refuse(command: Bench, names: Sequence[str], why: str) -> None:
    """Raises ValueError if any of these options was given."""
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if field.name not in names:
            continue
        if dataclasses.is_dataclass(value):
            given = [each.name for each in dataclasses.fields(value) if getattr(value, each.name) != each.default]
        else:
            given = [field.name] if value != field.default else []
        if given:
            raise ValueError(f"--{given[0].replace('_', '-')} {why}: leave it out")


def _requests(
    command: Bench, vocab: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int
) -> "list[SampleRequest]":
    from ling3.bench import measure as bench

    if command.prompts is not None:
        return bench.read_requests(command.prompts, output_len, command.num_prompts, seed)
    return bench.random_requests(_count(command), vocab, input_len, output_len, seed, command.shared_prefix or 0)


def follow(command: Bench) -> None:
    """Runs the command in a process that is not the first."""
    _source(command).follow()


def _source(command: Bench) -> ModelSource:
    if command.model is None:
        raise ValueError("MODEL is missing: a checkpoint, a hub id or nano; or --base-url, to measure a server")
    common, path = command.common, pathlib.Path(command.model)
    if path.suffix == ".json" and path.is_file():
        common = dataclasses.replace(common, random_weights=True)
    return common.source(command.model, command.devices, command.engine.speculation)


def _count(command: Bench) -> int:
    return REQUESTS if command.num_prompts is None else command.num_prompts


def _check_sizes(command: Bench, context: int, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """Raises ValueError if the workload does not fit in the context or in memory, before any of it is drawn."""
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
    """Parses `128` or `16:256` as the smallest and the largest length."""
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a number of tokens, or a range such as 16:256") from None
