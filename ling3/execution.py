"""How a model runs, apart from what it is: chunk sizes, forms of attention and experts, kernels."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from ling3.ops import attention, experts, kda, on_gpu
from ling3.ops.lowering import XLA, XLA_CPU, Lowering


@dataclasses.dataclass(frozen=True)
class Execution:
    """Which forms a forward pass runs on: an argument of `model.step` and of the engine, static under `jit`.

    Every field is one form of an operator in `ling3.ops`, which computes the plain form's numbers up to rounding; every
    row's bits are the same whoever its neighbours are. The defaults are the plain forms, without what one platform
    needs; `Execution.default()` has that. A kernel takes its place as

        dataclasses.replace(Execution.default(), kda_step=my_kda_step)

    On a GPU the defaults are Pallas kernels (`ops/*_kernel.py`) wherever they suit.
    """

    chunk_size: int = 16
    """Tokens that KDA's prefill takes at a time: 16 times a power of two. 16 is fastest on a CPU."""
    kda_step: Callable[..., tuple[Float[Array, "..."], Float[Array, "..."]]] = kda.kda_step
    """One token of KDA, as in a decode step."""
    chunk_kda: Callable[..., tuple[Float[Array, "..."], Float[Array, "..."]]] = kda.chunk_kda
    """Several tokens of KDA, as in prefill."""
    block_attention: Callable[..., Float[Array, "..."]] = attention.block_attention
    """MLA over whole sequences without a cache, as in training."""
    paged_attention: Callable[..., Float[Array, "..."]] = attention.paged_attention
    """MLA of several tokens over pages, with keys and values expanded, as in prefill."""
    latent_attention: Callable[..., Float[Array, "..."]] = attention.latent_attention
    """MLA of one token over pages of latents, absorbed, as in a decode step."""
    experts: Callable[..., Float[Array, "..."]] = experts.block_experts
    """The routed experts."""
    accumulation: str = "float32"
    """float32, or float64 (with `jax_enable_x64`): what products with weights are summed in."""
    lowering: Lowering = XLA
    """What XLA has to be told on this platform."""

    def __post_init__(self) -> None:
        kda.check_chunk_size(self.chunk_size)
        if self.accumulation not in ("float32", "float64"):
            raise ValueError(f"accumulation is {self.accumulation!r}, expected 'float32' or 'float64'")
        if self.accumulation == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError("accumulation is 'float64', which JAX has not enabled: set jax_enable_x64 first")
        # The operators read it there; the class is frozen.
        lowering = dataclasses.replace(self.lowering, accumulation=self.accumulation)
        object.__setattr__(self, "lowering", lowering)

    @staticmethod
    def default(platform: str | None = None) -> "Execution":
        """The one for a platform ("cpu", "gpu", "tpu"), or for JAX's default one."""
        platform = jax.default_backend() if platform is None else platform
        return PLATFORMS.get(platform, PLAIN)


PLAIN = Execution()
PLATFORMS: dict[str, Execution] = {
    "cpu": Execution(
        kda_step=kda.native_kda_step,
        chunk_kda=kda.native_chunk_kda,
        paged_attention=attention.native_attention,
        latent_attention=attention.native_latent_attention,
        experts=experts.native_experts,
        lowering=XLA_CPU,
    ),
    "gpu": Execution(
        chunk_size=64,
        kda_step=on_gpu.gpu_kda_step,
        latent_attention=on_gpu.gpu_latent_attention,
        experts=on_gpu.gpu_experts,
    ),
}
"""The defaults of platforms that need something else than the plain forms."""
