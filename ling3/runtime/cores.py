"""The number of cores that this process may use."""

import os


def cores() -> int:
    """As many as the scheduler grants; all of the machine's where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
