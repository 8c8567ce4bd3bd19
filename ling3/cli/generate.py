"""`ling3 generate`: continue prompts."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from ling3.cli.terminal import count, show

if TYPE_CHECKING:
    from ling3.tokenizer import Tokenizer

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

MAX_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts, all in one batch, and show the text as it comes.

    ling3 generate nano --chat -p "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A checkpoint directory, a hub id, or "nano" for the checkpoint in the package."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(aliases=["-p"], metavar="TEXT")] = ()
    """A text to continue; may be given several times. Without one, standard input is the prompt."""
    chat: bool = False
    """Each prompt is a user's message, put into the checkpoint's chat template."""
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """The system's message, with --chat."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """The template's thinking mode, with --chat; auto is the template's own choice."""
    max_tokens: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """The most new tokens for each prompt. Without it, 256 or what the model's context has room for."""
    temperature: float = 0.0
    """0 takes the most likely token each time."""
    top_p: float = 1.0
    """Sample from the fewest tokens that together are at least this likely."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Sample from so many most likely tokens."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one."""
    seed: int = 0
    """Prompt i samples from seed + i."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """End a text before this string; may be given several times."""
    ignore_eos: bool = False
    """Go on to --max-tokens, whatever the model says."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The matrices' type; auto is as stored."""
    json: bool = False
    """Print one JSON object per prompt, at the end, instead of the text."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclasses.dataclass
class _Row:
    """One prompt and what has come of it."""

    prompt: str
    ids: list[int]
    decoder: Any
    stops: Any
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    shown: int = 0
    finish_reason: str | None = None

    def take(self, new: Sequence[int], ends: Sequence[int]) -> None:
        """Adds tokens up to one of `ends`, or to the one that completes a stop string."""
        for token in new:
            if self.finish_reason is None:
                self.tokens.append(token)
                if token in ends:
                    self.finish("stop")
                else:
                    self.text += self.stops.feed(self.decoder.feed([token]))
                    self.finish_reason = "stop" if self.stops.stopped else None

    def finish(self, reason: str) -> None:
        """Ends the text, with what was held back."""
        if self.finish_reason is None:
            self.text += self.stops.feed(self.decoder.flush()) + self.stops.flush()
            self.finish_reason = reason

    def show(self) -> None:
        """Writes what is new of the text."""
        show(self.text[self.shown :])
        self.shown = len(self.text)


def run(command: Generate) -> None:
    """Prints each prompt's continuation."""
    import jax
    import jax.numpy as jnp

    from ling3 import checkpoint
    from ling3.generate import stream_tokens
    from ling3.streaming import StopStrings
    from ling3.tokenizer import load_tokenizer

    prompts = command.prompt or (_from_stdin(),)
    tokenizer = load_tokenizer(command.model)
    rows = []
    for prompt in prompts:
        ids = _encode(tokenizer, prompt, command)
        rows.append(_Row(prompt, ids, tokenizer.stream(ids), StopStrings(command.stop)))
    dtype = {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}[command.dtype]
    model = checkpoint.load(command.model, dtype)
    tokenizer.check_fits(model.config.vocab_size)
    max_tokens = command.max_tokens
    if max_tokens is None:
        room = model.config.max_position_embeddings - max(len(row.ids) for row in rows)
        max_tokens = max(1, min(MAX_TOKENS, room))
    ends = () if command.ignore_eos else (*tokenizer.eos_token_ids, *model.config.eos_token_id)

    clock = _Clock()
    news = stream_tokens(
        model,
        [row.ids for row in rows],
        max_tokens=max_tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        min_p=command.min_p,
        seed=command.seed,
        stop_token_ids=ends,
        ignore_eos=command.ignore_eos,
    )
    console = Console(stderr=True, highlight=False)
    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    name = model.lm_head.weight.dtype.name
    facts = f"{command.model}: {count(size)} parameters, {name}, on {jax.default_backend()}"
    console.print(Text(facts, "bold"), soft_wrap=True)
    for row in _finished_in_order(rows, clock.watch(news), ends, console, command):
        if command.json:
            result = {
                "prompt": row.prompt,
                "text": row.text,
                "finish_reason": row.finish_reason,
                "prompt_tokens": len(row.ids),
                "token_ids": row.tokens,
            }
            print(json.dumps(result, ensure_ascii=False))
        else:
            print()
    console.print(Text(clock.summary(), "dim"), soft_wrap=True)


def _finished_in_order(
    rows: list[_Row],
    news: Iterator[list[list[int]]],
    ends: Sequence[int],
    console: Console,
    command: Generate,
) -> Iterator[_Row]:
    """Each row when it and all before it are finished, the first unfinished one being shown as its text comes."""
    current = 0
    _head(rows, current, console, command)
    while current < len(rows):
        new = next(news, None)
        for index, row in enumerate(rows):
            row.take(new[index] if new else (), ends)
            if new is None:
                row.finish("length")
        while current < len(rows):
            if not command.json:
                rows[current].show()
            if rows[current].finish_reason is None:
                break
            yield rows[current]
            current += 1
            _head(rows, current, console, command)


def _head(rows: list[_Row], index: int, console: Console, command: Generate) -> None:
    """Shows the prompt, which its continuation follows on the same line."""
    if index < len(rows) and not command.json:
        if len(rows) > 1:
            console.print(Text(f"\nprompt {index + 1} of {len(rows)}", "bold"))
        end = "\n" if command.chat else ""
        console.print(Text(rows[index].prompt, "dim"), end=end, soft_wrap=True)


def _encode(tokenizer: "Tokenizer", prompt: str, command: Generate) -> list[int]:
    if not command.chat:
        if command.system is not None or command.thinking != "auto":
            raise ValueError("--system and --thinking are for --chat")
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if command.system is not None:
        messages.insert(0, {"role": "system", "content": command.system})
    if command.thinking == "auto":
        return tokenizer.apply_chat_template(messages)
    return tokenizer.apply_chat_template(messages, enable_thinking=command.thinking == "on")


def _from_stdin() -> str:
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text:
        raise ValueError("no prompt: give one with -p, or pipe it to standard input")
    return text


class _Clock:
    """Times a stream of new tokens."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.marks: list[tuple[float, int]] = []

    def watch(self, news: Iterator[list[list[int]]]) -> Iterator[list[list[int]]]:
        for new in news:
            self.marks.append((time.perf_counter() - self.begin, sum(map(len, new))))
            yield new

    def summary(self) -> str:
        """The rate leaves out the first two calls, prefill and decode, which are compiled, where there are more."""
        total, seconds = sum(count for _, count in self.marks), self.marks[-1][0]
        later = self.marks[2:]
        if later:
            rate = sum(count for _, count in later) / (seconds - self.marks[1][0])
            speed = f"{rate:,.0f} tokens/s once compiled"
        else:
            speed = f"{total / seconds:,.0f} tokens/s, compiling included"
        return f"{total} tokens in {seconds:.1f} s, the first after {self.marks[0][0]:.1f} s; {speed}"
