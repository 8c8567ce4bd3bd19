"""Multi-token-prediction layers: kept on request, saved again, and without effect on anything else."""

import dataclasses

import equinox as eqx
import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import small_engine
import tiny_transformers
from exhaustive_cases import exhaustively
from jax.sharding import Mesh
from quantized_models import CONFIGS, SIZES
from random_checkpoint import CLAMPED, FLASH_LIKE, TINY_LIKE, draw, draw_well_posed, to_bfloat16, write
from tiny import FLASH, TINY

import ling3
from ling3.checkpoint import CheckpointError, weight_names
from ling3.checkpoint.names import structure
from ling3.checkpoint.safetensors_file import open_file
from ling3.engine.origins import checksum
from ling3.evals.predictions import fingerprint
from ling3.families import without_mtp
from ling3.interpret import inspect

pytestmark = pytest.mark.thorough

ONE = dataclasses.replace(TINY, num_nextn_predict_layers=1)
TWO = dataclasses.replace(TINY_LIKE, num_nextn_predict_layers=2)
TOKENS = np.random.default_rng(0).integers(3, 90, (2, 9))
# As in test_truth.py, where the same rounding through four layers is measured.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def model():
    return ling3.init(ONE, key=jax.random.key(0), mtp=True)


@pytest.fixture(scope="module")
def plain(model):
    return dataclasses.replace(model, mtp=())


def stored(directory):
    """The tensors of a checkpoint, as bytes, by name."""
    found = {}
    for path in directory.glob("*.safetensors"):
        content = path.read_bytes()
        for name, own in open_file(path).items():
            found[name] = own.dtype, own.shape, content[own.start : own.start + own.nbytes]
    return found


def with_tensors(directory, change):
    """The checkpoint in `directory` after `change(tensors)`."""
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    return directory


def test_the_other_weights_are_those_of_the_model_without(model, plain):
    assert eqx.tree_equal(plain, ling3.init(ONE, key=jax.random.key(0)))
    assert model.parameters > plain.parameters


def test_an_index_sees_the_tokens_up_to_the_next(model):
    """Index t depends on tokens 0 to t + 1, and on no other row."""
    logits = ling3.mtp_logits(model, TOKENS)
    assert logits.shape == (2, 8, 96) and logits.dtype == jnp.float32
    changed = TOKENS.copy()
    changed[:, 5] = 91
    difference = np.abs(ling3.mtp_logits(model, changed) - logits).max(axis=(0, 2))
    assert difference[:4].max() <= TOLERANCE and difference[4:].min() > 100 * TOLERANCE
    np.testing.assert_allclose(ling3.mtp_logits(model, TOKENS[:1]), logits[:1], atol=TOLERANCE)


@pytest.mark.parametrize("listed", [True, *exhaustively([False])])
def test_the_layer_s_clamps_are_the_entries_after_the_decoder_layers_(listed, tmp_path):
    """Without such entries, as in Ling-3.0-flash, the layer is not clamped."""
    limits = {"expert_swiglu_limit_list": 0.15, "share_expert_swiglu_limit_list": 0.3} if listed else {}
    lists = {name: (*getattr(CLAMPED, name), limit) for name, limit in limits.items()}
    config = dataclasses.replace(CLAMPED, num_nextn_predict_layers=1, **lists)
    weights, tokens, _, truth = draw_well_posed(config, 40)
    write(tmp_path, config, weights)
    model = ling3.load(tmp_path, jnp.float32, mtp=True)
    logits = np.asarray(ling3.mtp_logits(model, jnp.array([tokens]))[0])
    assert 0.7 < truth["mtp.0"].std() < 1.4
    assert np.abs(logits - truth["mtp.0"]).max() <= TOLERANCE
    ling3.save(model, tmp_path / "saved")
    assert ling3.load(tmp_path / "saved", mtp=True).config == model.config
    ling3.save(ling3.load(tmp_path), tmp_path / "plain")
    assert len(ling3.load(tmp_path / "plain").config.expert_swiglu_limit_list) == config.num_hidden_layers


class TestSaved:
    @pytest.mark.parametrize("config", [TWO, dataclasses.replace(FLASH_LIKE, num_nextn_predict_layers=None)])
    def test_tensor_by_tensor(self, config, tmp_path):
        """A config that does not give their number has one; what is written says so."""
        count = config.num_nextn_predict_layers or 1
        drawn = to_bfloat16(draw(dataclasses.replace(config, num_nextn_predict_layers=count), seed=0))
        write(tmp_path / "a", config, drawn)
        model = ling3.load(tmp_path / "a", mtp=True)
        assert len(model.mtp) == count
        ling3.save(model, tmp_path / "b", max_shard_bytes=100_000)
        assert stored(tmp_path / "a") == stored(tmp_path / "b")
        assert {weight.name for weight in weight_names(config, mtp=True)} == drawn.keys()
        again = ling3.load(tmp_path / "b", mtp=True)
        assert again.config.num_nextn_predict_layers == count and eqx.tree_equal(again.mtp, model.mtp)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["int4", *exhaustively(["int8", "fp8", "mxfp4"])])
    def test_quantized_ones(self, name, tmp_path):
        config = dataclasses.replace(SIZES, num_nextn_predict_layers=1, quantization_config=CONFIGS[name])
        model = ling3.init(config, key=jax.random.key(0), mtp=True)
        ling3.save(model, tmp_path / "a")
        loaded = ling3.load(tmp_path / "a", mtp=True)
        assert type(loaded.mtp[0].eh_proj) is type(model.mtp[0].eh_proj) is not type(model.lm_head)
        ling3.save(loaded, tmp_path / "b")
        assert stored(tmp_path / "a") == stored(tmp_path / "b")
        found, expected = ling3.mtp_logits(loaded, TOKENS), ling3.mtp_logits(model, TOKENS)
        np.testing.assert_allclose(found, expected, atol=1e-4)  # scales' dtype, to which one model rounds
        assert eqx.tree_equal(dataclasses.replace(loaded, mtp=()), ling3.load(tmp_path / "a"))
        dense = ling3.load(tmp_path / "a", jnp.float32, mtp=True, dequantize=True)
        assert dense.mtp[0].eh_proj.weight.shape == (64, 128)

    @pytest.mark.parametrize("to", ["int8", *exhaustively(["int4", "fp8", "mxfp4"])])
    def test_those_that_quantize_writes(self, to, tmp_path):
        config = dataclasses.replace(SIZES, num_nextn_predict_layers=1)
        ling3.save(ling3.init(config, key=jax.random.key(0), mtp=True), tmp_path / "a")
        ling3.quantize(tmp_path / "a", tmp_path / "with", to, mtp=True)
        ling3.quantize(tmp_path / "a", tmp_path / "without", to)
        with_it, without = stored(tmp_path / "with"), stored(tmp_path / "without")
        assert without == {name: own for name, own in with_it.items() if ".layers.3." not in name} != with_it
        assert ling3.load(tmp_path / "without").config.num_nextn_predict_layers == 0
        loaded = ling3.load(tmp_path / "with", mtp=True)
        ling3.save(loaded, tmp_path / "again")
        assert stored(tmp_path / "again") == with_it

    def test_over_a_mesh(self, model, tmp_path):
        """Each device has its part of the layer, and the file has all of it."""
        mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))
        ling3.save(model, tmp_path / "a")
        placed = ling3.load(tmp_path / "a", mesh=mesh, mtp=True)
        np.testing.assert_allclose(ling3.mtp_logits(placed, TOKENS), ling3.mtp_logits(model, TOKENS), atol=TOLERANCE)
        assert placed.parameters == model.parameters
        ling3.save(placed, tmp_path / "b")
        assert stored(tmp_path / "a") == stored(tmp_path / "b")


def assert_near_in_a_log(found, expected):
    """Two trees are equal but for the rounding of A_log, of which GGUF files have the exponential."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [dataclasses.replace(FLASH, num_nextn_predict_layers=1), *exhaustively([TWO])])
def test_a_gguf_file(config, tmp_path):
    model = ling3.init(config, key=jax.random.key(1), mtp=True)
    path = gguf_files.write_model(tmp_path / "x.gguf", model, "bailingmoe3")
    found = ling3.load(path, mtp=True)
    assert eqx.tree_equal(found.mtp, model.mtp)
    assert_near_in_a_log(found.model, model.model)
    plain = ling3.load(path)
    assert plain.mtp == () and eqx.tree_equal(plain.model, found.model)
    assert plain.config.num_hidden_layers == config.num_hidden_layers


def test_blocks_of_a_gguf_file(tmp_path):
    """Each matrix of the layer has the type that its header says."""
    config = dataclasses.replace(SIZES, num_nextn_predict_layers=1)
    model = ling3.init(config, key=jax.random.key(1), mtp=True)
    tensors = gguf_files.tensors_of(model)
    blocks = np.random.default_rng(0).integers(0, 256, (64, 4, 34), np.uint8)
    blocks[..., :2] = np.float16(0.001).reshape(1).view(np.uint8)
    tensors["blk.3.nextn.eh_proj.weight"] = ("Q8_0", blocks.reshape(64, -1), (64, 128))
    path = gguf_files.write(tmp_path / "x.gguf", gguf_files.metadata_of(config, "bailingmoe3", 1), tensors)
    found = ling3.load(path, mtp=True)
    assert found.mtp[0].eh_proj.block == "Q8_0"
    dense = ling3.load(path, jnp.float32, mtp=True, dequantize=True)
    assert np.isfinite(ling3.mtp_logits(found, TOKENS)).all()
    np.testing.assert_allclose(ling3.mtp_logits(found, TOKENS), ling3.mtp_logits(dense, TOKENS), atol=TOLERANCE)
    ling3.save(dense, tmp_path / "saved")
    assert eqx.tree_equal(ling3.load(tmp_path / "saved", mtp=True).mtp, dense.mtp)


class TestNothingElseChanges:
    @pytest.mark.slow
    def test_logits_and_steps(self, model, plain):
        found, expected = (own.step(TOKENS, own.init_cache(2, 16)) for own in (model, plain))
        assert eqx.tree_equal(found, expected)
        np.testing.assert_array_equal(model(TOKENS), plain(TOKENS))
        change = ling3.Intervention.add(1, jnp.ones(32), from_position=2)
        np.testing.assert_array_equal(model(TOKENS, interventions=[change]), plain(TOKENS, interventions=[change]))

    def test_the_engine(self):
        config = dataclasses.replace(small_engine.CONFIG, num_nextn_predict_layers=1)
        model = ling3.init(config, key=jax.random.key(0), mtp=True)
        answers = []
        for own in (model, dataclasses.replace(model, mtp=())):
            engine = ling3.Engine(own, small_engine.tokenizer(), **small_engine.SETTINGS)
            params = dataclasses.replace(small_engine.SHORT, capture=ling3.Capture(residual=[1]))
            answers.append(engine.generate(small_engine.PROMPTS[:2], params))
        for found, expected in zip(*answers, strict=True):
            assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
            np.testing.assert_array_equal(found.captured.residual[1], expected.captured.residual[1])

    def test_what_identifies_the_model(self, model, plain):
        assert checksum(model) == checksum(plain)
        assert fingerprint(model) == fingerprint(plain)

    @pytest.mark.slow
    def test_training_leaves_the_layer_as_it_is(self, model, plain):
        train = pytest.importorskip("ling3.train")
        batch = train.Batch(jnp.asarray(TOKENS), jnp.ones(TOKENS.shape))
        steps = train.Optimization(steps=1, warmup=0, method="adamw")
        found, expected = (train.train(own, [batch], steps) for own in (model, plain))
        assert eqx.tree_equal(found.mtp, model.mtp)
        assert eqx.tree_equal(found.model, expected.model) and not eqx.tree_equal(found.model, model.model)

    def test_an_ablation_drops_the_layer(self, model, plain):
        assert eqx.tree_equal(ling3.ablate.no_decay(model), ling3.ablate.no_decay(plain))
        assert eqx.tree_equal(ling3.ablate.variant(model), plain)

    def test_a_report(self):
        without, report = inspect.report(ONE), inspect.report(ONE, mtp=True)
        assert report.activated == without.activated and report.memory == without.memory
        [row] = [row for row in report.arrays if row.path == "mtp.0.eh_proj.weight"]
        assert row.published == "model.layers.3.eh_proj.weight" and row.shape == (32, 64)
        assert report.parameters - without.parameters == sum(x.size for x in jax.tree.leaves(report.model.mtp))


def test_the_published_flash():
    """The layer of Ling-3.0-flash by shapes alone, with 3,072,194,048 parameters."""
    model = structure(ling3.Ling3Config.flash(), mtp=True)
    [layer] = model.mtp
    assert layer.eh_proj.shape == (2560, 5120)
    assert layer.attention.q_proj.shape == (6144, 2560) and layer.attention.g_proj.shape == (32, 2560)
    assert layer.mlp.experts.gate_proj.shape == (512, 768, 2560) and layer.mlp.experts.swiglu.limit == 0
    assert model.parameters - structure(ling3.Ling3Config.flash()).parameters == 3_072_194_048
    names = [weight.name for weight in weight_names(model.config, mtp=True)]
    own = {name.removeprefix("model.layers.42.") for name in names if name.startswith("model.layers.42.")}
    assert len(own) == 3 * 512 + 3 + 2 + 6 + 6, "experts, the shared one, router, attention, norms and eh_proj"
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight", "final_layernorm.weight"} < own


class TestRefused:
    @pytest.fixture
    def directory(self, model, tmp_path):
        ling3.save(model, tmp_path / "x")
        return tmp_path / "x"

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda tensors: tensors.pop("model.layers.3.enorm.weight"),
                r"no file has:\n +model.layers.3.enorm.weight \[32\]",
            ),
            (
                lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": np.zeros((32, 32), np.float32)}),
                r"model.layers.3.eh_proj.weight, in model.safetensors: found \[32, 32\]; expected \[32, 64\]",
            ),
            (
                lambda tensors: tensors.update({"model.layers.3.shared_head.weight": np.zeros(2, np.float32)}),
                r"has no place for:\n +model.layers.3.shared_head.weight",
            ),
            (
                lambda tensors: tensors.update({"model.layers.4.enorm.weight": np.zeros(32, np.float32)}),
                r"has no place for:\n +model.layers.4.enorm.weight",
            ),
        ],
        ids=["missing", "misshapen", "extra", "of a second layer"],
    )
    def test_tensors_that_do_not_fit(self, directory, change, message):
        with pytest.raises(CheckpointError, match=message):
            ling3.load(with_tensors(directory, change), mtp=True)

    def test_a_checkpoint_without_the_layer(self, plain, tmp_path):
        ling3.save(plain, tmp_path / "x")
        message = "x: mtp: num_nextn_predict_layers is 0: the model has no multi-token-prediction layers; leave mtp out"
        with pytest.raises(CheckpointError, match=message):
            ling3.load(tmp_path / "x", mtp=True)
        with pytest.raises(CheckpointError, match=message):
            ling3.quantize(tmp_path / "x", tmp_path / "q", "int8", mtp=True)

    def test_another_family(self, tmp_path):
        config = tiny_transformers.open_model("qwen3").config
        message = (
            "mtp: ling3 computes no multi-token-prediction layers of Qwen3, only of Ling-3, DeepSeek-V3, Qwen3-Next, "
            "Qwen3.5, Qwen3.5-MoE; leave mtp out"
        )
        assert without_mtp(config) == message
        with pytest.raises(ValueError, match=message):
            ling3.init(config, key=jax.random.key(0), mtp=True)
        tiny_transformers.write("qwen3", tmp_path)
        with pytest.raises(CheckpointError, match=message):
            ling3.load(tmp_path, mtp=True)

    def test_saving_with_a_config_without_the_layer(self, model, tmp_path):
        config = dataclasses.replace(ONE, num_nextn_predict_layers=0)
        with pytest.raises(CheckpointError, match="has multi-token-prediction layers, and its configuration none"):
            ling3.save(dataclasses.replace(model, config=config), tmp_path / "x")

    def test_logits(self, model, plain):
        with pytest.raises(ValueError, match="has 0 multi-token-prediction layers; load it with mtp=True"):
            ling3.mtp_logits(plain, TOKENS)
        with pytest.raises(ValueError, match="layer 1: the model has 1 multi-token-prediction layers"):
            ling3.mtp_logits(model, TOKENS, layer=1)
        with pytest.raises(ValueError, match=r"tokens has the shape \(2, 1\), expected at least one row and 2 columns"):
            ling3.mtp_logits(model, TOKENS[:, :1])
        with pytest.raises(ValueError, match=r"tokens\[0, 0\] is 96, expected an id in \[0, 96\)"):
            ling3.mtp_logits(model, np.full((1, 2), 96))
