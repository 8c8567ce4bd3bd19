"""The time of a decode step against the context: constant for KDA layers, growing with tokens in use for MLA layers.

    python -m benchmarks.decode_latency

The model has nano's sizes, random float32 weights and room for 65,536 tokens. The engine's pool and decode program run
at contexts that are set, not prefilled: latents and states are random numbers, which take as long as any others. The
KDA layers and the MLA layers are also run alone, in the same steps on caches of the same sizes. A measurement is the
fastest of several calls of eight steps, since other load on the machine can only add to it; contexts take turns, round
by round, and the rounds' median and spread are reported. Milliseconds hold for this machine at that hour; slopes and
ratios are more general.

The last part measures the cost of unused room: the same contexts in pools of more columns and more pages.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from jaxtyping import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ling3
from benchmarks.record import spread, write
from ling3.cache import CacheSpec, Span
from ling3.engine.forward import Batch, decode
from ling3.engine.pool import Pool, Rows
from ling3.engine.runner import Runner
from ling3.engine.shapes import Shapes
from ling3.execution import Execution
from ling3.runtime.plots import BLACK, BLUE, RED

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ROWS = (1, 16)
"""Numbers of running requests."""
PAGE = 256
STEPS = 8
"""Decode steps of a call, as in the engine."""
CALLS = 7
"""Calls of a measurement, which is the fastest of them."""
LONGEST = 65536

Timed = Callable[[int], float]
"""A function that measures milliseconds per step at a context."""


def whole_step(model: ling3.CausalLM, rows: int, columns: int, pages: int) -> Timed:
    """Times the engine's decode program over its pool, with `columns` pages per request and `pages` in all."""
    shapes = Shapes(slots=rows, pages=pages, page_size=PAGE, columns=columns, buckets=(16,), rows=(rows,))
    pool = Runner(model, shapes).pool
    pool = eqx.tree_at(lambda p: p.layers, pool, _random(pool.layers))
    pool = eqx.tree_at(lambda p: p.until, pool, jnp.full(rows, 2**30, jnp.int32))
    tokens, steps = jnp.zeros((rows, 0), jnp.int32), jnp.full(rows, STEPS, jnp.int32)

    def timed(context: int) -> float:
        nonlocal pool
        where = Rows(jnp.arange(rows, dtype=jnp.int32), _table(rows, columns, pages, context), in_place=True)
        seconds = []
        for _ in range(CALLS):
            pool = _at(pool, context)
            begin = time.perf_counter()
            _, pool = decode(model, Batch(where, tokens, steps), pool, Execution.default())
            jax.block_until_ready(pool.length)
            seconds.append(time.perf_counter() - begin)
        return 1e3 * min(seconds) / STEPS

    return timed


def layers_apart(model: ling3.CausalLM, kind: str, rows: int, columns: int) -> Timed:
    """Times only the attention layers of one kind, one after the other, step after step."""
    layers = tuple(
        layer.attention for i, layer in enumerate(model.model.layers) if model.config.attention_kind(i) == kind
    )
    pages = rows * columns
    spec = CacheSpec(rows, pages, PAGE, jnp.float32)
    memories = _random(tuple(layer.empty_state(spec) for layer in layers))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 1, model.config.hidden_size)), jnp.float32)

    def timed(context: int) -> float:
        nonlocal memories
        table, start = _table(rows, columns, pages, context), jnp.full(rows, context, jnp.int32)
        seconds = []
        for _ in range(CALLS):
            begin = time.perf_counter()
            y, memories = _attend(layers, x, table, start, memories)
            jax.block_until_ready(y)
            seconds.append(time.perf_counter() - begin)
        return 1e3 * min(seconds) / STEPS

    return timed


@functools.partial(jax.jit, donate_argnums=4)
def _attend(layers: Any, x: Array, table: Array, start: Array, memories: Any) -> tuple[Array, Any]:
    """Runs STEPS tokens through some attention layers with their states."""

    def step(i, carry):
        x, memories = carry
        span = Span(start + jnp.asarray(i, jnp.int32), jnp.ones_like(start), table, Execution.default())
        after = []
        for layer, memory in zip(layers, memories, strict=True):
            y, state = layer(x, memory, span)
            x = x + y
            after.append(state)
        return x * lax.rsqrt(jnp.mean(x * x)), tuple(after)

    return lax.fori_loop(0, STEPS, step, (x, memories))


def _random(memory: Any) -> Any:
    """Arrays of the same shapes, filled with random numbers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype), memory)


def _table(rows: int, columns: int, pages: int, context: int) -> Array:
    """The block table: each row has pages for its context and the steps after it; other indices are out of range."""
    used = -(-(context + STEPS) // PAGE)
    table = np.full((rows, columns), pages, np.int32)
    table[:, :used] = np.arange(rows * used).reshape(rows, used)
    return jnp.asarray(table)


def _at(pool: Pool, context: int) -> Pool:
    """The pool with every request at this context."""
    rows = pool.length.shape[0]
    fresh = (jnp.full(rows, context, jnp.int32), jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool))
    return eqx.tree_at(lambda p: (p.length, p.token, p.done), pool, jax.block_until_ready(fresh))


def against_context(model: ling3.CausalLM, rows: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per step of the complete step and of its parts, at each context, with fitted lines."""
    columns = -(-(max(CONTEXTS) + STEPS) // PAGE)
    sides = {
        "whole step": whole_step(model, rows, columns, rows * columns),
        "MLA layers": layers_apart(model, "mla", rows, columns),
        "KDA layers": layers_apart(model, "kda", rows, columns),
    }
    return {name: found | _fit(found) for name, found in _measured(sides, CONTEXTS, rounds).items()}


def unused_room(model: ling3.CausalLM, rounds: int) -> dict[str, Any]:
    """Milliseconds per step of 16 requests at small contexts, in pools of increasing size."""
    rows, contexts = 16, (128, 512)
    pools = {
        "4 columns, 64 pages": (4, 64),
        "256 columns, 64 pages": (256, 64),
        "256 columns, 2,048 pages": (256, 2048),
    }
    return _measured({name: whole_step(model, rows, *room) for name, room in pools.items()}, contexts, rounds)


def _measured(sides: dict[str, Timed], contexts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measures each side at each context, in turns; the first round only warms up."""
    times: dict[str, dict[int, list[float]]] = {name: {context: [] for context in contexts} for name in sides}
    for turn in range(rounds + 1):
        for context in contexts:
            for name, timed in sides.items():
                milliseconds = timed(context)
                if turn > 0:
                    times[name][context].append(milliseconds)
        print(f"round {turn} of {rounds}", file=sys.stderr)
    return {name: {"ms_per_step": {str(c): spread(ms) for c, ms in each.items()}} for name, each in times.items()}


def _fit(found: dict[str, Any]) -> dict[str, float]:
    """Fits a line to the medians, minimising relative errors."""
    contexts = np.asarray([float(context) for context in found["ms_per_step"]])
    medians = np.asarray([times["median"] for times in found["ms_per_step"].values()])
    slope, intercept = np.polyfit(contexts, medians, 1, w=1 / medians)
    return {"ms_at_0": round(float(intercept), 4), "ms_per_1000_tokens": round(1000 * float(slope), 5)}


def draw(found: dict[str, dict[str, Any]]) -> Figure:
    """Time per step against context, with the fitted lines, for each number of running requests."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, (rows, sides) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        _lines(axes, sides)
        axes.set_title(f"{rows} running request{'s' * (rows != '1')}", fontsize=10)
        axes.set_xlabel("context, tokens per request")
        axes.set_ylabel("time per decode step, ms")
    return figure


LOOKS = {"whole step": (BLACK, "o", "-"), "MLA layers": (RED, "s", "--"), "KDA layers": (BLUE, "^", ":")}


def _lines(axes: Axes, sides: dict[str, Any]) -> None:
    for name, (colour, marker, dashes) in LOOKS.items():
        side = sides[name]
        contexts = np.asarray([int(context) for context in side["ms_per_step"]])
        times = [side["ms_per_step"][str(context)] for context in contexts]
        medians, least, most = (np.asarray([t[key] for t in times]) for key in ("median", "least", "most"))
        slope = 1000 * side["ms_per_1000_tokens"]
        label = f"{name}: {side['ms_at_0']:.2f} ms + {slope:,.{0 if slope > 10 else 1}f} µs per 1,000 tokens"
        line = side["ms_at_0"] + side["ms_per_1000_tokens"] * contexts / 1000
        axes.plot(contexts, line, dashes, color=colour, linewidth=1.2)
        axes.errorbar(
            contexts, medians, (medians - least, most - medians), fmt=marker, color=colour, ms=4, lw=1, label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, 8 * high)  # room for the legend
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xticks(contexts, [f"{c // 1024}k" if c >= 1024 else str(c) for c in contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7.5, loc="upper left")


def main(rounds: int = 5, out: Path = Path("benchmarks/results")) -> None:
    """Measure, and write decode_latency.json and decode_latency.png.

    Args:
        rounds: measurements of each context.
        out: directory for both files.
    """
    nano = ling3.load("nano").config
    config = dataclasses.replace(nano, max_position_embeddings=LONGEST)
    model = ling3.init(config, key=jax.random.key(0))
    found = {str(rows): against_context(model, rows, rounds) for rows in ROWS}
    room = unused_room(model, rounds)
    findings = {"config": dataclasses.asdict(config), "steps_per_call": STEPS, "running_requests": found}
    write(out, "decode_latency", findings | {"unused_room": room}, draw(found))
    for rows, sides in found.items():
        for name, side in sides.items():
            short, long = (side["ms_per_step"][context]["median"] for context in ("512", "8192"))
            slope = 1000 * side["ms_per_1000_tokens"]
            print(
                f"{rows} running, {name}: {short:.3f} ms at 512, {long:.3f} ms at 8192, {slope:.1f} µs per 1,000 tokens"
            )
    for name, side in room.items():
        print(f"16 running at 512, {name}: {side['ms_per_step']['512']['median']:.3f} ms")


if __name__ == "__main__":
    tyro.cli(main)
