"""Accelerators on paper: what their vendors publish of memory, products and links."""

import dataclasses
import math

from ling3.afd.cost import H200, NIC, Hardware


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
