"""Quantized checkpoints against compressed-tensors and transformers: the same bits are the same numbers and logits."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("compressed_tensors", reason="the parity suite needs it: pip install -e '.[parity]'")

import torch
import transformers
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import ling3
from ling3.checkpoint.names import weights_of
from ling3.formats import QuantizedMatrix
from ling3.leaves import array_leaves
from ling3.ops.rounding import Rounding

SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
FORMATS = ("int4", "int8", "fp8", "mxfp4")
"""The formats that ling3 writes."""
WEIGHTS = {
    "zeros4": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64},
    "zeros8": {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"},
    "actorder": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "actorder": "static"},
    "int8-channels": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8-channels": {"num_bits": 8, "type": "float", "strategy": "channel"},
}
"""The `weights` of the formats that only compressed-tensors writes."""
THEIRS = {"int8-channels": IntQuantizationCompressor, "fp8-channels": FloatQuantizationCompressor}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory by format and dtype; "" is the checkpoint in floats."""
    made = {}

    def made_once(to, dtype):
        if (to, dtype) not in made:
            path = tmp_path_factory.mktemp("quantized") / "x"
            if to in WEIGHTS:
                compressed_by_them(made_once("", dtype), path, to)
            elif to:
                ling3.quantize(made_once("", dtype), path, to)
            else:
                torch.manual_seed(0)
                model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
                model.to(DTYPES[dtype]).save_pretrained(path)
            made[to, dtype] = path
        return made[to, dtype]

    return made_once


def compressed_by_them(source, target, name):
    """Writes the checkpoint `source` in one of WEIGHTS by compressed-tensors, the last two with rounded activations."""
    group = {"targets": ["Linear"], "weights": WEIGHTS[name]}
    if name in THEIRS:
        tokens = {"num_bits": 8, "type": WEIGHTS[name]["type"], "strategy": "token", "dynamic": True}
        group["input_activations"] = tokens
    scheme, compressor = QuantizationScheme.model_validate(group), THEIRS.get(name, PackedQuantizationCompressor)
    tensors = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            tensors[key] = tensor
            continue
        grouped = tensor.unflatten(-1, (-1, scheme.weights.group_size or tensor.shape[-1]))
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), scheme.weights)
        state = {"weight": tensor, "weight_scale": scale, "weight_zero_point": zero}
        for field, own in compressor.compress(state, scheme).items():
            tensors[f"{key.removesuffix('.weight')}.{field}"] = own
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    formats = {"int8-channels": "int-quantized", "fp8-channels": "float-quantized"}
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=formats.get(name, "pack-quantized"), ignore=["lm_head"]
    )
    raw["quantization_config"] = config.model_dump(mode="json") | {"quantization_status": "compressed"}
    (target / "config.json").write_text(json.dumps(raw))


def matrices(path, dtype=None):
    """The model's quantized matrices, by published module."""
    model = ling3.load(path, dtype)
    for leaf in array_leaves(model):
        if isinstance(leaf.module, QuantizedMatrix) and leaf.field in ("weight", "weight_packed"):
            (weight,) = weights_of(leaf)
            yield weight.name.rpartition(".")[0], leaf.module


def decoded(to, tensors, scheme):
    """A matrix by compressed-tensors' or transformers' own code."""
    if to == "fp8":
        return Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
    compressor = MXFP4PackedCompressor if to == "mxfp4" else THEIRS.get(to, PackedQuantizationCompressor)
    return compressor.decompress(tensors, scheme)["weight"]


@jax.jit
def dense(matrix):
    """A matrix's numbers; matrices of one shape share a program."""
    return matrix.dense()


def scheme_of(path):
    """What the checkpoint says of its weights; None for FP8."""
    groups = transformers.AutoConfig.from_pretrained(path).quantization_config.get("config_groups")
    return None if groups is None else QuantizationScheme.model_validate(groups["group_0"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", [*FORMATS, *WEIGHTS])
def test_dequantized_weights_are_theirs_bit_for_bit(checkpoint, to, dtype):
    path = checkpoint(to, dtype)
    tensors, scheme, count = load_file(path / "model.safetensors"), scheme_of(path), 0
    for module, matrix in matrices(path):
        own = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == module}
        theirs = decoded(to, own, scheme)
        found = np.asarray(dense(matrix), np.float32)
        np.testing.assert_array_equal(found, theirs.float().numpy(), err_msg=module)
        if to != "mxfp4":
            assert str(theirs.dtype).removeprefix("torch.") == str(matrix.dtype)
        count += 1
    assert count == 14


def test_bfloat16_scales_of_fp8_are_read_and_written(checkpoint, tmp_path):
    """Qwen3's own FP8 checkpoints have such scales."""
    shutil.copytree(checkpoint("fp8", "bfloat16"), tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    narrow = {n: t.bfloat16() if n.endswith("_scale_inv") else t for n, t in tensors.items()}
    save_file(narrow, file, {"format": "pt"})
    for module, matrix in matrices(tmp_path / "x"):
        theirs = decoded("fp8", {n: narrow[f"{module}.{n}"] for n in ("weight", "weight_scale_inv")}, None)
        np.testing.assert_array_equal(np.asarray(matrix.dense()), theirs.numpy(), err_msg=module)
    ling3.save(ling3.load(tmp_path / "x"), tmp_path / "y")
    written = load_file(tmp_path / "y" / "model.safetensors")
    assert written.keys() == narrow.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in narrow.items())


@pytest.mark.parametrize("to", ["int4", "int8"])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_a_model_in_float32_does_not_round_to_narrow_scales(checkpoint, tmp_path, to, scales):
    """transformers widens them when it loads such a model, before the first product."""
    shutil.copytree(checkpoint(to, "float32"), tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    tensors = {n: t.to(scales) if n.endswith("_scale") else t for n, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(3, 97, size=(1, 40))
    with torch.no_grad():
        logits = theirs(torch.as_tensor(tokens)).logits[0].numpy()  # decompresses them, too
    for dtype in (jnp.float32, None):
        own = ling3.load(tmp_path / "x", dtype)
        for module, matrix in matrices(tmp_path / "x", dtype):
            expected = theirs.get_submodule(module).weight.numpy(force=True)
            np.testing.assert_array_equal(np.asarray(matrix.dense()), expected, err_msg=f"{module}, {dtype}")
        np.testing.assert_allclose(own(jnp.asarray(tokens, jnp.int32))[0], logits, atol=2e-4)


@pytest.mark.parametrize("to", ["int4", "int8"])
def test_integers_are_quantized_as_compressed_tensors_does(checkpoint, to):
    """By its min-max rule, in float32: every word and every scale."""
    path, plain = checkpoint(to, "float32"), load_file(checkpoint("", "float32") / "model.safetensors")
    tensors, scheme = load_file(path / "model.safetensors"), scheme_of(path)
    for module, _ in matrices(path):
        weight = plain[f"{module}.weight"]
        groups = weight.unflatten(-1, (-1, scheme.weights.group_size))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        for field, theirs in PackedQuantizationCompressor.compress(state, scheme).items():
            assert torch.equal(tensors[f"{module}.{field}"], theirs), f"{module}.{field}"


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")  # only to have it dequantized
@pytest.mark.parametrize("to", [*FORMATS, *WEIGHTS])
def test_transformers_reads_what_is_written_and_computes_the_same(checkpoint, to):
    path = checkpoint(to, "float32")
    kind = transformers.FineGrainedFP8Config if to == "fp8" else transformers.CompressedTensorsConfig
    how = {"quantization_config": kind(dequantize=True)}
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **how
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.random.default_rng(0).integers(3, 97, size=(1, 40))
    with torch.no_grad():
        theirs = model.eval()(torch.as_tensor(tokens)).logits[0].float().numpy()
    own = np.asarray(ling3.load(path, jnp.float32)(jnp.asarray(tokens, jnp.int32))[0])
    plain = ling3.load(path, jnp.float32, dequantize=True)
    dequantized = np.asarray(plain(jnp.asarray(tokens, jnp.int32))[0])
    assert theirs.std() > 0.5
    np.testing.assert_allclose(own, dequantized, atol=1e-4)
    np.testing.assert_allclose(own, theirs, atol=2e-4)


@pytest.mark.parametrize("kind", ["int", "float"])
def test_activations_are_rounded_as_theirs_bit_for_bit(kind):
    x = np.random.default_rng(0).standard_normal((2, 7, 128)).astype(np.float32)
    x[0, 3] = 0
    how = QuantizationArgs(num_bits=8, type=kind, strategy="token", dynamic=True)
    scale, zero = compute_dynamic_scales_and_zp(torch.as_tensor(x), how, torch.nn.Module())
    theirs = fake_quantize(torch.as_tensor(x), scale, zero, how)
    np.testing.assert_array_equal(Rounding(kind)(jnp.asarray(x)), theirs.numpy())


def test_a_model_rounds_activations_only_on_request(checkpoint):
    """transformers always does. (INT8's largest numbers are halfway between codes, where any rounding decides.)"""
    path = checkpoint("fp8-channels", "float32")
    tokens = np.random.default_rng(0).integers(3, 97, size=(1, 40))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = theirs(torch.as_tensor(tokens)).logits[0].numpy()
    own = ling3.load(path, jnp.float32, rounded_activations=True)
    np.testing.assert_allclose(own(jnp.asarray(tokens, jnp.int32))[0], logits, atol=2e-4)
    unrounded = ling3.load(path, jnp.float32)(jnp.asarray(tokens, jnp.int32))[0]
    assert np.abs(unrounded - logits).max() > 0.1
    with pytest.raises(ValueError, match="rounded_activations: found True; expected False, since the checkpoint's"):
        ling3.load(checkpoint("int4", "float32"), rounded_activations=True)


def test_a_dense_sparsity_config_changes_nothing(checkpoint, tmp_path):
    """llm-compressor writes one beside integers; transformers and ling3 read the matrices as without it."""
    shutil.copytree(checkpoint("int4", "float32"), tmp_path / "x")
    config = tmp_path / "x" / "config.json"
    raw = json.loads(config.read_text())
    raw["quantization_config"]["sparsity_config"] = {
        "format": "dense",
        "global_sparsity": 0.153,
        "ignore": [],
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
        "targets": ["model.layers.0.self_attn.q_proj"],
    }
    config.write_text(json.dumps(raw))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "x", dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(3, 97, size=(1, 40))
    with torch.no_grad():
        logits = theirs(torch.as_tensor(tokens)).logits[0].numpy()
    own = ling3.load(tmp_path / "x", jnp.float32)
    np.testing.assert_allclose(own(jnp.asarray(tokens, jnp.int32))[0], logits, atol=2e-4)
