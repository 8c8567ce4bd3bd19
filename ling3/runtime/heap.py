"""Memory that the process has freed, returned to the operating system."""

import contextlib
import ctypes
import sys


def trim() -> None:
    """Returns the C heap's free memory to the operating system: on Linux with glibc, elsewhere it does nothing.

    Compiling a model's programs takes hundreds of megabytes in several threads, and glibc keeps what each thread frees
    for later requests of that thread.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library, such as musl, has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
