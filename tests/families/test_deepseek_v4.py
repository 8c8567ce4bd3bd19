"""DeepSeek-V4: its config, its layouts, and one small model through everything that serves and studies models."""

import copy
import json
import re

import deepseek_v4_reference as reference
import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from exhaustive_cases import exhaustively
from family_laws import answers_in_company_and_alone, losses_of_training, prompts
from published_configs import DEEPSEEK_V4_FLASH
from rich.console import Console

import ling3
from ling3.cache import Span
from ling3.checkpoint.names import structure, weight_names
from ling3.checkpoint.safetensors_file import open_file
from ling3.evals.ablations import ablations
from ling3.families import deepseek_v4
from ling3.families.config_fields import ConfigError
from ling3.families.deepseek_v4_config import HEAVY, SLIDING, SPARSE, DeepseekV4Config
from ling3.formats import Fp4, Fp8
from ling3.interpret import ablate
from ling3.interpret.inspect import report
from ling3.layers.hyper import sinkhorn
from ling3.layers.linear import Linear

SMALL = {
    **{
        name: value
        for name, value in DEEPSEEK_V4_FLASH.items()
        if name not in ("compress_ratios", "expert_dtype", "quantization_config")
    },
    "compress_rates": {SPARSE: 4, HEAVY: 8},
    "head_dim": 16,
    "hidden_size": 32,
    "index_head_dim": 8,
    "index_n_heads": 6,
    "index_topk": 3,
    "initializer_range": 0.2,
    "layer_types": [SLIDING, SPARSE, HEAVY],
    "max_position_embeddings": 256,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 3,
    "o_groups": 2,
    "o_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "rope_scaling": DEEPSEEK_V4_FLASH["rope_scaling"] | {"original_max_position_embeddings": 16},
    "sliding_window": 5,
    "vocab_size": 64,
}
"""A model with every kind of layer, whose windows, entries and choices of entries end within a few tokens."""

CONFIG = DeepseekV4Config.from_dict(SMALL)


@pytest.fixture(scope="module")
def model():
    """With other sinks, biases and hyper-connections than the first ones of a training."""
    fresh = ling3.init(CONFIG, key=jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))

    def drawn(x):
        return x + 0.3 * jax.random.normal(next(keys), x.shape) if x.ndim == 1 and x.dtype == jnp.float32 else x

    return jax.tree.map(drawn, fresh)


def ids(seed, *shape):
    return np.random.default_rng(seed).integers(3, 64, size=shape).astype(np.int32)


@pytest.mark.thorough
def test_speculation_is_refused_by_name(model):
    with pytest.raises(ValueError, match="speculation: SWA attention keeps no state to go back to behind drafts"):
        ling3.Engine(model, None, max_running_requests=2, max_model_len=64, speculation="lookup")


@pytest.mark.slow
def test_the_published_flash():
    """V4-Flash: 284 B parameters, of which a token uses 13 B; transformers' own model has as many."""
    described = report(DeepseekV4Config.from_dict(DEEPSEEK_V4_FLASH))
    table = 3 * 129_280 * 6  # the experts of each token id, in the first layers
    assert described.parameters - table == 284_332_240_471
    assert 13.0e9 < described.activated < 14.5e9
    kinds = [layer["attention"] for layer in described.to_dict()["layers"]]
    assert kinds == ["swa", "swa", *["csa", "hca"] * 20, "csa"]
    assert described.memory.cache_per_token == 2 * (21 * (512 + 128) // 4 + 20 * 512 // 128)
    packed = described.memory.packed
    assert packed.per_token == 21 * (584 + 132) / 4 + 20 * 584 / 128 == 3850.25
    # In a page 64 entries of 584 bytes and 64 keys of 132, or 2 entries; entries are padded to multiples of 576.
    assert (packed.per_token_in_pages, packed.page_size) == ((21 * (37_440 + 8_448) + 20 * 1_728) / 256, 256)
    assert described.to_dict()["memory_bytes"]["packed_cache"]["per_token"] == 3850.25
    assert sorted(described.memory.state_per_sequence) == ["compressor.tail", "indexer.tail", "window"]
    weights = {row.published: row.published_shape for row in described.arrays}
    assert weights["layers.0.attn.wo_a.weight"] == (8 * 1024, 64 * 512 // 8)
    assert weights["layers.2.attn.indexer.compressor.wkv.weight"] == (256, 4096)
    assert weights["layers.3.attn.compressor.ape"] == (128, 512)
    assert weights["layers.42.ffn.experts.{0..255}.w2.weight"] == (4096, 2048 // 2)  # two numbers in a byte
    assert weights["layers.42.ffn.experts.{0..255}.w2.scale"] == (4096, 2048 // 32)
    assert weights["layers.0.attn.wo_a.scale"] == (8 * 1024 // 128, 64 * 512 // 8 // 128)
    assert weights["layers.2.ffn.gate.tid2eid"] == (129_280, 6) and "layers.3.ffn.gate.bias" in weights
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.0.hc_attn_base"} < set(weights)
    with (console := Console(width=80)).capture() as shown:
        console.print(described)
    text = shown.get()
    assert "SWA SWA CSA HCA CSA HCA" in text
    assert "packed cache  3,850.25 bytes per token, 3,899.25 in pages of 256" in text


def test_the_config_is_written_as_it_is_read():
    for raw in (DEEPSEEK_V4_FLASH, SMALL):
        config = DeepseekV4Config.from_dict(copy.deepcopy(raw))
        written = json.loads(json.dumps(config.to_dict()))
        assert DeepseekV4Config.from_dict(written) == config
        same = set(raw) & set(written) - {"compress_ratios", "rope_scaling"}
        assert {name: written[name] for name in same} == {name: raw[name] for name in same}
        assert written["rope_scaling"].items() - {("rope_type", "yarn")} <= raw["rope_scaling"].items()
    assert config.to_dict()["compress_ratios"] == [0, 4, 8]


def test_other_spellings():
    nested = {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "compress": {
            **SMALL["rope_scaling"],
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "partial_rotary_factor": 0.25,
            "attention_factor": 1.0,
        },
    }
    renamed = {
        "num_local_experts": "n_routed_experts",
        "n_layers": "num_hidden_layers",
        "window_size": "sliding_window",
    }
    raw = {**SMALL, **{new: SMALL[old] for new, old in renamed.items()}, "partial_rotary_factor": 0.25}
    raw |= {"rope_parameters": nested, "mlp_layer_types": ["hash_moe", "moe", "moe"]}
    gone = (
        *renamed.values(),
        "rope_scaling",
        "rope_theta",
        "compress_rope_theta",
        "num_hash_layers",
        "qk_rope_head_dim",
    )
    raw = {name: value for name, value in raw.items() if name not in gone}
    assert DeepseekV4Config.from_dict(raw) == CONFIG
    raw["rope_parameters"] = {
        kind: {**nested[kind], "rope_theta": theta} for kind, theta in {"main": 12345.0, "compress": 99999.0}.items()
    }
    config = DeepseekV4Config.from_dict(raw)
    assert (config.rope_theta, config.compress_rope_theta) == (12345.0, 99999.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": [SLIDING, SPARSE]}, r"layer_types: found 2 entries; expected one per layer, 3"),
        ({"layer_types": [SLIDING, SPARSE, "full"]}, r"layer_types: found .*'full'"),
        ({"layer_types": None, "compress_ratios": [0, 4, 5]}, r"compress_ratios: found 5; expected 0, 4 or 128"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, r"mlp_layer_types: expected hash_moe for the first layers"),
        ({"num_hash_layers": 4}, r"num_hash_layers: found 4; expected at most 3"),
        ({"qk_rope_head_dim": 10}, r"qk_rope_head_dim: found 10; expected an even number up to 8"),
        ({"o_groups": 3}, r"o_groups: found 3; expected a divisor of num_attention_heads, 4"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok: found 5; expected at most n_routed_experts, 4"),
        ({"topk_method": "greedy"}, r"topk_method: found 'greedy'; expected 'noaux_tc'"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads: found 2"),
        ({"n_shared_experts": 2}, r"n_shared_experts: found 2"),
        ({"attention_bias": True}, r"attention_bias: found True"),
        ({"norm_topk_prob": False}, r"norm_topk_prob: found False"),
        ({"scoring_func": "tanh"}, r"scoring_func: found 'tanh'; expected one of sigmoid, softmax, sqrtsoftplus"),
        ({"hc_sinkhorn_iters": 0}, r"hc_sinkhorn_iters: found 0"),
        (
            {"rope_scaling": SMALL["rope_scaling"] | {"attention_factor": 2.0}},
            r"attention_factor: found 2.0; expected 1",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, r"rope_scaling.*rope_type: found 'longrope'"),
        ({"hidden_size": None}, r"hidden_size: not in this config; expected an integer"),
        ({"index_kv_heads": 3}, r"index_kv_heads: found 3; unknown field"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(fields, message):
    with pytest.raises(ling3.ConfigError, match=message):
        DeepseekV4Config.from_dict(SMALL | fields)


def test_its_entries_may_stand_for_any_number_of_tokens():
    config = DeepseekV4Config.from_dict(SMALL | {"compress_rates": {SPARSE: 3, HEAVY: 7}})
    assert report(config).memory.cache_per_token == 2 * ((16 + 8) // 3) + 2 * 16 // 7
    assert report(config).memory.packed is None and "packed_cache" not in report(config).to_dict()["memory_bytes"]
    odd = ling3.init(config, key=jax.random.key(0))
    assert odd.page_size % 21 == 0
    with pytest.raises(ValueError, match="page_size is 16, expected a multiple of"):
        ling3.Engine(odd, page_size=16)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A checkpoint in the release's layout, float32."""
    directory = tmp_path_factory.mktemp("v4") / "saved"
    ling3.save(model, directory)
    return directory


@pytest.mark.thorough
def test_it_is_saved_as_it_was(model, saved, tmp_path):
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    assert set(stored) == {weight.name for weight in weight_names(CONFIG)}
    assert stored["layers.0.ffn.gate.tid2eid"].dtype == np.int64
    again = ling3.load(saved)
    assert again.config == CONFIG and eqx.tree_equal(again, model)
    ling3.save(again, tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()


def _elsewhere(saved, directory, tensors):
    directory.mkdir()
    (directory / "config.json").write_bytes((saved / "config.json").read_bytes())
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.thorough
def test_transformers_layouts_load_too(model, saved, tmp_path):
    """Those that it writes by default and by its modules' names; and multi-token prediction is left out."""
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    for number, layout in enumerate(deepseek_v4.FAMILY.layouts):
        parts: dict[str, list] = {}
        for name, array in stored.items():
            place = layout(name, array.shape, CONFIG)
            parts.setdefault(place.name, []).append((place, array))
        whole = {}
        for name, pieces in parts.items():
            shape = pieces[0][0].whole or pieces[0][1].shape
            flat = np.empty(int(np.prod(shape)), pieces[0][1].dtype)
            for place, array in pieces:
                flat[place.start : place.start + array.size] = array.reshape(-1)
            whole[name] = flat.reshape(shape)
        loaded = ling3.load(_elsewhere(saved, tmp_path / str(number), whole))
        assert eqx.tree_equal(loaded, model)
        described = report(tmp_path / str(number))
        assert {row.dtype for row in described.arrays} == {"float32", "int64"}
        assert sum(row.parameters for row in described.arrays) == sum(x.size for x in jax.tree.leaves(model))
    assert "model.layers.1.mlp.experts.gate_up_proj" in whole and "lm_head.weight" in whole
    assert whole["model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight"].shape == (6, 32)
    assert eqx.tree_equal(ling3.load(_elsewhere(saved, tmp_path / "mtp", stored | {"mtp.0.e": np.zeros(2)})), model)


def test_tensors_that_do_not_fit_are_named(saved, tmp_path):
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    del stored["layers.2.attn.compressor.norm.weight"]
    stored["layers.1.attn.indexer.wq_b.weight"] = np.zeros((9, 12), np.float32)
    stored["layers.0.attn.compressor.ape"] = np.zeros((4, 32), np.float32)
    stored["layers.0.ffn.gate.tid2eid"][3, 1] = 2**40
    with pytest.raises(ling3.CheckpointError) as error:
        ling3.load(_elsewhere(saved, tmp_path / "wrong", stored))
    for said in (
        "layers.2.attn.compressor.norm.weight [16]",
        "layers.1.attn.indexer.wq_b.weight, in model.safetensors: found [9, 12]; expected [48, 12]",
        "layers.0.attn.compressor.ape, in model.safetensors",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize("expert", [-1, 4, 2**40])
def test_a_token_that_is_sent_to_no_expert_is_refused(saved, tmp_path, expert):
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    stored["layers.0.ffn.gate.tid2eid"][3, 1] = expert
    with pytest.raises(ling3.CheckpointError, match=r"layers\.0\.ffn\.gate\.tid2eid.*expected"):
        ling3.load(_elsewhere(saved, tmp_path / "wrong", stored))


def _in_fp8(array):
    """A matrix in FP8 with scales of 128 × 128 blocks, and what it means."""
    blocks = [-(-size // 128) for size in array.shape]
    padded = np.pad(array, [(0, 128 * n - size) for n, size in zip(blocks, array.shape, strict=True)])
    tiles = padded.reshape(blocks[0], 128, blocks[1], 128)
    scales = (2.0 ** np.ceil(np.log2(np.abs(tiles).max((1, 3)) / 448))).astype(ml_dtypes.float8_e8m0fnu)
    wide = np.repeat(np.repeat(scales.astype(np.float32), 128, 0), 128, 1)[: array.shape[0], : array.shape[1]]
    codes = (array / wide).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, codes.astype(np.float32) * wide


def _in_fp4(array, codes):
    """Random codes of four bits for a matrix of this shape, packed, with scales of 32 columns, and what they mean."""
    rows, columns = array.shape
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    drawn = codes.integers(0, 16, (rows, columns))
    scales = (2.0 ** codes.integers(-4, -1, (rows, columns // 32))).astype(ml_dtypes.float8_e8m0fnu)
    packed = (drawn[:, 0::2] | drawn[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    return packed, scales, numbers[drawn] * np.repeat(scales.astype(np.float32), 32, axis=1)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A checkpoint stored as the release is, the tensors it means, and the config: sizes that no block divides."""
    wide = SMALL | {
        "hidden_size": 160,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": [SPARSE] * 2,
        "o_lora_rank": 128,
    }
    config, draw = DeepseekV4Config.from_dict(wide), np.random.default_rng(0)
    stored, means = {}, {}
    for weight in weight_names(config):
        name, array = weight.name, (draw.normal(size=weight.shape) * 0.1).astype(np.float32)
        if name.endswith("tid2eid"):
            stored[name] = means[name] = np.tile(np.arange(2), (64, 1))
        elif ".experts." in name:
            stored[name], scales, means[name] = _in_fp4(array, draw)
            stored[name.replace(".weight", ".scale")] = scales
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_a|w[123])\.weight", name) and "compressor" not in name:
            stored[name], scales, means[name] = _in_fp8(array)
            stored[name.replace(".weight", ".scale")] = scales.astype(np.float32) if "wo_a" in name else scales
        else:
            stored[name] = means[name] = array
    directory = tmp_path_factory.mktemp("quantized")
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"expert_dtype": "fp4"}))
    safetensors.numpy.save_file(stored, directory / "model.safetensors")
    return directory, stored, means


@pytest.mark.thorough
def test_the_releases_fp8_and_fp4_are_kept_and_mean_the_same(quantized, tmp_path):
    """In memory and in what is saved they are the stored bits; dequantized, the numbers that these mean."""
    directory, stored, means = quantized
    model = ling3.load(directory)
    assert isinstance(model.model.layers[0].mlp.experts.gate_proj, Fp4)
    assert isinstance(model.model.layers[1].attention.wo_a, Fp8)
    assert isinstance(model.model.layers[1].attention.wo_b, Linear)  # which this checkpoint has in floats
    ling3.save(model, tmp_path / "kept")
    kept, given = (open_file(own / "model.safetensors") for own in (tmp_path / "kept", directory))
    assert kept.keys() == given.keys() == stored.keys()
    for name, array in stored.items():
        assert (kept[name].dtype, kept[name].shape) == (given[name].dtype, given[name].shape)
        read = np.empty((1, array.size), array.dtype)
        kept[name].read(0, read, array.size)
        assert read.tobytes() == array.tobytes(), name
    again = ling3.load(tmp_path / "kept")
    assert again.config == model.config and jax.tree.structure(again) == jax.tree.structure(model)
    ling3.save(ling3.load(directory, dtype=jnp.float32, dequantize=True), tmp_path / "dense")
    dense = safetensors.numpy.load_file(tmp_path / "dense" / "model.safetensors")
    assert dense.keys() == means.keys()
    for name, array in means.items():
        np.testing.assert_array_equal(dense[name], array, err_msg=name)


def test_where_scales_have_the_name_of_other_fp8_checkpoints(quantized, tmp_path):
    directory, stored, _ = quantized
    renamed = {re.sub(r"\.scale$", ".weight_scale_inv", name): array for name, array in stored.items()}
    found, expected = ling3.load(_elsewhere(directory, tmp_path / "renamed", renamed)), ling3.load(directory)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert all(
        np.asarray(one).tobytes() == np.asarray(other).tobytes()
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


def test_what_a_config_says_of_storage(quantized, tmp_path):
    """Without files it is believed, and where files have all as it says, it stays as it is."""
    directory, stored, _ = quantized
    own = json.loads((directory / "config.json").read_text()) | {"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }}  # fmt: skip
    config = DeepseekV4Config.from_dict(own)
    tree = structure(config).model.layers[0]
    assert isinstance(tree.mlp.experts.up_proj, Fp4) and isinstance(tree.attention.wo_b, Fp8)
    assert isinstance(tree.attention.indexer.weights_proj, Linear)
    assert isinstance(tree.attention.compressor.wkv, Linear)
    tensors = {**stored}
    for name in [name for name in stored if name.endswith((".wo_b.weight", "indexer.wq_b.weight"))]:
        tensors[name], tensors[name.replace(".weight", ".scale")], _ = _in_fp8(stored[name].astype(np.float32))
    target = _elsewhere(directory, tmp_path / "all", tensors)
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(own))
    assert ling3.load(target).config == config
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    other = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    with pytest.raises(ConfigError, match=r"quantization_config: .*expected null, or an object with .* fp8"):
        DeepseekV4Config.from_dict(own | {"expert_dtype": None, "quantization_config": other})


NAN = np.array(255, np.uint8).view(ml_dtypes.float8_e8m0fnu)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.0.attn.wq_a.scale": None}, r"no file has.*\n.*layers\.0\.attn\.wq_a\.scale \[1, 2\]"),
        ({"layers.0.attn.wq_b.weight": None}, r"(?s)no file has.*wq_b.*no place for.*layers\.0\.attn\.wq_b\.scale"),
        ({"layers.0.attn.wq_a.scale": np.ones((2, 2), np.float32)}, r"wq_a\.scale.*found \[2, 2\]; expected \[1, 2\]"),
        (
            {"layers.0.ffn.experts.1.w2.scale": np.ones((160, 1), np.float16)},
            r"w2\.scale.*: found F16; expected F8_E8M0",
        ),
        ({"layers.0.ffn.experts.1.w1.weight": np.zeros((32, 160), np.int8)}, r"found \[32, 160\]; expected \[32, 80\]"),
        ({"layers.0.ffn.experts.1.w1.scale": np.full((32, 5), NAN)}, r"NaN or infinite"),
        ({"layers.0.attn.wo_a.scale": np.full((2, 1), -1, np.float32)}, r"wo_a\.scale.*: found -1"),
        ({"layers.0.attn.wo_a.scale": np.zeros((2, 1), np.float32)}, r"wo_a\.scale.*: found 0"),
    ],
)
def test_quantized_tensors_that_do_not_fit_are_named(quantized, tmp_path, changes, message):
    directory, stored, _ = quantized
    tensors = {name: array for name, array in {**stored, **changes}.items() if array is not None}
    with pytest.raises(ling3.CheckpointError, match=message):
        ling3.load(_elsewhere(directory, tmp_path / "wrong", tensors))


def test_a_block_that_would_span_two_groups_is_refused(saved, tmp_path):
    """The groups of `wo_a` are matrices of their own, one below the other in the file."""
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    name = "layers.0.attn.wo_a.weight"
    stored[name], stored[name.replace(".weight", ".scale")], _ = _in_fp8(stored[name])
    with pytest.raises(
        ling3.CheckpointError, match=r"wo_a\.weight, in .*found F8_E4M3, whose blocks of 128 rows would"
    ):
        ling3.load(_elsewhere(saved, tmp_path / "wrong", stored))


def test_logits_are_the_equations(model, saved):
    """In float64, within float32's rounding; no choice of entries or experts comes near to another one."""
    tokens = ids(0, 2, 24)
    config, weights = reference.read(saved)
    for row, logits in zip(tokens.tolist(), np.asarray(model(tokens)), strict=True):
        expected, stages = reference.forward(weights, config, row)
        assert min(np.min(x) for name, x in stages.items() if name.endswith(".margin")) > 1e-4
        np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cut", exhaustively([1, 3, 4, 5, 7, 8, 9, 16], but=[7]))
def test_any_split_of_a_prompt_is_the_whole(model, cut):
    """In two padded parts, and then token by token: windows, rings and entries are what one pass makes of them."""
    tokens = ids(0, 2, 24)
    whole, together = model.step(tokens, model.init_cache(2, 64), np.asarray([20, 20], np.int32))
    first, cache = model.step(tokens, model.init_cache(2, 64), np.asarray([cut, cut], np.int32))
    second, cache = model.step(np.roll(tokens, -cut, axis=1), cache, np.asarray([20 - cut, 20 - cut], np.int32))
    parts = np.concatenate([first[:, :cut], second[:, : 20 - cut]], axis=1)
    np.testing.assert_allclose(parts, whole[:, :20], atol=2e-5)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    np.testing.assert_allclose(model(tokens)[:, :20], whole[:, :20], atol=2e-5)
    for t in range(20, 24):
        logits, cache = model.step(tokens[:, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], model(tokens)[:, t], atol=2e-5)


@pytest.mark.slow
def test_any_split_of_a_prompt_is_the_whole_at_the_published_ratios():
    """Entries of 4 and of 128 tokens and a window of 128, cut around each. The indexer takes all there are."""
    published = {"compress_rates": {SPARSE: 4, HEAVY: 128}, "sliding_window": 128, "index_topk": 64}
    model = ling3.init(DeepseekV4Config.from_dict(SMALL | published), key=jax.random.key(0))
    tokens, length = ids(0, 1, 320), 260

    def step(first, count, cache):
        rolled, lengths = np.roll(tokens, -first, axis=1), np.asarray([count], np.int32)
        logits, cache = model.step(rolled, cache, lengths)
        return np.asarray(logits[:, :count]), cache

    whole, together = step(0, length, model.init_cache(1, 320))
    for cut in (3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 257):
        first, cache = step(0, cut, model.init_cache(1, 320))
        second, cache = step(cut, length - cut, cache)
        np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=2e-5)
        for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.slow
def test_a_batch_is_each_row_alone_and_padding_leaves_no_trace(model):
    tokens, lengths = ids(1, 3, 16), np.asarray([16, 0, 7], np.int32)
    batch, cache = model.step(tokens, model.init_cache(3, 64), lengths)
    for row, length in enumerate(lengths):
        if length:
            alone, own = model.step(tokens[row : row + 1, :length], model.init_cache(1, 64))
            np.testing.assert_allclose(batch[row, :length], alone[0], atol=2e-5)
        else:
            own = model.init_cache(1, 64)
        for one, other in zip(cache.layers, own.layers, strict=True):
            np.testing.assert_allclose(one.window[row], other.window[0], atol=2e-5)


@pytest.mark.slow
def test_nan_in_unused_memory_changes_nothing(model):
    """In entries that are not complete, and in another row's memory."""
    tokens, more = ids(2, 2, 20), ids(3, 2, 20)
    _, cache = model.step(tokens, model.init_cache(2, 64), np.asarray([18, 18], np.int32))

    def poisoned(state):
        tail = state.tail.at[1].set(jnp.nan)
        entries = state.entries.entries.at[0, 18 // state.entries.tokens :].set(jnp.nan).at[1].set(jnp.nan)
        return eqx.tree_at(lambda s: (s.tail, s.entries.entries), state, (tail, entries))

    def poison(state):
        parts = (None if part is None else poisoned(part) for part in (state.compressor, state.indexer))
        return type(state)(state.window.at[1].set(jnp.nan), *parts)

    dirty = eqx.tree_at(lambda c: c.layers, cache, tuple(map(poison, cache.layers)))
    for width, length in ((1, 1), (20, 5)):
        at = np.full(2, length, np.int32)
        clean, other = (np.asarray(model.step(more[:, :width], c, at)[0])[:, :length] for c in (cache, dirty))
        np.testing.assert_array_equal(clean[0], other[0])
        assert np.all(np.isnan(other[1]))


@pytest.mark.slow
def test_no_token_sees_a_later_one_nor_an_entry_before_it_is_complete(model):
    """The gradient of each token's logits by the tokens after it is 0, and by a token of a complete entry it is not."""
    tokens = jnp.arange(3, 27, dtype=jnp.int32)[None]

    def scalar(table, t):
        changed = eqx.tree_at(lambda m: m.model.word_embeddings.weight, model, table)
        return jnp.sum(changed(tokens)[0, t] ** 2)

    table = model.model.word_embeddings.weight
    for t in (6, 7, 15, 22):
        by_token = np.asarray(jnp.abs(jax.grad(scalar)(table, t)[3:27]).sum(axis=1))
        assert np.all(by_token[t + 1 :] == 0) and np.all(by_token[max(0, t - 4) : t + 1] > 0)
        assert by_token[0] > 0  # through entries alone, from t = 7 on


@pytest.mark.slow
def test_it_generates_what_whole_sequences_say(model):
    asked = prompts(9, 2, 17)
    answers = ling3.generate(model, asked, max_tokens=8, ignore_eos=True)
    for prompt, new in zip(asked, answers, strict=True):
        logits = model(jnp.asarray([prompt + new], jnp.int32))[0]
        assert new == jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()


@pytest.mark.slow
@pytest.mark.optimized
def test_answers_are_the_same_bits_in_company_and_after_preemption(model):
    params = [ling3.SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True, logprobs=0) for t in (0, 1)]
    crowd, alone = answers_in_company_and_alone(model, prompts(3, 11, 8, 17, 1, 14), params * 3)
    assert crowd == alone


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_trains(model):
    losses = losses_of_training(model, prompts(12, 12))
    assert losses[-1] < losses[0]


def test_the_streams_are_mixed_by_nearly_doubly_stochastic_matrices():
    """Columns sum to 1 up to rounding and `eps`, rows nearly: more iterations, less of it."""
    matrix = jnp.exp(3 * jax.random.normal(jax.random.key(0), (50, 4, 4)))
    rows = []
    for iterations in (1, 5, 20, 200):
        mixing = sinkhorn(matrix, iterations, 1e-6)
        np.testing.assert_allclose(mixing.sum(axis=-2), 1, atol=1e-5)
        rows.append(float(jnp.abs(mixing.sum(axis=-1) - 1).max()))
    assert rows == sorted(rows, reverse=True) and rows[0] > 0.5 and rows[-1] < 1e-2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_stream_is_a_plain_residual(model):
    """Of a model whose config has one stream, and of one from which the hyper-connections were cut."""
    single = ling3.init(DeepseekV4Config.from_dict(SMALL | {"hc_mult": 1}), key=jax.random.key(0))
    assert single.model.hc_head is None and single.model.layers[0].attn_hc is None
    cut, tokens = ablate.one_stream(model), jnp.asarray(ids(4, 1, 9))
    assert jax.tree.structure(cut.model) == jax.tree.structure(single.model)
    x, span = cut.model.word_embeddings.embed(tokens), Span.whole(1, 9)
    span = eqx.tree_at(lambda s: s.tokens, span, tokens, is_leaf=lambda x: x is None)
    for layer in cut.model.layers:
        x = x + layer.attention(layer.input_layernorm(x), None, span)[0]
        x = x + layer.mlp(layer.post_attention_layernorm(x), span)
    np.testing.assert_allclose(cut(tokens), cut.logits(cut.model.norm(x)), atol=2e-5)


@pytest.mark.slow
def test_it_is_traced(model):
    seen = ling3.trace(model, jnp.asarray(ids(5, 1, 17)))
    assert [sorted(layer.attention) for layer in seen.layers][1] == ["heads", "index_scores", "kv", "q"]
    assert seen.layers[1].attention["index_scores"].shape[:2] == (1, 17)
    np.testing.assert_allclose(seen.layers[-1].logits, seen.logits, atol=2e-5)
    assert sorted(seen.moe) == [0, 1, 2]
    np.testing.assert_array_equal(seen.moe[0].chosen[0], model.model.layers[0].mlp.gate.tid2eid[seen.tokens[0]])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_its_mechanisms_are_cut(model):
    tokens = ids(6, 1, 17)
    names = {ablation.name for ablation in ablations(model)}
    assert {"CSA: no attention sink", "CSA: window only", "CSA: compressed only", "layer 1: no CSA"} < names
    sinkless = ablate.no_sink(model)
    same_memory = [sinkless, ablate.sinkhorn_iterations(model, 1), ablate.top_k(model, 1)]
    other_memory = [ablate.window_only(model), ablate.compressed_only(model), ablate.no_attention(model, [1])]
    found = [np.asarray(cut(tokens)) for cut in same_memory + other_memory]
    for logits in found:
        assert np.all(np.isfinite(logits)) and not np.allclose(logits, model(tokens), atol=1e-3)
    for cut, logits in zip(other_memory, found[3:], strict=True):
        served = ling3.generate(cut, [tokens[0].tolist()], max_tokens=4, ignore_eos=True)
        assert served[0][0] == int(np.argmax(logits[0, -1]))
    with pytest.raises(ling3.CheckpointError, match="do not fit its configuration"):
        ling3.save(sinkless, "nowhere")
    with pytest.raises(ValueError, match="iterations is 0"):
        ablate.sinkhorn_iterations(model, 0)
