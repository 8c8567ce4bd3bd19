"""How cost grows with the context, the prompt and the number of experts: fitted lines beside predicted ones."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks import floors
from benchmarks.decode_latency import STEPS, layers_apart, whole_step
from benchmarks.models import MID, TINY, TOY, prompts
from benchmarks.oracles import FLOAT32, close, likeliest
from benchmarks.registry import Line, Setting, Side, Trial, Wrong, case, milliseconds
from ling3.cache import KDAState, Span
from ling3.checkpoint.names import structure
from ling3.execution import Execution
from ling3.families.ling3 import moe_config
from ling3.generate import PREFILL_CHUNK
from ling3.layers.moe import MoE
from ling3.ops.experts import dense_experts

PAGE = 256


def _model(setting: Setting) -> ling3.CausalLM:
    config = setting.size(full=MID, toy=TOY)
    return setting.keep("mid-size", lambda: ling3.init(config, key=jax.random.key(0)))


def _generates(model: ling3.CausalLM) -> Callable[[], str]:
    """A check of the timed programs: prefill and decode over the cache, against a pass without one."""

    @functools.cache
    def check() -> str:
        batch = prompts(model.config, 2, 300)  # more than a page
        tokens = ling3.generate(model, batch, max_tokens=4, ignore_eos=True)
        seen = jnp.asarray([[*prompt, *row[:-1]] for prompt, row in zip(batch, tokens, strict=True)])
        return likeliest(tokens, lambda: np.asarray(model(seen)[:, -4:]))

    return check


@case("growth/context", "A decode step against the context, 128 to 131,072 tokens; KDA and MLA layers apart.", rounds=3)
def context(setting: Setting) -> Trial:
    """KDA layers take constant time, MLA layers grow only with the tokens in use. One row, mid-size model, float32."""
    model = _model(setting)
    contexts = setting.size(full=tuple(2**n for n in range(7, 18)), toy=(128, 512, 2048))
    columns = -(-(max(contexts) + STEPS) // PAGE)
    lines = {
        "whole step": whole_step(model, 1, columns, columns),
        "MLA layers": layers_apart(model, "mla", 1, columns),
        "KDA layers": layers_apart(model, "kda", 1, columns),
    }
    check = _generates(model)
    sides = [
        Side(name, functools.partial(timed, tokens), check, x=tokens)
        for tokens in contexts
        for name, timed in lines.items()
    ]
    config, layers = model.config, [model.config.attention_kind(i) for i in range(model.config.num_hidden_layers)]
    entry = config.latent_entry_dim
    by_bytes = 4 * entry * layers.count("mla") / floors.read_bandwidth()
    by_work = 4 * entry * config.num_attention_heads * layers.count("mla") / floors.matmul_rate()
    why = "each token's latent is read and multiplied by every head, at this machine's bandwidth and matmul rate"
    mla = Line(1e3 * max(by_bytes, by_work), why)
    flat = Line(0.0, "a state of fixed size")
    predicted = {"whole step": mla, "MLA layers": mla, "KDA layers": flat}
    return Trial(sides, axis="context, tokens", predicted=predicted, about={"steps_per_call": STEPS, "rows": 1})


@case("growth/prefill", "Microseconds per prompt token against the prompt's length.", rounds=2)
def prefill(setting: Setting) -> Trial:
    """Only MLA is quadratic in the prompt, so the time per token is a line, whose slope is MLA's quadratic term."""
    model, config = _model(setting), setting.size(full=MID, toy=TOY)
    lengths = setting.size(full=(512, 1024, 2048, 4096, 8192), toy=(128, 256, 512))
    check = _generates(model)

    def measure(prompt: list[int]) -> float:
        run = milliseconds(lambda: ling3.generate(model, [prompt], max_tokens=1, ignore_eos=True))
        return 1e3 * run() / len(prompt)

    sides = [
        Side("prefill", functools.partial(measure, prompts(config, 1, length)[0]), check, x=length)
        for length in lengths
    ]
    heads, value, latent = config.num_attention_heads, config.v_head_dim, config.kv_lora_rank
    width = config.qk_head_dim
    # On average half of a prompt precedes a token; every chunk expands all preceding latents again.
    attended = heads * (width + value)
    expanded = 2 * latent * heads * (config.qk_nope_head_dim + value) / PREFILL_CHUNK / 2
    mla = sum(config.attention_kind(i) == "mla" for i in range(config.num_hidden_layers))
    slope = 1e6 * mla * (attended + expanded) / floors.matmul_rate()
    why = "MLA's products with all tokens before, and their expansion once a chunk, at this machine's matmul rate"
    return Trial(sides, unit="µs/token", axis="prompt, tokens", predicted={"prefill": Line(slope, why)})


@case("growth/experts", "One MoE layer against the number of experts, eight of which a token takes.", rounds=5)
def experts(setting: Setting) -> Trial:
    """Time depends on the experts that are chosen, not on how many there are."""
    config = setting.size(full=MID, toy=TOY)
    counts = setting.size(full=(32, 64, 128, 256, 512), toy=(16, 32))
    sides = []
    for count in counts:
        sized = dataclasses.replace(config, num_experts=count, num_experts_per_tok=8, n_group=1, topk_group=1)
        layer = MoE.init(moe_config(sized, 1), key=jax.random.key(count), dtype=jnp.float32)
        for tokens in (1, 64):
            sides.append(_moe_side(layer, tokens, count, sized.hidden_size))
    flat = Line(0.0, "only the chosen experts are read")
    predicted = {"1 token": flat, "64 tokens, per expert chosen": flat}
    return Trial(sides, unit="µs", axis="experts", predicted=predicted, about={"top_k": 8})


def _moe_side(layer: MoE, tokens: int, count: int, hidden: int) -> Side:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, tokens, hidden)), jnp.float32)
    span = Span.whole(1, tokens, Execution.default())
    run = jax.jit(lambda x: layer(x, span))
    chosen, weights = layer.gate(x[0])
    distinct = len(np.unique(np.asarray(chosen)))
    routed = layer.experts

    def dense() -> jax.Array:
        y = dense_experts(
            x[0], chosen, weights, *(m.weight for m in (routed.gate_proj, routed.up_proj, routed.down_proj))
        )[None]
        return y if layer.shared_experts is None else y + layer.shared_experts(x, span)

    timed = milliseconds(lambda: run(x), calls=16)
    check = close(lambda: run(x), dense, FLOAT32)
    if tokens == 1:
        return Side("1 token", lambda: 1e3 * timed(), check, x=count)
    return Side("64 tokens, per expert chosen", lambda: 1e3 * timed() / distinct, check, x=count)


@case(
    "growth/memory",
    "Bytes of what Ling-3.0-tiny remembers of a sequence, against its tokens.",
    rounds=1,
    always_measured=True,
)
def memory(setting: Setting) -> Trial:
    """The sizes of allocated arrays: bfloat16, and float32 for KDA's states."""
    model = structure(TINY, jnp.bfloat16)
    tokens = (1024, 4096, 16384)

    def held(length: int) -> dict[str, int]:
        layers = model.init_cache(1, length, jnp.bfloat16).layers
        states = [layer for layer in layers if isinstance(layer, KDAState)]
        pages = [layer.entries for layer in layers if not isinstance(layer, KDAState)]
        return {
            "states": sum(state.recurrent.nbytes for state in states),
            "convolution tails": sum(state.conv.nbytes for state in states),
            "latents": sum(page.nbytes for page in pages),
        }

    heads, width = TINY.num_attention_heads, TINY.head_dim
    kda = sum(TINY.attention_kind(i) == "kda" for i in range(TINY.num_hidden_layers))
    entry = 2 * TINY.latent_entry_dim * (TINY.num_hidden_layers - kda)
    tails = 2 * kda * (TINY.short_conv_kernel_size - 1) * 3 * heads * width
    predicted = {
        "states": Line(0.0, "4 bytes × key × value × heads × KDA layers", 4.0 * kda * heads * width * width),
        "convolution tails": Line(0.0, "2 bytes × 3 tokens × (q, k, v) × KDA layers", float(tails)),
        "latents": Line(float(entry), "2 bytes × (latent + rope) × MLA layers", 0.0),
    }

    def check(name: str, length: int) -> str:
        found = held(length)[name]
        expected = predicted[name].slope * length + (predicted[name].at_0 or 0)
        if found != expected:
            raise Wrong(f"{found:,} bytes of {name} at {length} tokens, predicted {expected:,.0f}")
        return "exactly as predicted"

    sides = [
        Side(name, lambda n=length, name=name: float(held(n)[name]), functools.partial(check, name, length), x=length)
        for length in tokens
        for name in predicted
    ]
    return Trial(sides, unit="bytes", axis="tokens", predicted=predicted, warm=False)
