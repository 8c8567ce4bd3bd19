"""What only a fresh process can tell: the most memory that something takes."""

import subprocess
import sys
import textwrap
from pathlib import Path

import ling3


def in_a_process(code: str) -> int:
    """What `code` prints, run in an interpreter of its own, where `peak()` is the most memory it has had, in bytes."""
    prelude = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import ling3
from published_configs import FLASH
from ling3.checkpoint import load
from ling3.families.ling3_config import Ling3Config
from ling3.checkpoint.names import structure

def peak():
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Here ru_maxrss would begin at that of the process that started this one.
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
"""
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONPATH": str(Path(ling3.__file__).parents[1])},
    )
    return int(done.stdout)
