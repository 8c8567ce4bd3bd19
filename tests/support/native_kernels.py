"""The kernels in C++, for tests: compiled once for all of them, and for arrays of any size."""

import contextlib
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from ling3.ops.cpu import attention, conv, drawing, kda, logits, products, rows
from ling3.runtime import native

KEPT = pathlib.Path(__file__).parents[2] / ".jax_cache" / "native"
HAS_COMPILER = bool(native._compiler()) and shutil.which(native._compiler()[0]) is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")


def forget():
    """What is known of libraries."""
    native.target.cache_clear()
    native._library.cache_clear()
    native.instructions.cache_clear()


@contextlib.contextmanager
def installed():
    """Inside, operators run on their kernels, whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, str(KEPT))
        for kernel in (attention, conv, drawing, kda, logits, rows):
            patch.setattr(kernel, "LEAST", 0)
        patch.setattr(products, "LEAST", dict.fromkeys(products.LEAST, 0))
        forget()
        jax.clear_caches()
        sources = [kernel.SOURCE for kernel in (products, attention, conv, drawing, kda, logits, rows)]
        with ThreadPoolExecutor(2) as threads:
            absent = threads.map(native.missing, [products.SOURCE, *sources], ["QUANTIZED", *[""] * len(sources)])
            assert set(absent) == {None}
        yield
    forget()
    jax.clear_caches()
