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
    from jaxtyping import DTypeLike

    from ling3.engine.sampling_params import SamplingParams
    from ling3.model import CausalLM
    from ling3.text.tokenizer import Tokenizer

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
        from ling3.engine.sampling_params import SamplingParams

        return SamplingParams(**dataclasses.asdict(self), **others)


SamplingOptions = tyro.conf.OmitArgPrefixes[Sampling]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Which weights the model has."""

    revision: TextOption = None
    """A branch, a tag or a commit, where MODEL is a hub id; the branch main without it."""
    random_weights: bool = False
    """Draw weights at random. MODEL may then be a directory without weights, or a config.json."""
    weights_seed: WholeNumber = None
    """With --random-weights: what they are drawn from; 0 without it."""

    def of(self, path: str) -> "Source":
        """These weights of the model at `path`; a branch of the hub is what it is now."""
        from ling3.checkpoint import hub

        if not self.random_weights:
            if self.weights_seed is not None:
                raise ValueError("--weights-seed is for --random-weights")
            return Source(path, path, hub.pin(path, self.revision), None)
        seed = self.weights_seed or 0
        if not 0 <= seed < 2**32:
            raise ValueError(f"--weights-seed is {seed}, expected a whole number in [0, 2**32)")
        file = pathlib.Path(path)
        directory = str(file.parent) if file.is_file() else path
        return Source(path, directory, hub.pin(directory, self.revision), seed)


WeightsOptions = tyro.conf.OmitArgPrefixes[Weights]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a command's model and tokenizer come from, both of one commit."""

    name: str
    """MODEL, as it was given."""
    path: str
    """`ling3.load`'s path; the directory where a config.json was given."""
    revision: str | None
    """The commit, where that is a hub id."""
    seed: int | None
    """What random weights are drawn from; None for the checkpoint's own."""

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer; FileNotFoundError where there is none."""
        from ling3.text.tokenizer import load_tokenizer

        return load_tokenizer(self.path, revision=self.revision)


def load(source: Source, dtype: Dtype, tokenizer: "Tokenizer | None") -> "CausalLM":
    """The model of `source`, which has to fit the tokenizer."""
    import jax.numpy as jnp

    from ling3 import checkpoint
    from ling3.runtime import compilation_cache

    compilation_cache.switch_on()
    wanted = {"auto": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}[dtype]
    if source.seed is None:
        model = checkpoint.load(source.path, wanted, revision=source.revision)
    else:
        model = _random(source, source.seed, jnp.bfloat16 if wanted is None else wanted)
    if tokenizer is not None:
        tokenizer.check_fits(model.config.vocab_size)
    return model


def _random(source: Source, seed: int, dtype: "DTypeLike") -> "CausalLM":
    """A model of random weights; ValueError where they do not fit into the free memory."""
    import jax

    from ling3.checkpoint import hub
    from ling3.checkpoint.names import structure
    from ling3.engine.runner import free_bytes
    from ling3.families import init, read_config

    given = pathlib.Path(source.name)
    config = read_config(given if given.is_file() else hub.resolve(source.path, ("config.json",), source.revision))
    arrays = jax.tree.leaves(structure(config, dtype))
    # Each array is drawn in float32: its random bits, their values, and these scaled are there at once.
    needed = sum(array.size * array.dtype.itemsize for array in arrays) + 12 * max(array.size for array in arrays)
    if needed > (free := free_bytes()):
        raise ValueError(
            f"{source.name}: drawing {count(sum(array.size for array in arrays))} weights in "
            f"{jax.numpy.dtype(dtype).name} takes {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free: "
            "give a smaller config.json, or a narrower --dtype"
        )
    return init(config, key=jax.random.key(seed), dtype=dtype)


def introduce(source: Source, model: "CausalLM", console: Console) -> None:
    """Says what runs where."""
    import jax

    size = sum(leaf.size for leaf in jax.tree.leaves(model))
    kind = "parameters" if source.seed is None else "random parameters"
    facts = f"{source.name}: {count(size)} {kind}, {model.dtype.name}, on {jax.default_backend()}"
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
