"""Checkpoints of quantized weights: loaded as they are, saved as they were, and accounted for tensor by tensor."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exhaustive_cases import exhaustively, thoroughly
from quantized_models import CONFIGS, SIZES, compressed, config, model

import ling3
from ling3.checkpoint import weight_names
from ling3.checkpoint.names import structure
from ling3.checkpoint.safetensors_file import open_file
from ling3.families.ling3_config import ConfigError
from ling3.families.quantization import Scheme
from ling3.formats import PackedIntegers, QuantizedMatrix
from ling3.mesh import plan
from ling3.mesh.rules import MeshError, Rules

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 96, size=(2, 9)), jnp.int32)
SHAPES = {
    "fp8": {"weight": (64, 64), "weight_scale_inv": (1, 1)},
    "fp8-powers": {"weight": (64, 64), "weight_scale_inv": (1, 1)},
    "int4": {"weight_packed": (64, 8), "weight_scale": (64, 2), "weight_shape": (2,)},
    "int8": {"weight_packed": (64, 16), "weight_scale": (64, 1), "weight_shape": (2,)},
    "mxfp4": {"weight_packed": (64, 32), "weight_scale": (64, 2)},
}


@pytest.mark.parametrize("name", exhaustively(CONFIGS, but=["int4"]))
def test_what_was_loaded_is_saved_byte_for_byte(name, tmp_path):
    own = model(name)
    ling3.save(own, tmp_path / "one")
    loaded = ling3.load(tmp_path / "one", jnp.bfloat16)
    assert loaded.config == own.config and loaded.parameters == ling3.init(SIZES, key=jax.random.key(0)).parameters
    for leaf in jax.tree.leaves(loaded, is_leaf=lambda node: isinstance(node, QuantizedMatrix)):
        if isinstance(leaf, QuantizedMatrix):
            assert leaf.weight_scale.dtype != jnp.float32 if hasattr(leaf, "weight_scale") else True
    ling3.save(ling3.load(tmp_path / "one"), tmp_path / "two")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    names = {weight.name: weight.shape for weight in weight_names(own.config)}
    for field, shape in SHAPES[name].items():
        assert names[f"model.layers.0.mlp.gate_proj.{field}"] == shape
        assert f"model.layers.1.mlp.experts.7.up_proj.{field}" in names
    assert names["lm_head.weight"] == (96, 64) and names["model.word_embeddings.weight"] == (96, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustively(CONFIGS, but=["int4", "fp8", "mxfp4"]))
def test_a_quantized_model_computes_as_its_numbers_do(name, tmp_path):
    own = model(name)
    ling3.save(own, tmp_path / "x")
    plain = ling3.load(tmp_path / "x", jnp.float32, dequantize=True)
    assert plain.config == dataclasses.replace(own.config, quantization_config=None)
    kinds = {type(node) for node in jax.tree.leaves(plain, is_leaf=lambda node: isinstance(node, QuantizedMatrix))}
    assert not [kind for kind in kinds if issubclass(kind, QuantizedMatrix)]
    logits = eqx.filter_jit(lambda model: model(TOKENS))
    np.testing.assert_allclose(logits(own), logits(plain), atol=1e-4)
    narrow = ling3.load(tmp_path / "x", dequantize=True)
    assert narrow.model.layers[0].mlp.gate_proj.dtype == jnp.bfloat16


@pytest.mark.slow
def test_an_engine_answers_as_generate_does():
    own = model("int4")
    (prompt,) = TOKENS[:1].tolist()
    small = {"num_pages": 8, "page_size": 16, "max_model_len": 64, "chunked_prefill_size": 32, "token_paddings": (32,)}
    engine = ling3.Engine(own, max_running_requests=2, **small)
    (output,) = engine.generate([prompt], ling3.SamplingParams(max_tokens=4))
    assert [list(output.token_ids)] == ling3.generate(own, [prompt], max_tokens=4)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Tensors and config of a saved model."""
    path = tmp_path_factory.mktemp("quantized")
    ling3.save(model("int4"), path)
    return safetensors.numpy.load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())


KEY = "model.layers.1.mlp.experts.3.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop(f"{KEY}.weight_scale"), rf"no file has:\n.*{KEY}.weight_scale \[64, 1\]"),
        (lambda t, c: t.pop(f"{KEY}.weight_packed"), rf"no file has:\n.*{KEY}.weight_packed \[64, 4\]"),
        (
            lambda t, c: t.update({"lm_head.weight_scale": np.ones((96, 2), np.float16)}),
            r"no place for:\n.*lm_head.weight_scale",
        ),
        (
            lambda t, c: t.update({f"{KEY}.weight_zero_point": np.ones((8, 1), np.int32)}),
            rf"no place for:\n.*{KEY}.weight_zero_point",
        ),
        (
            lambda t, c: t.update({f"{KEY}.weight_scale": np.ones((64, 2), np.float16)}),
            rf"{KEY}.weight_scale, in .*: found \[64, 2\]; expected \[64, 1\]",
        ),
        (
            lambda t, c: t.update({f"{KEY}.weight_packed": np.ones((64, 4), np.int8)}),
            rf"{KEY}.weight_packed, in .*: found I8; expected I32",
        ),
        (
            lambda t, c: t.update({f"{KEY}.weight_shape": np.asarray([32, 64])}),
            rf"{KEY}.weight_shape, in .*: found \[32, 64\]; expected \[64, 32\]",
        ),
        (lambda t, c: c["quantization_config"].update(ignore=[]), "lm_head, which is stored in floats: add it"),
        (
            lambda t, c: c["quantization_config"]["ignore"].append("re:.*gate_proj"),
            "gate_proj is quantized, and quantization_config does not say so",
        ),
    ],
)
def test_every_scale_has_its_weight_and_fits(stored, change, message, tmp_path):
    tensors, raw = dict(stored[0]), json.loads(json.dumps(stored[1]))
    change(tensors, raw)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ling3.CheckpointError, match=message):
        ling3.load(tmp_path)


@pytest.mark.parametrize("name", thoroughly(["fp8", "mxfp4"], but=["fp8"]))
def test_numbers_that_are_nan_are_refused(name, tmp_path):
    own = model(name)
    ling3.save(own, tmp_path)
    file, field = tmp_path / "model.safetensors", "weight" if name == "fp8" else "weight_scale"
    content = bytearray(file.read_bytes())
    content[open_file(file)[f"{KEY}.{field}"].start + 5] = 255
    file.write_bytes(content)
    with pytest.raises(ling3.CheckpointError, match=rf"NaN or infinite.*\n.*{KEY}.{field}"):
        ling3.load(tmp_path)


SCALE = {"int4": "weight_scale", "int8": "weight_scale", "fp8": "weight_scale_inv", "mxfp4": "weight_scale"}
CODES = {"int4": "weight_packed", "int8": "weight_packed", "fp8": "weight"}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Saves a model of a format with some of its bytes changed: `changed(name, {tensor: numbers, …})`."""
    saved = {}

    def write(name, numbers):
        if name not in saved:
            saved[name] = tmp_path_factory.mktemp(name)
            ling3.save(model(name), saved[name])
        path = tmp_path_factory.mktemp("changed")
        (path / "config.json").write_bytes((saved[name] / "config.json").read_bytes())
        content = bytearray((saved[name] / "model.safetensors").read_bytes())
        tensors = open_file(saved[name] / "model.safetensors")
        for tensor, value in numbers.items():
            start, raw = tensors[tensor].start, np.asarray(value).tobytes()
            content[start : start + len(raw)] = raw
        (path / "model.safetensors").write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("name", exhaustively(["int4", "int8", "fp8"], but=["int4", "fp8"]))
@pytest.mark.parametrize("scale", thoroughly([0.0, -0.5, 3e38], but=[0.0]))
def test_scales_that_are_none_are_refused(name, scale, changed):
    stored = np.asarray([scale], jnp.float32 if name == "fp8" else jnp.bfloat16)
    path = changed(name, {f"{KEY}.{SCALE[name]}": stored})
    with pytest.raises(ling3.CheckpointError, match="scales that are not above 0, or so large that") as caught:
        ling3.load(path)
    assert (
        f"    {KEY}.{SCALE[name]}, in model.safetensors: found {float(stored[0]):g}" in str(caught.value).splitlines()
    )
    ling3.load(path, check_finite=False)


def test_an_exponent_that_makes_infinities_is_refused(changed):
    """6 · 2^125 is finite, and 6 · 2^126 is not."""
    ling3.load(changed("mxfp4", {f"{KEY}.weight_scale": np.asarray([252], np.uint8)}))
    with pytest.raises(ling3.CheckpointError, match=rf"{KEY}.weight_scale, in .*: found 8.50706e\+37"):
        ling3.load(changed("mxfp4", {f"{KEY}.weight_scale": np.asarray([253], np.uint8)}))


@pytest.mark.parametrize("name", exhaustively(["int4", "int8", "fp8"], but=["int4", "fp8"]))
def test_a_scale_of_0_may_multiply_zeros(name, changed):
    """As where a writer has pruned a group, or divides by the largest number of a block that has none."""
    zeros = {
        "int4": np.full(4, 0x88888888, np.uint32),  # the first row
        "int8": np.full(8, 0x80808080, np.uint32),
        "fp8": np.zeros((64, 32), np.uint8),  # the only block
    }
    scale = np.zeros(1, jnp.float32 if name == "fp8" else jnp.bfloat16)
    path = changed(name, {f"{KEY}.{SCALE[name]}": scale, f"{KEY}.{CODES[name]}": zeros[name]})
    expert = ling3.load(path).model.layers[1].mlp.experts.down_proj.dense()[3]
    assert not expert[0].any() and (name == "fp8" or expert[1].any())


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_integers_are_rounded_to_their_scales_but_in_float32(dtype, changed):
    """A model in float32 with scales in bfloat16: as transformers computes it (`tests/parity/test_quantized.py`)."""
    own = ling3.load(changed("int4", {}), dtype).model.layers[0].mlp.gate_proj
    packed, scale = np.asarray(own.weight_packed).view(np.uint32), np.asarray(own.weight_scale).astype(np.float32)
    codes = (packed[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(*own.shape).astype(np.float32) - 8
    numbers = codes * np.repeat(scale, 32, axis=-1)
    rounded = numbers.astype(jnp.bfloat16).astype(np.float32)
    assert (rounded != numbers).any()
    np.testing.assert_array_equal(np.asarray(own.dense(), np.float32), rounded if dtype == jnp.bfloat16 else numbers)


SUMS = Rules(sums=True, experts=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustively(["int4", "mxfp4", "fp8"], but=["int4", "fp8"]))
@pytest.mark.parametrize("rules", exhaustively([Rules(), SUMS], but=[SUMS]), ids=["rows", "sums"])
def test_a_mesh_cuts_scales_with_their_weights(name, rules, tmp_path):
    changes = {"intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": 2}
    changes |= {"moe_shared_expert_intermediate_size": 256, "n_group": 2, "layer_group_size": 2}
    changes |= {"head_dim": 128, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 32}
    own = model(name, **changes)
    ling3.save(own, tmp_path / "x")
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    loaded = ling3.load(tmp_path / "x", mesh=mesh, rules=rules)
    assert loaded.parameters == own.parameters
    np.testing.assert_allclose(loaded(TOKENS), own(TOKENS), atol=1e-4)
    ling3.save(loaded, tmp_path / "again")
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8", r"gate_proj.weight_scale_inv: 4 devices .* 96 rows each of 384, which cuts blocks of 128 .*; 1, 3 can"),
        (
            "mxfp4",
            r"down_proj.weight_scale: 4 .* 48 columns each of 192, which cuts blocks of 32 .*; 1, 2, 3 can share",
        ),
        ("int4", r"down_proj.weight_packed: 4 .* 12 columns each of 48, which cuts blocks of 8 .*; 1, 2, 3 can share"),
    ],
)
def test_a_block_that_a_mesh_would_cut_is_refused(name, message):
    size = {"fp8": 384, "mxfp4": 192, "int4": 48}[name]
    own = config(name, moe_intermediate_size=size)
    if name == "int4":
        own = dataclasses.replace(own, quantization_config=compressed(group=None))
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    with pytest.raises(MeshError, match=message):
        plan(structure(own), mesh, Rules(experts=None, heads=None))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quant_method": "eetq"}, "quant_method: found 'eetq'; expected fp8 or compressed-tensors or awq"),
        ({"quant_method": "fp8"}, "weight_block_size: not in this config; expected"),
        (CONFIGS["fp8"] | {"activation_scheme": "static"}, "activation_scheme: found 'static'; expected 'dynamic'"),
        (CONFIGS["fp8"] | {"weight_block_size": [64, 64]}, r"found \[64, 64\]; expected \[128, 128\]"),
        (CONFIGS["fp8"] | {"strange": 1}, "strange: found 1; unknown field"),
        (compressed(format="marlin-24"), "format: found 'marlin-24'; expected 'pack-quantized'"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme: found .*; expected null"),
        (compressed(group=48), r"group_0.weights.group_size: found 48; expected 32 or 64 or 128"),
        (compressed(bits=3), "weights.num_bits: found 3; expected 4 or 8"),
        (compressed(group=128), r"q_proj: found 64 columns; expected a multiple of the group size, 128; ignore it"),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            r"sparsity_config: found .*; expected the format",
        ),
        (compressed(sparsity_config=["dense"]), r"sparsity_config: found \['dense'\]; expected the format 'dense'"),
        (compressed(ignore=["re:("]), r"ignore: found 're:\(', which is no pattern"),
        (
            compressed(ignore=["model.layers.1.mlp.experts.0.up_proj"]),
            "experts.0.up_proj and its neighbours: found several schemes",
        ),
        (
            compressed(config_groups={"a": compressed()["config_groups"]["group_0"] | {"targets": ["re:.*embed"]}}),
            "word_embeddings: found a quantized embedding",
        ),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(raw, message):
    with pytest.raises(ConfigError, match=message):
        ling3.init(dataclasses.replace(SIZES, quantization_config=raw), key=jax.random.key(0))


@pytest.mark.parametrize("sparsity", [None, {}, {"format": "dense", "global_sparsity": 0.153, "ignore": []}])
def test_a_dense_layout_is_no_sparse_one(sparsity):
    raw = compressed(sparsity_config=sparsity)
    assert dataclasses.replace(SIZES, quantization_config=raw).quantization_config.to_dict() == raw


def test_scales_of_a_call_and_static_activations_are_refused():
    for change in ({"dynamic": True}, {"block_structure": [128, 128]}):
        raw = compressed()
        raw["config_groups"]["group_0"]["weights"] |= change
        with pytest.raises(ConfigError, match=rf"group_0.weights.{next(iter(change))}: found"):
            dataclasses.replace(SIZES, quantization_config=raw)
    raw = compressed()
    static = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
    raw["config_groups"]["group_0"]["input_activations"] = static
    with pytest.raises(ConfigError, match=r"(?s)group_0.input_activations.strategy: found 'tensor'.*dynamic: found"):
        dataclasses.replace(SIZES, quantization_config=raw)


def test_ignored_and_targeted_modules():
    """By exact names, patterns from a name's start, and for FP8 by whole parts of a name or its end."""
    scheme = config("int4").quantization_config.scheme
    assert scheme("model.layers.0.mlp.up_proj") == Scheme(PackedIntegers, (("bits", 4), ("group", 32)))
    assert scheme("lm_head") is None
    fp8 = dataclasses.replace(
        SIZES,
        quantization_config=CONFIGS["fp8"] | {"modules_to_not_convert": ["model.layers.1", "g_proj", "mlp.gate"]},
    ).quantization_config
    assert fp8.scheme("model.layers.1.mlp.up_proj") is None and fp8.scheme("model.layers.11.mlp.up_proj") is not None
    assert fp8.scheme("model.layers.2.attention.g_proj") is None and fp8.scheme("lm_head") is not None
    raw = compressed(ignore=["re:.*attention", "Embedding"])
    own = dataclasses.replace(SIZES, quantization_config=raw).quantization_config
    assert (
        own.scheme("model.layers.0.attention.q_proj") is None and own.scheme("model.layers.0.mlp.up_proj") is not None
    )
