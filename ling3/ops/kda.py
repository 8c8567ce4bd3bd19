"""The Kimi Delta Attention recurrence, token by token.

Kimi Linear, arXiv 2510.26692, §3. Per head, with a state S [key, value], a log decay g <= 0 per key channel and a
writing strength beta:

    S <- exp(g) S;    u = beta (v - S^T k);    S <- S + k u^T;    o = S^T q

`recurrent_kda` is the specification. `kda_chunks.py` computes the same result chunk by chunk with matrix products.
Everything is in the dtype of `g`, which is float32 in the model (float64 in some tests).

A `g` of one channel is the decay of all channels of a head: the gated delta rule (Gated DeltaNet, arXiv 2412.06464).
"""

from typing import NoReturn, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ling3.ops.forms import form_of


@runtime_checkable
class KDAStep(Protocol):
    """One token of the recurrence, as in a decode step."""

    def __call__(
        self,
        q: Float[Array, "batch heads key"],
        k: Float[Array, "batch heads key"],
        v: Float[Array, "batch heads value"],
        g: Float[Array, "batch heads #key"],
        beta: Float[Array, "batch heads"],
        state: Float[Array, "batch heads key value"],
        /,
    ) -> tuple[Float[Array, "batch heads value"], Float[Array, "batch heads key value"]]:
        """The output o and the state after the token."""
        ...


@runtime_checkable
class KDAInTurn(Protocol):
    """A few tokens of the recurrence with the bits of as many steps, whatever program either is part of."""

    def __call__(
        self,
        q: Float[Array, "batch seq heads key"],
        k: Float[Array, "batch seq heads key"],
        v: Float[Array, "batch seq heads value"],
        g: Float[Array, "batch seq heads #key"],
        beta: Float[Array, "batch seq heads"],
        state: Float[Array, "batch heads key value"],
        /,
    ) -> tuple[Float[Array, "batch seq heads value"], Float[Array, "batch heads key value"]]:
        """The outputs o and the state after the last token. Raises ValueError where the bits might differ, and why."""
        ...


@runtime_checkable
class KDALook(Protocol):
    """The outputs of a few tokens that may not be kept, with the bits of as many steps."""

    def __call__(
        self,
        q: Float[Array, "batch seq heads key"],
        k: Float[Array, "batch seq heads key"],
        v: Float[Array, "batch seq heads value"],
        g: Float[Array, "batch seq heads #key"],
        beta: Float[Array, "batch seq heads"],
        state: Float[Array, "batch heads key value"],
        /,
    ) -> Float[Array, "batch seq heads value"]:
        """The outputs o. Raises ValueError where the bits might differ, and why."""
        ...


@runtime_checkable
class ChunkKDA(Protocol):
    """Several tokens of the recurrence, as in prefill."""

    def __call__(
        self,
        q: Float[Array, "batch seq heads key"],
        k: Float[Array, "batch seq heads key"],
        v: Float[Array, "batch seq heads value"],
        g: Float[Array, "batch seq heads #key"],
        beta: Float[Array, "batch seq heads"],
        state: Float[Array, "batch heads key value"],
        /,
        *,
        lower_bound: float | None,
        chunk_size: int,
        resets: bool = False,
    ) -> tuple[Float[Array, "batch seq heads value"], Float[Array, "batch heads key value"]]:
        """The outputs of all tokens and the state after the last.

        With `resets` a token may have g = -inf in all its channels, which sets the state to zero before it.
        """
        ...


@form_of(KDAStep)
def kda_step(q, k, v, g, beta, state):
    """One token of the recurrence: the output o and the state after it."""
    o, *factors = output_and_factors(q, k, v, g, beta, state)
    return o, written(state, *factors)


def output_and_factors(
    q: Float[Array, "batch heads key"],
    k: Float[Array, "batch heads key"],
    v: Float[Array, "batch heads value"],
    g: Float[Array, "batch heads #key"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key value"],
) -> tuple[
    Float[Array, "batch heads value"],
    Float[Array, "batch heads #key"],
    Float[Array, "batch heads key"],
    Float[Array, "batch heads value"],
]:
    """The output o, and exp(g), k and u, from which `written` computes the new state.

    The state is read once for both products, since S^T q after the write is (exp(g) S)^T q + (q·k) u.
    """
    decay = jnp.exp(g)
    decayed = decay[..., None, :] * jnp.stack([k, q], axis=-2)
    read = jnp.einsum("bhrk,bhkv->bhrv", decayed, state, precision=lax.Precision.HIGHEST)
    u = beta[..., None] * (v - read[..., 0, :])
    return read[..., 1, :] + jnp.sum(q * k, axis=-1, keepdims=True) * u, decay, k, u


def written(
    state: Float[Array, "batch heads key value"],
    decay: Float[Array, "batch heads #key"],
    k: Float[Array, "batch heads key"],
    u: Float[Array, "batch heads value"],
) -> Float[Array, "batch heads key value"]:
    """The state after a write: exp(g) S + k uᵀ."""
    return decay[..., None] * state + k[..., None] * u[..., None, :]


def in_turn(*arrays: Array) -> NoReturn:
    """Raises ValueError: the last bits of the plain form depend on how XLA fuses it with the program around it."""
    raise ValueError("KDA keeps the bits of single steps only in its C++ kernel, which this platform does not have")


@form_of(KDAInTurn)
def recurrent_kda(q, k, v, g, beta, state):
    """The recurrence token by token: the outputs o of all tokens and the state after the last.

    A token with g = 0 and beta = 0 leaves the state unchanged; padding has both. g = -inf resets the state to zero.
    """

    def one(state, token):
        q, k, v, g, beta = token
        o, state = kda_step(q, k, v, g, beta, state)
        return state, o

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    state, o = lax.scan(one, state, tokens)
    return jnp.moveaxis(o, 0, 1), state


def state_norms(
    q: Float[Array, "batch seq heads key"],
    k: Float[Array, "batch seq heads key"],
    v: Float[Array, "batch seq heads value"],
    g: Float[Array, "batch seq heads #key"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads key value"],
) -> Float[Array, "batch seq heads"]:
    """The Frobenius norm of the state after each token, computed token by token."""

    def one(state, token):
        q, k, v, g, beta = token
        _, state = kda_step(q, k, v, g, beta, state)
        return state, jnp.linalg.norm(state, axis=(-2, -1))

    _, norms = lax.scan(one, state, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(norms, 0, 1)


def kda_gate(
    f: Float[Array, "batch seq heads key"],
    A_log: Float[Array, " heads"],
    dt_bias: Float[Array, "heads key"],
    lower_bound: float | None,
) -> Float[Array, "batch seq heads key"]:
    """The log decay g per token, head and key channel, in nats.

    bounded:    g = lower_bound · sigmoid(exp(A_log) · (f + dt_bias))      in (lower_bound, 0)
    unbounded:  g = -exp(A_log) · softplus(f + dt_bias)                    as in Kimi-Linear
    """
    rate = jnp.exp(A_log)[None, None, :, None]
    f = f + dt_bias[None, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(f)
    return lower_bound * jax.nn.sigmoid(rate * f)


def l2_normalize(x: Float[Array, "batch seq heads key"]) -> Float[Array, "batch seq heads key"]:
    """x / sqrt(Σ x² + 1e-6) per head. The epsilon is inside the root and added to the sum, not the mean."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
