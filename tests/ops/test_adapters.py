"""Low-rank updates in a call whose rows may each have another adapter: the formula, and whose bits depend on what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.execution import PLAIN, Execution
from ling3.ops.absorption import AdaptedLatents, adapted_queries, adapted_values
from ling3.ops.adapters import AdapterRows, StackedUpdates, added
from ling3.ops.matmul import matmul_transposed

OUT, IN, HEADS = 24, 32, 3


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def stack(count, rank, outer=OUT, inner=IN, seed=0):
    scale = jnp.asarray([0.5 + i for i in range(count)], jnp.float32)
    return StackedUpdates(drawn(count, rank, inner, seed=seed), drawn(count, outer, rank, seed=seed + 1), scale)


STACKS = {(0, 2): stack(2, 4), (1,): stack(1, 2, seed=2)}
"""Adapters 0 and 2 have rank 4, and adapter 1 has rank 2."""


def updates(which, stacks=None):
    stacks = STACKS if stacks is None else stacks
    return [(own, AdapterRows.of(jnp.asarray(which, jnp.int32), indices)) for indices, own in stacks.items()]


def product(y, x, which, execution=PLAIN, stacks=None):
    return jax.jit(lambda y, x: added(y, updates(which, stacks), lambda own, i: own.product(x, i, execution.times)))(
        y, x
    )


@pytest.mark.parametrize("each", [1, 3])
def test_it_is_the_formula(each):
    """Row by row, also where each row of a call has several tokens. Sums of 32 products near 1 in float32: 1e-4."""
    which = [2, 0, 7, 1, -1, 0]
    x, y = drawn(each * len(which), IN, seed=5), drawn(each * len(which), OUT, seed=6)
    found = product(y, x, which)
    for row, adapter in enumerate(np.repeat(which, each)):
        expected = np.asarray(y[row], np.float64)
        for indices, own in STACKS.items():
            if adapter in indices:
                A, B, scale = (np.asarray(array[indices.index(adapter)], np.float64) for array in own)
                expected = expected + scale * B @ (A @ np.asarray(x[row], np.float64))
        np.testing.assert_allclose(found[row], expected, atol=1e-4)


@pytest.mark.parametrize("execution", [PLAIN, Execution.default()])
def test_bits_depend_on_the_row_alone(execution):
    """Not on the adapters and numbers of other rows, and not on how many adapters there are, or in which order."""
    x, y, which = drawn(6, IN, seed=5), drawn(6, OUT, seed=6).at[2, 0].set(-0.0), [2, 0, 9, 1, -1, 0]
    found = product(y, x, which, execution)
    np.testing.assert_array_equal(np.asarray(found)[[2, 4]].view(np.int32), np.asarray(y)[[2, 4]].view(np.int32))
    for adapter, rows in ((0, [1, 5]), (1, [3]), (2, [0])):
        poisoned = jnp.full_like(x, jnp.nan).at[jnp.asarray(rows)].set(x[jnp.asarray(rows)])
        alone = product(y, poisoned, [adapter if row in rows else -1 for row in range(6)], execution)
        np.testing.assert_array_equal(alone[jnp.asarray(rows)], found[jnp.asarray(rows)])
    both = jax.tree.map(lambda *own: jnp.concatenate(own), stack(1, 2, seed=9), STACKS[1,])
    turned = {(5, 0): both, (3, 1): jax.tree.map(lambda array: array[::-1], STACKS[0, 2])}
    np.testing.assert_array_equal(product(y, x, [3, 1, 9, 0, -1, 1], execution, turned), found)


def test_mlas_absorbed_products_are_those_of_the_sum():
    """W + scale · B A for each row, which is not formed. Sums of 32 products near 1 in float32: 1e-4."""
    nope, value, latent = 4, 4, 16
    weight, which = drawn(HEADS * (nope + value), latent, seed=7), [1, -1, 0]
    own = stack(2, 3, outer=HEADS * (nope + value), inner=latent)
    latents = AdaptedLatents(weight, updates(which, {(0, 1): own}))
    q, summed = drawn(3, HEADS, nope, seed=8), drawn(3, HEADS, latent, seed=9)
    how = ("float32", PLAIN.times)
    queries = adapted_queries(q, latents, PLAIN.latent_queries, *how)
    values = adapted_values(summed, latents, value, PLAIN.latent_values, *how)
    for row, adapter in enumerate(which):
        total = (
            weight if adapter < 0 else weight + own.scale[adapter] * matmul_transposed(own.B[adapter], own.A[adapter].T)
        )
        alone = slice(row, row + 1)
        np.testing.assert_allclose(queries[alone], PLAIN.latent_queries(q[alone], total, "float32"), atol=1e-4)
        np.testing.assert_allclose(
            values[alone], PLAIN.latent_values(summed[alone], total, value, "float32"), atol=1e-4
        )
