"""The report of `ling3 inspect --plan`: costs of an engine's programs on a mesh, from the compiler, without weights."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import DTypeLike
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ling3.cache import CacheSpec, pages_of, slots_of
from ling3.engine.forward import Batch, decode, extend
from ling3.engine.pool import Pool, Rows, new_memory
from ling3.engine.sampling import Adjustments, Sampling
from ling3.engine.sampling_params import MAX_STOP_IDS, SamplingParams
from ling3.execution import PLAIN
from ling3.interpret import ablate
from ling3.interpret.collectives import Collective, by_source, collectives
from ling3.layers.linear import Matrix
from ling3.leaves import ArrayLeaf, array_leaves
from ling3.mesh import Rules, sharding
from ling3.mesh.chips import CHIPS, Chip
from ling3.mesh.sharded import Sharded
from ling3.mesh.share import Share
from ling3.model import CausalLM
from ling3.ops.spread import Spread

FOR_CPUS = "XLA for CPUs"
"""The name of the compiler for fake devices."""
PLATFORMS = ("cpu", "tpu", "cuda")
"""Platforms for which lowering is tried, whether or not their compiler is installed."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """The load of an engine, in fields named like its settings."""

    max_running_requests: int = 64
    """Requests over all groups of devices."""
    max_model_len: int = 8192
    """Tokens of each request, all of which have pages."""
    chunked_prefill_size: int = 512
    """Prompt tokens of a call, for one request in each group."""
    page_size: int = 256

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures for a program, per device."""

    compiler: str
    temporaries: int
    """Bytes in use while it runs, besides weights, state and results."""
    results: int
    """Bytes of results that do not reuse the memory of donated inputs."""
    collectives: tuple[Collective, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """One of the engine's programs, and the least work that each device does in it."""

    name: str
    tokens: int
    """Tokens over all groups of devices, in one run (or one step of decode)."""
    collectives: tuple[Collective, ...]
    """Collectives before compilation, in the dtypes that accelerators exchange."""
    read: int
    """Bytes of weights and state that a device reads or writes."""
    flops: int
    """Operations of a device in products with weights."""
    lowered: dict[str, str]
    """For each platform "yes", or the reason why lowering fails."""
    compiled: Compiled | None = None

    @property
    def sent(self) -> float:
        """Bytes that each device sends in the program."""
        return math.fsum(each.times * each.sent for each in self.collectives)

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Lower bounds on this chip, in seconds, for each of memory, products and links alone."""
        count, hardware = sum(each.times for each in self.collectives), chip.hardware
        links = math.fsum(each.times * each.sent / chip.link(each.devices) for each in self.collectives)
        return {
            "memory": self.read / hardware.memory_bandwidth,
            "products": self.flops / hardware.flops,
            "links": links + count * hardware.link_latency,
        }

    def bound(self, chip: Chip) -> float:
        """A lower bound in seconds, if communication does not overlap with computation."""
        own = self.seconds(chip)
        return max(own["memory"], own["products"]) + own["links"]


@dataclasses.dataclass(frozen=True)
class MeshReport:
    """A model on a mesh: the bytes of each device, and the engine's decode step and prefill call."""

    sizes: dict[str, int]
    """Sizes of the mesh axes."""
    workload: Workload
    layers: int
    weights: int
    """Bytes of weights on each device."""
    whole: int
    """Bytes of replicated matrices, included in `weights`."""
    all_weights: int
    """Bytes of the model's weights, unsharded."""
    slots: int
    """Bytes on each device of state that does not grow, such as KDA's."""
    pages: int
    """Bytes on each device of pages, such as MLA's latents."""
    adjustments: int
    """Bytes on each device of the requests' logit biases and token counts."""
    programs: tuple[Program, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain values, for JSON."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        programs = [
            dataclasses.asdict(program)
            | {
                "collectives": [_row(each) for each in by_source(program.collectives)],
                "sent": round(program.sent),
                "least_seconds": {chip.name: program.seconds(chip) | {"all": program.bound(chip)} for chip in CHIPS},
            }
            | ({} if program.compiled is None else {"compiled": _compiled_dict(program.compiled)})
            for program in self.programs
        ]
        return own | {"workload": dataclasses.asdict(self.workload), "programs": programs}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text | Table]:
        work, facts = self.workload, Table.grid(padding=(0, 2))
        axes = " x ".join(f"{size} {name}" for name, size in self.sizes.items())
        facts.add_row("mesh", f"{math.prod(self.sizes.values())} devices: {axes}")
        facts.add_row("weights", f"{_mb(self.weights)} a device, of {_mb(self.all_weights)}")
        facts.add_row("", f"{_mb(self.whole)} of it in matrices that every device has whole")
        facts.add_row("state", f"{_mb(self.slots)} a device for {work.max_running_requests} requests")
        facts.add_row("pages", f"{_mb(self.pages)} a device for {work.max_model_len:,} tokens of each")
        facts.add_row("adjustments", f"{_mb(self.adjustments)} a device: logit biases and token counts")
        yield facts
        for program in self.programs:
            yield Text(f"\n{program.name}", style="bold")
            yield from self._program(program)
        yield Text(
            "\nBounds from published rates: the slower of memory and products, and then the links, with a latency for "
            "each collective.\nMemory is weights and state once, products are those with weights, and rings carry "
            "collectives. Real times are longer."
        )
        if any(program.compiled and program.compiled.compiler == FOR_CPUS for program in self.programs):
            yield Text(
                f"{FOR_CPUS} multiplies and sums bfloat16 as float32, so an accelerator's temporaries are others: "
                "--topology v6e:4x4\nhas those of TPUs."
            )

    def _program(self, program: Program) -> Iterator[Text | Table]:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("collective", "of", "result", "devices", "times", "sent by a device"):
            table.add_column(name, justify="right" if name in ("devices", "times", "sent by a device") else "left")
        for each in by_source(program.collectives):
            cells = (each.kind, each.source or "-", each.result, str(each.devices), str(each.times))
            table.add_row(*cells, f"{each.times * each.sent:,.0f}")
        yield table
        a_token = program.sent * self.sizes.get("data", 1) / program.tokens
        yield Text(
            f"{program.sent:,.0f} bytes sent by a device, {a_token:,.0f} for each token, "
            f"{program.sent / self.layers:,.0f} for each layer"
        )
        if (made := program.compiled) is not None:
            temporaries, results = _mb(made.temporaries), _mb(made.results)
            yield Text(f"by {made.compiler}: {temporaries} of temporaries and {results} of results a device")
        if program.lowered:
            yield Text("lowered: " + ", ".join(f"{name} {said}" for name, said in program.lowered.items()))
        bounds = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("chip", "memory", "products", "links", "at least"):
            bounds.add_column(name, justify="left" if name == "chip" else "right")
        for chip in CHIPS:
            own = program.seconds(chip)
            bounds.add_row(
                chip.name, *(f"{1e3 * own[part]:.3g} ms" for part in own), f"{1e3 * program.bound(chip):.3g} ms"
            )
        yield bounds


def report(
    model: CausalLM,
    mesh: Mesh,
    rules: Rules | None = None,
    workload: Workload | None = None,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    compiler: str | None = FOR_CPUS,
    platforms: Sequence[str] = PLATFORMS,
) -> MeshReport:
    """Reports the memory and work of an engine of a model (its structure is enough) on a mesh; allocates nothing.

    Caches are counted in `dtype`. The programs are compiled for the devices of the mesh; `compiler` names the compiler
    in the report, and None skips compilation. Lowering is tried for each of `platforms`. Raises MeshError if the model
    cannot be sharded this way, and ValueError if the groups of devices cannot share the requests evenly.
    """
    work, layout = Workload() if workload is None else workload, sharding.plan(model, mesh, rules)
    placed, groups = layout.structure(model), layout.placement.row_groups
    requests, chunk = work.max_running_requests, work.chunked_prefill_size
    if requests % groups:
        raise ValueError(f"{requests} requests cannot be dealt to {groups} groups of devices: give a multiple of that")
    pool = _pool(placed, work, dtype)
    slots, pages = (sum(map(_on_a_device, jax.tree.leaves(part(pool.layers)))) for part in (slots_of, pages_of))
    used = _Used.of(model, placed, layout)
    columns = -(-work.max_model_len // work.page_size)
    step = _inputs(placed, lambda: _batch(requests, 0, columns, True))
    call = _inputs(placed, lambda: _batch(groups, chunk, columns, requests == groups))
    own = requests // groups
    programs = (
        _Traced("one step of decode", decode.trace(placed, step, pool, PLAIN), requests, 2 * slots + pages),
        _Traced(
            "one prefill call", extend.trace(placed, call, pool, PLAIN), groups * chunk, (2 * slots + pages) // own
        ),
    )
    costs = used.cost(own, requests, own), used.cost(chunk, groups * chunk, 1)
    adjustments = pool.sampling.adjustments
    return MeshReport(
        sizes=dict(mesh.shape),
        workload=work,
        layers=len(model.model.layers),
        weights=sum(map(_on_a_device, jax.tree.leaves(placed))),
        whole=sum(size for size, leaf, share in used.arrays if share.axis is None and isinstance(leaf.module, Matrix)),
        all_weights=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model)),
        slots=slots,
        pages=pages,
        adjustments=sum(map(_on_a_device, jax.tree.leaves(adjustments))),
        programs=tuple(
            each.program(cost, compiler, platforms, layout.placement.mesh)
            for each, cost in zip(programs, costs, strict=True)
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A program before any compiler."""

    name: str
    traced: Any
    tokens: int
    state: int
    """Bytes of state that a device reads or writes."""

    def program(self, cost: tuple[int, int], compiler: str | None, platforms: Sequence[str], mesh: Mesh) -> Program:
        """The figures of JAX and of the compiler; `cost` has the bytes of weights read and the operations."""
        lowered, (weights, flops) = self.traced.lower(), cost
        found = collectives(lowered.as_text("hlo", debug_info=True), mesh.shape)
        said = {platform: self._lowered(platform) for platform in platforms}
        made = None
        if compiler is not None:
            program = lowered.compile()
            memory, parts = program.memory_analysis(), collectives(program.as_text(), mesh.shape)
            results = memory.output_size_in_bytes - memory.alias_size_in_bytes
            made = Compiled(compiler, memory.temp_size_in_bytes, results, parts)
        return Program(self.name, self.tokens, found, weights + self.state, flops, said, made)

    def _lowered(self, platform: str) -> str:
        try:
            self.traced.lower(lowering_platforms=(platform,))
        except Exception as error:  # for whatever reason the platform does not support it
            return f"no ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        return "yes"


@dataclasses.dataclass(frozen=True)
class _Used:
    """The weights that a device reads and multiplies."""

    arrays: tuple[tuple[int, ArrayLeaf, Share], ...]
    """The model's arrays, each with its bytes on a device."""
    embedding: str
    """The path of the embedding table, of which only rows are read; empty if it is the head too."""
    experts: dict[str, float]
    """The share of a layer's experts that a token chooses, by the prefix of their paths."""
    together: bool
    """True if experts see the tokens of all groups of devices."""

    @staticmethod
    def of(model: CausalLM, placed: CausalLM, layout: sharding.Layout) -> "_Used":
        sizes = map(_on_a_device, jax.tree.leaves(placed))
        chosen = {
            f"model.layers.{i}.mlp.experts.": router.top_k / router.weight.shape[0]
            for i, router in ablate.having(model, "experts per token").items()
        }
        return _Used(
            tuple(zip(sizes, array_leaves(model), layout.shares, strict=True)),
            "" if model.lm_head is None else "model.word_embeddings.",
            chosen,
            any(isinstance(each, Spread) and each.rows for _, each in layout.placement.exchanges),
        )

    def cost(self, tokens: int, everyones: int, scored: int) -> tuple[int, int]:
        """Bytes read and operations of a device for its `tokens`, of which `scored` get logits.

        `everyones` are the tokens of all groups of devices. Assumes that experts are chosen evenly.
        """
        read, flops = 0.0, 0.0
        for size, leaf, _ in self.arrays:
            numbers = size / leaf.value.dtype.itemsize if isinstance(leaf.module, Matrix) else 0
            share = next((share for path, share in self.experts.items() if leaf.path.startswith(path)), None)
            if share is not None:
                seen = everyones if self.together else tokens
                read += size * (1 - (1 - share) ** seen)
                flops += 2 * numbers * seen * share
            elif not (self.embedding and leaf.path.startswith(self.embedding)):
                head = leaf.path.startswith("lm_head." if self.embedding else "model.word_embeddings.")
                read += size
                flops += 2 * numbers * (scored if head else tokens)
        return round(read), round(flops)


def _inputs(placed: Sharded, made: Callable[[], Any]) -> Any:
    """The shapes of a program's inputs from the host, which are replicated on every device."""
    where = placed.placement.sharding(PartitionSpec())
    shapes = eqx.filter_eval_shape(made)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)


def _batch(rows: int, seq: int, columns: int, in_place: bool) -> Batch:
    """A call with `seq` tokens in each row."""
    where = Rows(jnp.zeros(rows, jnp.int32), jnp.zeros((rows, columns), jnp.int32), in_place)
    return Batch(where, jnp.zeros((rows, seq), jnp.int32), jnp.zeros(rows, jnp.int32))


def _pool(placed: Sharded, work: Workload, dtype: DTypeLike) -> Pool:
    """The shapes of the engine's pool, without allocating it."""
    slots, vocab = work.max_running_requests, placed.config.vocab_size
    pages = slots * -(-work.max_model_len // work.page_size)

    def empty(model: Sharded) -> Pool:
        zeros, counts = jnp.zeros(slots), jnp.zeros(slots, jnp.int32)
        no, table = jnp.zeros(slots, bool), jnp.zeros((slots, vocab))
        adjustments = Adjustments(no, zeros, zeros, zeros, table, table.astype(jnp.int32))
        rows = [(SamplingParams(), 0, 0, ())] * slots
        put = lambda columns: jax.tree.map(jnp.asarray, columns)  # noqa: E731
        sampling = Sampling.build(rows, vocab, MAX_STOP_IDS, adjustments, put)
        layers = new_memory(model, CacheSpec(slots, pages, work.page_size, dtype))
        pool = Pool(layers, counts, counts, counts, no, sampling, model.placement)
        specs.extend(jax.tree.leaves(pool.specs))
        return pool

    specs: list[PartitionSpec] = []
    pool = eqx.filter_eval_shape(empty, placed)
    where = map(placed.placement.sharding, specs)
    arrays = zip(jax.tree.leaves(pool), where, strict=True)
    placed_arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in arrays]
    return jax.tree.unflatten(jax.tree.structure(pool), placed_arrays)


def _on_a_device(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's shard on a device."""
    assert x.sharding is not None, "an array on a mesh"
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _row(each: Collective) -> dict[str, Any]:
    return dataclasses.asdict(each) | {"sent": round(each.sent)}


def _compiled_dict(made: Compiled) -> dict[str, Any]:
    return dataclasses.asdict(made) | {"collectives": [_row(each) for each in by_source(made.collectives)]}


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
