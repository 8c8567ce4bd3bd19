"""The best that this machine can do, measured when needed: predictions are computed from these numbers."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TRIES = 5


def read_bandwidth(megabytes: int = 256) -> float:
    """Bytes per second that a matrix-vector product reads from memory; decoding cannot read faster."""
    rows = megabytes * 2**18 // 1024
    matrix, vector = jnp.ones((rows, 1024), jnp.float32), jnp.ones(1024, jnp.float32)
    return matrix.nbytes / _fastest(jax.jit(jnp.dot), matrix, vector)


def matmul_rate(size: int = 1024) -> float:
    """Floating-point operations per second of a float32 matrix product."""
    matrix = jnp.ones((size, size), jnp.float32)
    return 2 * size**3 / _fastest(jax.jit(jnp.dot), matrix, matrix)


def _fastest(function: Callable[..., Any], *arrays: jax.Array) -> float:
    """Seconds of the fastest of several calls, since other load on the machine can only add to it."""
    jax.block_until_ready(function(*arrays))
    seconds = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
