"""The engine's throughput against the same requests without it, on the same weights, machine and run, in turns.

    python -m benchmarks.engine_throughput

One by one: 64 requests of mixed length on nano (float32), together in the engine, and one after the other in that
engine, in one made for a single request, and through `ling3.generate`.

transformers: 48 requests on a random checkpoint of 114 million parameters (float32), in the engine, and through
transformers' `generate` in left-padded batches of 16 in the same order. A batch there runs to its longest row, and only
the tokens that were asked for count. torch has as many threads as there are cores, and the fastest of its own
implementations of experts and attention is found first. Needs the extra `parity`, and borrows from `tests/` what draws
random checkpoints and loads them into transformers.

Greedy tokens are compared before any speed is printed. Every side goes once unmeasured; then all take turns, so that
whatever else the machine does is shared. The ratio of two sides is taken within a turn. Tokens per second are of this
machine at that hour; ratios travel further.
"""

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ling3
from benchmarks.record import BLUE, GREEN, ORANGE, SKY, spread, write
from ling3.bench import SampleRequest, random_requests

MID = ling3.Ling3Config(
    vocab_size=16384,
    hidden_size=640,
    intermediate_size=1920,
    num_hidden_layers=8,
    layer_group_size=4,
    first_k_dense_replace=1,
    num_attention_heads=10,
    head_dim=64,
    q_lora_rank=None,  # transformers has no Q-LoRA
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    max_position_embeddings=2048,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=160,
    moe_shared_expert_intermediate_size=160,
    n_group=4,
    topk_group=2,
    eos_token_id=(2,),
    pad_token_id=0,
)
"""Ling-3.0-tiny's proportions at 114 million parameters."""
REQUESTS = 64
MAX_MODEL_LEN = 512
AGREEMENT = 0.9
"""The share of requests that must have all tokens in common with transformers: random weights tie here and there."""

TITLES = {"one_by_one": "one by one", "transformers": "transformers"}

Tokens = list[list[int]]
Side = Callable[[], Tokens]


def one_by_one(repetitions: int) -> dict[str, Any]:
    """64 requests together on nano, against three ways to serve them one after the other."""
    model = ling3.load("nano", dtype=jnp.float32)
    requests = random_requests(REQUESTS, model.config.vocab_size, (16, 256), (16, 256), seed=0)
    engine = _engine(model)
    lone = {rows: _engine(model, max_running_requests=1, decode_rows=rows) for rows in (1, 2)}
    sides: dict[str, Side] = {
        "engine, all at once": lambda: _together(engine, requests),
        "the same engine, one by one": lambda: _singly(engine, requests),
        **{
            f"an engine for one request, decode_rows {rows}": (lambda lone=lone: _singly(lone, requests))
            for rows, lone in lone.items()
        },
        "ling3.generate, one by one": lambda: _generated(model, requests),
    }
    answers = {name: side() for name, side in sides.items()}
    first, same, *others = answers.values()
    if first != same:
        raise SystemExit("the engine's tokens depend on company: no speed is worth that")
    if any(other != first for other in others):
        print("note: tokens differ between programs of different shapes", file=sys.stderr)
    agreement = {name: _agreement(answer, first) for name, answer in list(answers.items())[1:]}
    return _findings(requests, sides, repetitions) | {"model": "nano, float32", "same_tokens": agreement}


def against_transformers(repetitions: int) -> dict[str, Any]:
    """48 requests in the engine, against transformers' `generate` in batches of 16."""
    from benchmarks.transformers_peer import BATCH, Peer  # noqa: PLC0415 -- needs torch

    peer = Peer(MID)
    requests = random_requests(3 * BATCH, MID.vocab_size, (16, 128), (16, 128), seed=0)
    tried = peer.be_fastest(requests[:BATCH])
    engine = _engine(peer.ling3)
    sides: dict[str, Side] = {
        "engine, all at once": lambda: _together(engine, requests),
        "transformers, batches of 16": lambda: peer.generate(requests),
    }
    mine, other = (side() for side in sides.values())
    agreement = _agreement(mine, other)
    if agreement["requests"] < AGREEMENT:
        raise SystemExit(f"tokens differ from transformers', so no speed is printed: {agreement}")
    return _findings(requests, sides, repetitions) | {
        "model": f"random weights, {peer.parameters:,} parameters, float32",
        "config": dataclasses.asdict(MID),
        "same_tokens": {"transformers, batches of 16": agreement},
        "versions": peer.versions,
        "implementations_tried_s": tried,
    }


def _findings(requests: Sequence[SampleRequest], sides: dict[str, Side], repetitions: int) -> dict[str, Any]:
    """Seconds of each side, turn by turn, and how many times faster the first is than each other."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repetitions):
        for name, side in sides.items():
            begin = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - begin)
            print(f"turn {turn + 1}: {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    output = sum(request.max_tokens for request in requests)
    (_, mine), *others = seconds.items()
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": output,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "output_tokens_per_s": {name: spread([output / s for s in values]) for name, values in seconds.items()},
        "times_faster": {name: spread([s / m for s, m in zip(values, mine)]) for name, values in others},
    }


def _engine(model: ling3.Ling3ForCausalLM, **settings: Any) -> ling3.Engine:
    engine = ling3.Engine(model, max_model_len=MAX_MODEL_LEN, **settings)
    engine.warmup()
    return engine


def _params(request: SampleRequest) -> ling3.SamplingParams:
    return ling3.SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)


def _together(engine: ling3.Engine, requests: Sequence[SampleRequest]) -> Tokens:
    outputs = engine.generate([request.prompt for request in requests], [_params(request) for request in requests])
    return [list(output.token_ids) for output in outputs]


def _singly(engine: ling3.Engine, requests: Sequence[SampleRequest]) -> Tokens:
    return [list(engine.generate([request.prompt], _params(request))[0].token_ids) for request in requests]


def _generated(model: ling3.Ling3ForCausalLM, requests: Sequence[SampleRequest]) -> Tokens:
    return [
        ling3.generate(model, [request.prompt], max_tokens=request.max_tokens, ignore_eos=True)[0]
        for request in requests
    ]


def _agreement(mine: Tokens, other: Tokens) -> dict[str, float]:
    """The share of requests with all tokens in common, and of tokens before the first that differs."""
    common = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in zip(mine, other)]
    return {
        "requests": sum(n == len(a) for n, a in zip(common, mine)) / len(mine),
        "tokens": round(sum(common) / sum(map(len, mine)), 4),
    }


def draw(parts: dict[str, dict[str, Any]]) -> Figure:
    """How many times faster the engine is than each other side, turn by turn."""
    figure = Figure(
        figsize=(8, 0.9 + 0.55 * sum(len(part["times_faster"]) for part in parts.values())), layout="constrained"
    )
    heights = [len(part["times_faster"]) + 0.8 for part in parts.values()]
    for axes, (name, part) in zip(
        np.atleast_1d(figure.subplots(len(parts), 1, height_ratios=heights)), parts.items(), strict=True
    ):
        _bars(axes, part)
        axes.set_title(f"{TITLES[name]}: {part['model']}", fontsize=9, loc="left")
    axes.set_xlabel("times faster: all requests at once in the engine (median; dots are repetitions)")
    return figure


def _bars(axes: Axes, part: dict[str, Any]) -> None:
    names = list(part["times_faster"])
    for row, name in enumerate(names):
        ratio = part["times_faster"][name]
        axes.barh(row, ratio["median"], height=0.6, color=(BLUE, SKY, SKY, GREEN)[row % 4])
        axes.plot(ratio["all"], [row] * len(ratio["all"]), "o", color="black", markersize=3)
        axes.text(ratio["most"], row, f"  {ratio['median']:.1f} ×", va="center", fontsize=9)
    axes.axvline(1, color=ORANGE, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(part["times_faster"][name]["most"] for name in names))
    axes.spines[["top", "right"]].set_visible(False)


def main(
    part: Literal["all", "one_by_one", "transformers"] = "all",
    repetitions: int = 3,
    out: Path = Path("benchmarks/results"),
) -> None:
    """Measure, and write engine_throughput.json and engine_throughput.png.

    Args:
        part: which comparison.
        repetitions: how often each side is measured.
        out: the directory for both files.
    """
    parts = {}
    if part in ("all", "one_by_one"):
        parts["one_by_one"] = one_by_one(repetitions)
    if part in ("all", "transformers"):
        if importlib.util.find_spec("transformers") is None:
            raise SystemExit("transformers is not installed: pip install -e '.[parity]', or --part one_by_one")
        parts["transformers"] = against_transformers(repetitions)
    write(out, "engine_throughput", parts, draw(parts))
    for name, found in parts.items():
        for side, ratio in found["times_faster"].items():
            print(f"{TITLES[name]}: {ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}) times {side}")


if __name__ == "__main__":
    tyro.cli(main)
