"""Reads the collectives of a program on a mesh from its HLO text."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

SENT = {
    "all-gather": lambda result, devices: result * (devices - 1) / devices,
    "all-reduce": lambda result, devices: 2 * result * (devices - 1) / devices,
    "all-to-all": lambda result, devices: result * (devices - 1) / devices,
    "ragged-all-to-all": lambda result, devices: result * (devices - 1) / devices,
    "reduce-scatter": lambda result, devices: result * (devices - 1),
    "collective-permute": lambda result, devices: result,
    "collective-broadcast": lambda result, devices: result,
}
"""For each kind, the bytes that a device sends in a ring for a result of `result` bytes: no algorithm needs fewer."""

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*\) -> .*)? \{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<result>.*?) (?P<op>[a-z][a-z\-]*)\((?P<rest>.*)$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
CALLED_ONE_OF = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
OF_MESH = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^]]+)\]"
    r"(?:, device_ids=\((?:\[(?P<whole>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<listed>[\d,]+))\))?"
    r" \{(?P<along>[^}]*)\}"
)
SIZE = re.compile(r"([^,=]+)=(\d+)")
ALONG = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?")
NAME = re.compile(r'op_name="([^"]*)"')
OF_NO_MODULE = re.compile(r"shard_map|while|body|cond|branch_\d+_fun|closed_call|.*\(.*|")
"""Parts of an operation's name that come from transformations, not from modules."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program."""

    kind: str
    """all-gather, all-reduce, …"""
    source: str
    """The module that it belongs to, such as `layers.0.attention.o_proj`; empty outside all modules.

    The sources of collectives that the compiler has merged are joined by a plus.
    """
    result: str
    """Type and shape of each device's result: `bf16[64,1,2048]`."""
    bytes: int
    """Size of the result on each device."""
    devices: int
    """Number of devices in a group that communicates."""
    axes: tuple[str, ...]
    """Axes of the mesh along which the groups communicate."""
    times: int
    """Number of executions, with one for each loop of unknown length."""
    loops: int = 0
    """Number of enclosing loops of unknown length."""

    @property
    def sent(self) -> float:
        """Bytes that a device sends, and receives, per execution in a ring."""
        return SENT[self.kind](self.bytes, self.devices)


def collectives(hlo: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """The collectives in the HLO text of a program, in order of execution; `mesh` has the sizes of the mesh axes.

    `hlo` is `compiled.as_text()`, or `lowered.as_text("hlo", debug_info=True)` for the program before compilation.
    An asynchronous collective (`all-gather-start` and `-done`) counts once, one in a branch as if the branch were
    taken, and one in groups of a single device not at all.
    """
    computations, entry = _computations(hlo)
    return tuple(_of(computations, entry, mesh, 1, 0))


def by_source(found: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Merges collectives that differ only in their layer (`layers.*.attention.o_proj`), adding up their `times`."""
    alike: dict[Collective, int] = {}
    for each in found:
        source = re.sub(r"\blayers\.\d+", "layers.*", each.source)
        key = dataclasses.replace(each, source=source, times=0)
        alike[key] = alike.get(key, 0) + each.times
    return tuple(dataclasses.replace(key, times=times) for key, times in alike.items())


def _computations(hlo: str) -> tuple[dict[str, list[re.Match[str]]], str]:
    """The instructions of each computation, and the name of the entry computation."""
    found: dict[str, list[re.Match[str]]] = {}
    entry, own = "", []
    for line in hlo.splitlines():
        if (head := COMPUTATION.match(line)) is not None:
            own = found[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (instruction := INSTRUCTION.match(line)) is not None:
            own.append(instruction)
    if entry not in found:
        raise ValueError("hlo has no ENTRY computation, expected the text of an HLO module")
    return found, entry


def _of(
    computations: dict[str, list[re.Match[str]]], name: str, mesh: Mapping[str, int], times: int, loops: int
) -> Iterator[Collective]:
    """The collectives of one computation and of all computations that it calls."""
    for instruction in computations[name]:
        op, rest = instruction["op"], instruction["rest"]
        if op.endswith(("-done", "-update")):
            continue
        if (kind := op.removesuffix("-start")) in SENT:
            found = _collective(kind, instruction["result"], rest, mesh, times, loops, op != kind)
            if found.devices > 1:
                yield found
            continue
        trips = TRIPS.search(rest)
        inner = (times * int(trips[1]), loops) if trips else (times, loops + (op == "while"))
        called = [*CALLED.findall(rest), *(each for some in CALLED_ONE_OF.findall(rest) for each in some.split(","))]
        for each in called:
            yield from _of(computations, each.strip(" %"), mesh, *inner)


def _collective(
    kind: str, result: str, rest: str, mesh: Mapping[str, int], times: int, loops: int, started: bool
) -> Collective:
    arrays = ARRAY.findall(result)
    if started and kind in ("all-gather", "collective-permute"):  # its type has operands first and a context last
        arrays = [array for array in arrays if array != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    groups = _groups(rest, math.prod(mesh.values()))
    devices = len(groups[0]) if kind != "collective-permute" else len({device for pair in groups for device in pair})
    shown = ", ".join(f"{dtype}[{shape}]" for dtype, shape in arrays)
    size = sum(_bytes(dtype, shape) for dtype, shape in arrays)
    return Collective(kind, _source(rest), shown, size, devices, _axes(groups, mesh), times, loops)


def _source(rest: str) -> str:
    name = NAME.search(rest)
    outer, _, joined = name[1].rpartition("/(") if name else ("", "", "")
    # Merged collectives are named `layers.0/mlp/(experts/psum:shared_experts/down_proj/psum)`.
    names = [f"{outer}/{part}" for part in joined.removesuffix(")").split(":")] if outer else [joined]
    modules = ([part for part in each.split("/")[:-1] if not OF_NO_MODULE.fullmatch(part)] for each in names)
    return " + ".join(dict.fromkeys(".".join(module) for module in modules))


def _bytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(_numbers(shape)) * (int(bits[0]) if bits else 8) // 8  # pred has no digits and takes a byte


def _groups(rest: str, devices: int) -> list[list[int]]:
    """The groups of devices that communicate, or pairs of source and target.

    HLO has them as lists, `{{0,1},{2,3}}`; as rows of an array, `[2,2]<=[4]`; or, since jax 0.11, as axes of a mesh,
    `mesh['data'=2,'tensor'=2] {'tensor'}`. Without groups, all devices form one.
    """
    if (iota := IOTA.search(rest)) is not None:
        shape, whole, order = (_numbers(numbers or "") for numbers in iota.groups())
        return _ids(whole, order).reshape(shape).tolist()
    if (of_mesh := OF_MESH.search(rest)) is not None:
        return _groups_of_mesh(of_mesh)
    if (listed := GROUPS.search(rest)) is not None:
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return groups or [[*range(devices)]]
    if "replica_groups=" in rest:
        raise ValueError(f"hlo has replica_groups in an unknown form, expected lists, an iota or a mesh: {rest[:200]}")
    return [[*range(devices)]]


def _groups_of_mesh(found: re.Match[str]) -> list[list[int]]:
    """The groups along some axes of the mesh in the HLO, whose devices are in order unless it has `device_ids`.

    An axis may be split into factors: `'x':(2)4` is the middle factor of an axis of size 2 · 4 · n.
    """
    sizes = {name: int(size) for name, size in SIZE.findall(found["sizes"])}
    ids = _numbers(found["listed"] or "") or _ids(
        _numbers(found["whole"] or "") or [*sizes.values()], _numbers(found["order"] or "")
    )
    along = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in ALONG.findall(found["along"])]
    parts = []  # the factors of each axis: its name, the product of the factors before, the factor's size
    for name, size in sizes.items():
        cuts = {1, size} | {cut for own, before, count in along if own == name for cut in (before, before * count)}
        parts += [(name, before, after // before) for before, after in itertools.pairwise(sorted(cuts))]
    inner = [
        i
        for name, first, count in along
        for i, (own, before, _) in enumerate(parts)
        if own == name and first <= before < first * count
    ]
    outer = [i for i in range(len(parts)) if i not in inner]
    split = np.reshape(ids, [size for *_, size in parts]).transpose(outer + inner)
    return split.reshape(-1, math.prod(parts[i][2] for i in inner)).tolist()


def _ids(whole: list[int], order: list[int]) -> np.ndarray:
    """The numbers of all devices as an array of shape `whole`, transposed by `order`."""
    numbers = np.arange(math.prod(whole)).reshape(whole)
    return numbers.transpose(order) if order else numbers


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The smallest set of mesh axes that contains every group."""
    place = np.stack(np.unravel_index(np.arange(math.prod(mesh.values())), tuple(mesh.values())), axis=1)
    names = [*mesh]
    for count in range(len(names) + 1):
        for axes in itertools.combinations(range(len(names)), count):
            others = [axis for axis in range(len(names)) if axis not in axes]
            if all(len({tuple(place[device][others]) for device in group}) == 1 for group in groups):
                return tuple(names[axis] for axis in axes)
    return ()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
