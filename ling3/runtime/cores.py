"""The number of cores that this process may use."""

import os


def cores() -> int:
    """The cores in this process's CPU affinity, or all of the machine's if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
