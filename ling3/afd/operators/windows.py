"""The windows through which sessions and cards exchange tokens.

A session writes its tokens and their experts into the window of a card (`FfnArea`), and the card writes each expert's
output into the window of the session (`AttentionArea`). A token has K1 slots of HS bytes, one for each of its experts;
the layout of a slot depends on `token_dtype`:

    0: H float16      1: H bfloat16      2: H int8, then at byte H one float32, their scale

Numbers are little-endian. Float32 is sent unrounded as 2H float16: operators move a slot's bits as integers, since a
select or a gather of floating-point numbers may change a NaN.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int32, Shaped, UInt8

from ling3.afd.operators import limits

EMPTY = 2**31 - 1
"""The expert id that means no expert, and the value of all ids before they are written."""
TOKEN_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8))
SCALE = 4
"""Bytes of the float32 scale behind int8 numbers."""

# The largest dimensions of `token_data`; in a session's window there is no `sessions`.
_MOST = {
    "sessions": limits.SESSIONS,
    "micro_batches": limits.MICRO_BATCHES,
    "tokens": limits.LARGEST,
    "slots": limits.SLOTS,
    "slot_bytes": limits.LARGEST,
}


# Areas are not type-checked, as JAX also builds them from other things than arrays; operators call `checked`.


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FfnArea:
    """A card's window, and the messages that its scheduler took from it last. Operators return a new area.

    It is for A sessions with M micro-batches each, of BS tokens with K1 slots each.
    """

    token_info: Array
    """int32 [A, M, 2 + BS·K1]: a flag (1: complete), the layer id, and the expert ids [BS, K1] in order."""
    token_data: Array
    """uint8 [A, M, BS, K1, HS]: the slots."""
    polling_index: Array
    """int32: the micro-batch that is scheduled next, if all sessions are one group."""
    layer_ids: Array
    """int32 [A]: the layer of each message that was taken."""
    session_ids: Array
    """int32 [A]: its session."""
    micro_batch_ids: Array
    """int32 [A]: its micro-batch."""
    expert_ids: Array
    """int32 [A, BS, K1]: its expert ids."""
    out_num: Array
    """int32: how many messages were taken."""

    @staticmethod
    def empty(sessions: int, micro_batches: int, tokens: int, slots: int, slot_bytes: int) -> "FfnArea":
        """An area before the first message: flags 0, ids `EMPTY`. Raises ValueError for a size beyond the limits."""
        shape = _checked_sizes((sessions, micro_batches, tokens, slots, slot_bytes))
        # No two fields share an array, so that an area can be donated.
        fields = {name: jnp.full(own, EMPTY if own else 0, jnp.int32) for name, own in _ffn_shapes(*shape).items()}
        fields["token_info"] = fields["token_info"].at[:, :, 0].set(0)
        return FfnArea(token_data=jnp.zeros(shape, jnp.uint8), **fields)


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionArea:
    """One session's window: M micro-batches of BS tokens with K1 slots each. Operators return a new area."""

    token_info: Array
    """int32 [M, BS, K1]: a flag for each slot (1: written)."""
    token_data: Array
    """uint8 [M, BS, K1, HS]: the slots."""
    micro_batch_id: Array
    """int32: the micro-batch that was complete last."""

    @staticmethod
    def empty(micro_batches: int, tokens: int, slots: int, slot_bytes: int) -> "AttentionArea":
        """An area before the first message: flags 0, micro_batch_id M-1. Raises ValueError for invalid sizes."""
        shape = _checked_sizes((micro_batches, tokens, slots, slot_bytes))
        last = jnp.asarray(shape[0] - 1, jnp.int32)
        return AttentionArea(jnp.zeros(shape[:3], jnp.int32), jnp.zeros(shape, jnp.uint8), last)


@no_type_check
def slot_bytes(hidden: int, token_dtype: int) -> int:
    """HS: the bytes of a slot for `hidden` numbers, rounded up to a multiple of 512."""
    size = token_bytes(limits.integer("hidden", hidden, 1), limits.integer("token_dtype", token_dtype, 0, 2))
    return -(-size // limits.ALIGNMENT) * limits.ALIGNMENT


def token_bytes(hidden: int, token_dtype: int) -> int:
    """The bytes that a token takes up in its slot: 2H, or H + 4 for int8 and its scale."""
    return hidden * TOKEN_DTYPES[token_dtype].itemsize + (SCALE if token_dtype == 2 else 0)


def to_bytes(x: Shaped[Array, "*batch channels"]) -> UInt8[Array, "*batch bytes"]:
    """The bytes of numbers, without changing a bit."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def from_bytes(data: UInt8[Array, "*batch bytes"], dtype: jnp.dtype) -> Shaped[Array, "*batch channels"]:
    """The numbers of a dtype in bytes: undoes `to_bytes`."""
    if dtype.itemsize > 1:
        data = data.reshape(*data.shape[:-1], -1, dtype.itemsize)
    return lax.bitcast_convert_type(data, dtype)


def within(ids: Int32[Array, "*shape"], number: int) -> Bool[Array, "*shape"]:
    """True for ids in [0, number)."""
    return (ids >= 0) & (ids < number)


@no_type_check
def checked(area, kind: type, name: str):
    """The area, with scalars as int32. Raises ValueError unless it is a `kind`, and for a field outside the limits."""
    if not isinstance(area, kind):
        raise ValueError(f"{name} is a {type(area).__name__}, expected an {kind.__name__}")
    axes = ("A", "M", "BS", "K1", "HS")
    data = limits.array("token_data", area.token_data, jnp.uint8, axes if kind is FfnArea else axes[1:])
    _checked_sizes(data.shape, "token_data: ")
    shapes = _ffn_shapes(*data.shape) if kind is FfnArea else {"token_info": data.shape[:-1], "micro_batch_id": ()}
    fields = {}
    for field, shape in shapes.items():
        value = getattr(area, field)
        # The dtype of a NumPy scalar is checked, as under jit; a Python int has none.
        if shape or isinstance(value, np.generic):
            limits.array(field, value, jnp.int32, shape, f" with token_data of shape {data.shape}")
        fields[field] = value if shape else limits.scalar(field, value)
    return dataclasses.replace(area, token_data=data, **fields)


@no_type_check
def check_holds(area, size: int, what: str) -> None:
    """Raises ValueError unless a slot of the area has room for `size` bytes."""
    held = area.token_data.shape[-1]
    if size > held:
        raise ValueError(f"token_data has slots of {held} bytes, expected at least {size} for {what}")


@no_type_check
def _ffn_shapes(sessions, micro_batches, tokens, slots, _):
    """The shapes of the int32 fields of a card's area."""
    shapes = {"token_info": (sessions, micro_batches, 2 + tokens * slots), "expert_ids": (sessions, tokens, slots)}
    shapes |= dict.fromkeys(("layer_ids", "session_ids", "micro_batch_ids"), (sessions,))
    return shapes | dict.fromkeys(("polling_index", "out_num"), ())


@no_type_check
def _checked_sizes(shape, of: str = "") -> tuple[int, ...]:
    """The shape of `token_data`. Raises ValueError for a dimension beyond the limits."""
    names = list(_MOST)[-len(shape) :]
    shape = tuple(limits.integer(of + name, size, 1, _MOST[name]) for name, size in zip(names, shape))
    if shape[-1] % limits.ALIGNMENT:
        raise ValueError(f"{of}slot_bytes is {shape[-1]}, expected a multiple of {limits.ALIGNMENT}")
    return shape
