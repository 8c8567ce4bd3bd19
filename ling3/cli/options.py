"""What the commands have in common: options, and the checkpoint and files that these name."""

import contextlib
import dataclasses
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from ling3.cli.terminal import count

if TYPE_CHECKING:
    from ling3.model import Ling3ForCausalLM
    from ling3.params import SamplingParams
    from ling3.tokenizer import Tokenizer

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

# Seconds after which a first compilation is announced.
PATIENCE = 2.0


def _optional(metavar: str, read: Callable[[str], Any]) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """How an option that may be left out is read; the help text says what happens without it.

    tyro's own reading of `int | None` shows its users a NoneType, and takes the text "None" for none.
    """
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, (str, int)),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"found {word!r}, expected a whole number") from None


NO_DEFAULT = tyro.conf.arg(help_behavior_hint="")
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
TextOption = Annotated[str | None, _optional("TEXT", str), NO_DEFAULT]
FileOption = Annotated[str | None, _optional("FILE", str), NO_DEFAULT]
WholeNumber = Annotated[int | None, _optional("INT", _whole), NO_DEFAULT]
Thinking = Literal["auto", "on", "off"]
Dtype = Literal["auto", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and where a text ends."""

    temperature: float = 0.0
    """0 takes the most likely token each time."""
    top_p: float = 1.0
    """Sample from the fewest tokens that together are at least this likely."""
    top_k: WholeNumber = None
    """Sample from so many most likely tokens."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and text less likely."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the text has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the text has it."""
    min_tokens: int = 0
    """Nothing ends a text before it has so many tokens."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """End a text before this string; may be given several times."""
    ignore_eos: bool = False
    """Go on to the most tokens, whatever the model says."""

    def params(self, **others: Any) -> "SamplingParams":
        """The engine's form of these options, with its `others`; ValueError for senseless values."""
        from ling3.params import SamplingParams

        return SamplingParams(**dataclasses.asdict(self), **others)


SamplingOptions = tyro.conf.OmitArgPrefixes[Sampling]


def load(path: str, dtype: Dtype, tokenizer: "Tokenizer") -> "Ling3ForCausalLM":
    """The model at `path`, which has to fit the tokenizer."""
    import jax.numpy as jnp

    from ling3 import checkpoint, compilation_cache

    compilation_cache.switch_on()
    model = checkpoint.load(path, {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}[dtype])
    tokenizer.check_fits(model.config.vocab_size)
    return model


def introduce(path: str, model: "Ling3ForCausalLM", console: Console) -> None:
    """Says what runs where."""
    import jax

    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    facts = f"{path}: {count(size)} parameters, {model.lm_head.weight.dtype.name}, on {jax.default_backend()}"
    console.print(Text(facts, "bold"), soft_wrap=True)


@contextlib.contextmanager
def compiling(console: Console) -> Iterator[None]:
    """Says on stderr that programs are being compiled, once that has taken `PATIENCE`."""
    timer = threading.Timer(PATIENCE, console.print, ["compiling (first time)…"], {"style": "dim", "markup": False})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def chat_ids(tokenizer: "Tokenizer", messages: list[dict[str, str]], thinking: Thinking) -> list[int]:
    """The prompt for `messages`, by the checkpoint's chat template; `auto` is the template's own choice."""
    if thinking == "auto":
        return tokenizer.apply_chat_template(messages)
    return tokenizer.apply_chat_template(messages, enable_thinking=thinking == "on")


def check_directory(option: str, path: str) -> None:
    """ValueError where `option` names no file, or one in no directory, before the work is done that would go there."""
    if not path:
        raise ValueError(f"{option}: it is empty, expected the name of a file")
    if pathlib.Path(path).is_dir():
        raise ValueError(f"{option}: {path} is a directory, expected the name of a file")
    directory = pathlib.Path(path).absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{option}: there is no directory {directory}: make it first")


def read_text(path: str) -> str:
    """The text of a file in UTF-8, or of standard input for -; ValueError where it is no UTF-8."""
    content = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}): convert it first") from error
