"""Peers of the operators: KDA of flash-linear-attention and of transformers, attention and experts of torch.

Each function takes jax arrays and returns the call to measure, without arguments, on torch tensors that share the
arrays' memory. Raises Absent if a package is not installed.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.registry import Absent

Call = Callable[[], Any]


def torch_module(gpu: bool) -> Any:
    """The module torch, set to use all cores. Raises Absent without it, or with `gpu` if it sees no GPU."""
    if importlib.util.find_spec("torch") is None:
        raise Absent("torch is not installed: pip install -e '.[parity]', or its CUDA build on a GPU")
    import torch  # noqa: PLC0415 -- an extra

    if gpu and not torch.cuda.is_available():
        raise Absent(f"torch {torch.__version__} sees no GPU: install its CUDA build")
    torch.set_num_threads(os.cpu_count() or 1)
    return torch


def tensor(array: jax.Array) -> Any:
    """A torch tensor that shares the array's memory."""
    import torch  # noqa: PLC0415 -- an extra

    return torch.from_dlpack(array)


def kda(inputs: dict[str, jax.Array], gpu: bool, steps: bool) -> tuple[str, Call]:
    """The peer's name and its KDA: token by token if `steps`, else in chunks.

    On a GPU these are flash-linear-attention's kernels, in bfloat16 except for decay and state; on a CPU transformers'
    torch code. ling3's q already includes the scale key^-0.5.
    """
    torch = torch_module(gpu)
    q, k, v, g, beta, state = (tensor(inputs[name]) for name in ("q", "k", "v", "g", "beta", "state"))
    if gpu:
        if importlib.util.find_spec("fla") is None:
            raise Absent("flash-linear-attention is not installed: pip install flash-linear-attention")
        from fla.ops.kda import chunk_kda, fused_recurrent_kda  # noqa: PLC0415 -- for GPUs alone

        q, k, v, beta = (x.bfloat16() for x in (q, k, v, beta))
        run = functools.partial(fused_recurrent_kda if steps else chunk_kda, q, k, v, g, beta, scale=1.0)
        run = functools.partial(run, initial_state=state, output_final_state=True)
        if not steps:
            run = functools.partial(run, safe_gate=True, lower_bound=-5.0)
        name = "fla, fused_recurrent_kda" if steps else "fla, chunk_kda"
    else:
        if importlib.util.find_spec("transformers") is None:
            raise Absent("transformers is not installed: pip install -e '.[parity]'")
        from transformers.models.bailing_hybrid import modeling_bailing_hybrid as theirs  # noqa: PLC0415

        law = theirs.recurrent_kimi_delta_attention if steps else theirs.chunk_kimi_delta_attention
        q = q * q.shape[-1] ** 0.5  # transformers applies the scale itself
        run = functools.partial(law, q, k, v, g, beta, initial_state=state, output_final_state=True)
        name = "transformers, torch"
    return name, _inference(torch, run)


def attention_over_latents(q: jax.Array, entries: jax.Array, gpu: bool) -> tuple[str, Call]:
    """scaled_dot_product_attention of q [batch, 1, heads, entry] over contiguous entries [batch, context, entry]."""
    torch = torch_module(gpu)
    query, entry = tensor(q).transpose(1, 2).contiguous(), tensor(entries)[:, None]

    def run() -> Any:
        o = torch.nn.functional.scaled_dot_product_attention(query, entry, entry, scale=1.0, enable_gqa=True)
        return o.transpose(1, 2)

    return "torch, scaled_dot_product_attention", _inference(torch, run)


def causal_attention(
    q: jax.Array, latent: jax.Array, k_rope: jax.Array, weight: jax.Array, nope: int, gpu: bool
) -> tuple[str, Call]:
    """Expands keys and values from the latents, then scaled_dot_product_attention; q is [batch, heads, seq, width]."""
    torch = torch_module(gpu)
    query, latents, rotated, matrix = (tensor(x) for x in (q, latent, k_rope, weight))
    batch, heads, seq, _ = query.shape

    def run() -> Any:
        expanded = torch.nn.functional.linear(latents, matrix).view(batch, seq, heads, -1).transpose(1, 2)
        k = torch.cat([expanded[..., :nope], rotated[:, None].expand(-1, heads, -1, -1)], dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(
            query, k, expanded[..., nope:], is_causal=True, scale=1.0
        )

    return "torch, scaled_dot_product_attention", _inference(torch, run)


def experts(inputs: dict[str, jax.Array], gpu: bool, grouped: bool) -> tuple[str, Call]:
    """The routed experts, by torch's grouped matmul on rows sorted by expert, or one expert after the other."""
    torch = torch_module(gpu)
    x, chosen, weights = (tensor(inputs[name]) for name in ("x", "chosen", "weights"))
    gate, up, down = (tensor(inputs[name]) for name in ("gate_proj", "up_proj", "down_proj"))
    gate_up, top_k = torch.cat([gate, up], dim=1), chosen.shape[1]
    silu = torch.nn.functional.silu

    def by_group() -> Any:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat)
        ends = torch.cumsum(torch.bincount(flat, minlength=gate.shape[0]), 0).int()
        both = torch.nn.functional.grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends)
        half = both.shape[-1] // 2
        y = torch.nn.functional.grouped_mm(silu(both[:, :half]) * both[:, half:], down.transpose(1, 2), offs=ends)
        y = y * weights.reshape(-1)[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, order // top_k, y)

    def one_by_one() -> Any:
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            token, place = torch.where(chosen == expert)
            taken = x[token]
            hidden = silu(taken @ gate[expert].T) * (taken @ up[expert].T)
            out.index_add_(0, token, (hidden @ down[expert].T) * weights[token, place, None].to(x.dtype))
        return out

    return (
        ("torch, grouped_mm", _inference(torch, by_group))
        if grouped
        else (
            "torch, one by one",
            _inference(torch, one_by_one),
        )
    )


def _inference(torch: Any, run: Call) -> Call:
    def call() -> Any:
        with torch.inference_mode():
            return run()

    return call
