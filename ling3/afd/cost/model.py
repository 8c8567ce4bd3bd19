"""The cost of a decode step: an analytic model of its bytes and operations, and of their time on a device.

Every time is a roofline, max(bytes / bandwidth, flop / peak), which assumes that the peaks are reached, in the divided
system and the undivided one alike. Bytes come from the shapes of the model's arrays and states.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ling3.afd.plan import without_experts
from ling3.cache import CacheSpec, Paged, State, pages_of
from ling3.checkpoint.names import structure
from ling3.families.quantization import in_floats
from ling3.layers.csa import CSA
from ling3.layers.gated_deltanet import GatedDeltaNet
from ling3.layers.gqa import GQA
from ling3.layers.indexed_mla import IndexedMLA
from ling3.layers.kda import KDA
from ling3.layers.mla import MLA
from ling3.layers.moe import MoE
from ling3.mesh.chips import Hardware, Number, positive
from ling3.model import CausalLM, DecoderLayer, Mixer


@dataclasses.dataclass(frozen=True)
class Reads:
    """Bytes read and operations in a decode step for each token of a sequence's context, up to `most` tokens."""

    bytes: float
    flops: float
    most: float = math.inf


@dataclasses.dataclass(frozen=True)
class Block:
    """The work of an attention worker from one layer of experts to the next; reads `weights` once per micro-batch.

    Dense layers belong to the block of the next layer with experts, and the head to the first block, which runs next.
    """

    weights: float
    """Bytes."""
    flops: float
    """Operations per sequence that do not depend on its context."""
    moved: float
    """Bytes per sequence that do not depend on its context: recurrent states, which are read and written."""
    reads: tuple[Reads, ...]

    def __add__(self, other: "Block") -> "Block":
        sums = (getattr(self, name) + getattr(other, name) for name in ("weights", "flops", "moved", "reads"))
        return Block(*sums)

    def time(self, hardware: Hardware, batch: Number, context: float) -> Number:
        """Seconds for a micro-batch: max((weights + batch·(moved + Σ reads)) / bandwidth, batch·flop / peak)."""
        moved = self.moved + sum(read.bytes * min(context, read.most) for read in self.reads)
        flops = self.flops + sum(read.flops * min(context, read.most) for read in self.reads)
        return hardware.time(self.weights + batch * moved, batch * flops)


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """The costs of decoding with a model, in bytes and operations."""

    blocks: tuple[Block, ...]
    weights: float
    """Bytes of all weights but the routed experts, which every attention worker holds."""
    hidden: int
    experts: int
    """The number of routed experts in a layer."""
    top_k: int
    expert_bytes: float
    expert_flops: float
    """Operations of one expert for one token."""
    held: float
    """Bytes of a sequence's states that do not depend on its context."""
    held_per_token: tuple[tuple[float, float], ...]
    """(bytes, most): the cache takes `bytes` per token of context, for at most `most` tokens."""

    @staticmethod
    def of(config: Any, *, weight_bytes: float = 2.0, expert_bytes: float = 2.0, packed: bool = False) -> "ModelCost":
        """Computes the costs from the shapes of any family's model with routed experts; allocates nothing.

        `weight_bytes` and `expert_bytes` are bytes per number of a matrix outside and inside the routed experts (norms,
        routers and the like stay float32); `packed` means caches in the formats of `ling3.ops.packed_kv`. Shared
        experts and dense layers count as attention. Raises ValueError if there are no routed experts.
        """
        positive(weight_bytes=weight_bytes, expert_bytes=expert_bytes)
        model = structure(in_floats(config), jnp.bfloat16)
        sparse = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, MoE)]
        if not sparse:
            raise ValueError(f"config: {type(config).__name__} has no layer with routed experts to keep apart")
        tokens = math.lcm(1024, model.page_multiple)
        states = eqx.filter_eval_shape(lambda: model.empty_states(CacheSpec(1, 1, tokens, jnp.bfloat16, packed)))
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
        """The distinct blocks, each with its number of occurrences."""
        return tuple(collections.Counter(self.blocks).items())

    def sequence(self, context: float) -> float:
        """Bytes of the states and caches of a sequence of `context` tokens."""
        return self.held + sum(size * min(context, most) for size, most in self.held_per_token)


def distinct(experts: int, top_k: int, tokens: Number) -> Number:
    """The expected number of distinct experts if T tokens each choose k of E at random: E·(1 - (1 - k/E)^T)."""
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def _blocks(model: CausalLM, states: tuple[State, ...], weight_bytes: float) -> tuple[list[Block], float]:
    """The blocks of a model, and the bytes of all its weights but the routed experts."""
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
    rest = without_experts(layer)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(rest) if jnp.issubdtype(leaf.dtype, jnp.floating))
    moved, flops, reads = 0.0, 0.0, ()
    if layer.attention is not None:
        moved, flops, reads = _memory(layer.attention, state)
    return Block(_weights(rest, weight_bytes), 2.0 * numbers + flops, moved, reads)


def _memory(mixer: Mixer, state: State) -> tuple[float, float, tuple[Reads, ...]]:
    """A decode step's work on one sequence's state: fixed bytes and operations, and the `Reads` per token of context.

    For mixers that are not known here only bytes count: pages are read, arrays with a row per slot read and written.
    """
    pages = pages_of(state)
    if isinstance(mixer, KDA | GatedDeltaNet):  # g, Sᵀk, S + k(…), Sᵀq
        return 2.0 * _bytes(state), 7.0 * state.recurrent.size, ()
    if isinstance(mixer, MLA):  # absorbed: a score over the entry and a sum of the latents, for each head
        return 0.0, 0.0, (Reads(_per_token(state), 2.0 * mixer.heads * (mixer.entry + mixer.latent)),)
    if isinstance(mixer, GQA):
        (paged,) = pages
        most = math.inf if mixer.window is None else mixer.window
        return 0.0, 0.0, (Reads(_per_token(paged), 4.0 * mixer.q_proj.out_features, most),)
    if isinstance(mixer, CSA):
        return _of_csa(mixer, state)
    if isinstance(mixer, IndexedMLA):
        return _of_indexed(mixer, state)
    fixed = 2.0 * (_bytes(state) - sum(map(_bytes, pages)))
    return fixed, 0.0, tuple(Reads(_per_token(page), 0.0, page.window or math.inf) for page in pages)


def _of_csa(mixer: CSA, state: State) -> tuple[float, float, tuple[Reads, ...]]:
    """`_memory` of CSA: it reads the window, all indexer keys, and the chosen or all compressed entries.

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


def _of_indexed(mixer: IndexedMLA, state: State) -> tuple[float, float, tuple[Reads, ...]]:
    """`_memory` of indexed MLA: it reads all keys of pools, and the latents of the chosen ones."""
    mla, indexer, tail = mixer.mla, mixer.indexer, state.indexer.tail
    moved = _bytes(tail) * (1 / tail.shape[1] + 1 / indexer.pool)
    keys = Reads(_per_token(state.indexer.entries), 2.0 * indexer.heads * indexer.width / indexer.pool)
    over_latent = 2.0 * mla.heads * (mla.entry + mla.latent)
    return moved, 0.0, (keys, Reads(_per_token(state.latents), over_latent, indexer.top * indexer.pool))


def _weights(tree: Any, weight_bytes: float) -> float:
    """Bytes of a tree's floating-point arrays, with `weight_bytes` for each number that is bfloat16 in the tree."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return float(
        sum(leaf.size * (weight_bytes if leaf.dtype == jnp.bfloat16 else leaf.dtype.itemsize) for leaf in leaves)
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _per_token(paged: Paged) -> float:
    """Bytes of a paged array per token; for packed entries, without the padding of pages."""
    if paged.packing is not None:
        return paged.packing.entry / paged.tokens
    return _bytes(paged) / paged.page_size
