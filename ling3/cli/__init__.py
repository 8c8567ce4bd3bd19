"""The `ling3` command: a module for each of its commands. Results go to stdout, all else to stderr."""

import gc
import os
import sys
from collections.abc import Sequence

import jaxtyping
import tyro

from ling3.cli import ablate, bench, chat, eval, generate, inspect
from ling3.cli.ablate import Ablate
from ling3.cli.bench import Bench
from ling3.cli.chat import Chat
from ling3.cli.eval import Eval
from ling3.cli.generate import Generate
from ling3.cli.inspect import Inspect
from ling3.quoting import message
from ling3.version import __version__

RUN = {
    Generate: generate.run,
    Chat: chat.run,
    Bench: bench.run,
    Eval: eval.run,
    Ablate: ablate.run,
    Inspect: inspect.run,
}


def process() -> int:
    """`main` as a process of its own, whose first token comes in four fifths of the time.

    What is imported stays, so the garbage collector need not look through it again. And the package's functions do not
    check the types of each other's arguments, except with --debug: what a user types is checked by the commands.
    """
    gc.freeze()
    if "--debug" not in sys.argv:
        jaxtyping.config.update("jaxtyping_disable", True)
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code is 2 for what the user can mend, and 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--version"]:
        print(f"ling3 {__version__}")
        return 0
    command = tyro.cli(
        Generate | Chat | Bench | Eval | Ablate | Inspect,
        prog="ling3",
        description="Ling-3 in JAX.",
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
    )
    try:
        RUN[type(command)](command)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone, as `head` does; the interpreter must not flush to it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, FloatingPointError) as error:
        if command.debug:
            raise
        print(f"ling3: error: {message(str(error))}", file=sys.stderr)
        return 2
    return 0
