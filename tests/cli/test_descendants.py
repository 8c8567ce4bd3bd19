"""The processes that this one has started."""

import subprocess
import sys
import time

import pytest

from ling3.cli import descendants

pytestmark = pytest.mark.skipif(not descendants.PROCESSES.is_dir(), reason="processes are found in /proc")

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
time.sleep(60)
"""
ENDING = """
import subprocess, sys
from ling3.cli import descendants
child = subprocess.Popen([sys.executable, "-c", {parent!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(*descendants.descendants(), flush=True)
descendants.kill()
print(child.wait())
"""


def test_children_and_theirs_are_found_and_killed():
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(parent=PARENT)], capture_output=True, text=True, check=True
    )
    found, code = done.stdout.splitlines()
    assert len(found.split()) == 2 and code == "-9"
    until = time.monotonic() + 20
    while any(running(process) for process in found.split()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(running(process) for process in found.split())


def running(process):
    try:
        state = (descendants.PROCESSES / process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
