"""Adapters' files in PEFT's layout: what is read, what is refused by name, and what is written, whole or not at all."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tiny import FLASH, TINY, open_model

import ling3
from ling3.adapters.adapter import LowRankUpdate, adaptable
from ling3.checkpoint import safetensors_file
from ling3.checkpoint.adapter_config import AdapterConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PEFT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "/somewhere/else",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 6,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.0",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}
"""An `adapter_config.json` as PEFT 0.21 writes it."""


def write(directory, model, fields=None, names="module", change=lambda tensors: tensors):
    """An adapter of random tensors for the modules that the config selects, in one spelling of names."""
    directory.mkdir(exist_ok=True)
    raw = PEFT | (fields or {})
    (directory / CONFIG).write_text(json.dumps(raw))
    config, tensors, draw = AdapterConfig.from_dict(raw, CONFIG), {}, np.random.default_rng(0)
    for own in adaptable(model):
        name = getattr(own, names)
        if config.selection(name):
            (outer, inner), rank = own.matrix.shape, config.rank(name)
            for side, shape in (("lora_A", (rank, inner)), ("lora_B", (outer, rank))):
                array = draw.standard_normal(shape).astype(np.float32)
                tensors[f"base_model.model.{name}.{side}.weight"] = array
    safetensors.numpy.save_file(change(tensors), directory / TENSORS)
    return directory


def equal(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        left.dtype == right.dtype and jnp.array_equal(left, right)
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.fixture(scope="module")
def model():
    return open_model(TINY)


def modules(adapter):
    return {name.removeprefix("model.layers.").replace("self_attn.", "") for name in adapter.modules}


def test_a_file_of_peft(model, tmp_path):
    """`o_proj` is KDA's, and MLA's, which the checkpoint calls `dense`."""
    adapter = ling3.load_adapter(model, write(tmp_path / "x", model))
    assert modules(adapter) == {"0.q_proj", "0.o_proj", "1.q_proj", "1.o_proj", "2.o_proj"}
    update = adapter.modules["model.layers.2.self_attn.o_proj"]
    assert (update.rank, update.alpha, adapter.scale("model.layers.2.self_attn.o_proj")) == (4, 6.0, 1.5)
    assert adapter.base == "/somewhere/else"
    stored = safetensors.numpy.load_file(tmp_path / "x" / TENSORS)
    key = "base_model.model.model.layers.2.self_attn.o_proj.lora_B.weight"
    np.testing.assert_array_equal(update.lora_B, stored[key])


def test_the_names_of_the_checkpoint_are_read_too(model, tmp_path):
    fields = {"target_modules": ["q_proj", "dense", "f_proj"]}
    own = ling3.load_adapter(model, write(tmp_path / "x", model, fields, "published"))
    assert "base_model.model.model.layers.0.attention.f_proj.lora_A.weight" in safetensors.numpy.load_file(
        tmp_path / "x" / TENSORS
    )
    assert modules(own) == {"0.q_proj", "1.q_proj", "2.o_proj", "0.forget_gate.f_proj", "1.forget_gate.f_proj"}
    # Only the keys may be spelled so: then the targets are those of transformers.
    theirs = write(tmp_path / "y", model)
    tensors = safetensors.numpy.load_file(theirs / TENSORS)
    names = {own.module: own.published for own in adaptable(model)}
    renamed = {f"base_model.model.{names[key[17:-14]]}{key[-14:]}": array for key, array in tensors.items()}
    safetensors.numpy.save_file(renamed, theirs / TENSORS)
    assert equal(ling3.load_adapter(model, theirs), ling3.load_adapter(model, write(tmp_path / "z", model)))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_floats_are_widened(model, tmp_path, dtype):
    def narrow(tensors):
        return {name: array.astype(dtype) for name, array in tensors.items()}

    adapter = ling3.load_adapter(model, write(tmp_path / "x", model, change=narrow))
    assert {array.dtype for array in jax.tree.leaves(adapter)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target_modules": ["f_proj"]}, {"0.forget_gate.f_proj", "1.forget_gate.f_proj"}),
        ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, {"1.q_proj"}),
        ({"target_modules": ["mlp.up_proj"]}, {"0.mlp.up_proj"}),
        (
            {"target_modules": r"model\.layers\.[01]\.self_attn\.[kv]_proj"},
            {f"{i}.{x}_proj" for i in (0, 1) for x in "kv"},
        ),
        ({"target_modules": r".*\.kv_b_proj"}, {"2.kv_b_proj"}),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}, {"1.q_proj"}),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}, {"0.q_proj"}),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, {"1.q_proj"}),
        ({"target_modules": ["o_proj"], "layers_to_transform": [0, 2]}, {"0.o_proj", "2.o_proj"}),
        ({"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}, {"1.o_proj"}),
        # An entry that is a whole name stands, whichever layers are named.
        (
            {"target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"], "layers_to_transform": [1]},
            {"0.q_proj", "1.k_proj"},
        ),
    ],
)
def test_which_modules(model, tmp_path, fields, expected):
    assert modules(ling3.load_adapter(model, write(tmp_path / "x", model, fields))) == expected


def test_patterns_by_hand(tmp_path):
    """The first key that is the end of a name, from a dot on, says its rank or alpha."""
    config = AdapterConfig.from_dict(
        PEFT
        | {
            "rank_pattern": {"g_proj": 2, "mlp.up_proj": 3, ".*up_proj": 5},
            "alpha_pattern": {r"layers\.1\..*": 7, "g_proj": 8.5},
        },
        CONFIG,
    )
    layer = "model.layers.0"
    assert config.rank(f"{layer}.self_attn.g_proj") == 2 and config.rank(f"{layer}.self_attn.a_g_proj") == 4
    assert config.rank(f"{layer}.mlp.up_proj") == 3 and config.rank(f"{layer}.mlp.shared_experts.up_proj") == 5
    assert config.alpha(f"{layer}.self_attn.g_proj") == 8.5
    assert config.alpha("model.layers.1.self_attn.g_proj") == 7.0 and config.alpha(f"{layer}.self_attn.q_proj") == 6.0


@pytest.mark.parametrize(("rslora", "expected"), [(False, {4: 6 / 4, 9: 3 / 9}), (True, {4: 6 / 2, 9: 3 / 3})])
def test_the_scale_by_hand(model, tmp_path, rslora, expected):
    fields = {"use_rslora": rslora, "rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 3}}
    adapter = ling3.load_adapter(model, write(tmp_path / "x", model, fields))
    assert {update.rank: adapter.scale(name) for name, update in adapter.modules.items()} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora: found True; expected None"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: found"),
        ({"bias": "all"}, "bias: found 'all'; expected 'none'"),
        ({"bias": "lora_only"}, "bias: found 'lora_only'"),
        ({"lora_bias": True}, "lora_bias: found True"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters: found .*routed experts"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: found"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: found"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens: found"),
        ({"use_qalora": True}, "use_qalora: found"),
        *(({name: {"x": 1}}, f"{name}: found") for name in ("arrow_config", "kasa_config", "velora_config")),
        *(({name: {"x": 1}}, f"{name}: found") for name in ("monteclora_config", "use_bdlora")),
        ({"peft_type": "IA3"}, "peft_type: found 'IA3'; expected one of LORA"),
        ({"peft_type": None}, "peft_type: not in this config"),
        ({"r": 0}, "r: found 0; expected an integer from 1"),
        ({"r": True}, "r: found True"),
        ({"lora_alpha": "16"}, "lora_alpha: found '16'; expected a finite number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: found"),
        ({"rank_pattern": {"q_(": 2}}, "rank_pattern: found"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: found"),
        ({"target_modules": None}, "target_modules: not in this config"),
        ({"target_modules": "q_("}, "target_modules: found"),
        ({"target_modules": [3]}, "target_modules: found"),
        ({"layers_to_transform": "x"}, "layers_to_transform: found"),
        ({"use_newlora": True}, "use_newlora: found True; unknown field, which may affect results"),
        ({"target_modules": ["q_proj", "qkv"]}, r"target_modules: found qkv; no module has these names.* q_a_proj"),
        ({"target_modules": ["gate"]}, "target_modules: found gate"),
        ({"target_modules": ["embed_tokens"]}, "target_modules: found embed_tokens"),
        ({"target_modules": r".*\.experts\..*"}, "target_modules: found"),
        ({"layers_to_transform": [7]}, "no module is selected"),
    ],
)
def test_a_config_that_is_refused(model, tmp_path, fields, message):
    directory = write(tmp_path / "x", model)
    (directory / CONFIG).write_text(json.dumps(PEFT | fields))
    with pytest.raises(ling3.ConfigError, match=message):
        ling3.load_adapter(model, directory)


def test_a_file_that_is_no_config(model, tmp_path):
    directory = write(tmp_path / "x", model)
    for content in ("{", "[]", '{"r": 1, "r": 2}', '{"r": NaN}'):
        (directory / CONFIG).write_text(content)
        with pytest.raises(ling3.ConfigError, match=CONFIG):
            ling3.load_adapter(model, directory)
    (directory / CONFIG).unlink()
    with pytest.raises(ling3.ConfigError, match="expected the directory of an adapter"):
        ling3.load_adapter(model, directory)
    with pytest.raises(FileNotFoundError):
        ling3.load_adapter(model, tmp_path / "absent")


Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: a for n, a in t.items() if n != Q0}, rf"lacks:\n *{Q0} \[4, 32\]"),
        (lambda t: t | {f"{Q0}2": t[Q0]}, f"no update of a matrix of this model:\n *{Q0}2"),
        (
            lambda t: t | {Q0.replace("q_proj", "k_proj"): t[Q0]},
            "does not select:\n *base_model.model.model.layers.0.self_attn.k_proj",
        ),
        (
            lambda t: t | {"base_model.model.model.layers.1.mlp.experts.0.up_proj.lora_A.weight": t[Q0]},
            "no update of a matrix of this model",
        ),
        (lambda t: t | {Q0.replace("self_attn", "attention"): t[Q0]}, "no update of a matrix"),
        (lambda t: t | {Q0: t[Q0][:3]}, rf"{Q0}, in {TENSORS}: found \[3, 32\]; expected \[4, 32\]"),
        (lambda t: t | {Q0: t[Q0].astype(np.int32)}, "found I32; expected F32, BF16, F16"),
        (lambda t: t | {Q0: t[Q0] * np.nan}, f"NaN or infinite; fetch the file again:\n *{Q0}"),
    ],
)
def test_tensors_that_do_not_fit(model, tmp_path, change, message):
    directory = write(tmp_path / "x", model, change=change)
    with pytest.raises(ling3.CheckpointError, match=message):
        ling3.load_adapter(model, directory)


def test_a_pickle_is_never_read(model, tmp_path):
    directory = write(tmp_path / "x", model)
    (directory / TENSORS).rename(directory / "adapter_model.bin")
    with pytest.raises(ling3.CheckpointError, match="a pickle, which ling3 never reads"):
        ling3.load_adapter(model, directory)
    (directory / "adapter_model.bin").rename(directory / TENSORS)
    (directory / TENSORS).write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(ling3.CheckpointError, match=r"torch\.save"):
        ling3.load_adapter(model, directory)


@pytest.mark.parametrize("config", [TINY, FLASH])
def test_what_is_saved_is_loaded(config, tmp_path):
    """Every module, with ranks and alphas of its own, also in bfloat16, which float32 holds."""
    model, draw = open_model(config), np.random.default_rng(0)
    adapter = ling3.new_adapter(model, rank=2, key=jax.random.key(0), use_rslora=True)
    updates = {
        name: LowRankUpdate(
            jnp.asarray(draw.standard_normal((1 + i % 3, own.lora_A.shape[1])), jnp.float32),
            jnp.asarray(draw.standard_normal((own.lora_B.shape[0], 1 + i % 3)), jnp.float32),
            alpha=[1.0, 2.5, 16.0, 16.0][i % 4],
        )
        for i, (name, own) in enumerate(adapter.modules.items())
    }
    adapter = ling3.Adapter(updates, True, "owner/name")
    ling3.save_adapter(adapter, tmp_path / "x")
    assert equal(ling3.load_adapter(model, tmp_path / "x"), adapter)
    raw = json.loads((tmp_path / "x" / CONFIG).read_text())
    assert (raw["lora_alpha"], raw["use_rslora"], raw["base_model_name_or_path"]) == (16, True, "owner/name")
    narrow = jax.tree.map(lambda array: array.astype(jnp.bfloat16), adapter)
    ling3.save_adapter(narrow, tmp_path / "y")
    again = ling3.load_adapter(model, tmp_path / "y")
    assert equal(again, jax.tree.map(lambda array: array.astype(jnp.float32), narrow))


def test_where_an_adapter_is_saved(model, tmp_path):
    adapter = ling3.new_adapter(model, rank=1, key=jax.random.key(0), targets=["q_proj"])
    ling3.save_adapter(adapter, tmp_path / "x")
    (tmp_path / "x" / "README.md").write_text("kept")
    with pytest.raises(ling3.CheckpointError, match=r"is not empty; .*overwrite=True"):
        ling3.save_adapter(adapter, tmp_path / "x")
    other = ling3.new_adapter(model, rank=3, key=jax.random.key(1), targets=["k_proj"])
    ling3.save_adapter(other, tmp_path / "x", overwrite=True)
    assert equal(ling3.load_adapter(model, tmp_path / "x"), other)
    assert {path.name for path in (tmp_path / "x").iterdir()} == {CONFIG, TENSORS, "README.md"}
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "notes").write_text("")
    with pytest.raises(ling3.CheckpointError, match="holds no adapter"):
        ling3.save_adapter(adapter, tmp_path / "y", overwrite=True)
    with pytest.raises(ling3.CheckpointError, match="is a file"):
        ling3.save_adapter(adapter, tmp_path / "y" / "notes")
    with pytest.raises(ling3.CheckpointError, match="changes no module"):
        ling3.save_adapter(ling3.Adapter({}), tmp_path / "z")
    infinite = jax.tree.map(lambda array: array / 0, adapter)
    with pytest.raises(ling3.CheckpointError, match=r"NaN or infinite:\n *base_model"):
        ling3.save_adapter(infinite, tmp_path / "z")
    assert not (tmp_path / "z").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_what_was_there(model, tmp_path, monkeypatch, overwrite):
    old = ling3.new_adapter(model, rank=1, key=jax.random.key(0), targets=["q_proj"])
    target = tmp_path / ("old" if overwrite else "new")
    ling3.save_adapter(old, tmp_path / "old")
    before, real = sorted(tmp_path.rglob("*")), safetensors_file.write

    def fail(path, tensors, read):
        real(path, tensors, read)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(safetensors_file, "write", fail)
    other = ling3.new_adapter(model, rank=2, key=jax.random.key(0), targets=["k_proj"])
    with pytest.raises(OSError, match=r"an adapter of [\d,]+ bytes could not be saved there.*make room on the disk"):
        ling3.save_adapter(other, target, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    assert equal(ling3.load_adapter(model, tmp_path / "old"), old)
