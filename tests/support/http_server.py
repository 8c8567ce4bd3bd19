"""Servers for tests: `ling3 serve` as a process, and an app in a thread."""

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import uvicorn


class Process:
    """`ling3 serve nano` as a process, with its log, after a shell's command such as `ulimit -n 256`."""

    def __init__(self, *options, first=":", ling3=(sys.executable, "-m", "ling3")):
        command = ["sh", "-c", f'{first} && exec "$0" "$@"', *ling3, "serve", "nano", "--port", "0"]
        command += ["--max-running-requests", "4", "--max-model-len", "2048", *options]
        programs = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, **streams, text=True, env={**os.environ, **programs})
        self.lines, self._said = collections.deque(), threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self._wait(lambda line: (found := re.search(r"http://\S+", line)) and found.group())

    def _read(self):
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()

    def _wait(self, found, seconds=120):
        with self._said:
            assert self._said.wait_for(lambda: any(map(found, self.lines)), seconds), "\n".join(self.lines)
            return next(filter(None, map(found, self.lines)))

    def logged(self, request_id):
        """What the log says of a request, once it does."""
        return json.loads(self._wait(lambda line: f'"request_id": "{request_id}"' in line and line, 20))

    def signal(self, number):
        self.process.send_signal(number)

    def ended(self, seconds):
        """The status, once it has ended."""
        status = self.process.wait(seconds)
        self._reader.join()
        return status

    def close(self):
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.ended(20)
        self.process.stderr.close()


@contextlib.contextmanager
def process(*options, **how):
    started = Process(*options, **how)
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def listening(app):
    """The address of an app that a thread serves."""
    config = uvicorn.Config(app, port=0, log_level="warning", ws="none")
    socket, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        socket.close()
