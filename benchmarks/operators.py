"""ling3's operators on random inputs, each beside its specification and its peers; the cases are built from these.

Inputs have magnitudes like those in a trained model: unit keys, decays over their full range, weights that keep the
scale. Sizes come from the case, so that a CPU and a GPU run the same functions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from benchmarks import torch_peers
from benchmarks.oracles import BFLOAT16, FLOAT32, close, is_specification
from benchmarks.registry import Absent, Setting, Side, Trial, milliseconds
from ling3.execution import Execution
from ling3.layers.moe import Router
from ling3.ops.attention import Expansion, attention, latent_attention, paged_attention
from ling3.ops.experts import block_experts, dense_experts
from ling3.ops.kda import kda_gate, kda_step, l2_normalize, recurrent_kda
from ling3.ops.kda_chunks import chunk_kda
from ling3.ops.swiglu import SWIGLU

LOWER_BOUND = -5.0
PAGE = 256

Call = Callable[[], Any]


def kda_chunk(
    setting: Setting,
    batch: int,
    seq: int,
    heads: int,
    width: int,
    calls: int = 1,
    execution: Execution | None = None,
) -> Trial:
    """KDA's prefill, as the layer runs it, against the recurrence."""
    execution = execution or Execution.default()
    inputs = kda_inputs(batch, seq, heads, width, rounded=setting.gpu)
    arrays = tuple(inputs.values())
    ours, chunks = (
        _call(functools.partial(form, lower_bound=LOWER_BOUND, chunk_size=execution.chunk_size), *arrays)
        for form in (execution.chunk_kda, chunk_kda)
    )
    specification = _call(recurrent_kda, *arrays)
    sides = [
        ("ling3", ours),
        *([("ling3, without a kernel", chunks)] if execution.chunk_kda is not chunk_kda else []),
        *_peers(lambda: torch_peers.kda(inputs, setting.gpu, steps=False)),
        ("ling3, recurrent_kda", specification),
    ]
    about = {"batch": batch, "tokens": seq, "heads": heads, "key": width, "value": width, "dtype": "float32"}
    return _trial(setting, sides, specification, about, calls, tokens=batch * seq)


def kda_one_step(
    setting: Setting,
    batch: int,
    heads: int,
    width: int,
    calls: int = 16,
    execution: Execution | None = None,
) -> Trial:
    """One decode step of KDA, against the recurrence."""
    execution = execution or Execution.default()
    inputs = kda_inputs(batch, 1, heads, width, rounded=setting.gpu)
    *token, state = (x[:, 0] if name != "state" else x for name, x in inputs.items())
    forms = {"ling3, kda_step": execution.kda_step}
    if execution.kda_step is not kda_step:
        forms["ling3, without a kernel"] = kda_step
    sides = [(name, *_in_place(form, token, state)) for name, form in forms.items()]
    sides += [(name, run, run) for name, run in _peers(lambda: torch_peers.kda(inputs, setting.gpu, steps=True))]
    specification = _call(recurrent_kda, *inputs.values())

    def shaped(run: Call) -> Call:
        return lambda: tuple(jnp.asarray(_numpy(x)).reshape(y.shape) for x, y in zip(run(), specification()))

    allowed = BFLOAT16 if setting.gpu else FLOAT32
    measured = [
        Side(name, milliseconds(run, calls), close(shaped(once), specification, allowed)) for name, run, once in sides
    ]
    about = {"batch": batch, "heads": heads, "key": width, "value": width, "calls": calls, "dtype": "float32"}
    return Trial(measured, tokens=batch, about=about)


def _in_place(step: Callable[..., Any], token: list[Array], state: Array) -> tuple[Call, Call]:
    """The call to time, a step that donates its state, as in the engine, and continues from the last one's.

    And the call to check: the output and state of the same program after one step from `state`.
    """
    compiled = jax.jit(step, donate_argnums=len(token))
    held = [jnp.array(state, copy=True)]

    def timed() -> Array:
        o, held[0] = compiled(*token, held[0])
        return o

    return timed, lambda: compiled(*token, jnp.array(state, copy=True))


def mla_decode(
    setting: Setting,
    batch: int,
    context: int,
    heads: int,
    latent: int,
    rope: int,
    dtype: Any,
    calls: int = 1,
    execution: Execution | None = None,
) -> Trial:
    """One token's attention over pages of latents, in the absorbed form."""
    ours = (execution or Execution.default()).latent_attention
    rng, entry = np.random.default_rng(0), latent + rope
    columns = -(-context // PAGE)
    pages = normal(rng, (batch * columns, PAGE, entry), dtype)
    # Pages of different rows alternate, as they do once requests have come and gone.
    table = jnp.asarray(np.arange(batch * columns, dtype=np.int32).reshape(columns, batch).T)
    q = normal(rng, (batch, 1, heads, entry), dtype, std=entry**-0.5)
    positions = jnp.full((batch, heads), context - 1, jnp.int32)
    length = jnp.full(batch, context, jnp.int32)

    def over_pages(attend: Callable[..., Array]) -> Call:
        inputs = q[:, 0], positions, pages, table, length
        return _call(lambda *inputs: attend(*inputs)[:, None], *inputs)

    def in_a_row(q: Array, entries: Array) -> Array:
        keys = entries.astype(jnp.float32)[:, None]
        return attention(q.astype(jnp.float32), keys, keys, jnp.ones((batch, heads, context), bool))

    entries = jax.block_until_ready(pages[table].reshape(batch, -1, entry)[:, :context])
    specification = _call(in_a_row, q, entries)
    sides = [
        ("ling3", over_pages(ours)),
        *([("ling3, without a kernel", over_pages(latent_attention))] if ours is not latent_attention else []),
        *_peers(lambda: torch_peers.attention_over_latents(q, entries, setting.gpu)),
        ("ling3, attention", specification),
    ]
    about = {"batch": batch, "context": context, "heads": heads, "entry": entry, "page": PAGE, "dtype": str(q.dtype)}
    return _trial(setting, sides, specification, about, calls, tokens=batch)


def mla_prefill(
    setting: Setting, seq: int, heads: int, latent: int, nope: int, rope: int, dtype: Any, calls: int = 1
) -> Trial:
    """A prompt's attention over pages of its latents, which are expanded to keys and values of every head."""
    rng = np.random.default_rng(0)
    columns, value = -(-seq // PAGE), nope
    pages = normal(rng, (columns, PAGE, latent + rope), dtype)
    weight = normal(rng, (heads * (nope + value), latent), dtype, std=latent**-0.5)
    q = normal(rng, (1, heads, seq, nope + rope), dtype, std=(nope + rope) ** -0.5)
    table = jnp.arange(columns, dtype=jnp.int32)[None]
    positions = jnp.arange(seq, dtype=jnp.int32)[None]

    def expanded(block: Array, weight: Array) -> tuple[Array, Array]:
        block = block.astype(weight.dtype)
        both = lax.dot_general(block[..., :latent], weight, (((2,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        both = both.reshape(*block.shape[:2], heads, nope + value).transpose(0, 2, 1, 3)
        k_rope = jnp.broadcast_to(block[:, None, :, latent:], (*both.shape[:3], rope))
        return jnp.concatenate([both[..., :nope], k_rope], axis=-1), both[..., nope:]

    def over_pages(q: Array, pages: Array, weight: Array, length: Array) -> Array:
        expansion = Expansion(weight, heads, nope, Execution.default().times)
        return paged_attention(q, positions, pages, table, length, expansion)

    def in_a_row(q: Array, entries: Array, weight: Array) -> Array:
        k, v = expanded(entries.astype(jnp.float32), weight.astype(jnp.float32))
        return attention(q.astype(jnp.float32), k, v, jnp.tril(jnp.ones((1, seq, seq), bool)))

    entries = pages.reshape(1, -1, latent + rope)[:, :seq]
    latents, k_rope = jax.block_until_ready((entries[..., :latent], entries[..., latent:]))
    specification = _call(in_a_row, q, entries, weight)
    sides = [
        ("ling3, paged_attention", _call(over_pages, q, pages, weight, jnp.full(1, seq, jnp.int32))),
        *_peers(lambda: torch_peers.causal_attention(q, latents, k_rope, weight, nope, setting.gpu)),
        ("ling3, attention", specification),
    ]
    about = {"tokens": seq, "heads": heads, "latent": latent, "nope": nope, "rope": rope, "dtype": str(q.dtype)}
    return _trial(setting, sides, specification, about, calls, tokens=seq)


def experts(
    setting: Setting,
    tokens: int,
    count: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    dtype: Any,
    calls: int = 1,
    execution: Execution | None = None,
) -> Trial:
    """The routed experts, `top_k` random ones for each token."""
    execution = execution or Execution.default()
    rng = np.random.default_rng(0)
    shapes = {
        "gate_proj": (count, intermediate, hidden),
        "up_proj": (count, intermediate, hidden),
        "down_proj": (count, hidden, intermediate),
    }
    chosen = np.argsort(rng.random((tokens, count)), axis=1)[:, :top_k].astype(np.int32)
    inputs = {
        "x": normal(rng, (tokens, hidden), dtype),
        "chosen": jnp.asarray(chosen),
        "weights": jnp.asarray(rng.dirichlet(np.ones(top_k), tokens), jnp.float32),
        **{name: normal(rng, shape, dtype, std=shape[-1] ** -0.5) for name, shape in shapes.items()},
    }
    arrays = tuple(inputs.values())
    specification = _call(dense_experts, *arrays)
    ours = _call(lambda *arrays: execution.experts(*arrays, SWIGLU, execution.times), *arrays)
    plain = _call(lambda *arrays: block_experts(*arrays, SWIGLU, execution.times), *arrays)
    sides = [
        ("ling3, experts", ours),
        *_peers(lambda: torch_peers.experts(inputs, setting.gpu, grouped=True)),
        *_peers(lambda: torch_peers.experts(inputs, setting.gpu, grouped=False)),
        ("ling3, without a kernel", plain),
    ]
    about = {"tokens": tokens, "experts": count, "top_k": top_k, "hidden": hidden, "intermediate": intermediate}
    return _trial(setting, sides, specification, about | {"dtype": str(arrays[0].dtype)}, calls, tokens=tokens)


def router(setting: Setting, tokens: int, count: int, top_k: int, groups: int, hidden: int, calls: int = 4) -> Trial:
    """The choice of experts, against the same formula in numpy's float64."""
    rng = np.random.default_rng(0)
    gate = Router(
        weight=normal(rng, (count, hidden), jnp.float32, std=1.5 * hidden**-0.5),
        expert_bias=jnp.asarray(rng.uniform(-0.9, 0.1, count), jnp.float32),
        top_k=top_k,
        groups=groups,
        top_groups=groups // 2,
        normalize=True,
        scaling=2.5,
    )
    x = normal(rng, (tokens, hidden), jnp.float32)

    def shares(chosen: Array, weights: Array) -> Array:
        return jnp.zeros((tokens, count)).at[jnp.arange(tokens)[:, None], chosen].set(weights)

    def specification() -> np.ndarray:
        logits = np.asarray(x, np.float64) @ np.asarray(gate.weight, np.float64).T
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + np.asarray(gate.expert_bias, np.float64)
        grouped = choice.reshape(tokens, groups, -1)
        best = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        kept = np.argsort(-best, axis=1, kind="stable")[:, : groups // 2]
        open_ = np.isin(
            np.arange(groups)[None] + groups * np.arange(tokens)[:, None], kept + groups * np.arange(tokens)[:, None]
        )
        choice = np.where(open_[..., None], grouped, -np.inf).reshape(tokens, count)
        chosen = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
        found = np.zeros((tokens, count))
        weights = np.take_along_axis(scores, chosen, axis=1)
        np.put_along_axis(found, chosen, 2.5 * weights / weights.sum(axis=1, keepdims=True), axis=1)
        return found

    ours = _call(gate.__call__, x)
    check = close(lambda: shares(*ours()), specification, FLOAT32)
    about = {"tokens": tokens, "experts": count, "top_k": top_k, "groups": groups, "hidden": hidden, "calls": calls}
    return Trial([Side("ling3, Router", milliseconds(ours, calls), check)], tokens=tokens, about=about)


def _trial(
    setting: Setting,
    sides: list[tuple[str, Call]],
    specification: Call,
    about: dict[str, Any],
    calls: int,
    tokens: int,
) -> Trial:
    """A trial of sides that are checked against the specification, which is computed only once."""
    expected = functools.cache(specification)
    allowed = BFLOAT16 if setting.gpu or about["dtype"] == "bfloat16" else FLOAT32
    measured = [
        Side(
            name,
            milliseconds(run, calls),
            is_specification if run is specification else close(run, expected, allowed),
        )
        for name, run in sides
    ]
    return Trial(measured, tokens=tokens, about=about | {"calls": calls})


def _peers(make: Callable[[], tuple[str, Call]]) -> list[tuple[str, Call]]:
    """The peer, or a side that raises Absent with the reason."""
    try:
        return [make()]
    except Absent as error:
        reason = str(error)

        def absent() -> Any:
            raise Absent(reason)

        return [("peer", absent)]


def kda_inputs(batch: int, seq: int, heads: int, width: int, rounded: bool) -> dict[str, Array]:
    """Inputs in the order of `chunk_kda`'s arguments. `rounded`: q, k, v and beta are exact in bfloat16, for peers."""
    rng = np.random.default_rng(0)
    q, k, v, f = (normal(rng, (batch, seq, heads, width), jnp.float32) for _ in range(4))
    A_log, dt_bias = (
        jnp.asarray(rng.uniform(low, high, shape), jnp.float32)
        for low, high, shape in ((-1.0, 1.0, heads), (-5.0, 1.0, (heads, width)))
    )
    beta = jax.nn.sigmoid(normal(rng, (batch, seq, heads), jnp.float32))
    q, k = l2_normalize(q) * width**-0.5, l2_normalize(k)
    if rounded:
        q, k, v, beta = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v, beta))
    state = normal(rng, (batch, heads, width, width), jnp.float32, std=0.1)
    g = kda_gate(f, A_log, dt_bias, LOWER_BOUND)
    return jax.block_until_ready({"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state})


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, std: float = 1.0) -> Array:
    """Normal numbers around 0, drawn in float32."""
    return jnp.asarray(std * rng.standard_normal(shape, np.float32)).astype(dtype)


def _call(function: Callable[..., Any], *arrays: Array) -> Call:
    """The compiled function on these arrays."""
    compiled = jax.jit(function)
    return lambda: compiled(*arrays)


def _numpy(x: Any) -> np.ndarray:
    return x.float().cpu().numpy() if hasattr(x, "cpu") else np.asarray(x)
