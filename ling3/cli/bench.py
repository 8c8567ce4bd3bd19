"""`ling3 bench`: the engine's speed."""

import dataclasses
import json
import math
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from ling3.cli.options import Dtype, FileOption, Model, Weights, WeightsOptions, WholeNumber, check_directory, load
from ling3.cli.terminal import print_json

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
class Bench:
    """Measure the engine: throughput, and latency at a request rate.

    ling3 bench nano --input-len 16:256 --output-len 16:128 --request-rate 20 --plot nano.png
    """

    model: Model
    """A checkpoint directory, a hub id, "nano", or a config.json for a model of random weights."""
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
    dtype: Dtype = "auto"
    """The matrices' type; auto is as stored, and bfloat16 for random weights."""
    weights: WeightsOptions = dataclasses.field(default_factory=Weights)
    max_running_requests: int = 64
    """Slots of the engine; further requests wait."""
    page_size: int = 256
    """Tokens of a page of MLA latents."""
    num_pages: WholeNumber = None
    """How many pages; without it, as many as fit."""
    mem_fraction: float = 0.6
    """What share of the free memory those may take, with the slots' states."""
    chunked_prefill_size: int = 512
    """Prompt tokens of a prefill call."""
    token_paddings: tuple[int, ...] = (16, 128, 512)
    """The sizes that such calls are padded to."""
    max_model_len: WholeNumber = None
    """The most tokens of a request; without it, the model's context."""
    decode_rows: WholeNumber = None
    """Requests of a decode call; without it, the engine's choice."""
    decode_steps: int = 8
    """Tokens of a decode call, for each of its requests."""
    batch_invariant: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: off)")] = True
    """Let few requests share a smaller decode call; their last bits may then depend on each other."""
    json: FileOption = None
    """Write the numbers there as JSON; - prints them instead of the table."""
    plot: FileOption = None
    """Draw latencies and load there (PNG, PDF or SVG)."""
    debug: bool = False
    """Show the traceback of an error, and check the types of what functions are given."""


def run(command: Bench) -> None:
    """Measures, and prints the table."""
    from ling3.bench import measure as bench
    from ling3.bench.report import check_plot
    from ling3.serve import Engine

    lengths = _bounds(command.input_len, "--input-len"), _bounds(command.output_len, "--output-len")
    if command.json not in (None, "-"):
        check_directory("--json", command.json)
    if command.plot is not None:
        check_plot(command.plot)
    _check_sizes(command, *lengths)
    model, tokenizer = _load(command)
    requests = _requests(command, model.config.vocab_size, *lengths)
    settings = (
        *("max_running_requests", "page_size", "num_pages", "mem_fraction", "chunked_prefill_size", "token_paddings"),
        *("max_model_len", "decode_rows", "decode_steps", "batch_invariant"),
    )
    engine = Engine(
        model,
        tokenizer,
        max_queue=max(1024, len(requests)),
        **{name: getattr(command, name) for name in settings},
    )
    report = bench.measure(
        engine,
        requests,
        request_rate=command.request_rate,
        seed=command.seed,
        ignore_eos=not command.stop_at_eos,
        temperature=command.temperature,
        about=_about(command, model),
    )
    if command.json == "-":
        print_json(report.to_dict(), indent=1)
    else:
        # Rich would leave out columns where there is no room for them.
        Console(width=max(100, Console().width)).print(report)
    if command.json not in (None, "-"):
        pathlib.Path(command.json).write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if command.plot is not None:
        report.plot(command.plot)


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
    path = pathlib.Path(command.model)
    given = path.suffix == ".json" and path.is_file()
    config = read_config(path if given else hub.resolve(command.model, ("config.json",), command.weights.revision))
    context = config.max_position_embeddings if command.max_model_len is None else command.max_model_len
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
    path, weights = pathlib.Path(command.model), command.weights
    if path.suffix == ".json" and path.is_file():
        weights = dataclasses.replace(weights, random_weights=True)
    source = weights.of(command.model)
    try:
        tokenizer = source.tokenizer()
    except FileNotFoundError:
        if command.prompts is not None:
            raise
        tokenizer = None
    return load(source, command.dtype, tokenizer), tokenizer


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
        "dtype": model.dtype.name,
        "command": shlex.join(["ling3", *sys.argv[1:]]),
    }


def _bounds(text: str, name: str) -> tuple[int, int]:
    """`128` or `16:256` as the first and the last length."""
    first, _, last = text.partition(":")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, expected a number of tokens, or a range such as 16:256") from None
