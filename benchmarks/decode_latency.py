"""The time of a decode step against the context: KDA layers are flat, MLA layers grow with the tokens in use alone.

    python -m benchmarks.decode_latency

A random model of nano's sizes with room for 65,536 tokens, float32. The engine's own pool and decode program run on
contexts that are set, not prefilled: latents and states are random numbers, which take as long as any others. The
model's KDA layers and its MLA layers are also run apart from it, in the same steps on memories of the same sizes. A
measurement is the fastest of several calls of eight steps, since whatever else the machine does can only add to it;
contexts take turns, round by round, and the rounds' median and spread are reported. Milliseconds are of this machine at
that hour; slopes and ratios travel further.

The last part asks what room costs that nobody uses: the same contexts in pools of more columns and more pages.
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
"""Running requests."""
PAGE = 256
STEPS = 8
"""Decode steps of a call, as in the engine."""
CALLS = 7
"""Calls, the fastest of which is a measurement."""
LONGEST = 65536

Timed = Callable[[int], float]
"""Milliseconds per step at a context."""


def whole_step(model: ling3.CausalLM, rows: int, columns: int, pages: int) -> Timed:
    """The engine's decode program over its pool, with room for `columns` pages a request and `pages` in all."""
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
    """The attention layers of one kind alone, one after the other, step after step."""
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
    """STEPS tokens through some attention layers and their memories."""

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
    """Memory of the same shapes, full of random numbers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype), memory)


def _table(rows: int, columns: int, pages: int, context: int) -> Array:
    """Each row's own pages, as many as its context and the steps after it take; the others are no page."""
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
    """Milliseconds per step of the whole and of its parts, at each context, with the slopes of the fitted lines."""
    columns = -(-(max(CONTEXTS) + STEPS) // PAGE)
    sides = {
        "whole step": whole_step(model, rows, columns, rows * columns),
        "MLA layers": layers_apart(model, "mla", rows, columns),
        "KDA layers": layers_apart(model, "kda", rows, columns),
    }
    return {name: found | _fit(found) for name, found in _measured(sides, CONTEXTS, rounds).items()}


def unused_room(model: ling3.CausalLM, rounds: int) -> dict[str, Any]:
    """16 requests at small contexts in pools of more and more room."""
    rows, contexts = 16, (128, 512)
    pools = {
        "4 columns, 64 pages": (4, 64),
        "256 columns, 64 pages": (256, 64),
        "256 columns, 2,048 pages": (256, 2048),
    }
    return _measured({name: whole_step(model, rows, *room) for name, room in pools.items()}, contexts, rounds)


def _measured(sides: dict[str, Timed], contexts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Each side at each context, in turns; the first round is for warming up."""
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
    """The line through the medians, with errors weighed relative to them."""
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
        rounds: how often each context is measured.
        out: the directory for both files.
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
