"""What `ling3 inspect` shows: the module tree, the layer schedule, the published names, and what memory costs."""

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

from ling3.cache import KDAState, pages_of, slots_of
from ling3.checkpoint import hub, shards
from ling3.checkpoint.names import leaves, structure
from ling3.checkpoint.safetensors_file import DTYPES, CheckpointError
from ling3.families import read_config
from ling3.families.ling3_config import ConfigError, Ling3Config
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class ArrayRow:
    """One array of the module tree: its path, shape and dtype, and the `tensors` published tensors that make it up."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    published: str
    published_shape: tuple[int, ...]
    tensors: int

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """The 0-based decoder layer, None outside of the layers."""
        parts = self.path.split(".")
        return int(parts[2]) if parts[:2] == ["model", "layers"] else None

    @property
    def part(self) -> str:
        """The part of the decoder layer: `attention`, `mlp` or a norm."""
        return self.path.split(".")[3] if self.layer is not None else ""

    @property
    def within(self) -> str:
        """The path inside of that part."""
        return self.path.split(".", 4)[4] if self.layer is not None else self.path


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a sequence costs while it runs, in bytes: MLA's latents grow with each token, KDA's states do not."""

    cache_per_token: int
    recurrent_state_per_sequence: int
    conv_state_per_sequence: int


@dataclasses.dataclass(frozen=True)
class Report:
    """A model described from its configuration alone; `print` it with rich, or take `to_dict()`.

    `stored` says whether dtypes are those in the headers of weights at hand, and `problem` why these
    headers could not be read. `activated` leaves out the experts that a token does not choose.
    """

    source: str
    config: Ling3Config
    arrays: tuple[ArrayRow, ...]
    memory: Memory
    stored: bool
    problem: str | None = None

    @property
    def parameters(self) -> int:
        """All weights."""
        return sum(row.parameters for row in self.arrays)

    @property
    def activated(self) -> int:
        """The weights that one token's forward pass has a use for."""
        routed = sum(row.parameters for row in self.arrays if ".mlp.experts." in row.path)
        return self.parameters - routed + routed * self.config.num_experts_per_tok // self.config.num_experts

    @property
    def embedding(self) -> int:
        """The weights of the embedding table, of which a token looks up one row."""
        return self.config.vocab_size * self.config.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        config = self.config
        return {
            "source": self.source,
            "config": config.to_dict(),
            "parameters": self.parameters,
            "activated_parameters_per_token": self.activated,
            "embedding_parameters": self.embedding,
            "tensors": sum(row.tensors for row in self.arrays),
            "memory_bytes": dataclasses.asdict(self.memory),
            "layers": [
                {"layer": i, "attention": config.attention_kind(i), "mlp": config.mlp_kind(i)}
                for i in range(config.num_hidden_layers)
            ],
            "arrays": [{**dataclasses.asdict(row), "parameters": row.parameters} for row in self.arrays],
            "dtypes_as_stored": self.stored,
            "problem": self.problem,
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        config, memory = self.config, self.memory
        facts = Table.grid(padding=(0, 2))
        facts.add_row("model", self.source)
        facts.add_row("parameters", f"{self.parameters:,} in {sum(row.tensors for row in self.arrays):,} tensors")
        facts.add_row("activated", f"{self.activated:,} per token, of them {self.embedding:,} in the embedding table")
        if not config.mla_rope:
            facts.add_row("positions", "none: MLA without RoPE (use_mla_nope)")
        if variant := config.variant():
            facts.add_row("ablated", Text(json.dumps(variant)[1:-1]))
        facts.add_row("cache", f"{memory.cache_per_token:,} bytes per token")
        state = f"{memory.recurrent_state_per_sequence:,} bytes per sequence"
        facts.add_row("state", f"{state}, and {memory.conv_state_per_sequence:,} bytes of convolution inputs")
        facts.add_row("dtypes", "as stored" if self.stored else "of a bfloat16 model: there are no weights to look at")
        yield facts
        if self.problem:
            yield Text(f"\nThe weights cannot be read:\n{self.problem}", style="red")
        yield Text("\nlayer schedule", style="bold")
        yield _schedule(config)
        yield Text("\nmodule tree: shape, dtype, parameters; in the checkpoint, where it differs", style="bold")
        for row in self.arrays:
            if row.layer is None:
                yield _line(row.path, row, options.max_width)
        for (part, kind, _), layers in self._parts().items():
            rows = [row for row in self.arrays if row.layer == layers[0] and row.part == part]
            size = sum(row.parameters for row in rows)
            times = f"{len(layers)} x " if len(layers) > 1 else ""
            yield Text(f"\nmodel.layers.{_ranges(layers)}.{part}  {kind}  {times}{size:,}")
            for row in rows:
                yield _line(f"  {row.within}", row, options.max_width)

    def _parts(self) -> dict[tuple[str, str, tuple[Any, ...]], list[int]]:
        """The parts of decoder layers, equal ones folded into one entry with the layers that have it."""
        contents: dict[tuple[int, str], list[Any]] = {}
        for row in self.arrays:
            if row.layer is not None:
                contents.setdefault((row.layer, row.part), []).append((row.within, row.shape, row.dtype))
        folded: dict[tuple[str, str, tuple[Any, ...]], list[int]] = {}
        for (layer, part), rows in contents.items():
            folded.setdefault((part, _kind(self.config, layer, part), tuple(rows)), []).append(layer)
        return folded


def report(
    source: str | os.PathLike[str] | Ling3Config, dtype: DTypeLike = jnp.bfloat16, *, revision: str | None = None
) -> Report:
    """Describe a checkpoint (directory, hub id or `"nano"`), a `config.json` or a configuration; allocates no weight.

    Shapes come from the configuration. Dtypes are those in the headers of the weights, where these lie beside it, else
    those of a model in `dtype`, which the caches are counted in, too. From the hub only the configuration is fetched,
    of `revision`: a branch, a tag or a commit.

    Raises ConfigError for a configuration that is no Ling-3, and `hub.resolve`'s errors where there is nothing.
    """
    stored: dict[str, str] = {}
    problem = None
    if isinstance(source, Ling3Config):
        name, config = "Ling3Config", source
    elif revision is None and pathlib.Path(source).suffix == ".json" and pathlib.Path(source).is_file():
        name, config = os.fspath(source), read_config(source)
    else:
        directory = hub.resolve(source, ("config.json",), revision)
        name, config = os.fspath(source), read_config(directory)
        try:
            stored = _stored(directory)
        except CheckpointError as error:
            problem = str(error)
    if not isinstance(config, Ling3Config):
        raise ConfigError(name, [f"the config is a {type(config).__name__}; expected Ling-3's: no other is described"])
    tree = structure(config, dtype)
    return Report(name, config, tuple(_rows(tree, stored)), _memory(tree, dtype), bool(stored), problem)


def _stored(directory: pathlib.Path) -> dict[str, str]:
    """The dtype of each tensor at hand; none where there are no weights, as when only the configuration was fetched."""
    if not any(directory.glob("*.safetensors*")):
        return {}
    found = shards.open_all(directory)
    return {name: file.tensors[name].dtype for name, file in found.items()}


def _rows(tree: CausalLM, stored: dict[str, str]) -> Iterator[ArrayRow]:
    for leaf in leaves(tree):
        weights = tuple(leaf.weights())
        first, last = weights[0], weights[-1]
        name = first.name
        if len(weights) > 1:
            name = name.replace(f".experts.{first.expert}.", f".experts.{{{first.expert}..{last.expert}}}.")
        dtypes = {stored[weight.name] for weight in weights if weight.name in stored}
        names = {str(DTYPES[dtype]) if dtype in DTYPES else dtype for dtype in dtypes} or {str(leaf.value.dtype)}
        yield ArrayRow(leaf.path, tuple(leaf.value.shape), "/".join(sorted(names)), name, first.shape, len(weights))


def _memory(tree: CausalLM, dtype: DTypeLike) -> Memory:
    """From the shapes of the model's own states: what a page of 1,024 tokens takes, and what a slot does."""
    states = eqx.filter_eval_shape(lambda model: model.empty_states(1, 1, 1024, dtype), tree)
    conv = [state.conv for state in states if isinstance(state, KDAState)]
    conv_bytes = sum(map(_bytes, conv))
    return Memory(
        cache_per_token=sum(_bytes(paged.entries) for paged in pages_of(states)) // 1024,
        recurrent_state_per_sequence=sum(map(_bytes, jax.tree.leaves(slots_of(states)))) - conv_bytes,
        conv_state_per_sequence=conv_bytes,
    )


def _bytes(array: Any) -> int:
    shape: jax.ShapeDtypeStruct = array
    return math.prod(shape.shape) * shape.dtype.itemsize


def _schedule(config: Ling3Config) -> Table:
    """One row per group of layers; `*` marks a dense MLP."""
    table = Table.grid(padding=(0, 2))
    size = config.layer_group_size
    for first in range(0, config.num_hidden_layers, size):
        layers = range(first, min(first + size, config.num_hidden_layers))
        cells = [config.attention_kind(i).upper() + ("*" if config.mlp_kind(i) == "dense" else "") for i in layers]
        table.add_row(_ranges(list(layers)), " ".join(cells))
    if config.first_k_dense_replace:
        table.add_row("", "* with a dense MLP, the others with experts")
    return table


def _kind(config: Ling3Config, layer: int, part: str) -> str:
    if part == "attention":
        return config.attention_kind(layer).upper()
    if part != "mlp":
        return ""
    limits = [
        values[layer] if values else 0.0
        for values in (config.expert_swiglu_limit_list, config.share_expert_swiglu_limit_list)
    ]
    if config.mlp_kind(layer) == "moe" and any(limits):
        return f"experts, clamped at {limits[0]:g} (shared at {limits[1]:g})"
    return "dense" if config.mlp_kind(layer) == "dense" else "experts"


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
    """An array in columns; what the checkpoint has instead follows, on a line of its own where `width` is too small."""
    line = f"{path:<33}  {list(row.shape)!s:>17}  {row.dtype:<8}  {row.parameters:>13,}"
    if row.published != row.path:
        published = f"{row.published.removeprefix(f'model.layers.{row.layer}.{row.part}.')} {list(row.published_shape)}"
    elif row.published_shape != row.shape:
        published = str(list(row.published_shape))
    else:
        return Text(line)
    return Text(f"{line}  {published}" if len(line) + 2 + len(published) <= width else f"{line}\n    {published}")
