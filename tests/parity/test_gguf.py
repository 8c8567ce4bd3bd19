"""GGUF files against transformers, which dequantizes them, and against the format's own package."""

import dataclasses

import gguf
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_transformers
import torch
import transformers
from random_checkpoint import TINY_LIKE

import ling3
from ling3.formats.gguf_blocks import BLOCKS

TOKENS = [1, *tiny_transformers.TOKENS]
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
CASES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "sliding_window": None}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "qwen3-moe": ("qwen3moe", {"head_dim": 128, "moe_intermediate_size": 768, "mlp_only_layers": ()}),
}
"""Architectures, and what differs in the config. transformers reads neither size of the last two, and has these."""
WRITES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""The types to which the package `gguf` quantizes; of the others, blocks are drawn."""


def blocks_of(array, kind):
    """A matrix, or a stack of them, in blocks."""
    if kind in WRITES:
        return kind, gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]), array.shape
    draw, block = np.random.default_rng(array.size), BLOCKS[kind]
    stored = draw.integers(0, 256, (*array.shape[:-1], array.shape[-1] // block.columns, block.bytes), np.uint8)
    for place, scale in block.scales.items():
        stored[..., place : place + 2] = np.frombuffer(np.float16(scale * 0.03 / block.rms).tobytes(), np.uint8)
    return kind, stored, array.shape


def written(path, model, architecture, kind, **changes):
    """A file whose matrices are in blocks of this type, norms, biases and the router in float32."""
    tensors = gguf_files.tensors_of(model)
    plain = ("norm", "ffn_gate_inp", "ssm_a", "ssm_conv", "bias")
    packed = {
        name: array if any(part in name for part in plain) or array.ndim < 2 else blocks_of(array, kind)
        for name, array in tensors.items()
    }
    return gguf_files.write(path, {**gguf_files.metadata_of(model.config, architecture), **changes}, packed)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantized_weights(name, kind, tmp_path):
    architecture, changes = CASES[name]
    base = tiny_transformers.open_model(name).config
    if name == "llama":
        changes = {"rope_scaling": None}
    model = ling3.init(dataclasses.replace(base, **{**SIZES, **changes}), key=jax.random.key(0))
    path = written(tmp_path / "model.gguf", model, architecture, kind)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([TOKENS])).logits[0].numpy()
    found = np.asarray(ling3.load(path)(jnp.asarray([TOKENS], jnp.int32))[0])
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_0"])
def test_a_ling3_is_the_model_of_the_packages_numbers(kind, tmp_path):
    """Its experts, and a kv_b_proj that is made of two tensors of blocks, the first one transposed."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32}
    heads = {"head_dim": 16, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 32}
    more = {"moe_shared_expert_intermediate_size": 32, "num_attention_heads": 4}
    model = ling3.init(dataclasses.replace(TINY_LIKE, **sizes, **heads, **more), key=jax.random.key(0))
    path = written(tmp_path / "model.gguf", model, "bailingmoe3", kind)
    found, reader = ling3.load(path), gguf.GGUFReader(path)
    numbers = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        for tensor in reader.tensors
    }
    plain = gguf_files.write(tmp_path / "plain.gguf", gguf_files.metadata_of(model.config, "bailingmoe3"), numbers)
    expected = ling3.load(plain)(jnp.asarray([TOKENS], jnp.int32))
    np.testing.assert_allclose(found(jnp.asarray([TOKENS], jnp.int32)), expected, atol=2e-5)
    dense = ling3.load(path, jnp.float32, dequantize=True)
    for own, other in zip(jax.tree.leaves(dense), jax.tree.leaves(ling3.load(plain)), strict=True):
        np.testing.assert_array_equal(own, other)
