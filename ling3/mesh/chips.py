"""Accelerators on paper: the published memory, bandwidth, peak FLOP/s and links."""

import dataclasses
import math
from typing import no_type_check

import numpy as np

Number = float | np.ndarray
"""A number, or an array of numbers."""


# Types are not checked here: a search calls these functions thousands of times.
@no_type_check
def at_least(least: float, **values: Number) -> None:
    """Raises ValueError, naming the value, unless all `values` are at least `least`."""
    for name, value in values.items():
        if not np.min(value) >= least:
            raise ValueError(f"{name} is {value}, expected at least {least:g}")


@no_type_check
def positive(**values: float) -> None:
    """Raises ValueError, naming the value, unless all `values` are above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}, expected a number above 0")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, and its link to others. Raises ValueError for numbers that are not positive (a latency may be 0)."""

    memory: float
    """Bytes for weights and caches."""
    memory_bandwidth: float
    """Bytes per second."""
    flops: float
    """Floating-point operations per second."""
    link_bandwidth: float
    """Bytes per second in each direction."""
    link_latency: float = 0.0
    """Seconds from the end of writing a message until the receiver sees its flag."""
    price: float = 1.0
    """In any unit; throughputs are divided by it."""

    def __post_init__(self) -> None:
        at_least(0.0, link_latency=self.link_latency)
        positive(**{name: value for name, value in vars(self).items() if name != "link_latency"})

    @no_type_check
    def time(self, bytes: Number, flops: Number) -> Number:
        """Seconds to move `bytes` and compute `flops` at once: max(bytes / memory_bandwidth, flops / self.flops)."""
        return np.maximum(bytes / self.memory_bandwidth, flops / self.flops)


H200 = Hardware(memory=0.9 * 141e9, memory_bandwidth=4.8e12, flops=989e12, link_bandwidth=450e9, link_latency=5e-6)
"""NVIDIA's data sheet: 141 GB of HBM3e at 4.8 TB/s, 989 Tflop/s of dense bfloat16, NVLink 900 GB/s in both directions
together. A tenth of the memory is reserved for activations and buffers; the latency is an assumption."""
NIC = 50e9
"""Bytes per second of a 400 Gb/s network card, in each direction."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator, and the links between several of them."""

    name: str
    hardware: Hardware
    """The link latency is an assumption, as none is published."""
    group: int = 8
    """The number of chips that are connected by these links."""
    network: float = math.inf
    """Bytes per second from all chips of a group to other groups, in one direction; infinite if unknown."""

    def link(self, devices: int) -> float:
        """Bytes per second around a ring of chips: through a chip's links, or the network if it is slower."""
        own = self.hardware.link_bandwidth
        return own if devices <= self.group else min(own, self.network)


CHIPS = (
    Chip("TPU v6e", Hardware(32e9, 1638e9, 918e12, 400e9, 1e-6), group=256),
    Chip("A100 80 GB SXM", Hardware(80e9, 2039e9, 312e12, 300e9, 5e-6), network=8 * NIC / 2),
    Chip("H100 SXM", Hardware(80e9, 3350e9, 989e12, 450e9, 5e-6), network=8 * NIC),
    Chip("H200 SXM", H200, network=8 * NIC),
)
"""From docs.cloud.google.com/tpu/docs/v6e and NVIDIA's data sheets; links are half of the published figure
for both directions. GPUs are in groups of eight, as in DGX, with a network card each: 200 Gb/s for A100, else 400."""
