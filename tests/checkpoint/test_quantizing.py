"""`ling3.quantize`: its rounding by restatement in numpy, what it copies and keeps, and what it refuses."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny_transformers
from exhaustive_cases import exhaustively
from fresh_process import in_a_process
from quantized_models import CONFIGS, SIZES, model
from random_checkpoint import TINY_LIKE, write

import ling3
from ling3 import cli
from ling3.checkpoint import weight_names
from ling3.formats import fp8, integers, mxfp4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def drawn(*shape):
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    numbers[:2, :32] = 0  # a group of nothing
    return numbers


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, 128)])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_integers_are_the_nearest_ones(bits, group, dtype):
    numbers = drawn(5, 256)
    words, scale = integers.encoded(numbers, bits, group, np.dtype(dtype))
    assert scale.dtype == dtype and words.shape == (5, 256 * bits // 32)
    half = 2 ** (bits - 1)
    for row in range(5):
        for column in range(256):
            word = int(words.view(np.uint32)[row, column * bits // 32])
            q = (word >> bits * (column % (32 // bits))) % 2**bits - half
            own = np.float32(scale[row, column // group])
            assert q == np.clip(np.rint(numbers[row, column] / own), -half, half - 1)
    amax = np.abs(numbers.reshape(5, -1, group)).max(axis=-1)
    expected = (amax / np.float32(half - 0.5)).astype(dtype)
    np.testing.assert_array_equal(scale[amax > 0], expected[amax > 0])
    assert (scale > 0).all()


def test_fp8_blocks_have_their_largest_number_at_448():
    numbers = drawn(200, 130)
    codes, scale = fp8.encoded(numbers)
    assert codes.shape == numbers.shape and scale.shape == (2, 2) and scale.dtype == np.float32
    assert np.abs(codes[:128, :128].astype(np.float32)).max() == 448
    wide = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[:200, :130]
    decoded = codes.astype(np.float32) * wide
    assert (np.abs(decoded - numbers) <= np.abs(numbers) * 2**-4 + wide * 2**-10).all()


def test_mxfp4_is_the_nearest_number_below_its_exponent():
    numbers = drawn(4, 64)
    packed, scale = mxfp4.encoded(numbers)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(4, 64)
    wide = np.ldexp(1.0, np.repeat(scale.astype(int) - 127, 32, axis=1))
    decoded = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * wide
    grid = np.concatenate([-E2M1[::-1], E2M1])
    nearest = np.abs(grid - np.clip(numbers / wide, -6, 6)[..., None]).min(axis=-1)
    np.testing.assert_allclose(np.abs(decoded / wide - np.clip(numbers / wide, -6, 6)), nearest, atol=1e-6)
    amax = np.abs(numbers.reshape(4, 2, 32)).max(axis=-1)
    np.testing.assert_array_equal(scale[amax > 0], (np.floor(np.log2(amax[amax > 0])) - 2 + 127))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "x"
    ling3.save(ling3.init(SIZES, key=jax.random.key(0)), path, tokenizer_from="nano")
    return path


@pytest.mark.parametrize("to", ["int4", *exhaustively(["int8", "fp8", "mxfp4"])])
def test_what_is_written_loads_and_is_near(plain, to, tmp_path):
    ling3.quantize(plain, tmp_path / "q", to, keep=["lm_head", "b_proj"], max_shard_bytes=40_000)
    assert (tmp_path / "q" / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert (tmp_path / "q" / "model.safetensors.index.json").exists()
    own, before = ling3.load(tmp_path / "q"), ling3.load(plain)
    kept = own.model.layers[0].attention.b_proj.weight
    np.testing.assert_array_equal(kept, before.model.layers[0].attention.b_proj.weight)
    for name in ("gate_proj", "down_proj"):
        stack, true = (getattr(m.model.layers[1].mlp.experts, name).dense() for m in (own, before))
        far = np.abs(np.asarray(stack, np.float32) - np.asarray(true)).mean() / np.abs(np.asarray(true)).mean()
        assert 0 < far < {"int4": 0.15, "int8": 0.01, "fp8": 0.05, "mxfp4": 0.25}[to]


def test_a_tied_head_is_kept_as_the_embedding_is(tmp_path):
    """Other programs have it as a module, so it is named as one that is not quantized."""
    plain, out = tmp_path / "plain", tmp_path / "q"
    plain.mkdir()
    tiny_transformers.write("llama", plain)
    (plain / "tiktoken.model").write_bytes(b"IQ== 0\n")
    assert ling3.load(plain).config.tie_word_embeddings
    ling3.quantize(plain, out, "fp8")
    assert (out / "tiktoken.model").read_bytes() == b"IQ== 0\n"
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert said["modules_to_not_convert"] == ["lm_head"]
    own, before = ling3.load(out), ling3.load(plain)
    np.testing.assert_array_equal(own.model.word_embeddings.weight, before.model.word_embeddings.weight)
    assert type(own.model.layers[0].mlp.up_proj) is not type(before.model.layers[0].mlp.up_proj)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"to": "int3"}, ValueError, "to: found 'int3'; expected one of int4, int8, fp8, mxfp4"),
        ({"to": "int4", "group": 48}, ValueError, "group: found 48; expected 32 or 64 or 128"),
        ({"to": "fp8", "group": 32}, ValueError, "group: found 32; expected none for fp8"),
        ({"to": "int4", "keep": ["lm_hed"]}, ValueError, "keep: found 'lm_hed', which names no matrix"),
        ({"to": "int4", "keep": ["re:("]}, ValueError, r"keep: found 're:\(', which is no pattern"),
        ({"to": "int4", "group": 128}, ling3.ConfigError, "columns; expected a multiple of the group size, 128"),
    ],
)
def test_what_cannot_be_written_is_said(plain, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        ling3.quantize(plain, tmp_path / "q", **options)
    assert not list(tmp_path.iterdir())


def test_a_quantized_source_and_a_taken_directory_are_refused(plain, tmp_path):
    ling3.save(model("int4"), tmp_path / "quantized")
    with pytest.raises(ling3.CheckpointError, match=r"is quantized already \(compressed-tensors\)"):
        ling3.quantize(tmp_path / "quantized", tmp_path / "q", "int8")
    with pytest.raises(ling3.CheckpointError, match="is not empty"):
        ling3.quantize(plain, tmp_path / "quantized", "int8")
    assert CONFIGS["int4"] == ling3.load(tmp_path / "quantized").config.quantization_config.to_dict()


def test_numbers_that_are_infinite_are_refused(plain, tmp_path):
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.inf
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_bytes((plain / "config.json").read_bytes())
    safetensors.numpy.save_file(tensors, tmp_path / "x" / "model.safetensors")
    with pytest.raises(ling3.CheckpointError, match=r"layers.0.mlp.up_proj.weight: has numbers that are NaN"):
        ling3.quantize(tmp_path / "x", tmp_path / "q", "int4")
    assert not (tmp_path / "q").exists()


def test_the_command(plain, tmp_path, capsys):
    argv = ["quantize", str(plain), "--to", "int4", "--out", str(tmp_path / "q")]
    assert cli.main([*argv, "--keep", "lm_head,f_proj"]) == 0
    assert "in int4" in capsys.readouterr().err
    assert cli.main(argv) == 2
    assert (
        "is not empty; give another directory, or overwrite it (overwrite=True, --overwrite)" in capsys.readouterr().err
    )
    ignored = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]
    assert cli.main([*argv, "--overwrite"]) == 0
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"] != ignored


@pytest.mark.slow
def test_memory_does_not_grow_with_layers(tmp_path):
    """One tensor after the other is read, quantized and written.

    Of twelve layers more, each of 6 MB, there is room for two: Python's objects for them take 6 to 9 MB, depending on
    when they are collected.
    """

    def grown(layers):
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "first_k_dense_replace": layers, "vocab_size": 64}
        ends = {"eos_token_id": (63,), "pad_token_id": 62}
        config = dataclasses.replace(TINY_LIKE, num_hidden_layers=layers, kv_lora_rank=64, **sizes, **ends)
        weights = {
            weight.name: np.full(weight.shape, 0.1, np.float32).astype(ml_dtypes.bfloat16)
            for weight in weight_names(config)
        }
        source = tmp_path / str(layers)
        write(source, config, weights)
        return in_a_process(f"""
            structure(Ling3Config())
            before = peak()
            ling3.quantize({str(source)!r}, {str(source) + "-fp8"!r}, "fp8")
            print(peak() - before)
        """)

    assert grown(16) < grown(4) + 12 * 2**20
