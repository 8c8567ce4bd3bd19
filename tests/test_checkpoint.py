import dataclasses
import errno
import itertools
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizer_cases
from exhaustive_cases import exhaustively
from fresh_process import in_a_process
from published_configs import TINY
from random_checkpoint import FLASH_LIKE, TINY_LIKE, draw, to_bfloat16, write

import ling3
from ling3.checkpoint import CheckpointError, copying, load, safetensors_file, save, shards, weight_names
from ling3.checkpoint.names import structure
from ling3.families.ling3_config import ConfigError, Ling3Config
from ling3.leaves import array_leaves

CONFIG = dataclasses.replace(
    TINY_LIKE, num_hidden_layers=4, layer_group_size=4, num_experts=8, n_group=4, topk_group=2, vocab_size=61
)
STORED = to_bfloat16(draw(CONFIG, seed=0))
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.fixture
def directory(tmp_path) -> Path:
    write(tmp_path / "x", CONFIG, STORED)
    return tmp_path / "x"


def with_weights(directory: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    weights = dict(STORED)
    change(weights)
    safetensors.numpy.save_file(weights, directory / "model.safetensors")
    return directory


def sharded(directory: Path) -> dict[str, str]:
    """Cut the single file in two, with an index; returns the weight map."""
    names = sorted(STORED)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (directory / "model.safetensors").unlink()
    for file, part in halves.items():
        safetensors.numpy.save_file({name: STORED[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(directory: Path, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory, **options)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def stored_in(directory: Path) -> dict[str, np.ndarray]:
    stored = {}
    for file in directory.glob("*.safetensors"):
        stored |= safetensors.numpy.load_file(file)
    return stored


def arrays_of(model: ling3.CausalLM) -> dict[str, np.ndarray]:
    return {leaf.path: np.asarray(leaf.value) for leaf in array_leaves(model)}


def negated(model: ling3.CausalLM) -> ling3.CausalLM:
    return eqx.tree_at(lambda m: m.lm_head.weight, model, replace_fn=lambda w: -w)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


class TestNames:
    def test_the_census_of_the_published_tiny(self):
        weights = list(weight_names(Ling3Config.from_dict(TINY)))
        assert len(weights) == len({weight.name for weight in weights}) == 9_283
        assert sum(weight.size for weight in weights) == 7_893_392_800

    def test_names_and_shapes_are_the_published_ones(self):
        assert {w.name: w.shape for w in weight_names(CONFIG)} == {name: w.shape for name, w in STORED.items()}

    @pytest.mark.slow
    def test_a_structure_of_the_published_flash_allocates_nothing(self):
        grown = in_a_process("""
            small = Ling3Config.from_dict(FLASH | {"num_hidden_layers": 6, "expert_swiglu_limit_list": None,
                                                   "share_expert_swiglu_limit_list": None})
            structure(small)
            config = Ling3Config.from_dict(FLASH)
            before = peak()
            built = structure(config)
            print(peak() - before)
        """)
        assert grown < 50 * 2**20


class TestLoad:
    def test_every_array_is_where_its_name_says(self, directory):
        model = load(directory)
        assert model.config == CONFIG
        layer = model.model.layers[2]
        np.testing.assert_array_equal(layer.attention.f_proj.weight, STORED["model.layers.2.attention.f_proj.weight"])
        np.testing.assert_array_equal(
            layer.attention.k_conv1d.weight, STORED["model.layers.2.attention.k_conv1d.weight"][:, 0]
        )
        np.testing.assert_array_equal(layer.mlp.experts.up_proj.weight[5], STORED[EXPERT])
        np.testing.assert_array_equal(model.lm_head.weight, STORED["lm_head.weight"])

    @pytest.mark.parametrize("place", ["model.layers.{}.self_attn", "model.layers.{}.attention", "model"])
    def test_tables_of_rope_are_skipped(self, directory, place):
        """As old checkpoints have them; the numbers follow from the configuration."""
        old = {
            f"{place.format(layer)}.rotary_emb.{table}": np.ones(2, np.float32)
            for layer in range(CONFIG.num_hidden_layers)
            for table in ("inv_freq", "cos_cached", "sin_cached")
        }
        assert_same(arrays_of(load(with_weights(directory, lambda w: w.update(old)))), arrays_of(load(directory)))

    def test_other_tables_are_not(self, directory):
        message = refusal(with_weights(directory, lambda w: w.update({"model.inv_freq": np.ones(2, np.float32)})))
        assert "no place for:\n    model.inv_freq, in" in message

    def test_as_stored(self, directory):
        dtypes = {leaf.path: np.dtype(leaf.value.dtype) for leaf in array_leaves(load(directory))}
        for weight in weight_names(CONFIG):
            assert dtypes[weight.path] == STORED[weight.name].dtype

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_in_a_dtype(self, directory, dtype):
        model = load(directory, dtype)
        expected = {leaf.path: leaf.value.dtype for leaf in array_leaves(structure(CONFIG, dtype))}
        assert {leaf.path: leaf.value.dtype for leaf in array_leaves(model)} == expected
        layer = model.model.layers[1]
        assert layer.attention.q_proj.weight.dtype == dtype
        assert (
            layer.attention.A_log.dtype
            == layer.input_layernorm.weight.dtype
            == layer.mlp.gate.weight.dtype
            == jnp.float32
        )
        np.testing.assert_array_equal(
            np.asarray(layer.mlp.gate.weight), STORED["model.layers.1.mlp.gate.weight"].astype(np.float32)
        )

    def test_float32_weights_are_rounded_to_bfloat16(self, directory):
        weights = draw(CONFIG, seed=0)
        write(directory, CONFIG, weights)
        found = np.asarray(load(directory, jnp.bfloat16).lm_head.weight)
        np.testing.assert_array_equal(found, weights["lm_head.weight"].astype(ml_dtypes.bfloat16))

    def test_float16_is_read(self, directory):
        half = STORED["lm_head.weight"].astype(np.float16)
        with_weights(directory, lambda weights: weights.update({"lm_head.weight": half}))
        assert load(directory).lm_head.weight.dtype == jnp.float16
        np.testing.assert_array_equal(load(directory, jnp.float32).lm_head.weight, half.astype(np.float32))

    def test_no_other_dtype(self, directory):
        with pytest.raises(ValueError, match="dtype: found float16; expected None"):
            load(directory, jnp.float16)

    def test_the_model_outlives_its_files(self, directory):
        model = load(directory)
        (directory / "model.safetensors").write_bytes(bytes(1000))
        np.testing.assert_array_equal(model.lm_head.weight, STORED["lm_head.weight"])

    def test_a_log_in_four_dimensions(self, directory):
        name = "model.layers.0.attention.A_log"
        with_weights(directory, lambda weights: weights.update({name: STORED[name].reshape(1, 1, -1, 1)}))
        np.testing.assert_array_equal(load(directory).model.layers[0].attention.A_log, STORED[name])

    @pytest.mark.parametrize("dtype", [None, *exhaustively(["float32"])])
    @pytest.mark.slow
    def test_memory_peaks_at_the_model(self, tmp_path, dtype):
        config = dataclasses.replace(CONFIG, vocab_size=2**18, hidden_size=128)
        rng = np.random.default_rng(0)
        weights = {
            w.name: np.full(w.shape, rng.uniform(0.1, 1), np.float32).astype(ml_dtypes.bfloat16)
            for w in weight_names(config)
        }
        write(tmp_path / "x", config, weights)
        total = sum(array.nbytes for array in weights.values()) * (1 if dtype is None else 2)
        grown = in_a_process(f"""
            import jax, jax.numpy as jnp
            structure(Ling3Config())
            jax.block_until_ready(jnp.ones(3))
            before = peak()
            model = load({str(tmp_path / "x")!r}, {dtype!r})
            print(peak() - before)
        """)
        assert 0.9 * total <= grown <= total + 24 * 2**20 < 1.25 * total

    def test_headers_are_judged_before_any_weight_is_read(self, directory, monkeypatch):
        with_weights(directory, lambda weights: weights.pop(EXPERT))
        monkeypatch.setattr(safetensors_file.StoredTensor, "read", None)
        assert EXPERT in refusal(directory)


class TestReading:
    @pytest.mark.parametrize("dtype", [None, jnp.float32])
    def test_every_byte_is_read_once_and_in_small_pieces(self, directory, monkeypatch, dtype):
        monkeypatch.setattr(copying, "BLOCK", 100)
        reads, preadv = [], os.preadv

        def counted(file, buffers, offset):
            count = preadv(file, buffers, offset)
            reads.append((offset, offset + count))
            return count

        monkeypatch.setattr(os, "preadv", counted)
        loaded = arrays_of(load(directory, dtype))
        path = directory / "model.safetensors"
        data = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        assert sum(end - start for start, end in reads) == data == sum(array.nbytes for array in STORED.values())
        ordered = sorted(reads)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
        assert max(end - start for start, end in reads) <= 400
        monkeypatch.undo()
        assert_same(loaded, arrays_of(load(directory, dtype)))

    def test_every_bfloat16_is_widened_bit_for_bit(self, directory):
        config = dataclasses.replace(CONFIG, vocab_size=2**10)
        stored = to_bfloat16(draw(config, seed=0))
        embeddings = stored["model.word_embeddings.weight"].reshape(-1)
        assert embeddings.size > 2**16
        embeddings[: 2**16] = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
        write(directory.parent / "y", config, stored)
        found = load(directory.parent / "y", jnp.float32, check_finite=False).model.word_embeddings.weight
        bits = np.asarray(found).reshape(-1)[: 2**16].view(np.uint32)
        np.testing.assert_array_equal(bits, np.arange(2**16, dtype=np.uint32) << np.uint32(16))

    def test_the_first_of_several_errors(self, directory, monkeypatch):
        """And no thread goes on: what had not begun is given up."""
        monkeypatch.setattr(copying, "BLOCK", 10)
        begun = []

        def broken(self, start, out, stride):
            begun.append(self.name)
            raise CheckpointError(f"{self.name} at {start}")

        monkeypatch.setattr(safetensors_file.StoredTensor, "read", broken)
        with pytest.raises(CheckpointError, match=r"word_embeddings\.weight at 0$"):
            load(directory)
        assert len(begun) < STORED["model.word_embeddings.weight"].size / 10
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ling3-load")]


class TestRefused:
    def test_missing_and_left_over_together(self, directory):
        def change(weights):
            weights["model.layers.2.mlp.experts.8.up_proj.weight"] = weights.pop(EXPERT)
            weights["model.norm.bias"] = weights["model.norm.weight"]
            del weights["lm_head.weight"]

        message = refusal(with_weights(directory, change))
        asked, left = message.split("has no place for")
        assert EXPERT in asked and "lm_head.weight" in asked
        assert "experts.8.up_proj" in left and "model.norm.bias, in model.safetensors" in left

    def test_long_lists_are_cut(self, directory):
        message = refusal(with_weights(directory, lambda weights: weights.clear() or weights.update(x=np.zeros(1))))
        assert f"and {len(STORED) - 12:,} more" in message

    def test_shapes(self, directory):
        def change(weights):
            weights[EXPERT] = weights[EXPERT].T.copy()
            weights["model.layers.0.attention.q_conv1d.weight"] = weights["model.layers.0.attention.q_conv1d.weight"][
                :, 0
            ]

        message = refusal(with_weights(directory, change))
        assert f"{EXPERT}, in model.safetensors: found [72, 32]; expected [32, 72]" in message
        assert "q_conv1d.weight, in model.safetensors: found [64, 4]; expected [64, 1, 4]" in message

    @pytest.mark.parametrize("dtype", [np.int8, np.float64, ml_dtypes.float8_e4m3fn])
    def test_types(self, directory, dtype):
        message = refusal(
            with_weights(directory, lambda weights: weights.update({EXPERT: weights[EXPERT].astype(dtype)}))
        )
        assert EXPERT in message and "expected F32, BF16, F16" in message and "use another checkpoint" in message

    def test_experts_of_several_types(self, directory):
        with_weights(directory, lambda weights: weights.update({EXPERT: weights[EXPERT].astype(np.float32)}))
        message = refusal(directory)
        assert f"{EXPERT} is F32" in message and "dtype=jnp.float32" in message
        np.testing.assert_array_equal(
            load(directory, jnp.float32).model.layers[2].mlp.experts.up_proj.weight[5],
            STORED[EXPERT].astype(np.float32),
        )

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_numbers_that_are_not_finite(self, directory, value):
        def change(weights):
            weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float16)
            for name in names:
                weights[name] = weights[name].copy()
                weights[name].reshape(-1)[-1] = value

        names = (EXPERT, "lm_head.weight", "model.layers.0.attention.A_log", "model.norm.weight")
        with_weights(directory, change)
        message = refusal(directory)
        assert sorted(message.splitlines()[2:]) == sorted(f"    {name}, in model.safetensors" for name in names)
        assert not bool(jnp.isfinite(load(directory, check_finite=False).lm_head.weight).all())

    def test_only_pickled_weights(self, directory):
        (directory / "model.safetensors").unlink()
        (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}))
        message = refusal(directory)
        assert "pytorch_model.bin" in message and "never reads pickled" in message

    def test_no_weights(self, directory):
        (directory / "model.safetensors").unlink()
        assert "found no .safetensors file" in refusal(directory)

    def test_a_damaged_file_is_named(self, directory):
        whole = (directory / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(whole[:-3])
        assert "model.safetensors: no valid safetensors file" in refusal(directory)

    def test_a_bad_configuration(self, directory):
        (directory / "config.json").write_text("{}")
        with pytest.raises(ConfigError):
            load(directory)

    def test_no_such_directory(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no checkpoint directory"):
            load(tmp_path / "absent")

    def test_the_names_transformers_writes_get_a_hint(self, directory):
        def change(weights):
            for i in (0, 1, 2):
                weights[f"model.layers.{i}.attention.dense.weight"] = weights.pop(
                    f"model.layers.{i}.attention.o_proj.weight"
                )

        assert "transformers 5 writes KDA's o_proj" in refusal(with_weights(directory, change))


class TestMultiTokenPrediction:
    MTP = (
        "attention.q_a_proj.weight",
        "mlp.experts.0.up_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "eh_proj.weight",
        "enorm.weight",
        "hnorm.weight",
        "final_layernorm.weight",
    )

    def write(self, directory: Path, count: int | None, *extra: str) -> Path:
        write(directory, dataclasses.replace(CONFIG, num_nextn_predict_layers=count), STORED)
        layers = 1 if count is None else count
        names = [f"model.layers.{4 + layer}.{part}" for layer in range(layers) for part in self.MTP]
        return with_weights(
            directory, lambda weights: weights.update({n: np.zeros(3, np.int8) for n in (*names, *extra)})
        )

    @pytest.mark.parametrize("count", [1, 2, None])
    def test_is_skipped(self, directory, count):
        model = load(self.write(directory, count))
        assert len(model.model.layers) == 4 and model.config.num_nextn_predict_layers == count

    @pytest.mark.parametrize(
        "extra",
        [
            "model.layers.5.enorm.weight",
            "model.layers.4.shared_head.weight",
            "model.layers.4",
            "model.layers.3.enorm.weight",
            "model.layers.-4.enorm.weight",
            "mtp.layers.4.enorm.weight",
        ],
    )
    @pytest.mark.parametrize("count", [1, None])
    def test_nothing_else_is(self, directory, extra, count):
        message = refusal(self.write(directory, count, extra))
        assert message.split("has no place for:\n")[1].strip() == f"{extra}, in model.safetensors"

    def test_not_without_the_configurations_word(self, directory):
        assert "model.layers.4.enorm.weight" in refusal(self.write(directory, 0, "model.layers.4.enorm.weight"))


class TestShards:
    def test_with_an_index(self, directory, tmp_path):
        sharded(directory)
        save(load(directory), tmp_path / "out")
        assert_same(stored_in(tmp_path / "out"), STORED)

    def test_without_an_index(self, directory):
        sharded(directory)
        (directory / "model.safetensors.index.json").unlink()
        np.testing.assert_array_equal(load(directory).lm_head.weight, STORED["lm_head.weight"])

    @pytest.mark.parametrize("name", ["adapter_model", "consolidated", "model.fp16", "model-00001-of-00002"])
    def test_beside_the_single_file_others_do_not_count(self, directory, name):
        """An adapter, Mistral's layout of the same weights, another precision, a shard of another time."""
        other = {"some.lora_A.weight": np.ones((2, 3), np.float32), EXPERT: np.zeros((2, 3), np.float32)}
        safetensors.numpy.save_file(other, directory / f"{name}.safetensors")
        np.testing.assert_array_equal(load(directory).model.layers[2].mlp.experts.up_proj.weight[5], STORED[EXPERT])

    def test_shards_that_no_index_names_do_not_count(self, directory):
        sharded(directory)
        for name in ("consolidated", "model-00003-of-00002"):
            safetensors.numpy.save_file({EXPERT: np.zeros((2, 3), np.float32)}, directory / f"{name}.safetensors")
        np.testing.assert_array_equal(load(directory).model.layers[2].mlp.experts.up_proj.weight[5], STORED[EXPERT])

    def test_an_index_may_leave_out_tensors_of_its_shards(self, directory):
        weight_map = sharded(directory)
        del weight_map["lm_head.weight"]
        write_index(directory, weight_map)
        np.testing.assert_array_equal(load(directory).lm_head.weight, STORED["lm_head.weight"])

    def test_hidden_files_do_not_count(self, directory):
        (directory / "._model.safetensors").write_bytes(b"\0" * 163)
        load(directory)

    @pytest.mark.parametrize(
        "name",
        [
            "../x.safetensors",
            "/etc/x.safetensors",
            "a/b.safetensors",
            "..",
            "",
            "x.bin",
            ".a.safetensors",
            3,
            None,
            ["a"],
        ],
    )
    def test_names_that_lead_elsewhere(self, directory, name):
        weight_map = sharded(directory)
        message = refusal_at(directory, weight_map | {EXPERT: name})
        assert f"{EXPERT}: {name!r}" in message and "no plain name" in message

    def test_a_shard_that_is_not_there(self, directory):
        weight_map = sharded(directory)
        message = refusal_at(directory, weight_map | {EXPERT: "c.safetensors", "lm_head.weight": "d.safetensors"})
        assert "c.safetensors: cannot be found" in message and "d.safetensors: cannot be found" in message

    def test_a_tensor_in_two_shards(self, directory):
        weight_map = sharded(directory)
        other = "a.safetensors" if weight_map[EXPERT] == "b.safetensors" else "b.safetensors"
        content = safetensors.numpy.load_file(directory / other)
        safetensors.numpy.save_file(content | {EXPERT: STORED[EXPERT]}, directory / other)
        assert f"{EXPERT}: in a.safetensors and b.safetensors" in refusal(directory)
        (directory / "model.safetensors.index.json").unlink()
        assert f"{EXPERT}: in a.safetensors and b.safetensors" in refusal(directory)

    def test_an_index_that_disagrees_with_the_shards(self, directory):
        weight_map = sharded(directory)
        own = weight_map[EXPERT]
        other = "a.safetensors" if own == "b.safetensors" else "b.safetensors"
        message = refusal_at(directory, weight_map | {EXPERT: other, "ghost": own})
        assert f"{EXPERT}: not in {other}, but in {own}" in message
        assert f"ghost: not in {own}" in message

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[]", "no weight_map"),
            ('{"weight_map": {}}', "no weight_map"),
            ('{"weight_map": ["a"]}', "no weight_map"),
            ("{", "no valid JSON"),
            ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the same key twice: 'a'"),
            ('{"a":' * 100000 + "1" + "}" * 100000, "nested too deeply"),
        ],
    )
    def test_a_damaged_index(self, directory, text, said):
        (directory / "model.safetensors.index.json").write_text(text)
        assert said in refusal(directory)

    @pytest.mark.parametrize("name", ["\ud800.safetensors", "a\nb.safetensors", "\x1b[2J.safetensors"])
    def test_names_that_cannot_be_printed(self, directory, name):
        weight_map = sharded(directory)
        message = refusal_at(directory, weight_map | {EXPERT: name})
        assert (
            "model.safetensors.index.json" in message
            and f"{EXPERT}: {name!r}" in message
            and "no plain name" in message
        )
        message.encode()

    def test_more_files_than_a_process_may_open(self, directory):
        sharded(directory)
        message = refusal_at(directory, {f"x{i}": f"{i}.safetensors" for i in range(2000)})
        assert "index.json: found 2,000 safetensors files; expected at most 1,000" in message

    def test_an_index_that_is_no_file(self, directory):
        (directory / "model.safetensors.index.json").mkdir()
        assert "index.json: cannot be read" in refusal(directory)

    def test_two_checkpoints_in_one_directory(self, directory, tmp_path):
        shutil.copy(directory / "model.safetensors", tmp_path)
        sharded(directory)
        shutil.copy(tmp_path / "model.safetensors", directory)
        assert "remove one of the two" in refusal(directory)

    def test_links_within_the_hubs_cache(self, directory, tmp_path):
        blobs = tmp_path / "models--a--b" / "blobs"
        snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (directory / name).rename(blobs / f"blob-{name}")
            (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / f"blob-{name}")
        np.testing.assert_array_equal(load(snapshot).lm_head.weight, STORED["lm_head.weight"])

    @pytest.mark.parametrize("indexed", [True, False])
    def test_links_that_lead_elsewhere(self, directory, tmp_path, indexed):
        (directory / "model.safetensors").rename(tmp_path / "model.safetensors")
        (directory / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
        if indexed:
            write_index(directory, dict.fromkeys(STORED, "model.safetensors"))
        assert f"is a link to {tmp_path / 'model.safetensors'}" in refusal(directory)

    def test_a_broken_link(self, directory):
        (directory / "model.safetensors").unlink()
        (directory / "model.safetensors").symlink_to("nowhere")
        assert "model.safetensors: cannot be found" in refusal(directory)


class TestSave:
    def test_without_query_compression_and_with_clamps(self, tmp_path):
        config = dataclasses.replace(FLASH_LIKE, expert_swiglu_limit_list=[0, 0, 4, 4], kda_lower_bound=None)
        weights = to_bfloat16(draw(config, seed=1))
        write(tmp_path / "x", config, weights)
        model = load(tmp_path / "x")
        assert model.model.layers[2].mlp.experts.swiglu.limit == 4.0
        save(model, tmp_path / "out")
        assert_same(stored_in(tmp_path / "out"), weights)
        assert load(tmp_path / "out").config == config

    @pytest.mark.parametrize("vocabulary", [61, 128])
    def test_what_is_loaded_is_what_is_saved(self, vocabulary, tmp_path):
        config = dataclasses.replace(CONFIG, vocab_size=vocabulary)
        weights = to_bfloat16(draw(config, seed=0))
        write(tmp_path / "x", config, weights)
        save(load(tmp_path / "x"), tmp_path / "out")
        assert_same(stored_in(tmp_path / "out"), weights)
        assert Ling3Config.from_file(tmp_path / "out") == config
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"

    def test_in_shards(self, directory, tmp_path):
        save(load(directory), tmp_path / "out", max_shard_bytes=50_000)
        shards = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
        assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors" and len(shards) > 5
        assert all((tmp_path / "out" / name).stat().st_size < 70_000 for name in shards)
        assert_same(stored_in(tmp_path / "out"), STORED)
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in STORED.values())
        assert_same(arrays_of(load(tmp_path / "out")), arrays_of(load(directory)))

    def test_multi_token_prediction_is_gone(self, directory, tmp_path):
        write(directory, dataclasses.replace(CONFIG, num_nextn_predict_layers=1), STORED)
        save(load(directory), tmp_path / "out")
        assert Ling3Config.from_file(tmp_path / "out").num_nextn_predict_layers == 0

    def test_mla_without_rope_and_the_layers_by_their_attention(self, directory, tmp_path):
        write(directory, dataclasses.replace(CONFIG, mla_rope=False), STORED)
        model = load(directory)
        assert [layer.attention.rotation for layer in model.model.layers[3:]] == [None]
        save(model, tmp_path / "out")
        raw = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (raw["use_mla_nope"], raw["model_type"]) == (True, "bailing_hybrid")
        assert raw["linear_attn_config"]["full_attn_layers"] == [4]
        assert load(tmp_path / "out").config == model.config

    def test_with_a_tokenizer(self, directory, tmp_path):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "pytorch_model.bin"):
            (directory / name).write_text(name)
        model = load(directory)
        save(model, tmp_path / "out")
        save(ling3.ablate.no_output_gate(model, "kda"), tmp_path / "cut")
        save(model, tmp_path / "bare", tokenizer_from=None)
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
        assert (tmp_path / "cut" / "tokenizer.json").exists() and not (tmp_path / "bare" / "tokenizer.json").exists()
        assert (tmp_path / "out" / "chat_template.jinja").read_text() == "chat_template.jinja"
        assert not (tmp_path / "out" / "pytorch_model.bin").exists()

    def test_a_tokenizer_that_is_not_there(self, directory, tmp_path, caplog):
        save(load(directory), tmp_path / "bare")
        assert "a model is saved without a tokenizer, which serving needs: give tokenizer_from" in caplog.text
        with pytest.raises(CheckpointError, match=r"found no tokenizer\.json"):
            save(load(directory), tmp_path / "out", tokenizer_from=directory)
        assert not (tmp_path / "out").exists()

    def test_what_is_there_stays(self, directory, tmp_path):
        model = load(directory)
        (tmp_path / "out").mkdir()
        save(model, tmp_path / "out")
        with pytest.raises(CheckpointError, match="is not empty"):
            save(model, tmp_path / "out")
        with pytest.raises(CheckpointError, match="is a file"):
            save(model, directory / "config.json", overwrite=True)
        (tmp_path / "diary").mkdir()
        (tmp_path / "diary" / "page").touch()
        with pytest.raises(CheckpointError, match="holds no checkpoint"):
            save(model, tmp_path / "diary", overwrite=True)
        assert (tmp_path / "diary" / "page").exists()

    def test_replacing_a_checkpoint_even_the_one_it_came_from(self, directory, tmp_path):
        model = negated(load(directory))
        save(model, directory, overwrite=True)
        assert_same(arrays_of(load(directory)), arrays_of(model))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]
        assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]

    def test_what_is_no_part_of_the_checkpoint_stays(self, directory, monkeypatch):
        """In the working directory, too, which keeps its place."""
        others = ("notes.txt", ".git/HEAD", "model.safetensors.bak", "lora.safetensors", "tokenizer.json")
        for name in others:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(name)
        weight_map = sharded(directory)
        model = negated(load(directory))
        monkeypatch.chdir(directory)
        inode = directory.stat().st_ino
        save(model, ".", overwrite=True)
        assert directory.stat().st_ino == inode and Path.cwd() == directory
        assert all((directory / name).read_text() == name for name in others)
        assert not any((directory / name).exists() for name in weight_map.values())
        assert_same(arrays_of(load(directory)), arrays_of(model))
        assert not list(directory.glob(".ling3*"))

    def test_from_shards_to_one_file_and_back(self, directory):
        model = load(directory)
        save(model, directory, max_shard_bytes=50_000, overwrite=True)
        assert not (directory / "model.safetensors").exists()
        save(negated(model), directory, max_shard_bytes=100_000, overwrite=True)
        assert_same(arrays_of(load(directory)), arrays_of(negated(model)))
        save(model, directory, overwrite=True)
        assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]

    def test_a_tokenizer_is_replaced_whole(self, directory, tmp_path):
        model = load(directory)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "tokenizer.json").write_text("new")
        for name in ("tokenizer.json", "chat_template.jinja"):
            (directory / name).write_text("old")
        save(model, directory, overwrite=True)
        assert (directory / "chat_template.jinja").read_text() == (directory / "tokenizer.json").read_text() == "old"
        save(model, directory, overwrite=True, tokenizer_from=tmp_path / "other")
        assert (directory / "tokenizer.json").read_text() == "new" and not (directory / "chat_template.jinja").exists()
        save(model, directory, overwrite=True, tokenizer_from=directory)
        assert (directory / "tokenizer.json").read_text() == "new"

    def test_another_programs_configuration(self, directory, tmp_path):
        model = load(directory)
        (tmp_path / "app").mkdir()
        (tmp_path / "app" / "config.json").write_text('{"port": 8080}')
        with pytest.raises(CheckpointError, match=r"app: holds no checkpoint(.|\n)*architectures: not in this config"):
            save(model, tmp_path / "app", overwrite=True)
        assert (tmp_path / "app" / "config.json").read_text() == '{"port": 8080}'

    def test_a_directory_by_the_name_of_weights(self, directory):
        model = load(directory)
        sharded(directory)
        (directory / "model-00001-of-00002.safetensors").mkdir()
        with pytest.raises(CheckpointError, match=r"found model-00001-of-00002\.safetensors, which is no file"):
            save(model, directory, overwrite=True)

    @pytest.mark.parametrize("overwrite", [True, False])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EBUSY])
    def test_a_failure_leaves_nothing_behind(self, directory, tmp_path, monkeypatch, overwrite, number):
        model = load(directory)
        target = directory if overwrite else tmp_path / "out"
        real = safetensors_file.write

        def fail(path, tensors, read):
            real(path, tensors, read)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(safetensors_file, "write", fail)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(OSError, match=r"a checkpoint of [\d,]+ bytes could not be saved there") as caught:
            save(model, target, overwrite=overwrite)
        assert caught.value.errno == number
        assert os.strerror(number) in str(caught.value) and str(target) in str(caught.value)
        assert ("make room on the disk" in str(caught.value)) == (number == errno.ENOSPC)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("failing", ["x/config.json", "x/model.safetensors", "new", "ready/config.json", "old"])
    def test_a_failed_replacement_puts_the_old_one_back(self, directory, tmp_path, monkeypatch, failing):
        """Whichever of its moves fails."""
        model = negated(load(directory))
        rename = Path.rename

        def fail(path, target):
            if str(path).endswith(f"/{failing}"):
                raise OSError(errno.EBUSY, "busy")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match=r"nothing was replaced .*busy"):
            save(model, directory, overwrite=True)
        assert_same(stored_in(directory), STORED)
        assert Ling3Config.from_file(directory) == CONFIG
        assert [p.name for p in tmp_path.iterdir()] == ["x"]
        assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]

    @pytest.mark.slow
    def test_killed_at_any_moment_it_is_the_old_or_the_new_one(self, directory, tmp_path, monkeypatch):
        """The directory is copied after each step, and the copy loaded as the next process would find it."""
        old = load(directory)
        write(tmp_path / "y", dataclasses.replace(CONFIG, rope_theta=5.0), STORED)
        new = negated(load(tmp_path / "y"))
        copies = []

        def then_copied(step):
            def stepped(path, *args, **kwargs):
                step(path, *args, **kwargs)
                copies.append(tmp_path / f"copy-{len(copies)}")
                shutil.copytree(directory, copies[-1])

            return stepped

        with monkeypatch.context() as patch:
            for name in ("rename", "rmdir"):
                patch.setattr(Path, name, then_copied(getattr(Path, name)))
            save(new, directory, overwrite=True, max_shard_bytes=200_000)
        kinds = []
        for copy in copies:
            whole = (copy / "config.json").exists()
            found = load(copy)
            kinds.append((is_new := found.config.rope_theta == 5.0, whole))
            assert_same(arrays_of(found), arrays_of(new if is_new else old))
            left = {p.name for p in copy.iterdir()} - {".ling3.partial"}
            assert left == ({p.name for p in directory.iterdir()} if is_new else {"config.json", "model.safetensors"})
            save(old, copy, overwrite=True)
            assert sorted(p.name for p in copy.iterdir()) == ["config.json", "model.safetensors"]
        assert len(kinds) > 5
        assert list(dict.fromkeys(kinds)) == [(False, False), (True, False), (True, True)]

    def test_what_a_killed_process_left_is_removed(self, directory, tmp_path):
        model = load(directory)
        for work in (tmp_path / ".out.ling3.partial", directory / ".ling3.partial"):
            (work / "new").mkdir(parents=True)
            (work / "new" / "half.safetensors").write_bytes(bytes(10))
            (work / "lock").touch()
        save(model, tmp_path / "out")
        save(model, directory, overwrite=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "x"]
        assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]

    @pytest.mark.parametrize("overwrite", [True, False])
    def test_two_at_once(self, directory, tmp_path, monkeypatch, overwrite):
        """The first wins, and the second says so."""
        model = load(directory)
        target = directory if overwrite else tmp_path / "out"
        real = safetensors_file.write

        def second(path, tensors, read):
            monkeypatch.setattr(safetensors_file, "write", real)
            with pytest.raises(CheckpointError, match="another process is saving there"):
                save(negated(model), target, overwrite=overwrite)
            real(path, tensors, read)

        monkeypatch.setattr(safetensors_file, "write", second)
        save(model, target, overwrite=overwrite)
        assert_same(stored_in(target), STORED)
        assert sorted(p.name for p in target.iterdir()) == ["config.json", "model.safetensors"]

    def test_a_link_where_a_save_would_write(self, directory, tmp_path):
        """In a stranger's checkpoint it may lead anywhere."""
        for name in ("ready", "old"):
            (tmp_path / "precious" / name).mkdir(parents=True)
            (tmp_path / "precious" / name / "page").touch()
        before = sorted((tmp_path / "precious").rglob("*"))
        (directory / ".ling3.partial").symlink_to(tmp_path / "precious")
        model = load(directory)
        with pytest.raises(FileExistsError, match="is a link"):
            save(model, directory, overwrite=True)
        (directory / ".ling3.partial").unlink()
        (directory / ".ling3.partial").mkdir()
        for name in ("ready", "old"):
            (directory / ".ling3.partial" / name).symlink_to(tmp_path / "precious" / name)
        load(directory)
        assert sorted((tmp_path / "precious").rglob("*")) == before

    def test_replaced_while_it_is_loaded(self, directory, monkeypatch):
        model = load(directory)
        real = shards.open_all

        def replaced(path):
            save(negated(model), directory, overwrite=True)
            return real(path)

        monkeypatch.setattr(shards, "open_all", replaced)
        assert "was replaced while it was being loaded; load it again" in refusal(directory)

    @pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
    def test_numbers_that_are_not_finite(self, directory, tmp_path, value):
        model = load(directory)
        model = eqx.tree_at(lambda m: m.lm_head.weight, model, replace_fn=lambda w: w.at[3, 1].set(value))
        model = eqx.tree_at(
            lambda m: m.model.layers[2].mlp.experts.up_proj.weight, model, replace_fn=lambda w: w.at[5, 0, 0].set(value)
        )
        with pytest.raises(
            CheckpointError, match="NaN or infinite; mend them, or save with check_finite=False"
        ) as caught:
            save(model, tmp_path / "deep" / "out")
        assert sorted(str(caught.value).splitlines()[2:]) == sorted(["    lm_head.weight", f"    {EXPERT}"])
        assert not (tmp_path / "deep").exists()
        save(model, tmp_path / "out", check_finite=False)
        assert EXPERT in refusal(tmp_path / "out")

    def test_shards_of_no_size(self, directory, tmp_path):
        with pytest.raises(ValueError, match="max_shard_bytes: found 0; expected at least 1"):
            save(load(directory), tmp_path / "out", max_shard_bytes=0)

    def test_a_model_that_does_not_fit_its_configuration(self, directory, tmp_path):
        model = load(directory)
        cut = eqx.tree_at(lambda m: m.lm_head.weight, model, model.lm_head.weight[:-1])
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: found bfloat16\[60, 72\]; expected \[61, 72\]"):
            save(cut, tmp_path / "out")
        whole = eqx.tree_at(lambda m: m.lm_head.weight, model, jnp.zeros((61, 72), jnp.int32))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: found int32"):
            save(whole, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_model_that_no_file_had(self, tmp_path):
        model = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, leaf.dtype), structure(CONFIG))
        save(model, tmp_path / "deep" / "out")
        assert_same(arrays_of(load(tmp_path / "deep" / "out")), arrays_of(model))


def refusal_at(directory: Path, weight_map: object) -> str:
    write_index(directory, weight_map)
    return refusal(directory)


def test_the_templates_and_the_vocabulary_of_another_kind_of_tokenizer_go_along(directory, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(tokenizer_cases.directory("tiktoken"), source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (source / "chat_template.jinja").write_text("plain")
    model = load(directory)
    for overwrite in (False, True):
        save(model, target, tokenizer_from=source, overwrite=overwrite)
        saved = ling3.load_tokenizer(target)
        assert {name: one.source for name, one in saved.chat_templates.items()} == {
            "default": "plain",
            "tool_use": "tools",
        }
        assert saved.encode("the cat") == ling3.load_tokenizer(source).encode("the cat")
    # Another checkpoint's tokenizer takes all of it away.
    save(model, target, tokenizer_from="nano", overwrite=True)
    assert not (target / "tiktoken.model").exists() and not (target / "additional_chat_templates").exists()
