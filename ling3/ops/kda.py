"""The Kimi Delta Attention recurrence in two equivalent forms.

Kimi Linear, arXiv 2510.26692, §3. Per head, with a state S [key, value], a log decay g <= 0 per key channel and a
writing strength beta:

    S <- exp(g) S;    u = beta (v - S^T k);    S <- S + k u^T;    o = S^T q

`recurrent_kda` applies it token by token and is the specification. `chunk_kda` computes the same result chunk by chunk
with matrix products. Everything is in the dtype of `g`, which is float32 in the model (float64 in some tests).
"""

from typing import NoReturn, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

# The largest exponent in a factor of a decayed product: exp(40)² = exp(80) still fits float32 (up to exp(88.7)).
MAX_NATS = 40.0
# Tokens of a chunk that share one reference point for their decays.
SUB_CHUNK = 16


@runtime_checkable
class KDAStep(Protocol):
    """One token of the recurrence, as in a decode step."""

    def __call__(
        self,
        q: Float[Array, "batch heads key"],
        k: Float[Array, "batch heads key"],
        v: Float[Array, "batch heads value"],
        g: Float[Array, "batch heads key"],
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
        g: Float[Array, "batch seq heads key"],
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
        g: Float[Array, "batch seq heads key"],
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
        g: Float[Array, "batch seq heads key"],
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


def kda_step(
    q: Float[Array, "batch heads key"],
    k: Float[Array, "batch heads key"],
    v: Float[Array, "batch heads value"],
    g: Float[Array, "batch heads key"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key value"],
) -> tuple[Float[Array, "batch heads value"], Float[Array, "batch heads key value"]]:
    """One token of the recurrence: the output o and the state after it."""
    o, *factors = output_and_factors(q, k, v, g, beta, state)
    return o, written(state, *factors)


def output_and_factors(
    q: Float[Array, "batch heads key"],
    k: Float[Array, "batch heads key"],
    v: Float[Array, "batch heads value"],
    g: Float[Array, "batch heads key"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key value"],
) -> tuple[
    Float[Array, "batch heads value"],
    Float[Array, "batch heads key"],
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
    decay: Float[Array, "batch heads key"],
    k: Float[Array, "batch heads key"],
    u: Float[Array, "batch heads value"],
) -> Float[Array, "batch heads key value"]:
    """The state after a write: exp(g) S + k uᵀ."""
    return decay[..., None] * state + k[..., None] * u[..., None, :]


def in_turn(
    q: Float[Array, "batch seq heads key"],
    k: Float[Array, "batch seq heads key"],
    v: Float[Array, "batch seq heads value"],
    g: Float[Array, "batch seq heads key"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads key value"],
) -> NoReturn:
    """Raises ValueError: the last bits of the plain form depend on how XLA fuses it with the program around it."""
    raise ValueError("KDA keeps the bits of single steps only in its C++ kernel, which this platform does not have")


def recurrent_kda(
    q: Float[Array, "batch seq heads key"],
    k: Float[Array, "batch seq heads key"],
    v: Float[Array, "batch seq heads value"],
    g: Float[Array, "batch seq heads key"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads key value"],
) -> tuple[Float[Array, "batch seq heads value"], Float[Array, "batch heads key value"]]:
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
    g: Float[Array, "batch seq heads key"],
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


def chunk_kda(
    q: Float[Array, "batch seq heads key"],
    k: Float[Array, "batch seq heads key"],
    v: Float[Array, "batch seq heads value"],
    g: Float[Array, "batch seq heads key"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads key value"],
    *,
    lower_bound: float | None,
    chunk_size: int = 16,
    resets: bool = False,
) -> tuple[Float[Array, "batch seq heads value"], Float[Array, "batch heads key value"]]:
    """The recurrence as matrix products, `chunk_size` tokens at a time (16 times a power of two, else ValueError).

    16 is fastest on a CPU, to run and to compile; a GPU's matrix units want larger products and fewer iterations.

    With G the sum of g from the chunk's start, inside a chunk:

        A_ij = b_i Σ_c k_ic k_jc e^{G_ic - G_jc}  (i > j);  M = (I + A)^-1;  U = M (b v);  W = M (b k e^G)
        v' = U - W S;   o = (q e^G) S + tril(Σ_c q_ic k_jc e^{G_ic - G_jc}) v';   S <- e^{G_C} S + (k e^{G_C - G})^T v'

    The caller must ensure `lower_bound <= g <= 0`, which lets the decayed products factor into plain matrix products
    (see `_decayed_products`). None requires only g <= 0 and uses a slower per-channel form with the same result.
    Tokens with g = -inf (`resets`) are exempt from both.
    """
    check_chunk_size(chunk_size)
    seq, chunk = q.shape[1], chunk_size
    while chunk > SUB_CHUNK and chunk // 2 >= seq:
        chunk //= 2
    pad = -seq % chunk
    q, k, v, g = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v, g))
    beta = jnp.pad(beta, ((0, 0), (0, pad), (0, 0)))
    q, k, v, g = (rearrange(x, "b (n c) h d -> n b h c d", c=chunk) for x in (q, k, v, g))
    beta = rearrange(beta, "b (n c) h -> n b h c 1", c=chunk)

    same = _same_text(g[..., 0]) if resets else None
    products, since_start, to_end = _decayed_products(k, jnp.concatenate([k, q], axis=-2), g, lower_bound, same)
    kk, qk = jnp.split(products, 2, axis=-2)
    inverse = unit_lower_inverse(jnp.tril(beta * kk, -1))
    corrected = _matmul(inverse, beta * jnp.concatenate([v, k * since_start], axis=-1))
    u, w = corrected[..., : v.shape[-1]], corrected[..., v.shape[-1] :]
    reads = jnp.concatenate([w, q * since_start], axis=-2)
    decay = since_start[..., -1, :, None]

    def one(state, xs):
        u, reads, qk, writes, decay = xs
        w_state, q_state = jnp.split(_matmul(reads, state), 2, axis=-2)
        new = u - w_state
        return decay * state + _matmul(jnp.swapaxes(writes, -1, -2), new), q_state + _matmul(qk, new)

    state, o = lax.scan(one, state, (u, reads, jnp.tril(qk), k * to_end, decay))
    return rearrange(o, "n b h c d -> b (n c) h d")[:, :seq], state


def _same_text(g: Float[Array, "*chunks tokens"]) -> Bool[Array, "*chunks tokens tokens"]:
    """True for two tokens of a chunk between which no reset lies, a decay of -inf at the later of them included."""
    resets = jnp.cumsum(jnp.isneginf(g), axis=-1, dtype=jnp.int32)
    return resets[..., :, None] == resets[..., None, :]


def _decayed_products(
    right: Float[Array, "*chunks tokens key"],
    lefts: Float[Array, "*chunks lefts key"],
    g: Float[Array, "*chunks tokens key"],
    lower_bound: float | None,
    same: Bool[Array, "*chunks tokens tokens"] | None,
) -> tuple[
    Float[Array, "*chunks lefts tokens"], Float[Array, "*chunks tokens key"], Float[Array, "*chunks tokens key"]
]:
    """P_ij = Σ_c left_ic right_jc e^{G_ic - G_jc} where i >= j (any finite numbers elsewhere), e^G and e^{G_C - G}.

    With `same` (of `_same_text`) they are 0 across a reset: P for two texts, e^G behind one, e^{G_C - G} before one.

    `lefts` stacks one or more blocks, each with as many rows as `right`. e^{-G} over a chunk would overflow, so rows
    are computed by sub-chunks, both factors relative to one token of it. With a bound that is its midpoint, so the left
    factor stays below e^MAX_NATS, and right factors of earlier tokens only shrink. G is summed within a sub-chunk and
    then from one border to the next, so no large G cancels against another.
    """
    chunk, blocks = right.shape[-2], lefts.shape[-2] // right.shape[-2]
    sub = SUB_CHUNK
    while lower_bound is not None and -lower_bound * (sub // 2) > MAX_NATS and sub > 1:
        sub //= 2
    rows = rearrange(lefts, "... (r i s) k -> ... i r s k", r=blocks, s=sub)
    from_start = jnp.zeros_like(g[..., :1, :])
    to_end = g[..., :0, :]
    products, since_start = [], []
    for i in range(chunk // sub):
        seen = (i + 1) * sub
        within = None if same is None else same[..., i * sub : seen, i * sub : seen]
        inside, since = _sums(g[..., i * sub : seen, :], within)
        total = since[..., -1:, :]
        reference = inside[..., sub // 2 : sub // 2 + 1, :] if lower_bound is not None else inside[..., :1, :]
        if same is not None:  # it cancels, but for its rounding in a gradient, which would reach another text
            reference = lax.stop_gradient(reference)
        left = rows[..., i, :, :, :] * jnp.exp((since if lower_bound is None else inside) - reference)[..., None, :, :]
        left = rearrange(left, "... r s k -> ... (r s) k")
        if lower_bound is not None:
            decays = jnp.concatenate([reference + to_end, reference - inside], axis=-2)
            block = _matmul(left, jnp.swapaxes(right[..., :seen, :] * jnp.exp(decays), -1, -2))
        else:
            earlier = right[..., : i * sub, :] * jnp.exp(reference + to_end)
            own = _masked_products(rows[..., i, :, :, :], right[..., i * sub : seen, :], inside, within)
            block = jnp.concatenate([_matmul(left, jnp.swapaxes(earlier, -1, -2)), own], axis=-1)
        products.append(jnp.pad(block, [(0, 0)] * (block.ndim - 1) + [(0, chunk - seen)]))
        since_start.append(from_start + since)
        from_start = from_start + total
        earlier, until = to_end + total, inside[..., -1:, :] - inside if within is not None else total - inside
        until = until if within is None else jnp.where(within[..., -1, :, None], until, -jnp.inf)
        to_end = jnp.concatenate([earlier, until], axis=-2)
    stacked = rearrange(jnp.stack(products, axis=-3), "... i (r s) j -> ... (r i s) j", r=blocks)
    if same is not None:
        stacked = jnp.where(jnp.concatenate([same] * blocks, axis=-2), stacked, 0.0)
    return stacked, jnp.exp(jnp.concatenate(since_start, axis=-2)), jnp.exp(to_end)


def _sums(
    g: Float[Array, "*chunks tokens key"],
    same: Bool[Array, "*chunks tokens tokens"] | None,
) -> tuple[Float[Array, "*chunks tokens key"], Float[Array, "*chunks tokens key"]]:
    """Sums of g in a sub-chunk up to each token: of its text, and of all tokens, -inf behind a reset."""
    since = jnp.cumsum(g, axis=-2)
    if same is None:
        return since, since
    return _matmul(jnp.tril(same).astype(g.dtype), jnp.where(jnp.isneginf(g), 0.0, g)), since


def _masked_products(
    lefts: Float[Array, "*chunks blocks tokens key"],
    right: Float[Array, "*chunks tokens key"],
    inside: Float[Array, "*chunks tokens key"],
    same: Bool[Array, "*chunks tokens tokens"] | None,
) -> Float[Array, "*chunks blocks*tokens tokens"]:
    """The products of one sub-chunk channel by channel, for g without a bound: no exponent is above 0."""
    span = inside[..., :, None, :] - inside[..., None, :, :]
    causal = jnp.tril(jnp.ones(span.shape[-3:-1], bool) if same is None else same)
    decay = jnp.exp(jnp.where(jnp.broadcast_to(causal[..., None], span.shape), span, -jnp.inf))
    products = jnp.einsum("...rik,...jk,...ijk->...rij", lefts, right, decay, precision=lax.Precision.HIGHEST)
    return rearrange(products, "... r i j -> ... (r i) j")


def check_chunk_size(chunk_size: int) -> None:
    """Raises ValueError unless the chunk size is SUB_CHUNK times a power of two."""
    if chunk_size < SUB_CHUNK or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}, expected {SUB_CHUNK} or that times a power of two")


def unit_lower_inverse(strict: Float[Array, "*batch size size"]) -> Float[Array, "*batch size size"]:
    """(I + A)^-1 for strictly lower triangular A, whose size is a power of two.

    Recursively: [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]. Every intermediate is a sub-block of the
    result, which the delta rule keeps small. The shorter product (I - A)(I + A²)(I + A⁴)… would go through powers of A,
    which can be large.
    """
    size = strict.shape[-1]
    if size == 1:
        return jnp.ones_like(strict)
    half = size // 2
    diagonal = jnp.stack([strict[..., :half, :half], strict[..., half:, half:]], axis=-3)
    p, q = jnp.moveaxis(unit_lower_inverse(diagonal), -3, 0)
    corner = -_matmul(_matmul(q, strict[..., half:, :half]), p)
    top = jnp.concatenate([p, jnp.zeros_like(p)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, q], axis=-1)], axis=-2)


def _matmul(
    a: Float[Array, "*batch rows inner"], b: Float[Array, "*batch inner columns"]
) -> Float[Array, "*batch rows columns"]:
    # HIGHEST keeps float32 products in float32 on hardware whose default has fewer bits.
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


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
