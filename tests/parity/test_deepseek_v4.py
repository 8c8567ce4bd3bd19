"""DeepSeek-V4 against transformers' `DeepseekV4ForCausalLM` in fp32 on the CPU, and both against the equations."""

import copy
import functools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import deepseek_v4_checkpoint as checkpoint
import deepseek_v4_reference as reference
import torch
import transformers
from cases import first_divergence
from deepseek_v4_cases import CASES, LENGTH, float64_for_float32, in_double, make, open_theirs, stages_of
from exhaustive_cases import exhaustively
from family_cases import distance_on_a_cache, greedy_answers, logits_of
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import ling3
from ling3.checkpoint import weight_names
from ling3.families import read_config

LOGITS = 1e-4
"""The largest difference of fp32 logits whose standard deviation is near 1; transformers' are within 6e-6 of the truth.

Each of 35 misreadings of the equations moves a logit by at least 6e-4 in one of the cases, and most of them by over 1.
"""
LENGTHS = {"small": (1, 4, 127, 128), "real head sizes": (127, 128)}
"""Beside the whole of each case: around the first entries of 4 and of 128 tokens, and of 128 in windows of 128."""
ASKED = [(name, length) for name in CASES for length in (*LENGTHS.get(name, ()), LENGTH)]

SOME = ["small", "real head sizes"]
each_case = pytest.mark.parametrize("name", exhaustively(CASES, but=SOME))


@pytest.fixture(scope="module")
def open_v4(tmp_path_factory):
    """The case of a given name, and the same one when asked again."""
    return functools.cache(lambda name: make(tmp_path_factory.mktemp("deepseek"), CASES[name]))


def ours_of(ours, ids):
    return np.asarray(ours(jnp.asarray([ids], jnp.int32))[0])


def without_margins(stages):
    return {name: stage for name, stage in stages.items() if not name.endswith(".margin")}


@each_case
def test_transformers_agrees_with_the_equations(open_v4, name):
    """Each stage to 1e-4, fp32's rounding through the whole depth, and to 1e-11 where fp32 is float64."""
    case = open_v4(name)
    assert 0.7 < case.truth.std() < 1.4
    truth = without_margins(case.stages)
    assert first_divergence(stages_of(case.theirs, case.tokens), truth, tolerance=1e-4) is None
    with float64_for_float32():
        found = stages_of(in_double(case.theirs), case.tokens)
    assert first_divergence(found, truth, tolerance=1e-11) is None


@pytest.mark.parametrize(
    ("name", "length"), exhaustively(ASKED, but=[(name, length) for name, length in ASKED if name in SOME])
)
def test_logits(open_v4, name, length):
    case = open_v4(name)
    expected = logits_of(case.theirs, case.tokens[:length])
    assert np.abs(ours_of(case.ours, case.tokens[:length]) - expected).max() <= LOGITS


def test_ling3_is_as_close_to_the_truth_as_transformers(tmp_path, show):
    """In the median over all logits, and at worst: the mean of the largest distances in eight checkpoints.

    A single largest distance is luck: it hangs on one token whose rounding either program may hit at some length.
    """
    found = {"transformers": [], "ling3": []}
    for seed in range(1, 9):
        case = make(tmp_path / str(seed), seed=100 * seed)
        for length in (63, LENGTH):
            ids, truth = case.tokens[:length], case.truth[:length]
            found["transformers"].append(np.abs(logits_of(case.theirs, ids) - truth).ravel())
            found["ling3"].append(np.abs(ours_of(case.ours, ids) - truth).ravel())
    median = {name: np.median(np.concatenate(each)) for name, each in found.items()}
    worst = {name: np.mean([distances.max() for distances in each]) for name, each in found.items()}
    said = ", ".join(f"{name} {worst[name]:.2e} ({median[name]:.2e})" for name in found)
    show(f"DeepSeek-V4: fp32 logits - truth, mean of the largest (median): {said}")
    assert median["ling3"] <= median["transformers"], said
    assert worst["ling3"] <= worst["transformers"], said


@each_case
def test_rows_of_unequal_length_on_a_cache(open_v4, name):
    """Each row then takes one more token; the 128th of its row completes the first entry of 128 tokens."""
    case, lengths = open_v4(name), (1, 66, 127, 2)
    rows, following = [case.tokens[:length] for length in lengths], [case.tokens[length] for length in lengths]
    assert distance_on_a_cache(case.theirs, case.ours, rows, following) <= LOGITS


@pytest.mark.parametrize("name", exhaustively(["small", "real head sizes"], but=["small"]))
def test_greedy_continuations(open_v4, name):
    case = open_v4(name)
    expected, generated, served = greedy_answers(
        case.theirs, case.ours, [case.tokens[:length] for length in (3, 50, 120)]
    )
    assert generated == expected
    assert served == expected


def layouts(case, directory):
    """The checkpoint of `case` in each naming of its tensors and of its config, by name."""
    case.theirs.save_pretrained(directory / "default")
    case.theirs.save_pretrained(directory / "modules", save_original_format=False)
    return dict(zip(LAYOUTS, (directory / "default", directory / "modules", case.directory), strict=True))


LAYOUTS = ("save_pretrained", "the names of modules", "the release's")


@pytest.fixture(scope="module")
def small_in_layouts(open_v4, tmp_path_factory):
    return layouts(open_v4("small"), tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_equations_are_read_from_every_layout(open_v4, small_in_layouts, layout):
    case = open_v4("small")
    config, weights = reference.read(small_in_layouts[layout])
    logits, _ = reference.forward(weights, config, case.tokens[:40])
    np.testing.assert_allclose(logits, case.truth[:40], rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_model(open_v4, small_in_layouts, layout):
    case = open_v4("small")
    again = ling3.load(small_in_layouts[layout], jnp.float32)
    assert again.config == case.ours.config
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(case.ours), strict=True):
        assert jnp.array_equal(one, other)
    ids = case.tokens[:150]
    assert np.array_equal(ours_of(again, ids), ours_of(case.ours, ids))


STORAGES = {
    "experts in FP4": checkpoint.quantise,
    "scales named weight_scale_inv": lambda weights: {
        name.removesuffix(".scale") + ".weight_scale_inv" if name.endswith(".scale") else name: tensor
        for name, tensor in checkpoint.quantise(weights).items()
    },
    "all in FP8, scales in float32": functools.partial(checkpoint.quantise, experts_in_fp4=False),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_the_release_s_storage_is_read(tmp_path, storage):
    """FP8 and FP4 against transformers' model of the float32 weights that they stand for."""
    raw = checkpoint.BLOCKS
    drawn = checkpoint.draw_well_posed(reference.Config(raw), 150, store=STORAGES[storage])
    checkpoint.write(tmp_path / "stored", raw | checkpoint.QUANTISED, drawn.stored | checkpoint.mtp(raw))
    checkpoint.write(tmp_path / "float32", raw, drawn.weights)
    theirs = logits_of(open_theirs(tmp_path / "float32"), drawn.tokens)
    assert np.abs(theirs - drawn.logits).max() <= LOGITS
    ours = ours_of(ling3.load(tmp_path / "stored", jnp.float32), drawn.tokens)
    assert np.abs(ours - theirs).max() <= LOGITS


def test_the_storage_is_what_transformers_reads():
    """Where blocks are whole: of others it takes the scales' grid for an even division."""
    rng = np.random.default_rng(0)
    for name, shape in (("layers.0.attn.wq_b.weight", (256, 384)), ("layers.0.ffn.experts.0.w1.weight", (40, 96))):
        stored = checkpoint.quantise({name: rng.standard_normal(shape).astype(np.float32)})
        codes, scales = stored.values()
        own = torch.int8 if codes.dtype == np.int8 else torch.float8_e4m3fn
        theirs = Fp8Dequantize(None)._dequantize_one(
            torch.from_numpy(codes.view(np.int8)).view(own),
            torch.from_numpy(scales.view(np.int8)).view(torch.float8_e8m0fnu),
            torch.float32,
        )
        assert np.array_equal(theirs.numpy(), checkpoint.dequantise(stored)[name])


def test_gradients(open_v4, tmp_path):
    """Of the mean loss of 150 tokens, each array's within 1e-4 of its largest; transformers' come in as a checkpoint.

    transformers' own are within 2e-5 of theirs in float64. What only chooses has none: the indexer, and the router's
    bias, which transformers keeps beside its parameters.
    """
    case = open_v4("small")
    ids = case.tokens[:151]
    theirs = copy.deepcopy(case.theirs).requires_grad_(True)
    theirs.set_experts_implementation("eager")
    logits = theirs(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).backward()
    for parameter in theirs.requires_grad_(False).parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    theirs.save_pretrained(tmp_path)
    expected = eqx.filter(ling3.load(tmp_path, jnp.float32), eqx.is_inexact_array)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(model):
        own = jax.nn.log_softmax(model(jnp.asarray([ids[:-1]], jnp.int32))[0])
        return -jnp.mean(jnp.take_along_axis(own, jnp.asarray(ids[1:], jnp.int32)[:, None], axis=1))

    found, expected = map(jax.tree_util.tree_leaves_with_path, (gradients(case.ours), expected))
    for (path, one), (same, other) in zip(found, expected, strict=True):
        assert path == same
        assert jnp.abs(one - other).max() <= 1e-4 * jnp.abs(other).max(), jax.tree_util.keystr(path)


def test_it_is_saved_as_it_was(open_v4, tmp_path):
    case = open_v4("small")
    ling3.save(case.ours, tmp_path)
    again = ling3.load(tmp_path)
    assert again.config == case.ours.config
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(case.ours), strict=True):
        assert jnp.array_equal(one, other)
    ids = case.tokens[:150]
    assert np.abs(logits_of(open_theirs(tmp_path), ids) - ours_of(case.ours, ids)).max() <= LOGITS


def test_transformers_counts_as_many_parameters_in_v4_flash(tmp_path):
    own = checkpoint.shapes(reference.Config(checkpoint.FLASH))
    with torch.device("meta"):
        theirs = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**checkpoint.FLASH))
    count = sum(tensor.numel() for tensor in theirs.state_dict().values())
    assert count == sum(math.prod(shape) for shape in own.values()) == 284_334_567_511
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.FLASH))
    assert sum(weight.size for weight in weight_names(read_config(tmp_path))) == count
