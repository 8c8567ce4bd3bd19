"""Deployments of a model, divided into workers or not: the stages of a decode step, its time, the best deployment."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from ling3.afd.cost.model import ModelCost, distinct
from ling3.afd.operators.windows import slot_bytes
from ling3.mesh.chips import Hardware, Number, at_least, positive


@dataclasses.dataclass(frozen=True)
class Deployment:
    """How a model is distributed over devices.

    Divided: A attention workers hold everything but the routed experts, and W other devices hold these. Undivided (the
    baseline): `attention_workers == ffn_workers == N` are the same devices; each has all attention weights, 1/N of the
    experts and its own sequences, and rows are exchanged in all-to-alls. Raises ValueError for counts below 1.
    """

    attention_workers: int
    ffn_workers: int
    hardware: Hardware
    ffn_hardware: Hardware
    divided: bool = True

    def __post_init__(self) -> None:
        at_least(1, attention_workers=self.attention_workers, ffn_workers=self.ffn_workers)
        same = (self.attention_workers, self.hardware) == (self.ffn_workers, self.ffn_hardware)
        if not (self.divided or same):
            raise ValueError(f"ffn_workers is {self.ffn_workers}, expected the attention workers themselves: undivided")

    @staticmethod
    def undivided(devices: int, hardware: Hardware) -> "Deployment":
        """The undivided baseline on N = `devices` devices."""
        return Deployment(devices, devices, hardware, hardware, divided=False)

    @property
    def devices(self) -> int:
        """The number of devices: A + W where divided, N otherwise."""
        return self.attention_workers + self.ffn_workers * self.divided

    @property
    def price(self) -> float:
        """The price of all devices, in the unit of `Hardware.price`."""
        return self.attention_workers * self.hardware.price + self.divided * self.ffn_workers * self.ffn_hardware.price

    def room(self, model: ModelCost) -> float:
        """Bytes for caches on each attention worker; negative if its weights do not fit, or a card's experts do not."""
        experts = len(model.blocks) * math.ceil(model.experts / self.ffn_workers) * model.expert_bytes
        if not self.divided:
            return self.hardware.memory - model.weights - experts
        return min(self.hardware.memory - model.weights, math.inf if experts <= self.ffn_hardware.memory else -1.0)


@dataclasses.dataclass(frozen=True)
class DecodeStep:
    """One decode step: M micro-batches of `batch` sequences on each attention worker, with `context` tokens each.

    `batch` may be an array; times are then arrays too. `token_dtype` is that of rows sent to the cards. With
    `once_per_card`, a card gets a token's row once for all its experts and sends one sum back; otherwise, as in the
    operators' windows, one row per (token, slot) each way. Raises ValueError for counts below 1.
    """

    context: int
    batch: int | np.ndarray
    micro_batches: int
    token_dtype: int = 1
    once_per_card: bool = False

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, micro_batches=self.micro_batches)
        at_least(0, context=self.context)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The times of one micro-batch in one block, in seconds."""

    attention: Number
    experts: tuple[Number, ...]
    """A card's times for serving 1 to A sessions at once."""
    out: Number
    """How long one session's rows occupy the link to the cards, without `latency`: the session's link, or its share
    of the cards' links if that is slower."""
    back: Number
    latency: float

    def __post_init__(self) -> None:
        at_least(0.0, **vars(self))

    @property
    def round_trip(self) -> Number:
        """Seconds for a micro-batch that waits for no other, with cards that serve all sessions at once."""
        return self.attention + self.experts[-1] + self.out + self.back + 2 * self.latency

    def period(self, micro_batches: int, divided: bool = True) -> Number:
        """Time per layer in a steady state with M micro-batches, with cards that serve all A sessions at once:

            divided    max(M·t_attention, M·t_experts, M·t_out, M·t_back, round trip)
            undivided  max(M·(t_attention + t_experts), M·(t_out + t_back), round trip)

        Links are full duplex. Divided, `out` and `back` use opposite directions of a link and overlap; undivided, every
        device sends both its sequences' rows and its experts' answers, so the two add up.

        With M = 1 the period is the round trip, the sum of the stages; with more it is the time of the busiest
        resource, unless the round trip is longer. Undivided, M = 1 is a synchronous step, and M = 2 overlaps the
        computation and communication of two half batches.
        """
        at_least(1, micro_batches=micro_batches)
        both = np.maximum if divided else np.add
        busy = np.maximum(both(self.attention, self.experts[-1]), both(self.out, self.back))
        return np.maximum(micro_batches * busy, self.round_trip)


def stages(model: ModelCost, work: DecodeStep, deployment: Deployment) -> tuple[Stage, ...]:
    """The times of a micro-batch in each block, in order, as `simulate` takes them.

    A card has the share s = ⌈E/W⌉/E of the experts. Of T tokens it gets s·k·T rows, and touches s·distinct(T) experts:
    t_experts = max(those experts' bytes / bandwidth, rows·flop / peak). A session's link carries B·r slots each way and
    a card's A·B·r/W. r is k, or with `once_per_card` W·(1 - (1 - 1/W)^k), the expected number of cards with experts of
    a token. In the undivided system one row in N stays on its device.
    """
    known = dict(zip((block for block, _ in model.kinds), _stages(model, work, deployment, 1)))
    return tuple(known[block] for block in model.blocks)


def step_time(model: ModelCost, work: DecodeStep, deployment: Deployment) -> Number:
    """Seconds from one token of a sequence to the next: Σ over the blocks of their `Stage.period`."""
    found = _stages(model, work, deployment, deployment.attention_workers)
    periods = (stage.period(work.micro_batches, deployment.divided) for stage in found)
    return sum(count * period for (_, count), period in zip(model.kinds, periods))


def _stages(model: ModelCost, work: DecodeStep, deployment: Deployment, least: int) -> list[Stage]:
    """A `Stage` for each of the model's kinds of blocks, whose `experts` start at `least` sessions at once."""
    sessions, cards = deployment.attention_workers, deployment.ffn_workers
    share = math.ceil(model.experts / cards) / model.experts
    experts = []
    for o in range(least, sessions + 1):
        touched = share * distinct(model.experts, model.top_k, o * work.batch)
        rows = share * model.top_k * o * work.batch
        experts.append(deployment.ffn_hardware.time(touched * model.expert_bytes, rows * model.expert_flops))
    rows = work.batch * (distinct(cards, 1, model.top_k) if work.once_per_card else model.top_k)
    rows = rows * (1.0 if deployment.divided else 1.0 - 1.0 / cards)
    slowest = max(1 / deployment.hardware.link_bandwidth, sessions / cards / deployment.ffn_hardware.link_bandwidth)
    out, back = (rows * slot_bytes(model.hidden, dtype) * slowest for dtype in (work.token_dtype, 1))
    latency = max(deployment.hardware.link_latency, deployment.ffn_hardware.link_latency)
    return [
        Stage(block.time(deployment.hardware, work.batch, work.context), tuple(experts), out, back, latency)
        for block, _ in model.kinds
    ]


@dataclasses.dataclass(frozen=True)
class Filled:
    """A deployment, and the largest decode step that fits it."""

    deployment: Deployment
    work: DecodeStep
    step_time: float
    """Seconds per output token of a sequence."""
    throughput: float
    """Output tokens per second, divided by the price of the devices."""


def fullest(model: ModelCost, work: DecodeStep, deployment: Deployment, limit: float = math.inf) -> Filled | None:
    """`work` with the largest micro-batches whose caches fit and whose step takes at most `limit` seconds, if any.

    More sequences never lower the throughput: every term of a step's time is set by a bandwidth or the peak, and grows
    at most in proportion. So the largest batch is also the best one. Raises ValueError for a limit of 0 or less.
    """
    positive(limit=limit)
    low, high = 0, int(max(deployment.room(model), 0.0) / model.sequence(work.context)) // work.micro_batches
    while low < high:
        tried = np.unique(np.linspace(low + 1, high, 64).astype(int))
        fits = step_time(model, dataclasses.replace(work, batch=tried), deployment) <= limit
        found = int(np.sum(fits))  # larger batches take longer, so those that fit come first
        low, high = (int(tried[found - 1]) if found else low), (int(tried[found]) - 1 if found < len(tried) else low)
        high = max(low, high)
    if not low:
        return None
    work = dataclasses.replace(work, batch=low)
    seconds = float(step_time(model, work, deployment))
    return Filled(
        deployment, work, seconds, low * work.micro_batches * deployment.attention_workers / seconds / deployment.price
    )


def best(
    model: ModelCost,
    work: DecodeStep,
    deployments: Iterable[Deployment],
    limit: float = math.inf,
    most_micro_batches: int = 4,
) -> Filled | None:
    """The `fullest` deployment of the highest throughput, with 1 to `most_micro_batches`; None if nothing fits."""
    filled = (
        fullest(model, dataclasses.replace(work, micro_batches=m), deployment, limit)
        for deployment in deployments
        for m in range(1, most_micro_batches + 1)
    )
    return max((one for one in filled if one is not None), key=lambda one: one.throughput, default=None)
