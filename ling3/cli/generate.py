"""`ling3 generate`: continues prompts and prints the text."""

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from ling3.cli.devices import Machines
from ling3.cli.files import prompt_from_stdin
from ling3.cli.options import Command, Guessing, Sampling, TextOption, Thinking, WholeNumber, hint_at_chat, prompt_ids
from ling3.cli.serving import Serving
from ling3.cli.terminal import compiling, print_json, show

if TYPE_CHECKING:
    from ling3.engine.outputs import Completion, Delta
    from ling3.engine.settings import EngineSettings

MAX_TOKENS = 256
# The most prompts that run at once; the others wait.
MOST_SLOTS = 64
# Rows of a decode call: one is no faster than two, and more than 16 slow a CPU down.
FEWEST_ROWS, MOST_ROWS = 2, 16
# Sizes of a prefill call: the first one that holds the longest prompt, else the last, for chunks of it.
WIDTHS = (16, 128, 512)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(Command):
    """Continue prompts, all at once, and show the text as it comes.

    ling3 generate nano --chat -p "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
    """

    common: Serving
    devices: Machines
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(aliases=["-p"], metavar="TEXT")] = ()
    """A text to continue; may be given several times. By default, standard input."""
    chat: bool = False
    """Put each prompt into the checkpoint's chat template, as a user message."""
    system: TextOption = None
    """The system message, with --chat."""
    thinking: Thinking = "auto"
    """The template's thinking mode, with --chat; auto is the template's own choice."""
    max_tokens: WholeNumber = None
    """The most new tokens for each prompt; by default 256, or fewer if the model's context has no room for them."""
    seed: int = 0
    """Prompt i samples with seed + i."""
    sampling: Sampling
    guessing: Guessing
    json: bool = False
    """Print one JSON object per prompt, as each is done, instead of the text."""
    logprobs: WholeNumber = None
    """With --json: the log-probability of each token, and of this many most likely tokens."""


@dataclasses.dataclass
class _Row:
    """One prompt and its continuation."""

    name: str
    prompt: str
    ids: list[int]
    has_text: bool
    """False without a tokenizer: token ids are shown instead of text."""
    text: str = ""
    shown: int = 0
    completion: "Completion | None" = None

    def take(self, delta: "Delta") -> None:
        """Adds the text or token ids of a delta."""
        self.text += delta.text if self.has_text else "".join(f"{token} " for token in delta.token_ids)
        if delta.output is not None:
            self.completion = delta.output.outputs[0]


def run(command: Generate) -> None:
    """Prints the continuation of each prompt. Raises FloatingPointError at the end if some ended in an error."""
    from ling3.engine.sampling_params import check_prompt, check_room

    if command.logprobs is not None and not command.json:
        raise ValueError("--logprobs is for --json")
    most = MAX_TOKENS if command.max_tokens is None else command.max_tokens
    params = command.sampling.params(max_tokens=most, seed=command.seed, logprobs=command.logprobs)
    prompts = command.prompt or (prompt_from_stdin(),)
    source = command.common.source(command.model, command.devices, command.guessing.speculation)
    tokenizer = source.tokenizer_if_any() if command.common.random_weights else source.tokenizer()
    names = [f"prompt {i + 1}" for i in range(len(prompts))] if len(prompts) > 1 else ["the prompt"]
    template = {name: getattr(command, name) for name in ("chat", "system", "thinking")}
    has_text = tokenizer is not None
    rows = [
        _Row(name, prompt, prompt_ids(tokenizer, prompt, **template), has_text) for name, prompt in zip(names, prompts)
    ]
    config = source.config()
    context, longest = config.max_position_embeddings, max(len(row.ids) for row in rows)
    if command.max_tokens is None:
        params = dataclasses.replace(params, max_tokens=max(1, min(MAX_TOKENS, context - longest)))
    for row in rows:
        check_prompt(row.ids, config.vocab_size, row.name)
        check_room(row.ids, params.max_tokens, context, row.name)

    console = Console(stderr=True, highlight=False)
    hint_at_chat(tokenizer, command.chat, console)
    slots = command.devices.slots(min(len(rows), MOST_SLOTS))
    settings = _settings(slots, longest, params.max_tokens, command.guessing)
    own = [dataclasses.replace(params, seed=command.seed + i) for i in range(len(rows))]
    with command.common.serve(source, tokenizer, settings, console) as served:
        server, current = served.server, 0
        with compiling(console):
            server.warmup(first_token=True)
        clock = _Clock(server.stats().compile_seconds)
        _head(rows, current, console, command)
        for index, delta in server.stream_all([row.ids for row in rows], own):
            clock.take(delta)
            rows[index].take(delta)
            current = _show(rows, current, console, command)
        console.print(Text(clock.summary(server.stats().compile_seconds), "dim"), soft_wrap=True)
    broken = [f"{row.name}: {row.completion.error}" for row in rows if row.completion and row.completion.error]
    if broken:
        raise FloatingPointError("; ".join(broken))


def _settings(prompts: int, longest: int, max_tokens: int, guessing: Guessing) -> "EngineSettings":
    """Settings for an engine just large enough for this many prompts at once."""
    from ling3.engine.settings import EngineSettings

    rows = prompts * guessing.rows
    width = next(width for width in WIDTHS if width >= min(longest, WIDTHS[-1]))
    return EngineSettings(
        max_running_requests=prompts,
        chunked_prefill_size=width,
        token_paddings=(width,),
        max_model_len=longest + max_tokens,
        decode_rows=max(FEWEST_ROWS, rows) if rows < MOST_ROWS else None,
        **dataclasses.asdict(guessing),
    )


def _show(rows: list[_Row], current: int, console: Console, command: Generate) -> int:
    """Prints the new text of row `current`; if it has finished, goes on with the next ones.

    Returns the first unfinished row.
    """
    while current < len(rows):
        row = rows[current]
        if not command.json:
            show(row.text[row.shown :])
            row.shown = len(row.text)
        if row.completion is None:
            break
        if command.json:
            print_json(_result(row, row.completion))
        else:
            print()
        current += 1
        _head(rows, current, console, command)
    return current


def _head(rows: list[_Row], index: int, console: Console, command: Generate) -> None:
    """Prints a prompt; on a terminal, and without --chat, its continuation follows on the same line."""
    if index < len(rows) and not command.json:
        if len(rows) > 1:
            console.print(Text(f"\nprompt {index + 1} of {len(rows)}", "bold"))
        end = "\n" if command.chat or not sys.stdout.isatty() else ""
        console.print(Text(rows[index].prompt, "dim"), end=end, soft_wrap=True)


def _result(row: _Row, completion: "Completion") -> dict[str, Any]:
    result = {
        "prompt": row.prompt,
        "text": row.text if row.has_text else None,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(row.ids),
        "token_ids": list(completion.token_ids),
    }
    if completion.logprobs is not None:
        result["logprobs"] = [
            {
                "token_id": each.token_id,
                "logprob": each.logprob,
                "top": [{"token_id": token, "logprob": logprob} for token, logprob in each.top.items()],
            }
            for each in completion.logprobs
        ]
    if completion.error is not None:
        result["error"] = completion.error
    return result


class _Clock:
    """Measures the time of new tokens without compilation; before it started, `compiled` seconds were spent on that."""

    def __init__(self, compiled: float) -> None:
        self.begin, self.compiled = time.perf_counter(), compiled
        self.first = self.last = 0.0
        self.total = 0

    def take(self, delta: "Delta") -> None:
        """Counts the tokens of a delta, and notes the time."""
        self.last = time.perf_counter() - self.begin
        self.first = self.first or self.last
        self.total += len(delta.token_ids)

    def summary(self, compiled: float) -> str:
        """The tokens per second, including prefill but not compilation, which took `compiled` seconds in all."""
        # A fleet reports the minimum over its replicas, which falls if another one compiles for less time.
        seconds = self.last - max(0.0, compiled - self.compiled)
        return (
            f"{self.total} tokens in {seconds:.2f} s, the first after {self.first:.2f} s: "
            f"{self.total / seconds:,.0f} tokens/s, prompts included; compiled in {compiled:.1f} s besides"
        )
