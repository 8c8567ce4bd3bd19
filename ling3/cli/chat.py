"""`ling3 chat`: a conversation in the terminal."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ling3.cli import interruption
from ling3.cli.conversation import Conversation, Unanswered, settings_line, with_settings
from ling3.cli.devices import Machines
from ling3.cli.loading import Loading
from ling3.cli.options import Command, Guessing, Sampling, TextOption, Thinking, WholeNumber, chat_ids
from ling3.cli.terminal import compiling, show

# Tokens of the longest conversation without --max-model-len: memory for all of them is reserved.
CONTEXT = 32_768

HELP = """\
/reset                           forget what was said; the system's message stays
/params                          show how answers are drawn
/params temperature=0.7 top_p=1  change that; stop=TEXT may be given several times, stop= is none
/help                            show this
/quit, or Ctrl-D                 leave
Ctrl-C stops an answer; what it has said stays in the conversation.
A line that begins with a space is never a command."""
LEAVE = "Ctrl-D or /quit leaves, /help says more."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(Command):
    """Talk with a model; in the conversation, /help lists the commands.

    If standard input is piped, each line is a question, and the answers go to standard output.
    """

    common: Loading
    devices: Machines
    system: TextOption = None
    """The system message, which begins the conversation."""
    thinking: Thinking = "auto"
    """The template's thinking mode; auto is the template's own choice."""
    max_tokens: WholeNumber = None
    """The most tokens of an answer; by default, what the context has room for."""
    max_model_len: WholeNumber = None
    """The most tokens of the conversation; by default the model's context, but at most 32,768."""
    seed: WholeNumber = None
    """The same seed samples the same answers; without it, each answer is random."""
    sampling: Sampling
    guessing: Guessing


def run(command: Chat) -> None:
    """Talks until the input ends. Raises ValueError at the end if questions from a pipe were not answered."""
    from ling3.engine.settings import EngineSettings
    from ling3.serve import Engine

    most = CONTEXT if command.max_tokens is None else command.max_tokens
    params = command.sampling.params(max_tokens=most, seed=command.seed)
    source = command.common.source(command.model, command.devices, command.guessing.speculation)
    tokenizer = source.tokenizer()
    chat_ids(tokenizer, [{"role": "user", "content": ""}], command.thinking)  # raises now if there is no template
    model = source.load(tokenizer)
    context = command.max_model_len
    if context is None:
        context = min(CONTEXT, model.config.max_position_embeddings)
    # For one reader: few decode steps per call, so that text flows, and the fewest rows with which a call is fast.
    engine = Engine(
        model,
        tokenizer,
        EngineSettings(
            max_running_requests=command.devices.slots(1),
            max_model_len=context,
            token_paddings=(128, 512),
            decode_rows=max(2, command.guessing.rows),
            decode_steps=4,
            **dataclasses.asdict(command.guessing),
        ),
    )
    if command.max_tokens is None:
        params = dataclasses.replace(params, max_tokens=context)
    console = Console(stderr=True, highlight=False)
    source.introduce(model, console)
    with compiling(console):
        engine.warmup()
    _talk(Conversation(engine, tokenizer, params, command.system, command.thinking), console)


def _talk(conversation: Conversation, console: Console) -> None:
    if typed := sys.stdin.isatty():
        interruption.raise_again()
    questions = unanswered = 0
    for line in _typed(console) if typed else _piped():
        if line.rstrip() == "/quit":
            break
        if line.startswith("/"):
            _obey(line, conversation, console)
        elif line.strip():
            questions += 1
            unanswered += not _answer(line, conversation, console, typed)
    if unanswered and not typed:
        raise ValueError(f"{unanswered} of {questions} questions found no answer")


def _typed(console: Console) -> Iterator[str]:
    """Yields the lines typed at a terminal; Ctrl-C drops the line and prints how to leave."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its line editing

    _note(console, LEAVE)
    while True:
        try:
            line = _line()
        except KeyboardInterrupt:
            _note(console, f"\n{LEAVE}")
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        yield line


def _piped() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\n")


def _line() -> str:
    """Reads a typed line. Raises EOFError at the end. The prompt goes to stdout if it is a terminal, else to stderr."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _obey(line: str, conversation: Conversation, console: Console) -> None:
    """Runs one of the commands that /help lists."""
    name, _, rest = line.strip().partition(" ")
    if name == "/params":
        try:
            conversation.params = with_settings(conversation.params, rest)
        except ValueError as error:
            _error(console, f"{error}; nothing was changed")
        else:
            _note(console, settings_line(conversation.params))
    elif name == "/reset" and not rest:
        conversation.reset()
        _note(console, "forgotten")
    elif name == "/help" and not rest:
        _note(console, HELP)
    else:
        _error(console, f"{line.strip()!r} is not a command: /help lists them")


def _answer(question: str, conversation: Conversation, console: Console, typed: bool) -> bool:
    """Shows the answer as it comes. Returns whether there was one. At a terminal, Ctrl-C stops only the answer."""
    reason, error, begun = None, None, False
    try:
        with contextlib.closing(conversation.ask(question)) as deltas:
            for delta in deltas:
                begun = True
                reason = delta.finish_reason
                show(delta.text)
    except Unanswered as unanswered:
        error = unanswered
    except KeyboardInterrupt:
        if not typed:
            raise
        begun = True
    if begun:
        print(flush=True)
    if error is not None:
        _error(console, str(error))
    elif reason is None:
        _note(console, "stopped")
    elif reason == "length" and conversation.full:
        _note(console, f"the context of {conversation.engine.max_model_len:,} tokens is full: /reset forgets it")
    elif reason == "length":
        most = conversation.params.max_tokens
        _note(console, f"stopped after max_tokens={most}: /params max_tokens={2 * most} would allow more")
    return error is None


def _note(console: Console, text: str) -> None:
    console.print(Text(text, "dim"), soft_wrap=True)


def _error(console: Console, text: str) -> None:
    console.print(Text(text, "red"), soft_wrap=True)
