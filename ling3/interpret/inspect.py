"""The report of `ling3 inspect`: module tree, layers, published names, and the memory of a sequence."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ling3.cache import CacheSpec, pages_of, slots_of, window_of
from ling3.checkpoint import hub, shards
from ling3.checkpoint.names import stored_parts, structure
from ling3.checkpoint.safetensors_file import DTYPES, CheckpointError, StoredTensors
from ling3.checkpoint.stored_formats import as_stored
from ling3.engine.settings import EngineSettings
from ling3.families import read_config
from ling3.formats import weights_per_element
from ling3.interpret import ablate
from ling3.model import CausalLM, DecoderLayer
from ling3.ops.swiglu import SWIGLU


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """One array of the module tree: its path, shape and dtype, and the published tensors that make it up."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    published: str
    published_shape: tuple[int, ...]
    tensors: int
    parameters: int
    """Number of weights. A packed array counts the elements of its matrix; scales count none."""

    @property
    def place(self) -> tuple[int | None, str, str]:
        """The 0-based decoder layer (None outside layers), its part (`attention`, `mlp`, …), and the path in it."""
        match self.path.split(".", 4):
            case ["model", "layers", layer, part, within]:
                return int(layer), part, within
        return None, "", self.path


@dataclasses.dataclass(frozen=True)
class PackedCache:
    """Bytes per token in packed pages (`cache_dtype="packed"`)."""

    per_token: float
    """Bytes of its entries, scales included."""
    per_token_in_pages: float
    """Bytes including the padding of the engine's pages."""
    page_size: int
    """Tokens in a page."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a sequence takes while it is served.

    Paged arrays grow with each token. Arrays with a row per slot do not; `state_per_sequence` lists them by name.
    """

    cache_per_token: int
    state_per_sequence: dict[str, int]
    packed: PackedCache | None = None
    """None for a model whose caches cannot be packed."""
    window: int | None = None
    """The number of last tokens whose entries are kept; None for all."""

    def sequence(self, tokens: int) -> int:
        """The bytes of a sequence of this many tokens, without the unused rest of its last page."""
        kept = tokens if self.window is None else min(tokens, self.window)
        return sum(self.state_per_sequence.values()) + kept * self.cache_per_token


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """A model of any family, described from its configuration alone; `print` it with rich, or take `to_dict()`.

    `model` has a `jax.ShapeDtypeStruct` for each array. `stored` is True if the dtypes are from the headers of stored
    weights, and `problem` says why these headers could not be read.
    """

    source: str
    model: CausalLM
    arrays: tuple[ArrayRow, ...]
    memory: Memory
    stored: bool
    problem: str | None = None

    @property
    def config(self) -> Any:
        """The model's configuration, of its family's class."""
        return self.model.config

    @property
    def parameters(self) -> int:
        """The number of weights in the model."""
        return sum(row.parameters for row in self.arrays)

    @property
    def activated(self) -> int:
        """The number of weights used in the forward pass of one token.

        These are all but the experts that it does not choose, and multi-token-prediction layers.
        """
        unused = sum(row.parameters for row in self.arrays if row.path.startswith("mtp."))
        for i, router in ablate.having(self.model, "experts per token").items():
            experts = f"model.layers.{i}.mlp.experts."
            routed = sum(row.parameters for row in self.arrays if row.path.startswith(experts))
            unused += routed - routed * router.top_k // router.weight.shape[0]
        return self.parameters - unused

    @property
    def embedding(self) -> int:
        """The number of weights in the embedding table, of which a token reads one row."""
        return math.prod(self.model.model.word_embeddings.shape)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        memory: dict[str, Any] = {"cache_per_token": self.memory.cache_per_token}
        if self.memory.packed is not None:
            memory["packed_cache"] = dataclasses.asdict(self.memory.packed)
        memory |= {f"{name}_state_per_sequence": size for name, size in self.memory.state_per_sequence.items()}
        return {
            "source": self.source,
            "config": self.config.to_dict(),
            "parameters": self.parameters,
            "activated_parameters_per_token": self.activated,
            "embedding_parameters": self.embedding,
            "tensors": sum(row.tensors for row in self.arrays),
            "memory_bytes": memory,
            "layers": [
                {"layer": i, "attention": _attention(layer).lower(), "mlp": "moe" if _sparse(layer) else "dense"}
                for i, layer in enumerate(self.model.model.layers)
            ],
            "arrays": [dataclasses.asdict(row) for row in self.arrays],
            "dtypes_as_stored": self.stored,
            "problem": self.problem,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        variant, states = getattr(self.config, "variant", dict)(), self.memory.state_per_sequence
        facts = Table.grid(padding=(0, 2))
        facts.add_row("model", self.source)
        facts.add_row("parameters", f"{self.parameters:,} in {sum(row.tensors for row in self.arrays):,} tensors")
        facts.add_row("activated", f"{self.activated:,} per token, of them {self.embedding:,} in the embedding table")
        if variant:
            facts.add_row("ablated", Text(json.dumps(variant)[1:-1]))
        some, rotated = (ablate.having(self.model, "rotary embedding", uncut) for uncut in (False, True))
        if unrotated := sorted(some.keys() - rotated.keys()):
            facts.add_row("positions", f"no RoPE in layers {_ranges(unrotated)}")
        last = "" if self.memory.window is None else f", of the last {self.memory.window:,}"
        facts.add_row("cache", f"{self.memory.cache_per_token:,} bytes per token{last}")
        if (packed := self.memory.packed) is not None:
            padded = f"{packed.per_token_in_pages:,.10g} in pages of {packed.page_size}"
            facts.add_row("packed cache", f"{packed.per_token:,.10g} bytes per token, {padded}")
        for name, size in states.items():
            facts.add_row("state", f"{size:,} bytes per sequence ({name})")
        facts.add_row("dtypes", "as stored" if self.stored else "of a bfloat16 model: there are no weights to look at")
        yield facts
        if self.problem:
            yield Text(f"\nThe weights cannot be read:\n{self.problem}", style="red")
        yield Text("\nlayer schedule", style="bold")
        yield _schedule(self.model)
        yield Text("\nmodule tree: shape, dtype, parameters; in the checkpoint, where it differs", style="bold")
        outside = [row for row in self.arrays if row.place[0] is None]
        yield from (_line(row.path, row, options.max_width) for row in outside)
        for (part, kind, _), found in self._parts().items():
            (_, rows), times = found[0], f"{len(found)} x " if len(found) > 1 else ""
            layers, size = _ranges([layer for layer, _ in found]), sum(row.parameters for row in rows)
            yield Text(f"\nmodel.layers.{layers}.{part}  {kind}  {times}{size:,}")
            yield from (_line(f"  {row.place[2]}", row, options.max_width) for row in rows)

    def _parts(self) -> dict[tuple[str, str, tuple[Any, ...]], list[tuple[int, list[ArrayRow]]]]:
        """Groups equal parts of the decoder layers; a group has the layers with this part and their arrays."""
        rows: dict[tuple[int, str], list[ArrayRow]] = {}
        for row in self.arrays:
            layer, part, _ = row.place
            if layer is not None:
                rows.setdefault((layer, part), []).append(row)
        parts: dict[tuple[str, str, tuple[Any, ...]], list[tuple[int, list[ArrayRow]]]] = {}
        for (layer, part), own in rows.items():
            contents = tuple((row.place[2], row.shape, row.dtype) for row in own)
            kind = _kind(self.model.model.layers[layer], part)
            parts.setdefault((part, kind, contents), []).append((layer, own))
        return parts


def report(
    source: Any, dtype: DTypeLike = jnp.bfloat16, *, revision: str | None = None, mtp: bool = False
) -> ModelReport:
    """Describes a checkpoint (directory, hub id or `"nano"`), a `config.json` or a configuration, without any weights.

    Shapes come from the configuration. Dtypes come from the headers of weights in the same directory if there are any,
    else from a model in `dtype`; caches are counted in `dtype`. From the hub only the configuration is fetched, at
    `revision`: a branch, a tag or a commit. With `mtp`, the model has its multi-token-prediction layers.

    Raises ConfigError for a configuration that no registered family reads, ValueError for `mtp` if it has none, and the
    errors of `hub.resolve` if nothing is found.
    """
    tensors: StoredTensors = {}
    problem = None
    if not isinstance(source, str | os.PathLike):
        name, config = type(source).__name__, source
    elif revision is None and pathlib.Path(source).suffix == ".json" and pathlib.Path(source).is_file():
        name, config = os.fspath(source), read_config(source)
    else:
        directory = hub.resolve(source, ("config.json",), revision)
        name, config = os.fspath(source), read_config(directory)
        try:
            if shards.holds_weights(directory):  # not if only the configuration was fetched
                tensors = shards.open_all(directory)
                config, tensors = as_stored(config, tensors, mtp=mtp)
        except CheckpointError as error:
            problem = str(error)
    model = structure(config, dtype, mtp=mtp)
    stored = {own: tensor.block or tensor.dtype for own, tensor in tensors.items()}
    return ModelReport(name, model, tuple(_rows(model, stored)), _memory(model, dtype), bool(stored), problem)


def _rows(tree: CausalLM, stored: dict[str, str]) -> Iterator[ArrayRow]:
    for (leaf, weights), count in zip(stored_parts(tree, stored), weights_per_element(tree), strict=True):
        first, last = weights[0], weights[-1]
        name = first.name
        if len(weights) > 1:
            name = name.replace(f".experts.{first.expert}.", f".experts.{{{first.expert}..{last.expert}}}.")
        dtypes = {stored[weight.name] for weight in weights if weight.name in stored}
        names = {str(DTYPES[dtype]) if dtype in DTYPES else dtype for dtype in dtypes} or {str(leaf.value.dtype)}
        shape, numbers = tuple(leaf.value.shape), int(math.prod(leaf.value.shape) * count)
        yield ArrayRow(leaf.path, shape, "/".join(sorted(names)), name, first.shape, len(weights), numbers)


def _memory(model: CausalLM, dtype: DTypeLike) -> Memory:
    """Computed from the shapes of the mixers' states, with one slot and one page of at least 1,024 tokens."""
    tokens = math.lcm(1024, model.page_multiple)
    states = eqx.filter_eval_shape(lambda: model.empty_states(CacheSpec(1, 1, tokens, dtype)))
    sizes: dict[str, int] = {}
    for state in states:
        for path, array in jax.tree_util.tree_leaves_with_path(slots_of(state)):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "state"
            sizes[name] = sizes.get(name, 0) + _bytes(array)
    per_token = sum(_bytes(paged.entries) for paged in pages_of(states)) // tokens
    return Memory(per_token, sizes, _packed(model, dtype), window_of(states))


def _packed(model: CausalLM, dtype: DTypeLike) -> PackedCache | None:
    """Computed from one packed page of each paged array, in the engine's page size if the model permits that."""
    size = math.lcm(EngineSettings().page_size, model.page_multiple)
    spec = CacheSpec(1, 1, size, dtype, packed=True)
    pages = () if model.unpackable else pages_of(eqx.filter_eval_shape(lambda: model.empty_states(spec)))
    if not pages:
        return None
    entries = sum(paged.packing.entry / paged.tokens for paged in pages if paged.packing is not None)
    return PackedCache(entries, sum(_bytes(paged.entries) for paged in pages) / size, size)


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _schedule(model: CausalLM) -> Table:
    """The layers' attention kinds, up to eight per row; a new row begins where the first layer's kind comes again."""
    table = Table.grid(padding=(0, 2))
    kinds = [_attention(layer) for layer in model.model.layers]
    dense = [not _sparse(layer) for layer in model.model.layers]
    rows: list[list[int]] = [[]]
    for i, kind in enumerate(kinds):
        if i and (len(rows[-1]) == 8 or (kind == kinds[0] and kinds[i - 1] not in (kind, "NONE"))):
            rows.append([])
        rows[-1].append(i)
    mixed = any(dense) and not all(dense)
    for row in rows:
        table.add_row(_ranges(row), " ".join(kinds[i] + ("*" if dense[i] and mixed else "") for i in row))
    if mixed:
        table.add_row("", "* with a dense MLP, the others with experts")
    return table


def _attention(layer: DecoderLayer) -> str:
    return "NONE" if layer.attention is None else getattr(layer.attention, "kind", type(layer.attention).__name__)


def _sparse(layer: DecoderLayer) -> bool:
    return hasattr(layer.mlp, "experts")


def _kind(layer: DecoderLayer, part: str) -> str:
    if part == "attention":
        return _attention(layer)
    if part != "mlp" or not _sparse(layer):
        return "dense" if part == "mlp" else ""
    units = [getattr(getattr(layer.mlp, name, None), "swiglu", SWIGLU) for name in ("experts", "shared_experts")]
    limits = [unit.limit for unit in units]
    return f"experts, clamped at {limits[0]:g} (shared at {limits[1]:g})" if any(limits) else "experts"


def _ranges(layers: list[int]) -> str:
    """`0-2,4` for layers 0, 1, 2 and 4."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _line(path: str, row: ArrayRow, width: int) -> Text:
    """An array in columns, then its published name and shape if different, on a second line if `width` is too small."""
    line = f"{path}  {str(list(row.shape)).rjust(50 - len(path))}  {row.dtype:<8}  {row.parameters:>13,}"
    if row.published != row.path:
        published = f"{row.published.removeprefix(row.path.removesuffix(row.place[2]))} {list(row.published_shape)}"
    elif row.published_shape != row.shape:
        published = str(list(row.published_shape))
    else:
        return Text(line)
    return Text(f"{line}  {published}" if len(line) + 2 + len(published) <= width else f"{line}\n    {published}")
