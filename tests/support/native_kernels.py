"""The kernels in C++, for tests: compiled once for all of them, and for arrays of any size."""

import contextlib
import pathlib
import shutil

import jax
import pytest

from ling3.ops import attention_cpu, kda_cpu, products_cpu, rows_cpu
from ling3.runtime import native

KERNELS = {"attention": attention_cpu, "kda_run": kda_cpu, "product": products_cpu, "take_rows": rows_cpu}
KEPT = pathlib.Path(__file__).parents[2] / ".jax_cache" / "native"
HAS_COMPILER = bool(native._compiler()) and shutil.which(native._compiler()[0]) is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")


def forget():
    """What is known of libraries."""
    native.ffi_target.cache_clear()
    native._library.cache_clear()
    native.instructions.cache_clear()


@contextlib.contextmanager
def installed():
    """Inside, operators run on their kernels, whatever the size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, str(KEPT))
        for kernel in (attention_cpu, kda_cpu, rows_cpu):
            patch.setattr(kernel, "LEAST", 0)
        patch.setattr(products_cpu, "LEAST", dict.fromkeys(products_cpu.LEAST, 0))
        forget()
        jax.clear_caches()
        for name, kernel in KERNELS.items():
            assert native.ffi_target(kernel.SOURCE, name) is not None
        assert native.ffi_target(products_cpu.SOURCE, "product", "QUANTIZED") is not None
        yield
    forget()
    jax.clear_caches()
