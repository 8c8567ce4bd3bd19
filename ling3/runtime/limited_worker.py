"""The process of `limited_process.py`: one JSON request per line on stdin, one JSON reply per line on stdout.

It is run as a script, with the path of the module that prepares and answers, and imports nothing of ling3.
"""

import faulthandler
import importlib.util
import json
import os
import pathlib
import signal
import sys
from typing import Any


def main(path: str, mebibytes: int) -> None:
    """Answers requests until stdin ends; exits early if one exceeds its seconds, or `mebibytes` of extra memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module = _module(path)
    if not (setup := sys.stdin.buffer.readline()):
        sys.exit(1)  # the parent is gone
    module.prepare(**json.loads(setup))
    if sys.platform == "linux":
        _limit_memory(mebibytes * 2**20)
    # Nothing more goes to stderr: the parent, if it still runs, reports how this process ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    print(flush=True)  # tells the parent that this process has started
    try:
        for line in sys.stdin.buffer:
            seconds, request = json.loads(line)
            # A timer in C, as one long operation may block the interpreter for hours. It exits with status 1.
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            reply = json.dumps(module.answer(**request))
            faulthandler.cancel_dump_traceback_later()
            print(reply, flush=True)
    except MemoryError:
        os._exit(2)


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None and spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _limit_memory(more: int) -> None:
    import resource  # noqa: PLC0415

    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
