"""ScheduleContext: the 1,024-byte structure of CANN's AFD operators with a worker's sizes, buffers and progress.

Numbers are little-endian. Reserved bytes are the fields `reserve0`, …, as in CANN's page on FfnWorkerBatching, so that
reading and writing the structure changes no byte. Addresses (`…_buf`) are numbers that are never dereferenced.
"""

import dataclasses
import struct
from typing import Any, Self, no_type_check

from ling3.afd.operators import limits

# Not type-checked: the package's checker would raise another error in `__init__`, before `__post_init__` runs.


@no_type_check
def _field(form: str) -> Any:
    """A field in the notation of `struct`: I and i for 32 bits, Q for 64, `96s` for 96 reserved bytes."""
    reserved = form.endswith("s")
    default = bytes(struct.calcsize(form)) if reserved else 0
    return dataclasses.field(default=default, metadata={"format": form}, repr=not reserved)


@no_type_check
def _area(field: dataclasses.Field) -> Any:
    """The class of a field that is an area itself; None for a number or bytes."""
    return None if field.metadata else field.default_factory


@no_type_check
@dataclasses.dataclass(frozen=True)
class _Area:
    """A part of the structure: its fields, in order and without gaps."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _checked(getattr(self, field.name), field))

    @classmethod
    def layout(cls) -> struct.Struct:
        """The binary layout of the fields."""
        forms = (field.metadata.get("format") or f"{_area(field).layout().size}s" for field in dataclasses.fields(cls))
        return struct.Struct("<" + "".join(forms))

    @classmethod
    def from_bytes(cls, b: Any) -> Self:
        """The area from its bytes, or from an array of that size. Raises ValueError for any other length."""
        layout = cls.layout()
        try:
            data = b.tobytes() if hasattr(b, "tobytes") else bytes(memoryview(b))
        except TypeError:
            raise ValueError(f"b is a {type(b).__name__}, expected {layout.size} bytes") from None
        if len(data) != layout.size:
            raise ValueError(f"b has {len(data)} bytes, expected {layout.size}")
        areas = map(_area, dataclasses.fields(cls))
        return cls(*(area.from_bytes(value) if area else value for area, value in zip(areas, layout.unpack(data))))

    def to_bytes(self) -> bytes:
        """The area's bytes; reserved ones are as they were read."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return self.layout().pack(*(value.to_bytes() if isinstance(value, _Area) else value for value in values))


@no_type_check
@dataclasses.dataclass(frozen=True)
class CommonArea(_Area):
    """Sizes that sessions and cards share, in bytes [0, 128)."""

    session_num: int = _field("I")
    """A, the number of sessions."""
    micro_batch_num: int = _field("I")
    """M, for each session."""
    micro_batch_size: int = _field("I")
    """BS, the tokens of a micro-batch."""
    selected_expert_num: int = _field("I")
    """K1, the slots of a token: the top-k and the shared experts."""
    expert_num: int = _field("I")
    """The number of experts in a layer."""
    attn_to_ffn_token_size: int = _field("I")
    """Bytes of a slot in a card's window, a multiple of 512."""
    ffn_to_attn_token_size: int = _field("I")
    """Bytes of a slot in a session's window, a multiple of 512."""
    schedule_mode: int = _field("i")
    """0 for cards, 1 for sessions, 2 for both."""
    reserve0: bytes = _field("96s")


@no_type_check
@dataclasses.dataclass(frozen=True)
class ControlArea(_Area):
    """The flag that stops the loops, in bytes [128, 256)."""

    run_flag: int = _field("i")
    """1 while workers run; 0 ends every waiting loop."""
    reserve1: bytes = _field("124s")


@no_type_check
@dataclasses.dataclass(frozen=True)
class AttentionContext(_Area):
    """A session's window and progress, in bytes [256, 384)."""

    token_info_buf: int = _field("Q")
    token_info_buf_size: int = _field("Q")
    token_data_buf: int = _field("Q")
    token_data_buf_size: int = _field("Q")
    micro_batch_id: int = _field("I")
    """The micro-batch that was combined last; M-1 at first."""
    reserve5: bytes = _field("92s")


@no_type_check
@dataclasses.dataclass(frozen=True)
class FfnContext(_Area):
    """A card's window, progress and the messages that it took last, in bytes [384, 640)."""

    token_info_buf: int = _field("Q")
    token_info_buf_size: int = _field("Q")
    token_data_buf: int = _field("Q")
    token_data_buf_size: int = _field("Q")
    polling_index: int = _field("Q")
    """The micro-batch that is scheduled next."""
    reserve3: bytes = _field("88s")
    layer_ids_buf: int = _field("Q")
    layer_ids_buf_size: int = _field("Q")
    session_ids_buf: int = _field("Q")
    session_ids_buf_size: int = _field("Q")
    micro_batch_ids_buf: int = _field("Q")
    micro_batch_ids_buf_size: int = _field("Q")
    expert_ids_buf: int = _field("Q")
    expert_ids_buf_size: int = _field("Q")
    out_num: int = _field("I")
    """The number of messages taken, at most one per session."""
    reserve4: bytes = _field("60s")


@no_type_check
@dataclasses.dataclass(frozen=True)
class ScheduleContext(_Area):
    """The complete structure. `dataclasses.replace` changes a field of it or of one of its parts.

    Raises ValueError, naming the field, for a value that a field cannot hold.
    """

    common: CommonArea = dataclasses.field(default_factory=CommonArea)
    control: ControlArea = dataclasses.field(default_factory=ControlArea)
    attention: AttentionContext = dataclasses.field(default_factory=AttentionContext)
    ffn: FfnContext = dataclasses.field(default_factory=FfnContext)
    reserve6: bytes = _field("384s")


@no_type_check
def _checked(value: Any, field: dataclasses.Field) -> Any:
    """A field's value (an area, bytes or an int), if the field can hold it."""
    name, area = field.name, _area(field)
    if area:
        if not isinstance(value, area):
            raise ValueError(f"{name} is a {type(value).__name__}, expected {area.__name__}")
        return value
    form = field.metadata["format"]
    size = struct.calcsize("<" + form)
    if form.endswith("s"):
        if not isinstance(value, bytes | bytearray) or len(value) != size:
            raise ValueError(f"{name} is {value!r}, expected {size} bytes")
        return bytes(value)
    least = -(2 ** (8 * size - 1)) if form.islower() else 0
    return limits.integer(name, value, least, least + 2 ** (8 * size) - 1)
