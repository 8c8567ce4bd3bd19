"""An operator: a plain function that specifies it, and per platform the kernel that may run in its place.

On a CPU the experts have one from the start (`experts_cpu`). The `*_kernel.py` beside it are written for a GPU, in
Pallas for Triton, and none is installed: so far they have run in Pallas' interpreter alone, and no time was taken. With
a GPU at hand: hold a kernel to its twin there, take both times, and `Operator.install("gpu", kernel)`.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """A function that is its `plain` form until a kernel is installed for the platform that it is traced for.

    Layers call it like the function. The choice falls when a program is traced, by `jax.default_backend()` ("cpu",
    "gpu"); nothing is chosen while it runs. A kernel takes the arguments of the plain form and gives its results: the
    same shapes and dtypes, values to the last bits of float32, every row's bits the same whoever its neighbours are.
    """

    def __init__(self, plain: Callable[P, R], **kernels: Callable[P, R]):
        """`kernels` are installed from the start, by platform."""
        self.plain = plain
        self._kernels = kernels
        functools.update_wrapper(self, plain)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What the kernel of this platform gives, or the plain form."""
        return self._kernels.get(jax.default_backend(), self.plain)(*args, **kwargs)

    def install(self, platform: str, kernel: Callable[P, R] | None) -> None:
        """From now on `kernel` is traced in the plain form's place on `platform`; None brings the plain form back.

        What was compiled before would go on as it is, so all compiled programs are dropped.
        """
        if kernel is None:
            self._kernels.pop(platform, None)
        else:
            self._kernels[platform] = kernel
        jax.clear_caches()


def triton_params(warps: int) -> Any:
    """How a kernel is compiled for a GPU: by Triton, with so many warps to a program."""
    # Newer releases of jax mean to drop Triton: whoever does not compile for it need not have it.
    from jax.experimental.pallas import triton  # noqa: PLC0415

    return triton.CompilerParams(num_warps=warps)
