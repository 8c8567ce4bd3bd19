"""AWQ, GPTQ and activation orders: the numbers of their authors' code, and models that are the same as elsewhere."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from quantized_models import SIZES, compressed

import ling3
from ling3.checkpoint import shards
from ling3.checkpoint.names import structure
from ling3.checkpoint.repacking import AWQ_ORDER, repacked
from ling3.families.config_fields import ConfigError
from ling3.families.quantization import Quantization
from ling3.families.qwen2 import Qwen2Config
from ling3.formats import PackedIntegers
from ling3.layers.linear import Linear
from ling3.leaves import array_leaves

pytestmark = pytest.mark.thorough

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def drawn(method, bits, inner=256, outer=48, group=64):
    """The tensors of a matrix of random bits."""
    draw, per = np.random.default_rng(bits), 32 // bits

    def words(*shape):
        return draw.integers(-(2**31), 2**31, shape).astype(np.int32)

    tensors = {
        "qweight": words(*((inner, outer // per) if method == "awq" else (inner // per, outer))),
        "qzeros": words(inner // group, outer // per),
        "scales": draw.uniform(0.001, 0.1, (inner // group, outer)).astype(np.float16),
        "g_idx": draw.permutation(np.arange(inner) // group).astype(np.int32),
    }
    if method == "gptq":  # zeros of all ones are 0 to one class of AutoGPTQ and 2^bits to the other
        tensors["qzeros"] &= np.int32(0x77777777 if bits == 4 else 0x7F7F7F7F)
    return tensors


def matrix_of(directory, raw, tensors):
    """The matrix `m` of a checkpoint with these tensors."""
    safetensors.numpy.save_file({f"m.{field}": own for field, own in tensors.items()}, directory / "model.safetensors")
    quantization = Quantization.read(raw)
    options = dict(quantization.groups[0].scheme.options)
    new = repacked(shards.open_all(directory), quantization)
    like = PackedIntegers.init(Linear(jnp.zeros((48, 256), jnp.bfloat16)), key=jax.random.key(0), std=1, **options)
    fields = [field for field in PackedIntegers.STORED if getattr(like, field) is not None]
    assert new.keys() == {f"m.{field}" for field in fields}
    arrays = {field: new[f"m.{field}"].array() for field in fields}
    assert all(arrays[field].shape == getattr(like, field).shape for field in fields)
    arrays["weight_shape"] = arrays["weight_shape"].astype(np.int32)
    return PackedIntegers(**{field: jnp.asarray(array) for field, array in arrays.items()}, bits=raw["bits"])


@pytest.mark.parametrize(
    ("raw", "digest"),
    [
        (AWQ | {"group_size": 64}, "15c7e3b603d24188"),
        (GPTQ | {"group_size": 64}, "c9649d2db191abf1"),
        (GPTQ | {"group_size": 64, "desc_act": True}, "4a23d0affff9d915"),
        (GPTQ | {"group_size": 64, "bits": 8}, "e7ebb2b1e402b007"),
        (GPTQ | {"group_size": 64, "bits": 8, "desc_act": True}, "afd203cccf55646f"),
    ],
    ids=["awq", "gptq", "gptq-ordered", "gptq-8", "gptq-8-ordered"],
)
def test_the_numbers_are_the_authors_bit_for_bit(raw, digest, tmp_path, monkeypatch):
    """The digests are of float16 numbers by AutoAWQ 0.2.9 (`dequantize_gemm`) and by AutoGPTQ 0.7.1: of `qlinear_cuda`
    with an activation order, of `qlinear_cuda_old` without one."""
    monkeypatch.setattr("ling3.checkpoint.repacking.SLICE", 1000)  # of 256 · 6 words, or 32 · 48
    tensors = drawn(raw["quant_method"], raw["bits"])
    if raw["quant_method"] == "awq":
        tensors.pop("g_idx")
    elif not raw["desc_act"]:
        tensors["g_idx"] = (np.arange(256) // 64).astype(np.int32)
    matrix = matrix_of(tmp_path, raw, tensors)
    numbers = np.asarray(matrix.dense())
    assert numbers.dtype == np.float16
    assert hashlib.sha256(np.ascontiguousarray(numbers).tobytes()).hexdigest()[:16] == digest
    np.testing.assert_array_equal(matrix.rows(jnp.asarray([[3], [47]])), numbers[[[3], [47]]])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 256)), jnp.float32)
    y = jax.jit(lambda m, x: m.product(x, ling3.Execution.default()))(matrix, x)
    exact, terms = (own(x) @ own(numbers).T for own in (np.float64, lambda array: np.abs(np.float64(array))))
    assert np.all(np.abs(y - exact) <= 256 * 2**-24 * terms)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The tensors and the config of a Ling-3 whose integers have zero points, as compressed-tensors stores it."""
    path, draw = tmp_path_factory.mktemp("repacking") / "x", np.random.default_rng(0)
    # AWQ's words have eight outputs, so that matrices with fewer stay in floats.
    raw = compressed(ignore=["lm_head", "re:.*b_proj", "re:.*g_proj", "re:.*kv_a_proj_with_mqa"])
    raw["config_groups"]["group_0"]["weights"]["symmetric"] = False
    ling3.save(ling3.init(dataclasses.replace(SIZES, quantization_config=raw), key=jax.random.key(0)), path)
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".weight_zero_point"):  # 6 to 9, so that numbers stay about 0
            words = np.zeros(tensor.shape, np.uint32)
            for place in range(8):
                words |= draw.integers(6, 10, tensor.shape).astype(np.uint32) << np.uint32(4 * place)
            tensors[name] = words.view(np.int32)
    return tensors, json.loads((path / "config.json").read_text())


def codes_of(words):
    """The unsigned integers of each row."""
    return np.stack([words.view(np.uint32) >> np.uint32(4 * i) & 15 for i in range(8)], axis=-1).reshape(len(words), -1)


def words_of(codes, order=range(8)):
    """Words of eight neighbours in a row, of which the lowest bits have number order[0]."""
    eights = codes.reshape(len(codes), -1, 8)
    return sum(eights[..., own].astype(np.uint32) << np.uint32(4 * i) for i, own in enumerate(order)).view(np.int32)


def as_others(tensors, method, groups=None):
    """The same numbers as AWQ or GPTQ stores them; `groups(inner)` are those of an activation order."""
    new = {}
    for name, tensor in tensors.items():
        module, _, field = name.rpartition(".")
        if field == "weight_packed":
            q, scale = codes_of(tensor), tensors[f"{module}.weight_scale"]
            zero = codes_of(np.ascontiguousarray(tensors[f"{module}.weight_zero_point"].T))
            if method == "awq":
                own = {"qweight": words_of(q.T, AWQ_ORDER), "qzeros": words_of(zero, AWQ_ORDER)}
            else:
                order = np.arange(q.shape[1]) // 32 if groups is None else groups(q.shape[1])
                sorted_q = np.empty_like(q)
                sorted_q[:, np.argsort(order, kind="stable")] = q
                own = {"qweight": words_of(sorted_q).T, "qzeros": words_of(zero - 1), "g_idx": order.astype(np.int32)}
            own["scales"] = scale.T
            new |= {f"{module}.{field}": np.ascontiguousarray(array) for field, array in own.items()}
        elif not field.startswith("weight_"):
            new[name] = tensor
    return new


def written(path, tensors, raw, **quantization):
    """Writes a checkpoint."""
    path.mkdir()
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw | quantization))
    return path


@pytest.fixture(scope="module")
def plain(stored, tmp_path_factory):
    """The model of `stored`."""
    return ling3.load(written(tmp_path_factory.mktemp("plain") / "x", *stored))


@pytest.mark.parametrize("raw", [AWQ, GPTQ, GPTQ | {"checkpoint_format": "gptq_v2"}], ids=["awq", "gptq", "gptq-v2"])
def test_a_model_is_that_of_compressed_tensors(stored, plain, raw, tmp_path):
    """Every array, those of experts too; saving it writes the format of compressed-tensors."""
    tensors, config = stored
    others = as_others(tensors, raw["quant_method"])
    if "checkpoint_format" in raw:
        others |= {name: others[name] + np.int32(0x11111111) for name in others if name.endswith(".qzeros")}
    path = written(tmp_path / "other", others, config, quantization_config=raw)
    model = ling3.load(path)
    for own, expected in zip(array_leaves(model), array_leaves(plain), strict=True):
        assert own.path == expected.path and type(own.module) is type(expected.module)
        np.testing.assert_array_equal(own.value, expected.value, err_msg=own.path)
    ling3.save(model, tmp_path / "saved", tokenizer_from=None)
    again = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name].view(np.uint8), tensor.view(np.uint8)) for name, tensor in tensors.items())
    assert model.parameters == plain.parameters


@pytest.mark.slow
@pytest.mark.parametrize("theirs", [True, False], ids=["gptq", "compressed-tensors"])
def test_an_activation_order_permutes_columns(stored, plain, theirs, tmp_path, monkeypatch):
    """Sorted by group, the columns are those of the model without an order; products permute x, experts the columns."""
    monkeypatch.setattr("ling3.checkpoint.repacking.SLICE", 1000)
    tensors, config = stored
    orders = {}

    def groups(inner):
        own = np.random.default_rng(len(orders)).permutation(np.arange(inner) // 32)
        return orders.setdefault(len(orders), own)

    others = as_others(tensors, "gptq", groups)
    raw = GPTQ | {"desc_act": True}
    if not theirs:
        raw = json.loads(json.dumps(config["quantization_config"]))
        raw["config_groups"]["group_0"]["weights"]["actorder"] = "group"
        others = {
            **{name: tensor for name, tensor in tensors.items() if not name.endswith(".weight_packed")},
            **{
                f"{name.removesuffix('qweight')}weight_packed": np.ascontiguousarray(tensor.T)
                for name, tensor in others.items()
                if name.endswith(".qweight")
            },
            **{
                f"{name.removesuffix('g_idx')}weight_g_idx": tensor
                for name, tensor in others.items()
                if name.endswith(".g_idx")
            },
        }
    path = written(tmp_path / "ordered", others, config, quantization_config=raw)
    model = ling3.load(path)
    arrays = {leaf.path: leaf.value for leaf in array_leaves(plain)}
    count = 0
    for leaf in array_leaves(model):
        if leaf.field != "weight_g_idx":
            np.testing.assert_array_equal(leaf.value, arrays[leaf.path], err_msg=leaf.path)
            continue
        by_group = np.take_along_axis(np.asarray(leaf.module.decoded()), leaf.value[..., None, :], axis=-1)
        np.testing.assert_array_equal(by_group, dataclasses.replace(leaf.module, weight_g_idx=None).decoded())
        count += 1
    assert count > 20
    if theirs:
        tokens, dense = jnp.arange(20)[None], ling3.load(path, jnp.float32, dequantize=True)
        np.testing.assert_allclose(model(tokens), dense(tokens), atol=2e-4)
    with pytest.raises(ling3.CheckpointError, match=r"q_proj.weight_packed has an activation order.*dequantize=True"):
        ling3.save(model, tmp_path / "saved")


KEY = "model.layers.0.attention.q_proj"


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (AWQ, lambda t: t.pop(f"{KEY}.qzeros"), rf"{KEY}.qweight, in .*: found no {KEY}.qzeros, which AWQ stores"),
        (AWQ, lambda t: t.update({f"{KEY}.scales": np.ones((2, 32), np.float16)}), r"scales, in .*found \[2, 32\]"),
        (AWQ, lambda t: t.update({f"{KEY}.qweight": np.ones((64, 8), np.int64)}), "found I64; expected I32"),
        (AWQ, lambda t: t.update({f"{KEY}.qweight": np.ones(64, np.int32)}), "no matrices"),
        (AWQ | {"group_size": -1}, lambda t: None, r"weight_scale, in .*: found \[64, 2\]; expected \[64, 1\]"),
        (GPTQ, lambda t: t.update({f"{KEY}.g_idx": np.arange(64, dtype=np.int32) % 2}), "desc_act: false"),
        (
            GPTQ | {"desc_act": True},
            lambda t: t.update({f"{KEY}.g_idx": np.zeros(64, np.int32)}),
            "groups of several sizes; expected 2 groups of 32",
        ),
        (
            GPTQ | {"desc_act": True},
            lambda t: t.update({f"{KEY}.g_idx": np.zeros(64, np.float32)}),
            r"g_idx, in .*: found F32\[64\]; expected a vector of I32",
        ),
        (
            AWQ | {"group_size": -1},
            lambda t: t.update({f"{KEY}.qweight": np.zeros((60, 8), np.int32)}),
            "qweight, in .*: found 60 inputs; expected a multiple of 8",
        ),
        (GPTQ | {"desc_act": True}, lambda t: t.pop(f"{KEY}.g_idx"), "found no .*g_idx, which GPTQ stores"),
    ],
)
def test_what_fits_no_method_is_refused(stored, raw, change, message, tmp_path):
    tensors, config = stored
    others = as_others(tensors, raw["quant_method"])
    change(others)
    with pytest.raises(ling3.CheckpointError, match=message):
        ling3.load(written(tmp_path / "x", others, config, quantization_config=raw))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (AWQ | {"bits": 3}, "bits: found 3; expected 4"),
        (AWQ | {"version": "gemv"}, "version: found 'gemv'; expected 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point: found False; expected True"),
        (GPTQ | {"bits": 2}, "bits: found 2; expected 4 or 8"),
        (GPTQ | {"group_size": 16}, "group_size: found 16; expected 32 or 64 or 128 or -1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: found 'marlin'"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic: found .*; expected only modules that are left"),
        (GPTQ | {"rotation": "hadamard"}, "rotation: found 'hadamard'; unknown field"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(raw, message):
    with pytest.raises(ConfigError, match=message):
        Quantization.read(raw)


def test_published_configs_are_read():
    """Qwen2.5-7B-Instruct's AWQ and GPTQ-Int4, without their tensors: nothing is allocated."""
    gptq = {
        **{
            "batch_size": 1,
            "bits": 4,
            "block_name_to_quantize": None,
            "cache_block_outputs": True,
            "damp_percent": 0.01,
        },
        **{"dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "sym": True},
        **{"max_input_length": None, "model_seqlen": None, "module_name_preceding_first_block": None},
        **{"modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq", "tokenizer": None},
        **{"true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
    }
    awq = {
        **{"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"},
        **{"zero_point": True},
    }
    sizes = {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584},
        **{"intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"max_position_embeddings": 32768, "eos_token_id": 151645, "bos_token_id": 151643, "rms_norm_eps": 1e-6},
        **{"rope_theta": 1e6, "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "float16"},
    }
    for raw in (gptq, awq):
        model = structure(Qwen2Config.from_dict(sizes | {"quantization_config": raw}))
        down = model.model.layers[0].mlp.down_proj
        assert isinstance(down, PackedIntegers) and down.shape == (3584, 18944)
        assert down.weight_zero_point.shape == (448, 148)
        assert model.parameters == 7_615_616_512
