"""Options that the commands share: how they are parsed, how tokens are sampled, and what every command has."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ling3.engine.sampling_params import SamplingParams
from ling3.runtime.parameters import meanings, parameters
from ling3.runtime.quoting import shown

if TYPE_CHECKING:
    from rich.console import Console

    from ling3.text.tokenizer import Tokenizer


def _optional(metavar: str, read: Callable[[str], Any]) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """How tyro parses an optional value, whose help text says what happens without it.

    tyro's default for `int | None` shows NoneType in its help and accepts the text "None".
    """
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, (str, int, float)),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def whole_number(word: str) -> int:
    """Parses a whole number. Raises ValueError, with a message for users, for anything else."""
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"found {word!r}, expected a whole number") from None


NO_DEFAULT = tyro.conf.arg(help_behavior_hint="")
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
MoreModels = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL ...]"), NO_DEFAULT]
OptionalModel = Annotated[str | None, tyro.conf.Positional, _optional("MODEL", str), NO_DEFAULT]
TextOption = Annotated[str | None, _optional("TEXT", str), NO_DEFAULT]
FileOption = Annotated[str | None, _optional("FILE", str), NO_DEFAULT]
DirectoryOption = Annotated[str | None, _optional("DIR", str), NO_DEFAULT]
NamesOption = Annotated[str | None, _optional("NAMES", str), NO_DEFAULT]
WholeNumber = Annotated[int | None, _optional("INT", whole_number), NO_DEFAULT]


def _guesser(word: str) -> str:
    if word not in ("lookup", "mtp"):
        raise ValueError(f"found {word!r}, expected lookup or mtp")
    return word


GuesserOption = Annotated[Literal["lookup", "mtp"] | None, _optional("lookup|mtp", _guesser), NO_DEFAULT]
FloatOption = Annotated[float | None, _optional("FLOAT", float), NO_DEFAULT]
OPTIONAL = {int: WholeNumber, float: FloatOption}
Thinking = Literal["auto", "on", "off"]


def chat_ids(tokenizer: "Tokenizer", messages: list[dict[str, str]], thinking: Thinking) -> list[int]:
    """The token ids of `messages` in the checkpoint's chat template, which with "auto" chooses the thinking mode."""
    if thinking == "auto":
        return tokenizer.apply_chat_template(messages)
    return tokenizer.apply_chat_template(messages, enable_thinking=thinking == "on")


def prompt_ids(
    tokenizer: "Tokenizer | None", prompt: str, *, chat: bool, system: str | None, thinking: Thinking
) -> list[int]:
    """The token ids of a text or, with `chat`, of a user message in the chat template.

    Without a tokenizer the text must be token ids, separated by blanks. Raises ValueError for other texts, and for the
    options of `chat` without it.
    """
    if not chat and (system is not None or thinking != "auto"):
        raise ValueError("--system and --thinking are for --chat")
    if tokenizer is None:
        words = prompt.split()
        if chat or not all(word.isascii() and word.isdecimal() for word in words):
            raise ValueError(
                f"the model has no tokenizer, and {shown(prompt)} has to be token ids: give them as in -p '5 17 3', "
                "without --chat, or put the files of a tokenizer beside config.json"
            )
        return [int(word) for word in words]
    if not chat:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return chat_ids(tokenizer, messages, thinking)


def hint_at_chat(tokenizer: "Tokenizer | None", chat: bool, console: "Console") -> None:
    """Prints on a terminal that a text is continued as it stands, if the checkpoint has a chat template."""
    if not chat and tokenizer is not None and tokenizer.chat_templates and console.is_terminal:
        console.print("The text is continued as it stands; --chat asks it as a question.", style="dim")


def _common() -> Any:
    """A dataclass with an option for each engine parameter that all commands and the server share."""
    options = []
    for name, each in parameters(SamplingParams).items():
        if each.common:
            kind = OPTIONAL[each.kind] if each.optional else each.kind
            option = Annotated[kind, tyro.conf.arg(help=meanings(SamplingParams)[name])]
            options.append((name, option, dataclasses.field(default=each.default)))
    return dataclasses.make_dataclass("Common", options, frozen=True, kw_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling(_common()):
    """How tokens are sampled, and where a text ends."""

    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """End a text before this string; may be given several times."""

    def params(self, **others: Any) -> SamplingParams:
        """The options and `others` as SamplingParams. Raises ParameterError for invalid values."""
        return SamplingParams(**{**dataclasses.asdict(self), **others})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guessing:
    """How tokens are guessed ahead, which is faster where the guesses are right."""

    speculation: GuesserOption = None
    """Guess tokens, and check several in one pass: lookup guesses what followed the same tokens before, mtp asks the
    checkpoint's multi-token-prediction layer."""
    draft_tokens: int = 3
    """The most guesses in a pass."""

    @property
    def rows(self) -> int:
        """The rows of a decode call for each sequence."""
        return 1 if self.speculation is None else self.draft_tokens + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The options common to all commands."""

    model: Model
    """A checkpoint directory, a GGUF file, a hub id, or "nano" for the checkpoint in the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options for the version of the checkpoint, and for how errors are shown."""

    revision: TextOption = None
    """A branch, a tag or a commit, if MODEL is a hub id; by default the branch main."""
    debug: bool = False
    """Show the traceback of an error, and check the types of functions' arguments."""
