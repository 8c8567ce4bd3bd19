"""ling3 against transformers' `BailingHybridForCausalLM`: fp32, CPU, random checkpoints in the published layout."""

import itertools

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import transformers
from cases import CONFIGS, LENGTHS, LOGITS, first_divergence
from exhaustive_cases import exhaustively
from stages import ling3_stages
from tiny import FLASH, open_model

import ling3

# The logits of every checkpoint at the greatest length are in `test_closeness.py` too.
each_case = pytest.mark.parametrize(
    ("name", "length"),
    exhaustively(itertools.product(CONFIGS, LENGTHS), but=[("tiny-like, bound -5.0", length) for length in LENGTHS]),
)
# A bound of -1 runs the program of -5 with another constant: lengths are compared, the costlier questions asked once.
each_program = pytest.mark.parametrize(
    "name",
    exhaustively(
        [name for name in CONFIGS if "bound -1.0" not in name],
        but=["tiny-like, bound -5.0", "flash-like, bound None", "real head sizes"],
    ),
)


@each_case
def test_logits(open_case, name, length):
    case = open_case(name)
    ours, theirs = case.logits("ling3", length), case.logits("transformers", length)
    assert 0.7 < theirs.std() < 1.4, "logits this small or large would make the tolerance mean something else"
    assert np.abs(ours - theirs).max() <= LOGITS, case.diagnosis(length)


@each_program
def test_every_stage(open_case, name):
    case = open_case(name)
    assert first_divergence(case.stages("ling3", 130), case.stages("transformers", 130)) is None


def test_a_wrong_weight_is_found_where_it_is(open_case):
    case = open_case("tiny-like, bound -5.0")
    norm = case.ling3.model.layers[3].attention.kv_a_layernorm.weight
    wrong = eqx.tree_at(
        lambda m: m.model.layers[3].attention.kv_a_layernorm.weight, case.ling3, norm.at[0].multiply(1.5)
    )
    found = first_divergence(ling3_stages(wrong, jnp.array(case.tokens[:130])), case.stages("transformers", 130))
    assert found.startswith("model.layers.3.attention is the first stage to differ")


@each_program
def test_rows_of_unequal_length(open_case, name):
    """One right-padded batch on a cache against each row alone in transformers."""
    case = open_case(name)
    rows = [case.tokens[start : start + length] for start, length in ((0, 1), (40, 65), (7, 130), (90, 2), (3, 64))]
    lengths = jnp.array([len(row) for row in rows], jnp.int32)
    padded = jnp.array([row + [0] * (130 - len(row)) for row in rows])
    logits, cache = case.ling3.step(padded, case.ling3.init_cache(len(rows), 160), lengths)
    assert cache.length.tolist() == lengths.tolist()
    for ours, row in zip(np.asarray(logits), rows, strict=True):
        difference = np.abs(ours[: len(row)] - case.oracle.logits(row)).max()
        assert difference <= LOGITS, f"{name}, the row of {len(row)} tokens: {difference:.1e}"


@each_program
def test_greedy_continuations(open_case, name):
    """24 tokens after prompts of unequal length, generated in one batch, against transformers' one prompt at a time."""
    case = open_case(name)
    prompts = [case.tokens[start : start + length] for start, length in ((0, 1), (40, 65), (7, 130))]
    ours = ling3.generate(case.ling3, prompts, max_tokens=24, temperature=0.0, ignore_eos=True)
    assert ours == [case.oracle.greedy(prompt, 24) for prompt in prompts]


def test_transformers_takes_no_ablated_model_for_a_ling3(tmp_path):
    ling3.save(ling3.ablate.no_decay(open_model(FLASH)), tmp_path / "cut")
    with pytest.raises(ValueError, match="ling3_ablated"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
