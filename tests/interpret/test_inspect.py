import dataclasses
import io
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from published_configs import FLASH, TINY
from random_checkpoint import TINY_LIKE, draw, to_bfloat16, write
from rich.console import Console

from ling3.families.ling3_config import ConfigError, Ling3Config
from ling3.interpret import inspect


@pytest.fixture(scope="module")
def tiny() -> inspect.ModelReport:
    return inspect.report(Ling3Config.from_dict(TINY))


@pytest.fixture
def directory(tmp_path) -> Path:
    write(tmp_path / "x", TINY_LIKE, to_bfloat16(draw(TINY_LIKE, seed=0)))
    return tmp_path / "x"


def shown(report: inspect.ModelReport, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(report)
    return out.getvalue()


def test_the_published_tinys_numbers(tiny):
    assert tiny.parameters == 7_893_392_800
    assert sum(row.tensors for row in tiny.arrays) == 9_283
    routed = 23 * 128 * 3 * 512 * 1536
    assert tiny.activated == tiny.parameters - routed * 120 // 128
    assert tiny.embedding == 157184 * 1536


def test_the_published_tinys_memory(tiny):
    assert tiny.memory.cache_per_token == 6 * 576 * 2 == 6_912
    states = tiny.memory.state_per_sequence
    assert states == {"recurrent": 18 * 16 * 128 * 128 * 4, "conv": 18 * 3 * 2048 * 3 * 2}
    wide = inspect.report(tiny.config, jnp.float32).memory
    assert wide.cache_per_token == 2 * 6_912
    assert wide.state_per_sequence == {"recurrent": states["recurrent"], "conv": 2 * states["conv"]}


@pytest.mark.slow
def test_the_published_flashs_numbers():
    report = inspect.report(Ling3Config.from_dict(FLASH))
    assert 124e9 < report.parameters < 125e9
    assert 5.0e9 < report.activated - report.embedding < 5.2e9
    assert report.memory.cache_per_token == 7 * 576 * 2
    assert "model.layers.36-40.mlp  experts, clamped at 4 (shared at 5)  5 x" in shown(report)
    assert "model.layers.41.mlp  experts, clamped at 4 (shared at 7)" in shown(report)


def test_everything_is_shown_folded(tiny):
    text = shown(tiny)
    for said in (
        "7,893,392,800 in 9,283 tensors",
        "6,912 bytes per token",
        "18,874,368 bytes per sequence (recurrent)",
        "663,552 bytes per sequence (conv)",
        "0-3    KDA* KDA KDA MLA",
        "20-23  KDA KDA KDA MLA",
        "model.layers.0-2,4-6,8-10,12-14,16-18,20-22.attention  KDA  18 x",
        "model.layers.3,7,11,15,19,23.attention  MLA  6 x",
        "model.layers.0.mlp  dense  21,233,664",
        "model.layers.1-23.mlp  experts  23 x",
        "experts.{0..127}.up_proj.weight",
        "model.word_embeddings.weight",
    ):
        assert said in text, said
    assert len(text.splitlines()) < 80
    assert "…" not in shown(tiny, width=60)


def test_no_array_is_folded_within_80_columns(tiny):
    """What the checkpoint has instead moves to a line of its own."""
    row = f"  experts.gate_proj.weight{'[128, 512, 1536]':>26}  bfloat16    100,663,296"
    published = "experts.{0..127}.gate_proj.weight [512, 1536]"
    assert f"{row}  {published}" in shown(tiny, width=160).splitlines()
    narrow = shown(tiny, width=80).splitlines()
    at = narrow.index(row)
    assert narrow[at + 1] == f"    {published}" and narrow[at + 2].startswith("  experts.up_proj.weight ")


def test_each_array_says_where_it_comes_from(tiny):
    rows = {row.path: row for row in tiny.arrays}
    conv = rows["model.layers.0.attention.q_conv1d.weight"]
    assert (conv.published, conv.shape, conv.published_shape) == (conv.path, (2048, 4), (2048, 1, 4))
    experts = rows["model.layers.1.mlp.experts.down_proj.weight"]
    assert experts.published == "model.layers.1.mlp.experts.{0..127}.down_proj.weight"
    assert (experts.shape, experts.published_shape, experts.tensors) == ((128, 1536, 512), (1536, 512), 128)
    plain = rows["model.layers.3.attention.kv_b_proj.weight"]
    assert (plain.published, plain.published_shape, plain.dtype) == (plain.path, plain.shape, "bfloat16")


def test_clamped_layers_stand_apart():
    limits = [0.0, 4.0, 4.0, 0.0]
    config = Ling3Config(num_hidden_layers=4, expert_swiglu_limit_list=limits, share_expert_swiglu_limit_list=[5.0] * 4)
    text = shown(inspect.report(config))
    assert "model.layers.1-2.mlp  experts, clamped at 4 (shared at 5)  2 x" in text
    assert "model.layers.3.mlp  experts, clamped at 0 (shared at 5)" in text


def test_json(tiny):
    raw = json.loads(json.dumps(tiny.to_dict()))
    assert Ling3Config.from_dict(raw["config"]) == tiny.config
    assert raw["parameters"] == sum(row["parameters"] for row in raw["arrays"])
    assert raw["layers"][3] == {"layer": 3, "attention": "mla", "mlp": "moe"}
    assert raw["layers"][0] == {"layer": 0, "attention": "kda", "mlp": "dense"}
    assert raw["memory_bytes"] == {
        "cache_per_token": 6_912,
        "recurrent_state_per_sequence": 18_874_368,
        "conv_state_per_sequence": 663_552,
    }
    assert raw["dtypes_as_stored"] is False and raw["problem"] is None


def test_a_configuration_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        report = inspect.report(source)
        assert report.parameters == 7_893_392_800 and not report.stored
    assert "there are no weights to look at" in shown(report)


def test_dtypes_as_stored(directory):
    report = inspect.report(directory)
    dtypes = {row.path: row.dtype for row in report.arrays}
    assert report.stored and report.problem is None
    assert dtypes["model.norm.weight"] == "bfloat16"
    assert dtypes["model.layers.0.attention.A_log"] == "float32"
    assert "as stored" in shown(report)


def test_experts_of_several_dtypes(directory):
    weights = safetensors.numpy.load_file(directory / "model.safetensors")
    name = "model.layers.2.mlp.experts.0.up_proj.weight"
    safetensors.numpy.save_file(weights | {name: weights[name].astype(np.float32)}, directory / "model.safetensors")
    dtypes = {row.path: row.dtype for row in inspect.report(directory).arrays}
    assert dtypes["model.layers.2.mlp.experts.up_proj.weight"] == "bfloat16/float32"


def test_weights_that_cannot_be_read_do_not_hide_the_rest(directory):
    (directory / "model.safetensors").write_bytes(b"no")
    report = inspect.report(directory)
    assert report.problem is not None and "model.safetensors" in report.problem
    assert "The weights cannot be read" in shown(report)
    assert report.parameters > 0


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError):
        inspect.report(tmp_path)
    with pytest.raises(FileNotFoundError):
        inspect.report(tmp_path / "absent")


def test_an_ablated_model_says_so(tiny):
    cut = dataclasses.replace(tiny.config, kda_short_conv=False, layer_overrides={1: {"attention": "none"}})
    report = inspect.report(cut)
    assert '"kda_short_conv": false, "layer_overrides": {"1": {"attention": "none"}}' in shown(report)
    assert "KDA* NONE KDA MLA" in shown(report) and "ablated" not in shown(tiny)
    assert report.memory.state_per_sequence == {"recurrent": 17 * 16 * 128 * 128 * 4, "conv": 0}
