"""The `ling3` command line, one module per command. Results go to stdout, everything else to stderr."""

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Imports wait until they are needed: Ctrl-C is handled first, then the options are read, then JAX is imported.

# The most characters of an error message: a screen of 24 lines.
LONGEST_ERROR = 24 * 80


def process() -> int:
    """Runs `main` as a process: Ctrl-C ends it at once, and characters that stdout cannot encode are escaped."""
    from ling3.cli import interruption

    interruption.end_process()
    # A standard stream is None if it was closed, as with >&-.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stdout is None:
        return _failed(1, "standard output is closed, and results go there: leave it open")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    return main(before=_settle)


def _settle(debug: bool) -> None:
    """Imports what commands need, and prepares the process so that the first token comes sooner.

    The garbage collector skips the objects that exist by then. Without `debug` the package's functions do not check the
    types of their arguments; the commands check what a user types.
    """
    import gc

    import ling3

    if not debug:
        ling3.leave_types_unchecked()
    import ling3.serve

    gc.freeze()


def main(argv: Sequence[str] | None = None, before: Callable[[bool], Any] | None = None) -> int:
    """Runs the command line; `before` is called with the value of --debug once the options are read.

    The exit code is 2 for errors that the user can correct, 1 for others, 130 after Ctrl-C, and 141 if the reader of
    stdout has closed it. An error is printed as one line on stderr; with --debug it is raised instead.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            _run(argv, before)
        finally:
            _flush()
    except SystemExit:
        raise
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except (ValueError, OSError, FloatingPointError) as error:
        if "--debug" in argv:
            raise
        return _failed(2, str(error) or type(error).__name__)
    except BaseException as error:
        # Panics in Rust code derive from BaseException only.
        if "--debug" in argv:
            raise
        lines = str(error).strip().splitlines()
        words = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        return _failed(1, f"{words} (--debug shows the traceback)", of_jax=type(error).__name__ == "JaxRuntimeError")
    return 0


def _run(argv: list[str], before: Callable[[bool], Any] | None) -> None:
    if argv == ["--version"]:
        from ling3.version import __version__

        print(f"ling3 {__version__}")
        return
    import tyro

    from ling3.cli import ablate, bench, chat, eval, generate, inspect, look, quantize, serve, train
    from ling3.cli.devices import Machines
    from ling3.cli.loading import follow
    from ling3.cli.serving import Serving

    command = tyro.cli(
        generate.Generate
        | chat.Chat
        | serve.Serve
        | bench.Bench
        | eval.Eval
        | ablate.Ablate
        | inspect.Inspect
        | look.Look
        | quantize.Quantize
        | train.Train,
        prog="ling3",
        description="Ling-3 in JAX.",
        args=argv,
        config=(
            *(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            *(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        ),
    )
    if before is not None:
        before("--debug" in argv)
    module, devices = sys.modules[type(command).__module__], getattr(command, "devices", None)
    if isinstance(devices, Machines) and isinstance(command.common, Serving):
        command.common.check(devices)  # before waiting for other processes
    if isinstance(devices, Machines) and devices.nnodes is not None:
        _keep_stdout()
    if isinstance(devices, Machines) and devices.connect():
        getattr(module, "follow", follow)(command)
    else:
        module.run(command)


def _keep_stdout() -> None:
    """Keeps stdout for Python alone: libraries that connect processes write to its descriptor, which now is stderr."""
    try:
        own, descriptor = sys.stdout, sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):  # stdout is not a file
        return
    sys.stdout = open(os.dup(descriptor), "w", encoding=own.encoding, errors=own.errors)  # noqa: SIM115, PTH123
    os.dup2(sys.stderr.fileno(), descriptor)


def _failed(code: int, message: str, of_jax: bool = False) -> int:
    """Prints an error, at most a screen long, and returns the exit code.

    If several processes run the command, the error is reported to the others. A JAX error may mean that another process
    has ended; then the error of that process is printed.
    """
    from ling3.runtime import quoting

    if (processes := sys.modules.get("ling3.runtime.processes")) is not None:
        if of_jax and (errors := processes.failed()):
            message = "; ".join(errors)
        else:
            processes.say_failed(message)
    print(f"ling3: error: {quoting.message(message, LONGEST_ERROR)}", file=sys.stderr)
    return code


def _flush() -> None:
    """Flushes stdout. If its reader has closed it, as after `| head`, drops the buffered output and raises again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise
