"""GGUF files as checkpoints: the same model as from the directory that a file was made of."""

import dataclasses
import json
import pathlib
import random
import struct
import time

import gguf_files
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_transformers
from exhaustive_cases import exhaustively, thoroughly
from random_checkpoint import CLAMPED, TINY_LIKE

import ling3
from ling3.checkpoint import CheckpointError, hub
from ling3.checkpoint.gguf_file import open_gguf
from ling3.families import ConfigError, llama
from ling3.families.kimi_linear import KimiLinearConfig
from ling3.interpret import inspect
from ling3.leaves import array_leaves
from ling3.text.byte_alphabet import CHARACTERS
from ling3.text.tokenizer_file import TokenizerError

DEFAULTS = {"initializer_range", "pad_token_id", "bos_token_id", "num_nextn_predict_layers", "max_window_layers"}
"""Fields that a GGUF file does not state here, and that change no logit."""


def whole_context(config):
    """The config without sliding windows, which GGUF files do not state."""
    has = hasattr(config, "use_sliding_window")
    return dataclasses.replace(config, use_sliding_window=False, sliding_window=None) if has else config


def model_of(name):
    if name.startswith("ling3"):
        return ling3.init(TINY_LIKE if name == "ling3-tiny" else CLAMPED, key=jax.random.key(1))
    model = tiny_transformers.open_model(name)
    return ling3.init(whole_context(model.config), key=jax.random.key(0)) if "qwen" in name else model


CASES = {
    "ling3-tiny": "bailingmoe3",
    "ling3-flash": "bailing-hybrid",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
}


def assert_same(found, expected):
    """The arrays are equal; A_log is up to the rounding of its exponential."""
    for own, other in zip(array_leaves(found), array_leaves(expected), strict=True):
        assert own.path == other.path
        if own.path.endswith("A_log"):
            np.testing.assert_allclose(own.value, other.value, atol=1e-6, err_msg=own.path)
        else:
            np.testing.assert_array_equal(own.value, other.value, err_msg=own.path)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_model_that_the_file_was_made_of(name, tmp_path):
    model = model_of(name)
    path = gguf_files.write_model(tmp_path / "model.gguf", model, CASES[name])
    found = ling3.load(path)
    assert_same(found, model)
    said, expected = found.config.to_dict(), model.config.to_dict()
    assert {k: v for k, v in said.items() if k not in DEFAULTS} == {
        k: v for k, v in expected.items() if k not in DEFAULTS
    }


@pytest.mark.parametrize("seed", thoroughly(range(4), but=[0]))
def test_any_sizes_and_any_schedule_of_a_ling3(seed, tmp_path):
    draw = np.random.default_rng(seed)
    groups = int(draw.integers(1, 5))
    layers = int(draw.integers(1, 10))
    config = dataclasses.replace(
        TINY_LIKE,
        num_hidden_layers=layers,
        layer_group_size=int(draw.integers(1, 6)),
        first_k_dense_replace=int(draw.integers(0, layers + 1)),
        num_attention_heads=int(draw.integers(1, 6)),
        n_group=groups,
        topk_group=int(draw.integers(1, groups + 1)),
        num_experts=int(groups * draw.integers(3, 6)),
        num_shared_experts=int(draw.integers(1, 3)),
        q_lora_rank=None if seed % 2 else 24,
        qk_nope_head_dim=int(draw.integers(1, 5) * 4),
        v_head_dim=int(draw.integers(1, 5) * 4),
    )
    model = ling3.init(config, key=jax.random.key(seed))
    found = ling3.load(gguf_files.write_model(tmp_path / "model.gguf", model, "bailingmoe3"))
    assert_same(found, model)
    assert dataclasses.replace(found.config, pad_token_id=config.pad_token_id) == config


def test_a_llama_with_rows_in_pairs_and_scaled_frequencies(tmp_path):
    base = tiny_transformers.open_model("llama")
    scaling = dataclasses.replace(base.config.rope_scaling, original_max_position_embeddings=8192)
    config = dataclasses.replace(base.config, rope_scaling=scaling, head_dim=64)
    model = ling3.init(config, key=jax.random.key(0))
    plain = 1 / config.rope_theta ** (np.arange(0, 64, 2) / 64)
    divisors = (plain / np.asarray(config.rope.frequencies)).astype(np.float32)
    tensors = {**gguf_files.tensors_of(model), "rope_freqs.weight": divisors}
    path = gguf_files.write(tmp_path / "model.gguf", gguf_files.metadata_of(config, "llama"), tensors)
    found = ling3.load(path)
    assert_same(found, model)
    assert found.config.rope_scaling == config.rope_scaling
    tensors["rope_freqs.weight"] = divisors * np.linspace(1, 1.1, len(divisors), dtype=np.float32)
    gguf_files.write(tmp_path / "other.gguf", gguf_files.metadata_of(config, "llama"), tensors)
    with pytest.raises(ConfigError, match=r"other.gguf: 1 problem\n.*rope_freqs.weight: found divisors from"):
        ling3.load(tmp_path / "other.gguf")


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_scalings_of_rope_are_in_the_metadata(kind, tmp_path):
    model = model_of("qwen3")
    changes = {"qwen3.rope.scaling.type": kind, "qwen3.rope.scaling.factor": 4.0}
    if kind == "yarn":
        changes["qwen3.rope.scaling.original_context_length"] = 64
    found = ling3.load(gguf_files.write_model(tmp_path / "m.gguf", model, "qwen3", **changes)).config.rope_scaling
    assert (found.rope_type, found.factor) == (kind, 4.0)
    assert found.original_max_position_embeddings == (64 if kind == "yarn" else None)


def test_kimi_linear(tmp_path):
    raw = {
        **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16},
        **{"num_attention_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{"model_max_length": 256, "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_token": 2},
        **{"num_shared_experts": 1, "moe_intermediate_size": 16, "routed_scaling_factor": 2.446},
    }
    model = ling3.init(KimiLinearConfig.from_dict(raw), key=jax.random.key(0))
    prefix = "kimi-linear."
    metadata = {
        "general.architecture": "kimi-linear",
        **{f"{prefix}{key}": raw[field] for key, field in KIMI_KEYS.items()},
        **{f"{prefix}kda.head_dim": 16, f"{prefix}ssm.conv_kernel": 4},
        f"{prefix}attention.head_count_kv": [0, 1],
        f"{prefix}attention.key_length_mla": 12,
        f"{prefix}attention.layer_norm_rms_epsilon": 1e-6,
    }
    tensors = {}
    for leaf in array_leaves(model):
        tensors |= dict(kimi_tensors(leaf))
    found = ling3.load(gguf_files.write(tmp_path / "kimi.gguf", metadata, tensors))
    assert found.config == dataclasses.replace(model.config, pad_token_id=None)
    assert_same(found, model)


KIMI_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "model_max_length",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_token",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
KIMI_STEMS = {
    "attention.f_proj.a_proj": "ssm_f_a",
    "attention.f_proj.b_proj": "ssm_f_b",
    "attention.g_proj.a_proj": "ssm_g_a",
    "attention.g_proj.b_proj": "ssm_g_b",
    "attention.b_proj": "ssm_beta",
    "attention.o_norm": "ssm_norm",
    "attention.o_proj": "attn_output",
    "attention.dense": "attn_output",
    "attention.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "attention.kv_a_layernorm": "attn_kv_a_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"attention.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"attention.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}


def kimi_tensors(leaf):
    array = np.asarray(leaf.value, np.float32)
    outside = {"model.word_embeddings": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, field = leaf.path.rpartition(".")
    if module in outside:
        return [(f"{outside[module]}.{field}", array)]
    _, _, layer, within = leaf.path.split(".", 3)
    module = within.rpartition(".")[0]
    block = f"blk.{layer}."
    match within:
        case "attention.A_log":
            return [(f"{block}ssm_a", -np.exp(array).reshape(1, 1, -1, 1))]
        case "attention.dt_bias":
            return [(f"{block}ssm_dt.bias", array)]
        case "mlp.gate.expert_bias":
            return [(f"{block}exp_probs_b.bias", array)]
        case "attention.kv_b_proj.weight":
            keys, values = np.split(array.reshape(2, 16, 16), 2, axis=1)
            return [(f"{block}attn_k_b.weight", keys.swapaxes(1, 2)), (f"{block}attn_v_b.weight", values)]
    return [(f"{block}{KIMI_STEMS[module]}.{field}", array[None, :, None] if "conv1d" in module else array)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A file of a tiny Qwen3."""
    directory = tmp_path_factory.mktemp("qwen")
    return gguf_files.write_model(directory / "tiny.gguf", model_of("qwen3"), "qwen3")


def test_a_hub_id_with_the_name_of_a_file(qwen, monkeypatch):
    asked = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision, allow_patterns))
        return str(qwen.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert ling3.load("owner/name:tiny.gguf", revision="v1").config == ling3.load(qwen).config
    assert hub.pin("owner/name:tiny.gguf") == qwen.parent.name
    with pytest.raises(FileNotFoundError, match=r"'owner/name' has no file 'big-00001-of-00002.gguf'"):
        hub.resolve("owner/name:big-00001-of-00002.gguf", ())
    assert asked == [
        ("owner/name", "v1", ["tiny.gguf"]),
        ("owner/name", None, ["tiny.gguf"]),
        ("owner/name", None, ["big-?????-of-00002.gguf"]),
    ]
    with pytest.raises(ValueError, match=r"names the file 'weights.bin' .* one that ends in .gguf"):
        hub.resolve("owner/name:weights.bin", ())


def test_its_directory_is_made_once(qwen):
    directory = hub.resolve(qwen, ())
    assert hub.resolve(str(qwen), ()) == directory
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen3"
    assert hub.lasting(qwen) == str(qwen)
    assert hub.pin(qwen) is None
    with pytest.raises(FileNotFoundError, match="no GGUF file at "):
        hub.resolve(qwen.with_name("nonesuch.gguf"), ())


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    path, model = tmp_path / "model.gguf", model_of("qwen3")
    first = hub.resolve(gguf_files.write_model(path, model, "qwen3"), ())
    gguf_files.write_model(path, model, "qwen3", **{"qwen3.context_length": 512})
    assert hub.resolve(path, ()) != first
    assert ling3.load(path).config.max_position_embeddings == 512


def test_inspect_reads_it(qwen):
    found = inspect.report(qwen)
    assert not found.problem and found.stored
    assert [row.parameters for row in found.arrays] == [leaf.value.size for leaf in array_leaves(ling3.load(qwen))]


def test_inspect_shows_the_blocks_of_matrices(tmp_path):
    model = model_of("qwen3")
    tensors = gguf_files.tensors_of(model)
    shape = tensors["blk.0.ffn_up.weight"].shape
    tensors["blk.0.ffn_up.weight"] = "Q8_0", np.zeros(shape[0] * 34, np.uint8), shape
    path = gguf_files.write(tmp_path / "model.gguf", gguf_files.metadata_of(model.config, "qwen3"), tensors)
    [row] = [row for row in inspect.report(path).arrays if row.path == "model.layers.0.mlp.up_proj.weight"]
    assert (row.dtype, row.shape, row.parameters) == ("Q8_0", (24, 34), 24 * 32)


def test_in_float_types_it_is_saved_as_safetensors(qwen, tmp_path):
    model = ling3.load(qwen, jnp.bfloat16)
    ling3.save(model, tmp_path / "out", tokenizer_from=None)
    assert_same(ling3.load(tmp_path / "out"), model)


def problem(path, tmp_path, message, tensors=None, **changes):
    model = model_of(path)
    architecture = CASES[path]
    metadata = {**gguf_files.metadata_of(model.config, architecture), **changes}
    file = tmp_path / "wrong.gguf"
    all_tensors = gguf_files.tensors_of(model) | (tensors or {})
    kept = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    gguf_files.write(file, {k: v for k, v in metadata.items() if v is not None}, kept)
    with pytest.raises((ConfigError, CheckpointError), match=message) as raised:
        ling3.load(file)
    assert "wrong" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, r"general.architecture: found 'gemma3'; ling3 reads bailingmoe3"),
        ({"general.architecture": None}, "general.architecture: not in this config"),
        ({"qwen3.embedding_length": None}, "qwen3.embedding_length: not in this config; expected an integer"),
        ({"qwen3.block_count": "two"}, "qwen3.block_count: found 'two'; expected a number"),
        ({"qwen3.attention.sliding_window": 12}, "qwen3.attention.sliding_window: found 12; unknown key"),
        ({"qwen3.rope.scaling.type": "longrope"}, "rope.scaling.type: found 'longrope'; expected none, linear or yarn"),
        ({"qwen3.rope.dimension_count": 6}, "rope.dimension_count: found 6; expected 12"),
        ({"qwen3.vocab_size": 65}, "qwen3.vocab_size: found 65; expected 64"),
        ({"qwen3.attention.head_count_kv": [2, 2]}, r"head_count_kv: found \[2, 2\]; expected a number"),
        ({"qwen3.rope.scaling.type": 1}, "rope.scaling.type: found 1; expected a string"),
        ({"qwen3.rope.freq_base": "far"}, "rope.freq_base: found 'far'; expected a number"),
        ({"tokenizer.ggml.eos_token_id": [1]}, r"tokenizer.ggml.eos_token_id: found \[1\]; expected the id"),
        (
            {"tokenizer.ggml.tokens": ["a"] * 65},
            "tokenizer.ggml.tokens: found 65 tokens; expected at most 64, the rows",
        ),
    ],
)
def test_metadata_that_cannot_be_read(changes, message, tmp_path):
    problem("qwen3", tmp_path, message, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_gating_func": 1}, "expert_gating_func: found 1; expected 2, the sigmoid"),
        ({"attention.head_count_kv": [1, 0, 0, 1]}, r"found full attention in the layers \[0, 3\]"),
        ({"attention.head_count_kv": [0, 1]}, "attention.head_count_kv: found .*; expected a list of a number"),
        ({"swiglu_clamp_exp": 1.0}, "swiglu_clamp_exp: found 1.0; expected a list"),
        ({"attention.key_length_mla": None}, "attention.key_length_mla.*: found .*; expected whole numbers"),
    ],
)
def test_metadata_of_a_hybrid_that_cannot_be_read(changes, message, tmp_path):
    problem("ling3-tiny", tmp_path, message, **{f"bailingmoe3.{key}": value for key, value in changes.items()})


def test_a_number_of_layers_that_is_none(tmp_path):
    message = "qwen3moe.block_count: found 2.5; expected an integer"
    problem("qwen3-moe", tmp_path, message, **{"qwen3moe.block_count": 2.5})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_q.weight": None}, "the configuration asks for and no file has.*\n.*layers.0.self_attn.q_proj"),
        ({"token_embd.weight": None}, "tensor token_embd.weight: not in this file"),
        ({"blk.0.attn_q.weight": np.zeros((4, 4), np.float32)}, r"q_proj.weight, in .*: found \[4, 4\]; expected"),
        ({"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, "has no place for.*\n.*blk.0.attn_sinks.weight"),
        ({"blk.9.attn_q.weight": np.zeros((4, 4), np.float32)}, "has no place for.*\n.*layers.9.self_attn.q_proj"),
    ],
)
def test_tensors_that_do_not_fit(tensors, message, tmp_path):
    problem("qwen3", tmp_path, message, tensors)


def with_tokenizer(path, **changes):
    """Writes a model with a byte-level vocabulary of 64 tokens, the first of which are bytes."""
    tokens = [*CHARACTERS[:62], "<s>", "</s>"]
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [1] * 62 + [3, 3], "merges": []}
    fields |= {"bos_token_id": 62, "eos_token_id": 63} | changes
    places = {"chat_template": "tokenizer.chat_template"}
    metadata = {places.get(key, f"tokenizer.ggml.{key}"): value for key, value in fields.items()}
    return gguf_files.write_model(path, model_of("qwen3"), "qwen3", **metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ["a" * 20_000, *CHARACTERS[:63]]}, "found a string of 20,000 characters"),
        ({"chat_template": "{{"}, "end of template"),
        ({"tokens": ["a"] * 64}, "'a' at 0 and at 1"),
        ({"model": "none"}, "found 'none', so the file has no tokenizer"),
        ({"model": None}, "found none, so the file has no tokenizer"),
    ],
)
def test_messages_of_its_tokenizer_name_the_file(changes, message, tmp_path):
    path = with_tokenizer(tmp_path / "model.gguf", **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        ling3.load_tokenizer(path)
    assert str(raised.value).startswith(str(path)) and "ling3-gguf-" not in str(raised.value)


def test_messages_of_a_tokenizer_that_was_read_name_the_file(tmp_path):
    path = with_tokenizer(tmp_path / "model.gguf", chat_template="{{ raise_exception('no') }}")
    tokenizer, plain = ling3.load_tokenizer(path), ling3.load_tokenizer(with_tokenizer(tmp_path / "plain.gguf"))
    chat = [{"role": "user", "content": "x"}]
    for call in (
        lambda: tokenizer.check_fits(12),
        lambda: tokenizer.apply_chat_template(chat),
        lambda: plain.apply_chat_template(chat),
    ):
        with pytest.raises((ValueError, OverflowError)) as raised:
            call()
        assert ".gguf" in str(raised.value) and "ling3-gguf-" not in str(raised.value), raised.value
    assert repr(tokenizer).startswith(f"<Tokenizer of {path}: 64 tokens")


def test_a_model_loads_without_a_tokenizer_that_can_be_read(tmp_path):
    changes = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "nonesuch", "tokenizer.ggml.tokens": ["a", "b"]}
    more = {"tokenizer.ggml.token_type": [1, 1], "tokenizer.ggml.merges": [], "tokenizer.ggml.eos_token_id": 1}
    path = gguf_files.write_model(tmp_path / "model.gguf", model_of("qwen3"), "qwen3", **changes, **more)
    assert ling3.load(path).config.eos_token_id == (1,)
    with pytest.raises(CheckpointError, match=r"model\.gguf: tokenizer\.ggml\.pre: found 'nonesuch'"):
        ling3.load_tokenizer(path)


@pytest.mark.parametrize("seed", exhaustively(range(8), but=[0]))
def test_damage_of_any_part_of_a_header_is_an_error_that_names_the_file(seed, tmp_path):
    """100 headers with other bytes, sizes or types, or with bytes left out; a few of them are still valid."""
    content = with_tokenizer(tmp_path / "whole.gguf").read_bytes()
    end = min(tensor.start for tensor in open_gguf(tmp_path / "whole.gguf").tensors.values())
    draw, path, refused = random.Random(seed), tmp_path / "model.gguf", 0
    for _ in range(100):
        at, new = draw.randrange(end), draw.choice((0, 1, 4, 8, 9, 39, 2**31, 2**40, 2**63))
        size, code = draw.choice(((1, "<B"), (4, "<I"), (8, "<Q")))
        written = draw.choice((struct.pack(code, new % 256**size), b""))
        path.write_bytes(content[:at] + written + content[at + size :])
        start = time.monotonic()
        for load in (ling3.load, ling3.load_tokenizer):
            try:
                load(path)
            except (CheckpointError, ConfigError, TokenizerError, FileNotFoundError) as error:
                assert "model.gguf" in str(error) and "ling3-gguf-" not in str(error)
                refused += 1
        assert time.monotonic() - start < 5
    assert refused > 100


@pytest.mark.parametrize("shape", [(4, 40), (4, 24, 20)])
def test_a_kv_b_proj_in_two_parts_that_do_not_fit(shape, tmp_path):
    message = r"blk.1.attn_k_b.weight and blk.1.attn_v_b.weight: found .* expected \[heads, latent, nope\]"
    problem("ling3-tiny", tmp_path, message, {"blk.1.attn_k_b.weight": np.zeros(shape, np.float32)})


def test_pairs_become_halves():
    config = dataclasses.replace(tiny_transformers.open_model("llama").config, num_attention_heads=2, head_dim=6)
    how = llama.GGUF.arrangement("model.layers.0.attention.q_proj.weight", ["blk.0.attn_q.weight"], config)
    assert how.rows.tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_a_directory_with_a_gguf_file_and_no_weights_names_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model_of("qwen3").config.to_dict()))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"found model.gguf, and no .safetensors file"):
        ling3.load(pathlib.Path(tmp_path))
