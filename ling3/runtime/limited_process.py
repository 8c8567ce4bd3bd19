"""A process with limits on its memory and time, for work on untrusted input: it dies in place of this process.

A request that takes too much time or memory, or crashes the interpreter, fails alone: the next one starts the process
again. Time is limited on all systems, memory on Linux only.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

WORKER = pathlib.Path(__file__).with_name("limited_worker.py")


class LimitExceeded(Exception):
    """Raised if a request ended the process; the message says how, as in "it takes more than 3 seconds"."""


class LimitedProcess:
    """Answers requests in a separate process, one at a time.

    `module` is a file that imports nothing of ling3: its `prepare` gets the keywords of `setup()` at each start, and
    its `answer` those of each request, all of JSON types. After `prepare`, the process may take `mebibytes` more of
    address space. It is started at first use, and again after it has died.
    """

    def __init__(self, module: pathlib.Path, mebibytes: int, setup: Callable[[], dict[str, Any]] = dict):
        self.module, self.mebibytes, self._setup = module, mebibytes, setup
        self._lock = threading.Lock()
        self._process: Any = None
        self._parent = os.getpid()

    def ask(self, seconds: float, **request: Any) -> dict[str, Any]:
        """Returns the result of `answer(**request)` in the process.

        Raises LimitExceeded if the process dies of it or takes more than `seconds`, and RuntimeError if it does not
        start.
        """
        line = json.dumps([seconds, request]).encode() + b"\n"
        with self._lock:
            try:
                process = self._started()
                self._write(line)
                reply = process.stdout.readline()
            except BaseException:
                self.stop()  # else the next request would read this one's reply
                raise
            if reply.endswith(b"\n"):
                return json.loads(reply)
            status = self.stop()
        memory = f"takes more than {self.mebibytes} MiB of memory"
        ends = {
            1: f"takes more than {seconds:g} seconds",
            2: memory,
            -signal.SIGABRT: memory,  # by Rust, if it cannot allocate
            -signal.SIGSEGV: "is nested too deeply, and overflows the stack",
        }
        raise LimitExceeded(f"it {ends.get(status, f'crashes Python (exit status {status})')}")

    def stop(self) -> int:
        """Kills the process, if it runs and this process started it; returns its exit status."""
        process, self._process = self._process, None
        if process is None or self._parent != os.getpid():
            return 0
        process.kill()
        process.communicate()  # closes the pipes and waits
        return process.returncode

    def _started(self) -> Any:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            # -S skips `site`, the slowest part of the start; PYTHONPATH has this process's module path instead. With
            # one arena, glibc reserves no address space for threads.
            path = os.pathsep.join(map(str, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-P", str(WORKER), str(self.module), str(self.mebibytes)],
                env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
            self._write(json.dumps(self._setup()).encode() + b"\n")
            if not self._process.stdout.readline():
                raise RuntimeError(f"{sys.executable} does not run {self.module} in a process with limits")
        return self._process

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # the process has ended, and `ask` will find no reply
            self._process.stdin.write(line)
            self._process.stdin.flush()
