"""The files of a checkpoint directory as one set of tensors, each in exactly one file."""

import pathlib
from collections.abc import Iterable
from typing import Any

from ling3.checkpoint import gguf_checkpoint
from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensor, StoredTensors, open_file
from ling3.runtime import strict_json
from ling3.runtime.quoting import LONGEST_LINE, MOST_LINES, printable, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_BYTES = 2**25
"""The largest index that is read: enough for 200,000 tensors."""
MOST_FILES = 1000
"""The most files of one checkpoint: all are open while it is read, and many systems let a process open 1,024."""

_LISTED = 12


def open_all(directory: pathlib.Path) -> StoredTensors:
    """Opens a checkpoint's safetensors or GGUF files and returns their tensors by name; only headers are read.

    With an index, the files are those that it names, and each tensor must be in the file that it gives. Without one,
    `model.safetensors` is read or, if that is missing, every `*.safetensors` in the directory. Other files are ignored,
    such as adapters and other layouts of the same weights (`consolidated.safetensors`). File names must be plain names
    in the directory. A link may lead to another file in it or to the same repository's blobs in the hub's cache, and
    nowhere else. Pickled weights (`.bin`, `.pt`) are never read.

    Raises CheckpointError, with all problems of a kind in one message.
    """
    if (tensors := gguf_checkpoint.tensors_of(directory)) is not None:
        return tensors
    weight_map = index(directory)
    if weight_map is None:
        names = sorted(p.name for p in directory.glob("*.safetensors") if not p.name.startswith("."))
        names = [SINGLE] if SINGLE in names else names
        if not names:
            raise CheckpointError(_nothing_to_read(directory))
    else:
        names = sorted(set(weight_map.values()))
    if len(names) > MOST_FILES:
        place = directory if weight_map is None else directory / INDEX
        raise CheckpointError(
            f"{place}: found {len(names):,} safetensors files; expected at most {MOST_FILES:,}; write it in fewer"
        )
    problems = [problem for name in names if (problem := _misplaced(directory, name))]
    if problems:
        raise CheckpointError(complaint(directory, [("files that are absent or lie elsewhere", problems)]))

    holders: dict[str, list[StoredTensor]] = {}
    for name in names:
        for tensor in open_file(directory / name).values():
            holders.setdefault(tensor.name, []).append(tensor)
    _check_holders(directory, holders, weight_map)
    return {name: found[0] for name, found in holders.items()}


def holds_weights(directory: pathlib.Path) -> bool:
    """True if the directory has files that `open_all` opens, whether they are valid or not."""
    return gguf_checkpoint.tensors_of(directory) is not None or any(directory.glob("*.safetensors*"))


def complaint(place: object, problems: Iterable[tuple[str, list[str]]]) -> str:
    """An error message with the first problems of each kind, cut to fit on one screen."""
    found = [(kind, items) for kind, items in problems if items]
    most = _LISTED
    while sum(2 + min(len(items), most) for _, items in found) > MOST_LINES - 2:
        most -= 1
    lines = [f"{place}:"]
    for kind, items in found:
        lines.append(f"  {kind}:")
        lines += [f"    {printable(item, LONGEST_LINE // 3)}" for item in items[:most]]
        lines += [f"    and {len(items) - most:,} more"] * (len(items) > most)
    return "\n".join(lines)


def index(directory: pathlib.Path) -> dict[str, str] | None:
    """The file name of each tensor, from the directory's index; None without one. Raises CheckpointError if invalid."""
    path = directory / INDEX
    if not path.exists():
        return None
    try:
        raw: Any = strict_json.read(path, INDEX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: found no weight_map; expected an object of tensor names and file names in it")
    wrong = [f"{key}: {shown(value)}" for key, value in weight_map.items() if not _is_plain(value)]
    if wrong:
        kind = "weight_map has names that are no plain names of .safetensors files in the same directory"
        raise CheckpointError(complaint(path, [(kind, wrong)]))
    if (directory / SINGLE).exists() and SINGLE not in weight_map.values():
        raise CheckpointError(
            f"{directory}: found {SINGLE} and an {INDEX} that does not name it; remove one of the two"
        )
    return weight_map


def _is_plain(name: object) -> bool:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        return False
    return name.isprintable() and not any(character in name for character in "/\\:") and not name.startswith(".")


def _misplaced(directory: pathlib.Path, name: str) -> str | None:
    home = directory.resolve()
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parent.parent / "blobs")
    try:
        target = (directory / name).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        return f"{name}: cannot be found ({error}); fetch it, or write the checkpoint again"
    if not any(target.is_relative_to(root) for root in roots):
        return f"{name}: is a link to {target}; expected a file in the directory; copy it there"
    return None


def _nothing_to_read(directory: pathlib.Path) -> str:
    others = sorted(
        p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf")
    )
    if others:
        return (
            f"{directory}: found {', '.join(others[:_LISTED])}, and no .safetensors file; ling3 never reads pickled or "
            "foreign weights: get the safetensors files of this checkpoint, or convert it where you trust it"
        )
    return (
        f"{directory}: found no .safetensors file; expected {SINGLE}, or shards with {INDEX}; for random weights use "
        "ling3.init(config) or --random-weights"
    )


def _check_holders(
    directory: pathlib.Path, holders: dict[str, list[StoredTensor]], weight_map: dict[str, str] | None
) -> None:
    twice = [
        f"{name}: in {' and '.join(tensor.file.path.name for tensor in found)}"
        for name, found in holders.items()
        if len(found) > 1
    ]
    absent, elsewhere = [], []
    for tensor, name in (weight_map or {}).items():
        if tensor not in holders:
            absent.append(f"{tensor}: not in {name}")
        elif all(holder.file.path.name != name for holder in holders[tensor]):
            elsewhere.append(f"{tensor}: not in {name}, but in {holders[tensor][0].file.path.name}")
    if twice or absent or elsewhere:
        kinds = [
            ("tensors in two files; keep one of each", twice),
            (f"tensors that {INDEX} names and the file lacks", absent),
            (f"tensors in another file than {INDEX} says", elsewhere),
        ]
        raise CheckpointError(complaint(directory, kinds))
