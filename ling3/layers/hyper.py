"""Manifold-constrained hyper-connections: several residual streams, mixed by a doubly stochastic matrix."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from ling3.layers.linear import normal
from ling3.ops.precision import Wide, wide


@dataclasses.dataclass(frozen=True)
class HyperConfig:
    """The sizes of a model's hyper-connections."""

    hidden: int
    streams: int
    iterations: int
    """Sinkhorn-Knopp iterations, at least 1."""
    eps: float
    """Added to `pre` and to C, and to the sums by which C is divided."""
    norm_eps: float
    std: float
    """Standard deviation of random matrices."""


class Streams(eqx.Module):
    """The residual streams X of each token, to which a sublayer's output o is added with `+`.

    X + o is the array of streams X'_k = post_k · o + Σ_j combination[j, k] X_j, in the dtype of X.
    """

    x: Float[Array, "batch seq streams hidden"]
    post: Wide[Array, "batch seq streams"]
    combination: Wide[Array, "batch seq streams streams"]

    def __add__(self, added: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq streams hidden"]:
        x, dtype = self.x, self.post.dtype
        kept = (self.combination[:, :, j, :, None] * x[:, :, j, None].astype(dtype) for j in range(x.shape[2]))
        new = self.post[..., None] * added[:, :, None].astype(dtype)
        return functools.reduce(jnp.add, kept, new).astype(x.dtype)


class HyperConnection(eqx.Module):
    """Reads a sublayer's input from n residual streams X [n, hidden], and adds its output to them.

        z = fn · rms(flatten X)                                    [(2 + n)·n], rms without a weight
        pre  = sigmoid(z[:n] · scale_0 + base) + eps               sublayer's input: h = Σ_j pre_j X_j
        post = 2 · sigmoid(z[n:2n] · scale_1 + base)
        C    = softmax(z[2n:] as [n, n] · scale_2 + base) + eps    over the last axis, then made doubly stochastic:
               C /= column sums + eps;  `iterations` - 1 times: C /= row sums + eps, C /= column sums + eps
        X'_k = post_k · o + Σ_j C[j, k] X_j

    Row sums are over the last axis. All in float32 or wider. Sources: Xie et al., mHC, arXiv 2512.24880; DeepSeek-V4.
    """

    fn: Float[Array, "mixes channels"]  # (2 + streams)·streams, streams·hidden
    base: Float[Array, " mixes"]
    scale: Float[Array, "3"]
    iterations: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

    @staticmethod
    def init(config: HyperConfig, *, key: PRNGKeyArray) -> "HyperConnection":
        """Random `fn`, `base` 0 and `scale` 1, float32."""
        mixes = (2 + config.streams) * config.streams
        return HyperConnection(
            fn=normal(key, (mixes, config.streams * config.hidden), jnp.float32, config.std),
            base=jnp.zeros(mixes, jnp.float32),
            scale=jnp.ones(3, jnp.float32),
            iterations=config.iterations,
            eps=config.eps,
            norm_eps=config.norm_eps,
        )

    def __call__(self, x: Float[Array, "batch seq streams hidden"]) -> tuple[Float[Array, "batch seq hidden"], Streams]:
        """The sublayer's input h in the dtype of `x`, and the streams to which its output is added."""
        n = x.shape[2]
        z, base = _mixes(self.fn, x, self.norm_eps), self.base.astype(wide(x.dtype))[None, None]
        s = self.scale.astype(z.dtype)
        pre = jax.nn.sigmoid(z[..., :n] * s[0] + base[..., :n]) + self.eps
        post = 2.0 * jax.nn.sigmoid(z[..., n : 2 * n] * s[1] + base[..., n : 2 * n])
        logits = (z[..., 2 * n :] * s[2] + base[..., 2 * n :]).reshape(*z.shape[:2], n, n)
        combination = jax.nn.softmax(logits, axis=-1) + self.eps
        return _collapsed(pre, x), Streams(x, post, sinkhorn(combination, self.iterations, self.eps))


class HyperHead(eqx.Module):
    """Joins the streams after the last layer: Σ_j pre_j X_j, with pre = sigmoid(fn · rms(X) · scale + base) + eps."""

    hc_fn: Float[Array, "streams channels"]  # streams·hidden
    hc_base: Float[Array, " streams"]
    hc_scale: Float[Array, "1"]
    eps: float = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)

    @staticmethod
    def init(config: HyperConfig, *, key: PRNGKeyArray) -> "HyperHead":
        """Random `hc_fn`, `hc_base` 0 and `hc_scale` 1, float32."""
        return HyperHead(
            hc_fn=normal(key, (config.streams, config.streams * config.hidden), jnp.float32, config.std),
            hc_base=jnp.zeros(config.streams, jnp.float32),
            hc_scale=jnp.ones(1, jnp.float32),
            eps=config.eps,
            norm_eps=config.norm_eps,
        )

    @property
    def streams(self) -> int:
        """The number of residual streams that are joined."""
        return self.hc_base.shape[0]

    def __call__(self, x: Float[Array, "batch seq {self.streams} hidden"]) -> Float[Array, "batch seq hidden"]:
        """The joined stream, in the dtype of `x`."""
        z = _mixes(self.hc_fn, x, self.norm_eps)
        scale, base = (y.astype(z.dtype)[None, None] for y in (self.hc_scale, self.hc_base))
        return _collapsed(jax.nn.sigmoid(z * scale + base) + self.eps, x)


class HyperMean(eqx.Module):
    """Joins the streams after the last layer by their mean (GLM-5.3-Flash)."""

    streams: int = eqx.field(static=True)
    """The number of residual streams that are joined."""

    def __call__(self, x: Float[Array, "batch seq {self.streams} hidden"]) -> Float[Array, "batch seq hidden"]:
        """The mean of the streams, in the dtype of `x`."""
        return jnp.mean(x.astype(wide(x.dtype)), axis=2).astype(x.dtype)


def sinkhorn(
    matrix: Wide[Array, "*batch streams streams"], iterations: int, eps: float
) -> Wide[Array, "*batch streams streams"]:
    """Makes a positive matrix doubly stochastic (Sinkhorn & Knopp, 1967).

    Divides columns by their sums, then `iterations` - 1 times rows and columns. Columns come last: their sums are 1 up
    to rounding and `eps`, row sums only approximately.
    """

    def divided(matrix: Array, axis: int) -> Array:
        return matrix / (jnp.sum(matrix, axis=axis, keepdims=True) + eps)

    return lax.fori_loop(0, iterations - 1, lambda _, m: divided(divided(m, -1), -2), divided(matrix, -2))


def _mixes(
    fn: Float[Array, "mixes channels"], x: Float[Array, "batch seq streams hidden"], eps: float
) -> Wide[Array, "batch seq mixes"]:
    """fn · rms(flatten x)."""
    dtype = wide(x.dtype)
    flat = x.reshape(*x.shape[:2], -1).astype(dtype)
    normed = flat * lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps)
    return jnp.matmul(normed, fn.astype(dtype).T, precision=lax.Precision.HIGHEST)


def _collapsed(
    pre: Wide[Array, "batch seq streams"], x: Float[Array, "batch seq streams hidden"]
) -> Float[Array, "batch seq hidden"]:
    """Σ_j pre_j X_j, in the dtype of `x`."""
    parts = (pre[..., j, None] * x[:, :, j].astype(pre.dtype) for j in range(x.shape[2]))
    return functools.reduce(jnp.add, parts).astype(x.dtype)
