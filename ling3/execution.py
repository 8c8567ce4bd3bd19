"""`Execution`: the table of a model's operators and their forms, and the sizes that they work in."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from ling3.ops import absorption, attention, cpu, kda, matmul, rows
from ling3.ops.experts import RoutedExperts, block_experts
from ling3.ops.precision import Accumulation, Wide
from ling3.ops.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class Execution:
    """The table of forms for a forward pass: an argument of `model.step` and of the engine, static under `jit`.

    A field with an operator's type, which says what it computes, is a form of it. A form computes the plain form's
    numbers up to rounding; a row's bits do not depend on the rest of the batch. The defaults are the plain forms,
    without what one platform needs; `Execution.default()` has that. A kernel takes its place as

        dataclasses.replace(Execution.default(), kda_step=my_kda_step)

    `ling3.ops.cpu` and `ling3.ops.gpu` have the forms for a platform, each of which leaves to the plain form what it
    does not suit.
    """

    chunk_size: int = 16
    """Tokens that KDA's prefill takes at a time: 16 times a power of two. 16 is fastest on a CPU."""
    kda_step: kda.KDAStep = kda.kda_step
    chunk_kda: kda.ChunkKDA = kda.chunk_kda
    block_attention: attention.BlockAttention = attention.block_attention
    paged_attention: attention.PagedAttention = attention.paged_attention
    latent_attention: attention.LatentAttention = attention.latent_attention
    latent_queries: absorption.LatentQueries = absorption.latent_queries
    latent_values: absorption.LatentValues = absorption.latent_values
    experts: RoutedExperts = block_experts
    product: matmul.Product = matmul.product
    read: rows.Read = rows.read
    take_rows: rows.TakeRows = rows.take_rows
    accumulation: str = "float32"
    """float32, or float64 (with `jax_enable_x64`): what products with weights are summed in."""
    row_by_row: bool = False
    """Tokens are chosen for one row after the other, so that rows without a token cost nothing."""
    narrow_from: int | None = None
    """Bytes of a matrix from which on a product costs what its rows cost, so that calls of a few tokens pay; or None.

    An engine whose matrices all have as many then cuts prompts into narrower calls too.
    """

    def __post_init__(self) -> None:
        kda.check_chunk_size(self.chunk_size)
        if self.accumulation not in ("float32", "float64"):
            raise ValueError(f"accumulation is {self.accumulation!r}, expected 'float32' or 'float64'")
        if self.accumulation == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError("accumulation is 'float64', which JAX has not enabled: set jax_enable_x64 first")

    @property
    def sums(self) -> Accumulation:
        """The dtype `accumulation`, as operators take it."""
        return "float64" if self.accumulation == "float64" else "float32"

    def times(
        self, x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"] | Quantized
    ) -> Wide[Array, "*stack rows outer"]:
        """x Wᵀ: `product`, summed in `accumulation`."""
        return self.product(x, weight, self.sums)

    @staticmethod
    def default(platform: str | None = None) -> "Execution":
        """The one for a platform ("cpu", "gpu", "tpu"), or for JAX's default one."""
        platform = jax.default_backend() if platform is None else platform
        return PLATFORMS.get(platform, lambda: PLAIN)()


PLAIN = Execution()
XLA_CPU = Execution(
    kda_step=cpu.kda.xla_kda_step,
    experts=cpu.experts.xla_experts,
    product=cpu.matmul.xla_product,
    read=cpu.rows.read,
    row_by_row=True,
)
"""The forms that XLA's CPU backend runs fast, without kernels in C++."""
CPU = dataclasses.replace(
    XLA_CPU,
    kda_step=cpu.kda.kda_step,
    chunk_kda=cpu.kda.chunk_kda,
    paged_attention=cpu.attention.paged_attention,
    latent_attention=cpu.attention.latent_attention,
    latent_queries=cpu.absorption.latent_queries,
    latent_values=cpu.absorption.latent_values,
    experts=cpu.experts.experts,
    product=cpu.matmul.product,
    take_rows=cpu.rows.take_rows,
    narrow_from=cpu.products.LEAST["dense"],
)


@functools.cache
def _gpu() -> Execution:
    # Pallas takes time to import, which no CPU has a use for.
    from ling3.ops import gpu  # noqa: PLC0415

    return Execution(
        kda_step=gpu.kda.kda_step,
        latent_attention=gpu.attention.latent_attention,
        experts=gpu.experts.experts,
        chunk_size=64,
    )


PLATFORMS: dict[str, Callable[[], Execution]] = {"cpu": lambda: CPU, "gpu": _gpu}
"""The tables of platforms that need something else than the plain forms."""
