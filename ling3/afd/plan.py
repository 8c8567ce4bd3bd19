"""The plan that attention and FFN workers share before the first message, and the split of a model into halves."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

from ling3.afd.messages import GONE, Computed, Routed
from ling3.afd.operators import limits
from ling3.afd.operators.windows import TOKEN_DTYPES, AttentionArea, FfnArea, slot_bytes
from ling3.execution import Execution
from ling3.layers.moe import Experts, MoE
from ling3.model import CausalLM, DecoderLayer

Device = Any
"""A `jax.Device`; Any, as type checkers take that name for a variable."""
REQUESTS = 16
"""Default number of requests that an attention worker runs at once."""
TOKENS = 16
"""The size of a micro-batch is a multiple of this, as that of a prompt's chunks is."""
Activations = Literal["exact", "int8"]
"""How tokens are sent to the experts: unchanged, or rounded to 8 bits with one scale per token."""


@dataclasses.dataclass(frozen=True)
class AfdPlan:
    """The sizes of every window and message: static under `jit`, and the same on every worker.

    A micro-batch has `tokens` tokens, some of which may be padding. The experts of the `layers` sparse layers are
    sharded over the FFN workers in ranges of almost equal length, the same in every layer.
    """

    attention_workers: int
    ffn_workers: int
    micro_batches: int
    tokens: int
    top_k: int
    experts: int
    layers: int
    hidden: int
    dtype: str
    activations: Activations = "exact"

    @property
    def token_dtype(self) -> int:
        """The dtype of a token's slot, as an index in the operators' `TOKEN_DTYPES`."""
        return TOKEN_DTYPES.index(jnp.dtype("int8" if self.activations == "int8" else self.payload_dtype))

    @property
    def width(self) -> int:
        """Numbers in a token's slot; a float32 is sent as the bits of two float16."""
        return 2 * self.hidden if self.dtype == "float32" and self.activations == "exact" else self.hidden

    @property
    def payload_dtype(self) -> str:
        """The dtype of the tokens in a message."""
        return "float16" if self.width != self.hidden else self.dtype

    def share(self, rank: int) -> range:
        """The experts of an FFN worker, in every sparse layer."""
        fewest, more = divmod(self.experts, self.ffn_workers)
        first = rank * fewest + min(rank, more)
        return range(first, first + fewest + (rank < more))

    @functools.cached_property
    def rank_table(self) -> Int32[np.ndarray, "experts 3"]:
        """For each expert [1, its FFN worker, its index there]."""
        shares = (self.share(rank) for rank in range(self.ffn_workers))
        places = [(1, rank, place) for rank, share in enumerate(shares) for place in range(len(share))]
        return np.asarray(places, np.int32)

    def ffn_area(self) -> FfnArea:
        """An FFN worker's window before the first message."""
        size = slot_bytes(self.width, self.token_dtype)
        return FfnArea.empty(self.attention_workers, self.micro_batches, self.tokens, self.top_k, size)

    def attention_area(self) -> AttentionArea:
        """An attention worker's window before the first result; results are float32."""
        return AttentionArea.empty(self.micro_batches, self.tokens, self.top_k, slot_bytes(2 * self.hidden, 0))

    def last_routed(self, session: int) -> Routed:
        """A session's last message to an FFN worker, without tokens."""
        x = jnp.zeros((self.tokens, self.width), self.payload_dtype)
        header = np.asarray([session, GONE, 0, 0], np.int32)
        return Routed(header, x, jnp.full((self.tokens, self.top_k), -1, jnp.int32))

    def last_computed(self) -> Computed:
        """An FFN worker's last message to a session, without rows."""
        rows = self.tokens * self.top_k
        y, ids = jnp.zeros((rows, self.hidden), jnp.float32), jnp.full(rows, -1, jnp.int32)
        return Computed(np.asarray(GONE, np.int32), y, ids, ids, ids, ids, jnp.zeros((), jnp.int32))

    def packed(self, x: Float[Array, "tokens {self.hidden}"]) -> Float[Array, "tokens {self.width}"]:
        """Tokens as they are sent, before `attention_to_ffn` rounds them if they are to be int8."""
        if self.width == self.hidden:
            return x
        return lax.bitcast_convert_type(x, jnp.float16).reshape(x.shape[0], self.width)

    def unpacked(
        self, y: Num[Array, "rows {self.width}"], scale: Float32[Array, " scales"]
    ) -> Float[Array, "rows {self.hidden}"]:
        """The received tokens in the model's dtype."""
        if self.activations == "int8":
            return (y.astype(jnp.float32) * scale[:, None]).astype(self.dtype)
        if self.width == self.hidden:
            return y
        return lax.bitcast_convert_type(y.reshape(y.shape[0], self.hidden, 2), jnp.float32)


class ExpertShard(eqx.Module):
    """One FFN worker's experts of all sparse layers; with `count` per layer, expert e of a layer is layer · count + e.

    Layers whose experts differ in more than their weights (in their clamp, for instance) are in different stacks.
    """

    stacks: tuple[Experts, ...]
    places: Int32[Array, "stacks experts"]
    """The index of each of the worker's experts in each stack; -1 if it is not in that stack."""

    def __call__(
        self, x: Float[Array, "rows hidden"], expert: Int32[Array, " rows"], execution: Execution
    ) -> Float32[Array, "rows hidden"]:
        """expert_j(x_j) for each row j, in float32; -1 means no expert: that output is undefined, and not computed."""
        ones = jnp.ones((x.shape[0], 1), jnp.float32)
        total = jnp.zeros(x.shape, jnp.float32)
        for stack, places in zip(self.stacks, self.places, strict=True):
            own = jnp.where(expert >= 0, places[expert], -1)
            rows = stack(x, own[:, None], ones, execution)
            total = rows if len(self.stacks) == 1 else jnp.where(own[:, None] >= 0, rows, total)
        return total


class Halves(NamedTuple):
    """The model of attention workers, whose routed experts are None, and the shards of FFN workers."""

    attention: CausalLM
    shares: tuple[ExpertShard, ...]


def without_experts(layer: DecoderLayer) -> DecoderLayer:
    """The layer without its routed experts, which FFN workers hold."""
    return eqx.tree_at(lambda own: own.mlp.experts, layer, None) if isinstance(layer.mlp, MoE) else layer


def agree(
    model: CausalLM,
    attention_workers: Any,
    ffn_workers: Any,
    micro_batches: Any,
    requests: int,
    activations: Any = "exact",
) -> AfdPlan:
    """The plan for a model, with up to `requests` requests at once on each attention worker.

    Raises ValueError, naming the count, the dtype or the layers that do not fit.
    """
    sparse = [layer.mlp for layer in model.model.layers if isinstance(layer.mlp, MoE)]
    if not sparse:
        raise ValueError("model has no routed experts, so there is nothing to put on FFN workers")
    shapes = {(mlp.experts.count, mlp.gate.top_k) for mlp in sparse}
    if len(shapes) > 1:
        raise ValueError(f"model has layers of {sorted(shapes)} (experts, top_k), expected the same in every layer")
    [(experts, top_k)] = shapes
    dtype = str(model.dtype)
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"model has weights of {dtype}, expected float32, bfloat16 or float16: windows hold no others")
    if activations not in ("exact", "int8"):
        raise ValueError(f"activations is {activations!r}, expected 'exact' or 'int8'")
    for name, value, most in (
        ("attention_workers", attention_workers, limits.SESSIONS),
        ("ffn_workers", ffn_workers, experts),
        ("micro_batches", micro_batches, limits.MICRO_BATCHES),
    ):
        limits.integer(name, value, 1, most)
    most = limits.EXPERTS // len(sparse)
    if -(-experts // ffn_workers) > most:
        raise ValueError(
            f"ffn_workers is {ffn_workers}, expected at least {-(-experts // most)}: an FFN worker has room for "
            f"{limits.EXPERTS} experts, those of all {len(sparse)} layers together"
        )
    hidden = model.model.word_embeddings.in_features
    tokens = -(-requests // (micro_batches * TOKENS)) * TOKENS
    counts = (attention_workers, ffn_workers, micro_batches, tokens, top_k, experts, len(sparse), hidden)
    return AfdPlan(*counts, dtype, activations)


def halve(model: CausalLM, plan: AfdPlan, ranks: Iterable[int]) -> Halves:
    """Splits a model into halves, with the shards of the FFN workers `ranks`; the attention half is not copied."""
    layers = model.model.layers
    experts = [layer.mlp.experts for layer in layers if isinstance(layer.mlp, MoE)]
    plain = dataclasses.replace(model, mtp=())
    attention = eqx.tree_at(lambda m: m.model.layers, plain, tuple(map(without_experts, layers)))
    return Halves(attention, tuple(_share(experts, plan.share(rank)) for rank in ranks))


def committed(memory: Any, weights: Any) -> Any:
    """Commits `memory` to the device of a worker's weights, as the results of programs are.

    JAX would compile a program a second time for arguments that are not committed to a device.
    """
    return jax.device_put(memory, jax.tree.leaves(weights)[0].sharding)


def _share(layers: Sequence[Experts], own: range) -> ExpertShard:
    """The shard with the experts `own` of every layer."""
    kinds: dict[Any, list[int]] = {}
    for i, experts in enumerate(layers):
        arrays, tree = jax.tree.flatten(experts)
        kinds.setdefault((tree, *((x.shape, x.dtype) for x in arrays)), []).append(i)
    places = np.full((len(kinds), len(layers) * len(own)), -1, np.int32)
    stacks = []
    for kind, members in enumerate(kinds.values()):
        for position, i in enumerate(members):
            places[kind, i * len(own) : (i + 1) * len(own)] = np.arange(len(own)) + position * len(own)
        parts = (jax.tree.map(lambda x: x[own.start : own.stop], layers[i]) for i in members)
        stacks.append(jax.tree.map(lambda *x: jnp.concatenate(x), *parts))
    return ExpertShard(tuple(stacks), jnp.asarray(places))
