"""The recurrence of `kda.py` chunk by chunk, with matrix products."""

import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from ling3.ops.forms import form_of
from ling3.ops.kda import ChunkKDA

# The largest exponent in a factor of a decayed product: exp(40)² = exp(80) still fits float32 (up to exp(88.7)).
MAX_NATS = 40.0
# Tokens of a chunk that share one reference point for their decays.
SUB_CHUNK = 16


@form_of(ChunkKDA)
def chunk_kda(q, k, v, g, beta, state, *, lower_bound, chunk_size=16, resets=False):
    """The recurrence as matrix products, `chunk_size` tokens at a time (16 times a power of two, else ValueError).

    16 is fastest on a CPU, to run and to compile; a GPU's matrix units want larger products and fewer iterations.

    With G the sum of g from the chunk's start, inside a chunk:

        A_ij = b_i Σ_c k_ic k_jc e^{G_ic - G_jc}  (i > j);  M = (I + A)^-1;  U = M (b v);  W = M (b k e^G)
        v' = U - W S;   o = (q e^G) S + tril(Σ_c q_ic k_jc e^{G_ic - G_jc}) v';   S <- e^{G_C} S + (k e^{G_C - G})^T v'

    The caller must ensure `lower_bound <= g <= 0`, which lets the decayed products factor into plain matrix products
    (see `_decayed_products`). None requires only g <= 0 and uses a slower per-channel form with the same result. With
    one g per head the bound plays no part: decays stand outside of the products. Tokens with g = -inf (`resets`) are
    exempt from all of this.
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

    lefts = jnp.concatenate([k, q], axis=-2)
    if g.shape[-1] < k.shape[-1]:
        products, since_start, to_end = _evenly_decayed_products(k, lefts, g)
    else:
        same = _same_text(g[..., 0]) if resets else None
        products, since_start, to_end = _decayed_products(k, lefts, g, lower_bound, same)
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
        before = to_end + total
        if within is None:
            until = total - inside
        else:
            until = jnp.where(within[..., -1, :, None], inside[..., -1:, :] - inside, -jnp.inf)
        to_end = jnp.concatenate([before, until], axis=-2)
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


def _evenly_decayed_products(
    right: Float[Array, "*chunks tokens key"],
    lefts: Float[Array, "*chunks lefts key"],
    g: Float[Array, "*chunks tokens 1"],
) -> tuple[Float[Array, "*chunks lefts tokens"], Float[Array, "*chunks tokens 1"], Float[Array, "*chunks tokens 1"]]:
    """`_decayed_products` for one decay per head: P_ij = e^{G_i - G_j} left_i · right_j, in one matrix product.

    G_i - G_j is summed from j + 1 to i, for each j anew, so no large G cancels against another, and with a reset
    between them it is -inf.
    """
    tokens, blocks = right.shape[-2], lefts.shape[-2] // right.shape[-2]
    later = jnp.tril(jnp.ones((tokens, tokens), bool), -1).reshape(*[1] * (g.ndim - 2), tokens, tokens)
    spans = jnp.cumsum(jnp.where(later, g, 0.0), axis=-2)  # [i, j]
    products = _matmul(lefts, jnp.swapaxes(right, -1, -2)) * jnp.concatenate([jnp.exp(spans)] * blocks, axis=-2)
    to_end = jnp.swapaxes(spans[..., -1:, :], -1, -2)
    return products, jnp.exp(jnp.cumsum(g, axis=-2)), jnp.exp(to_end)


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
