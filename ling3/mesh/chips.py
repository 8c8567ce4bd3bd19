"""Accelerators on paper: what their vendors publish of memory, products and links."""

import dataclasses
import math
from typing import no_type_check

import numpy as np

Number = float | np.ndarray
"""One, or an array of them."""


# What a search calls thousands of times is not checked each time.
@no_type_check
def at_least(least: float, **values: Number) -> None:
    """ValueError unless these values are at least `least`."""
    for name, value in values.items():
        if not np.min(value) >= least:
            raise ValueError(f"{name} is {value}, expected at least {least:g}")


@no_type_check
def positive(**values: float) -> None:
    """ValueError unless these values are above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}, expected a number above 0")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, and its link to the others. ValueError for a number that is not positive (a latency may be 0)."""

    memory: float
    """Bytes for weights and caches."""
    memory_bandwidth: float
    """Bytes per second."""
    flops: float
    """Floating-point operations per second."""
    link_bandwidth: float
    """Bytes per second in each direction."""
    link_latency: float = 0.0
    """Seconds from the end of writing a message until its flag is seen."""
    price: float = 1.0
    """In any unit; throughputs are per price."""

    def __post_init__(self) -> None:
        at_least(0.0, link_latency=self.link_latency)
        positive(**{name: value for name, value in vars(self).items() if name != "link_latency"})

    @no_type_check
    def time(self, bytes: Number, flops: Number) -> Number:
        """max(bytes / memory_bandwidth, flops / peak), in seconds."""
        return np.maximum(bytes / self.memory_bandwidth, flops / self.flops)


H200 = Hardware(memory=0.9 * 141e9, memory_bandwidth=4.8e12, flops=989e12, link_bandwidth=450e9, link_latency=5e-6)
"""NVIDIA's data sheet: 141 GB of HBM3e at 4.8 TB/s, 989 Tflop/s of dense bfloat16, NVLink 900 GB/s in both directions
together. A tenth of the memory is left to activations and buffers; the latency is an assumption."""
NIC = 50e9
"""Bytes per second of a 400 Gb/s network card, a direction."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator, as one of several."""

    name: str
    hardware: Hardware
    """Of its latencies none is published: they are assumptions."""
    group: int = 8
    """Chips that have such links among them."""
    network: float = math.inf
    """Bytes per second from a whole group to others, in one direction; unknown if infinite."""

    def link(self, devices: int) -> float:
        """Bytes per second around a ring of so many: through a chip's links, or between groups if that is less."""
        own = self.hardware.link_bandwidth
        return own if devices <= self.group else min(own, self.network)


CHIPS = (
    Chip("TPU v6e", Hardware(32e9, 1638e9, 918e12, 400e9, 1e-6), group=256),
    Chip("A100 80 GB SXM", Hardware(80e9, 2039e9, 312e12, 300e9, 5e-6), network=8 * NIC / 2),
    Chip("H100 SXM", Hardware(80e9, 3350e9, 989e12, 450e9, 5e-6), network=8 * NIC),
    Chip("H200 SXM", H200, network=8 * NIC),
)
"""From docs.cloud.google.com/tpu/docs/v6e and NVIDIA's data sheets; links are half of what these give for both
directions together. GPUs are in groups of eight as in DGX, with a network card each: 200 Gb/s for A100, else 400."""
