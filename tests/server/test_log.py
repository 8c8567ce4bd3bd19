"""The log where nobody reads it: it is dropped, and the server goes on."""

import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading

import httpx
import jax

from ling3.server import log


def test_a_stderr_that_nobody_reads_stops_neither_requests_nor_the_end():
    """A pipe holds 64 KiB, which are 300 lines."""
    programs = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    command = [
        sys.executable,
        "-m",
        "ling3",
        "serve",
        "nano",
        "--port",
        "0",
        "--max-running-requests",
        "4",
        "--max-model-len",
        "2048",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, **programs})
    try:
        said = b""
        while not (found := re.search(rb"(http://\S+)\n", said)):
            assert select.select([process.stderr], [], [], 60)[0], said
            said += os.read(process.stderr.fileno(), 2**16)
        with httpx.Client(base_url=found[1].decode(), timeout=10) as client:
            for _ in range(600):
                assert client.get("/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_is_dropped_is_counted(monkeypatch):
    monkeypatch.setattr(log, "MOST_LINES", 2)
    go, began, written = threading.Event(), threading.Event(), []

    def write(line):
        began.set()
        go.wait()
        written.append(line)

    writer = log.Writer(write)
    record = lambda text: logging.LogRecord("a", logging.INFO, "", 0, text, (), None)  # noqa: E731
    writer.emit(record("first"))
    began.wait()
    for i in range(5):
        writer.emit(record(str(i)))
    writer.drain(0.01)
    go.set()
    writer.drain(10)
    lines = [json.loads(line)["message"] for line in b"".join(written).splitlines()]
    assert lines == ["first", "3 lines of the log were dropped, as nobody read them", "0", "1"]
