"""Runs servers and their clients as separate processes, with the commands that users type."""

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

PATIENCE = 300
"""Seconds to wait for a server to start, or for one measurement."""


@contextlib.contextmanager
def served(*command: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """Runs a server while the context lasts, and gives its base URL; `command` gets `--host` and a free `--port`.

    Raises RuntimeError, with the command, if it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*command, "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env) as process:
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
            while not _answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"no server began with {' '.join(arguments)}")
                time.sleep(0.2)
            yield f"{url}/v1"
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def ling3(command: str, *arguments: Any) -> list[str]:
    """The command line of `ling3 COMMAND`."""
    return [sys.executable, "-m", "ling3.cli", command, *map(str, arguments)]


def bench(*arguments: Any) -> dict[str, Any]:
    """The report of `ling3 bench`. Raises RuntimeError with its message if it fails, or if requests failed."""
    done = subprocess.run(
        ling3("bench", *arguments, "--json", "-"), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    report = json.loads(done.stdout)
    levels: Sequence[dict[str, Any]] = report.get("levels", [report])
    if any(level["failed"] for level in levels):
        raise RuntimeError(f"requests failed: {[level['errors'] for level in levels]}")
    return levels[0]


def posted(url: str, body: dict[str, Any]) -> Any:
    """Posts `body` as JSON and returns the answer's JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
