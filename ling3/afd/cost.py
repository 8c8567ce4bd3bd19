"""When attention and experts are better apart: an analytic model of the time of a decode step, and of its peer's.

Every time is a roofline: max(bytes / bandwidth, flop / peak), the peak being as good as reached, for the divided system
and for the undivided one alike. Bytes come from the shapes of the model's own arrays and states.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, no_type_check

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ling3.afd.windows import slot_bytes
from ling3.cache import Paged, State, pages_of
from ling3.checkpoint.names import structure
from ling3.layers.csa import CSA
from ling3.layers.gqa import GQA
from ling3.layers.kda import KDA
from ling3.layers.mla import MLA
from ling3.layers.moe import MoE
from ling3.model import CausalLM, DecoderLayer, Mixer

Number = float | np.ndarray
"""One, or as many as there are batches in a `Work`."""


# What a search calls thousands of times is not checked each time.


@no_type_check
def _at_least(record: Any, least: float, *names: str) -> None:
    for name in names:
        if not np.min(getattr(record, name)) >= least:
            raise ValueError(f"{name} is {getattr(record, name)}, expected at least {least:g}")


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
        _at_least(self, 0.0, "link_latency")
        for name in ("memory", "memory_bandwidth", "flops", "link_bandwidth", "price"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a number above 0")

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
class Reads:
    """What a decode step does for each token of a sequence's context, of at most `most` tokens."""

    bytes: float
    flops: float
    most: float = math.inf


@dataclasses.dataclass(frozen=True)
class Block:
    """What an attention worker does from one layer of experts to the next: once a micro-batch it reads `weights`.

    Dense layers belong to the block of the next layer with experts, the head to the first block, which comes after it.
    """

    weights: float
    """Bytes."""
    flops: float
    """Per sequence, whatever its context."""
    moved: float
    """Bytes per sequence, whatever its context: recurrent states, which are read and written."""
    reads: tuple[Reads, ...]

    def __add__(self, other: "Block") -> "Block":
        sums = (getattr(self, name) + getattr(other, name) for name in ("weights", "flops", "moved", "reads"))
        return Block(*sums)

    @no_type_check
    def time(self, hardware: Hardware, batch: Number, context: float) -> Number:
        """Of a micro-batch: max((weights + batch·(moved + Σ read)) / bandwidth, batch·flop / peak), in seconds."""
        moved = self.moved + sum(read.bytes * min(context, read.most) for read in self.reads)
        flops = self.flops + sum(read.flops * min(context, read.most) for read in self.reads)
        return hardware.time(self.weights + batch * moved, batch * flops)


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """A model as decoding sees it, in bytes and operations."""

    blocks: tuple[Block, ...]
    weights: float
    """Bytes of everything but the routed experts: what every attention worker holds."""
    hidden: int
    experts: int
    """Routed ones of a layer."""
    top_k: int
    expert_bytes: float
    expert_flops: float
    """Of one expert for one token."""
    held: float
    """Bytes of a sequence's memory, whatever its context."""
    held_per_token: tuple[tuple[float, float], ...]
    """More bytes per token, for at most so many tokens."""

    @staticmethod
    def of(config: Any, *, weight_bytes: float = 2.0, expert_bytes: float = 2.0, packed: bool = False) -> "ModelCost":
        """From the shapes of any family's model with routed experts; nothing is allocated.

        `weight_bytes` and `expert_bytes` are those of a number in a matrix outside and inside the routed experts
        (norms, routers and the like stay float32), `packed` caches those of `ling3.ops.packed_kv`. Shared experts and
        dense layers count with the attention. ValueError if there are no routed experts.
        """
        if not (weight_bytes > 0 and expert_bytes > 0):
            name = "expert_bytes" if weight_bytes > 0 else "weight_bytes"
            raise ValueError(f"{name} is {min(weight_bytes, expert_bytes)}, expected a number above 0")
        model = structure(config, jnp.bfloat16)
        sparse = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, MoE)]
        if not sparse:
            raise ValueError(f"config: {type(config).__name__} has no layer with routed experts to keep apart")
        tokens = math.lcm(1024, model.page_multiple)
        states = eqx.filter_eval_shape(lambda m: m.empty_states(1, 1, tokens, jnp.bfloat16, packed), model)
        blocks, held = _blocks(model, states, weight_bytes)
        pages = pages_of(states)
        per_token: collections.defaultdict[float, float] = collections.defaultdict(float)
        for paged in pages:
            per_token[math.inf if paged.window is None else paged.window] += _per_token(paged)
        router, experts = sparse[0].gate, sparse[0].experts
        sizes = [matrix.shape for matrix in (experts.gate_proj, experts.up_proj, experts.down_proj)]
        numbers = sum(math.prod(shape[1:]) for shape in sizes)
        return ModelCost(
            blocks=tuple(blocks),
            weights=held,
            hidden=sizes[0][-1],
            experts=experts.count,
            top_k=router.top_k,
            expert_bytes=expert_bytes * numbers,
            expert_flops=2.0 * numbers,
            held=float(_bytes(states) - sum(_bytes(paged) for paged in pages)),
            held_per_token=tuple((size, most) for most, size in sorted(per_token.items())),
        )

    @functools.cached_property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """The different blocks, each with how often it comes."""
        return tuple(collections.Counter(self.blocks).items())

    def sequence(self, context: float) -> float:
        """Bytes of the memory of a sequence of `context` tokens."""
        return self.held + sum(size * min(context, most) for size, most in self.held_per_token)


def distinct(experts: int, top_k: int, tokens: Number) -> Number:
    """The expected number of experts that are touched: E·(1 - (1 - k/E)^T), if each token chooses k of E at random."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model lies on devices.

    Divided: A attention workers hold everything but the routed experts, and W other devices hold these. Undivided (the
    peer): `attention_workers == ffn_workers == N` are the same devices, each with all attention weights, 1/N of the
    experts and its own sequences, which exchange rows in all-to-alls. ValueError for counts below 1.
    """

    attention_workers: int
    ffn_workers: int
    hardware: Hardware
    ffn_hardware: Hardware
    divided: bool = True

    def __post_init__(self) -> None:
        _at_least(self, 1, "attention_workers", "ffn_workers")
        same = (self.attention_workers, self.hardware) == (self.ffn_workers, self.ffn_hardware)
        if not (self.divided or same):
            raise ValueError(f"ffn_workers is {self.ffn_workers}, expected the attention workers themselves: undivided")

    @staticmethod
    def undivided(devices: int, hardware: Hardware) -> "Layout":
        """The peer, on so many devices."""
        return Layout(devices, devices, hardware, hardware, divided=False)

    @property
    def devices(self) -> int:
        """A + W, or N."""
        return self.attention_workers + self.ffn_workers * self.divided

    @property
    def price(self) -> float:
        """Of all devices."""
        return self.attention_workers * self.hardware.price + self.divided * self.ffn_workers * self.ffn_hardware.price

    def room(self, model: ModelCost) -> float:
        """Bytes of an attention worker's memory for caches, or for them all where the cards have no room for experts:
        negative if the weights do not fit."""
        experts = len(model.blocks) * math.ceil(model.experts / self.ffn_workers) * model.expert_bytes
        if not self.divided:
            return self.hardware.memory - model.weights - experts
        return min(self.hardware.memory - model.weights, math.inf if experts <= self.ffn_hardware.memory else -1.0)


@dataclasses.dataclass(frozen=True)
class Work:
    """One decode step: M micro-batches of `batch` sequences on each attention worker, with `context` tokens each.

    `batch` may be an array; times are then arrays too. `once_per_card`: a card gets a token's row once for all its
    experts, and sends one sum back, instead of a row for each (token, slot). The operators' windows have the latter.
    ValueError for counts below 1.
    """

    context: int
    batch: int | np.ndarray
    micro_batches: int
    token_dtype: int = 1
    once_per_card: bool = False

    def __post_init__(self) -> None:
        _at_least(self, 1, "batch", "micro_batches")
        _at_least(self, 0, "context")


@no_type_check
@dataclasses.dataclass(frozen=True)
class Stage:
    """The times of one micro-batch in one block, in seconds."""

    attention: Number
    experts: tuple[Number, ...]
    """Of the cards, by how many sessions they serve at once, from 1 to A."""
    out: Number
    """That the link is taken by the rows of one session on their way to the cards, not counting `latency`; it is a
    session's own link, or its share of the cards' links where that is slower."""
    back: Number
    latency: float

    def __post_init__(self) -> None:
        _at_least(self, 0.0, "attention", "experts", "out", "back", "latency")

    @property
    def round_trip(self) -> Number:
        """Of a micro-batch that waits for nobody, its cards serving all sessions at once."""
        return self.attention + self.experts[-1] + self.out + self.back + 2 * self.latency

    def period(self, micro_batches: int, divided: bool = True) -> Number:
        """Time per layer in a steady state with M micro-batches, whose cards serve all A sessions at once:

            divided    max(M·t_attention, M·t_experts, M·t_out, M·t_back, round trip)
            undivided  max(M·(t_attention + t_experts), M·(t_out + t_back), round trip)

        Links are full duplex. A session sends on its link and receives on it, and a card answers on its own; a device
        that is both sends its sequences' rows and its experts' answers the same way.

        With M = 1 it is the round trip, the sum of the stages; with more, the slowest resource, unless the round trip
        is longer than what the others keep it busy. Undivided, M = 1 is a synchronous step, and M = 2 the overlap of
        two half batches' computation and communication.
        """
        if micro_batches < 1:
            raise ValueError(f"micro_batches is {micro_batches}, expected at least 1")
        both = np.maximum if divided else np.add
        busy = np.maximum(both(self.attention, self.experts[-1]), both(self.out, self.back))
        return np.maximum(micro_batches * busy, self.round_trip)


def stages(model: ModelCost, work: Work, layout: Layout) -> tuple[Stage, ...]:
    """The times of a micro-batch in each block, in order: what the simulation takes.

    A card has the share s = ⌈E/W⌉/E of the experts. Of T tokens it gets s·k·T rows, and touches s·distinct(T) experts:
    t_experts = max(those experts' bytes / bandwidth, rows·flop / peak). A session's link carries B·r slots each way and
    a card's A·B·r/W, where r is k, or with `once_per_card` the W·(1 - (1 - 1/W)^k) cards that a token is for. Of the
    undivided system's rows, one in N stays where it is.
    """
    known = dict(zip((block for block, _ in model.kinds), _stages(model, work, layout, 1)))
    return tuple(known[block] for block in model.blocks)


def step_time(model: ModelCost, work: Work, layout: Layout) -> Number:
    """Seconds from one token of a sequence to its next: Σ over the blocks of their `Stage.period`."""
    found = _stages(model, work, layout, layout.attention_workers)
    periods = (stage.period(work.micro_batches, layout.divided) for stage in found)
    return sum(count * period for (_, count), period in zip(model.kinds, periods))


def _stages(model: ModelCost, work: Work, layout: Layout, least: int) -> list[Stage]:
    """Those of the model's kinds of blocks, with the times of cards that serve `least` sessions or more."""
    sessions, cards = layout.attention_workers, layout.ffn_workers
    share = math.ceil(model.experts / cards) / model.experts
    experts = []
    for o in range(least, sessions + 1):
        touched = share * distinct(model.experts, model.top_k, o * work.batch)
        rows = share * model.top_k * o * work.batch
        experts.append(layout.ffn_hardware.time(touched * model.expert_bytes, rows * model.expert_flops))
    rows = work.batch * (distinct(cards, 1, model.top_k) if work.once_per_card else model.top_k)
    rows = rows * (1.0 if layout.divided else 1.0 - 1.0 / cards)
    slowest = max(1 / layout.hardware.link_bandwidth, sessions / cards / layout.ffn_hardware.link_bandwidth)
    out, back = (rows * slot_bytes(model.hidden, dtype) * slowest for dtype in (work.token_dtype, 1))
    latency = max(layout.hardware.link_latency, layout.ffn_hardware.link_latency)
    return [
        Stage(block.time(layout.hardware, work.batch, work.context), tuple(experts), out, back, latency)
        for block, _ in model.kinds
    ]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout and the work that fills it."""

    layout: Layout
    work: Work
    step_time: float
    """Seconds per output token of a sequence."""
    throughput: float
    """Output tokens per second, by the price of the devices."""


def fullest(model: ModelCost, work: Work, layout: Layout, limit: float = math.inf) -> Plan | None:
    """`work` with the largest micro-batches whose caches fit and whose step takes at most `limit` seconds, if any do.

    More sequences never lower the throughput: every part of a step is the time of a bandwidth or of the peak, and grows
    at most in proportion. So the largest batch is also the best one. ValueError for a limit of 0 or less.
    """
    if not limit > 0:
        raise ValueError(f"limit is {limit}, expected a number of seconds above 0")
    low, high = 0, int(max(layout.room(model), 0.0) / model.sequence(work.context)) // work.micro_batches
    while low < high:
        tried = np.unique(np.linspace(low + 1, high, 64).astype(int))
        fits = step_time(model, dataclasses.replace(work, batch=tried), layout) <= limit
        found = int(np.sum(fits))  # a longer step for a larger batch: the first ones fit
        low, high = (int(tried[found - 1]) if found else low), (int(tried[found]) - 1 if found < len(tried) else low)
        high = max(low, high)
    if not low:
        return None
    work = dataclasses.replace(work, batch=low)
    seconds = float(step_time(model, work, layout))
    return Plan(layout, work, seconds, low * work.micro_batches * layout.attention_workers / seconds / layout.price)


def best(
    model: ModelCost, work: Work, layouts: Iterable[Layout], limit: float = math.inf, most_micro_batches: int = 4
) -> Plan | None:
    """The fullest plan of most throughput among the layouts, with 1 to `most_micro_batches`. None if nothing fits."""
    plans = (
        fullest(model, dataclasses.replace(work, micro_batches=m), layout, limit)
        for layout in layouts
        for m in range(1, most_micro_batches + 1)
    )
    return max((plan for plan in plans if plan is not None), key=lambda plan: plan.throughput, default=None)


def _blocks(model: CausalLM, states: tuple[State, ...], weight_bytes: float) -> tuple[list[Block], float]:
    """The blocks of a model, and the bytes of its weights but for the routed experts."""
    memory, sizes = iter(states), functools.partial(_weights, weight_bytes=weight_bytes)
    blocks, waiting = [], []
    for layer in model.model.layers:
        waiting.append(_block(layer, None if layer.attention is None else next(memory), weight_bytes))
        if isinstance(layer.mlp, MoE):
            blocks.append(functools.reduce(Block.__add__, waiting))
            waiting = []
    head = model.model.word_embeddings if model.lm_head is None else model.lm_head
    held = sizes(model) - sum(sizes(layer.mlp.experts) for layer in model.model.layers if isinstance(layer.mlp, MoE))
    last = [*waiting, Block(sizes(head), 2.0 * math.prod(head.shape), 0.0, ())]
    blocks[0] = functools.reduce(Block.__add__, last, blocks[0])
    return blocks, held


def _block(layer: DecoderLayer, state: State, weight_bytes: float) -> Block:
    """A decoder layer without its routed experts."""
    rest = eqx.tree_at(lambda layer: layer.mlp.experts, layer, None) if isinstance(layer.mlp, MoE) else layer
    numbers = sum(leaf.size for leaf in jax.tree.leaves(rest) if jnp.issubdtype(leaf.dtype, jnp.floating))
    moved, flops, reads = 0.0, 0.0, ()
    if layer.attention is not None:
        moved, flops, reads = _memory(layer.attention, state)
    return Block(_weights(rest, weight_bytes), 2.0 * numbers + flops, moved, reads)


def _memory(mixer: Mixer, state: State) -> tuple[float, float, tuple[Reads, ...]]:
    """What a decode step does with one sequence's memory: bytes and flop in any case, and what each token adds.

    Of mixers that are not known here only the bytes count: pages are read, what has a row per slot is read and written.
    """
    pages = pages_of(state)
    if isinstance(mixer, KDA):  # g, Sᵀk, S + k(…), Sᵀq
        return 2.0 * _bytes(state), 7.0 * state.recurrent.size, ()
    if isinstance(mixer, MLA):  # absorbed: a score over the entry and a sum of the latents, for each head
        return 0.0, 0.0, (Reads(_per_token(state), 2.0 * mixer.heads * (mixer.entry + mixer.latent)),)
    if isinstance(mixer, GQA):
        (paged,) = pages
        most = math.inf if mixer.window is None else mixer.window
        return 0.0, 0.0, (Reads(_per_token(paged), 4.0 * mixer.q_proj.out_features, most),)
    if isinstance(mixer, CSA):
        return _of_csa(mixer, state)
    fixed = 2.0 * (_bytes(state) - sum(map(_bytes, pages)))
    return fixed, 0.0, tuple(Reads(_per_token(page), 0.0, page.window or math.inf) for page in pages)


def _of_csa(mixer: CSA, state: State) -> tuple[float, float, tuple[Reads, ...]]:
    """The window's entries, all keys of the indexer, and of the compressed entries those that it chooses, or all.

    A compressor writes one row of its tail each step, and reads the tail when an entry is complete.
    """
    over_entry, moved, reads = 4.0 * mixer.heads * mixer.head_dim, 0.0, []
    if mixer.sliding_window is not None:
        reads.append(Reads(float(mixer.head_dim * state.window.dtype.itemsize), over_entry, mixer.sliding_window))
    for compressor in (state.compressor, state.indexer):
        if compressor is not None:
            moved += _bytes(compressor.tail) * (1 / compressor.tail.shape[1] + 1 / compressor.entries.tokens)
    if mixer.compressor is not None:
        ratio, most = mixer.compressor.ratio, math.inf
        if mixer.indexer is not None:
            flops = 2.0 * mixer.indexer.heads * mixer.indexer.compressor.width / ratio
            reads.append(Reads(_per_token(state.indexer.entries), flops))
            most = mixer.indexer.top * ratio
        reads.append(Reads(_per_token(state.compressor.entries), over_entry / ratio, most))
    return moved, 0.0, tuple(reads)


def _weights(tree: Any, weight_bytes: float) -> float:
    """Bytes of a tree's floating-point arrays, `weight_bytes` for each number that the structure has in bfloat16."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return float(
        sum(leaf.size * (weight_bytes if leaf.dtype == jnp.bfloat16 else leaf.dtype.itemsize) for leaf in leaves)
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _per_token(paged: Paged) -> float:
    """Bytes of a token, of one page; packed entries without the padding of the page."""
    if paged.packing is not None:
        return paged.packing.entry / paged.tokens
    return _bytes(paged) / paged.page_size
