"""`Execution`: which form of each operator a model runs, and their settings."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from ling3.ops import absorption, attention, conv, cpu, drawing, kda, kda_chunks, logits, matmul, rows
from ling3.ops.experts import RoutedExperts, block_experts
from ling3.ops.precision import Accumulation, Wide
from ling3.ops.quantized import Quantized


@dataclasses.dataclass(frozen=True)
class Execution:
    """The forms that a forward pass runs: an argument of `model.step` and of the engine, static under `jit`.

    A field whose type is an operator's Protocol, which says what it computes, holds a form (an implementation) of it.
    All forms agree up to rounding, and a row's result does not depend bitwise on the other rows' values. The defaults
    are the plain forms, which run on any platform; `Execution.default()` has this platform's. To use another kernel:

        dataclasses.replace(Execution.default(), kda_step=my_kda_step)

    The platforms' forms are in `ling3.ops.cpu` and `ling3.ops.gpu`; they call the plain form for inputs that do not
    suit them.
    """

    chunk_size: int = 16
    """Tokens per chunk of KDA's prefill: 16 times a power of two. 16 is fastest on a CPU."""
    short_conv: conv.ShortConvolution = conv.short_conv
    kda_step: kda.KDAStep = kda.kda_step
    kda_in_turn: kda.KDAInTurn = kda.in_turn
    kda_look: kda.KDALook = kda.in_turn
    chunk_kda: kda.ChunkKDA = kda_chunks.chunk_kda
    block_attention: attention.BlockAttention = attention.block_attention
    paged_attention: attention.PagedAttention = attention.paged_attention
    latent_attention: attention.LatentAttention = attention.latent_attention
    latent_queries: absorption.LatentQueries = absorption.latent_queries
    latent_values: absorption.LatentValues = absorption.latent_values
    experts: RoutedExperts = block_experts
    product: matmul.Product = matmul.product
    read: rows.Read = rows.read
    take_rows: rows.TakeRows = rows.take_rows
    likeliest: logits.Likeliest = logits.likeliest
    draw: drawing.DrawToken = drawing.draw
    accumulation: str = "float32"
    """The dtype in which products with weights are summed: float32, or float64 (needs `jax_enable_x64`)."""
    row_by_row: bool = False
    """Samples tokens for one row after another, so that rows without a token cost nothing."""
    narrow_from: int | None = None
    """Bytes of a matrix from which on a product's time is proportional to its rows, so that narrow calls pay off.

    An engine whose matrices are all at least this large also splits prompts into narrower calls. None: it never does.
    """

    def __post_init__(self) -> None:
        kda_chunks.check_chunk_size(self.chunk_size)
        if self.accumulation not in ("float32", "float64"):
            raise ValueError(f"accumulation is {self.accumulation!r}, expected 'float32' or 'float64'")
        if self.accumulation == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError("accumulation is 'float64', which JAX has not enabled: set jax_enable_x64 first")

    @property
    def sums(self) -> Accumulation:
        """`accumulation` as the type that operators take."""
        return "float64" if self.accumulation == "float64" else "float32"

    def times(
        self, x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"] | Quantized
    ) -> Wide[Array, "*stack rows outer"]:
        """x Wᵀ: `product`, summed in `accumulation`."""
        return self.product(x, weight, self.sums)

    @staticmethod
    def default(platform: str | None = None) -> "Execution":
        """The forms for a platform ("cpu", "gpu", "tpu"), by default for JAX's default backend."""
        platform = jax.default_backend() if platform is None else platform
        return PLATFORMS.get(platform, lambda: PLAIN)()


PLAIN = Execution()
XLA_CPU = Execution(
    kda_step=cpu.kda.xla_kda_step,
    experts=cpu.experts.xla_experts,
    product=cpu.matmul.xla_product,
    read=cpu.rows.read,
    likeliest=cpu.logits.xla_likeliest,
    draw=cpu.drawing.xla_draw,
    row_by_row=True,
)
"""The forms that XLA's CPU backend runs fast, without C++ kernels."""
CPU = dataclasses.replace(
    XLA_CPU,
    short_conv=cpu.conv.short_conv,
    kda_step=cpu.kda.kda_step,
    kda_in_turn=cpu.kda.in_turn,
    kda_look=cpu.kda.look,
    chunk_kda=cpu.kda.chunk_kda,
    paged_attention=cpu.attention.paged_attention,
    latent_attention=cpu.attention.latent_attention,
    latent_queries=cpu.absorption.latent_queries,
    latent_values=cpu.absorption.latent_values,
    experts=cpu.experts.experts,
    product=cpu.matmul.product,
    take_rows=cpu.rows.take_rows,
    likeliest=cpu.logits.likeliest,
    draw=cpu.drawing.draw,
    narrow_from=2**21,
)


@functools.cache
def _gpu() -> Execution:
    # Importing Pallas takes time and is useless on a CPU.
    from ling3.ops import gpu  # noqa: PLC0415

    return Execution(
        kda_step=gpu.kda.kda_step,
        latent_attention=gpu.attention.latent_attention,
        experts=gpu.experts.experts,
        chunk_size=64,
    )


PLATFORMS: dict[str, Callable[[], Execution]] = {"cpu": lambda: CPU, "gpu": _gpu}
"""For each platform a function that makes its `Execution`; other platforms run `PLAIN`."""
