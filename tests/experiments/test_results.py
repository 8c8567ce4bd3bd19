"""The stored runs are whole and follow the protocol; what they show is shown again, small."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import sweep
from experiments.__main__ import RESULTS, conduct
from experiments.design import EXPERIMENTS
from experiments.hybrids import HYBRIDS
from experiments.tasks import mqar, parity
from ling3.train.balance import balanced, expert_biases

TINY = dataclasses.replace(
    EXPERIMENTS["parity"],
    task=parity(16),
    layers=1,
    variants={"beta in [0, 1]": {}, "beta in [0, 2]": {"kda_allow_neg_eigval": True}},
    steps=160,
    points=4,
    learning_rates=(1.6e-2,),
    more_rates={},
    held_out=128,
)


STORED = EXPERIMENTS | {f"hybrids_{name}": make() for name, make in HYBRIDS.items()}
"""The experiments whose runs are all made."""


@pytest.mark.parametrize("name", STORED)
def test_every_run_of_the_design_is_stored_once(name):
    experiment, runs = STORED[name], sweep.read(RESULTS / f"{name}.jsonl")
    wanted = []
    for variant in experiment.variants:
        wanted += [(variant, rate, experiment.sweep_seed) for rate in experiment.rates(variant)]
        best = sweep.best_rate(runs, experiment, variant)
        wanted += [(variant, best, seed) for seed in experiment.seeds]
    assert sorted((run.variant, run.learning_rate, run.seed) for run in runs) == sorted(wanted)


@pytest.mark.parametrize("name", STORED)
def test_runs_keep_to_the_budget_and_match_in_parameters(name):
    experiment, runs = STORED[name], sweep.read(RESULTS / f"{name}.jsonl")
    for run in runs:
        budget = (experiment.task.name, experiment.steps, experiment.rows, experiment.layers)
        assert (run.task, run.steps, run.rows, run.layers) == budget
        assert [p.step for p in run.curve] == list(
            range(run.steps // experiment.points, run.steps + 1, run.steps // experiment.points)
        )
        assert all(0 <= point.error <= 1 and point.loss > 0 for point in run.curve)
        assert (run.final is not None) == (run.seed in experiment.seeds)
        assert run.steps_to_90 == next((point.step for point in run.curve if point.error <= 0.1), None)
    parameters = [run.parameters for run in runs]
    assert max(parameters) <= 1.01 * min(parameters)


@pytest.mark.slow
def test_a_mixture_is_measured_part_by_part():
    runs = sweep.read(RESULTS / "text_and_recall.jsonl")
    points = [point for run in runs for point in (*run.curve, *([run.final] if run.final else []))]
    for point in points:
        assert point.parts.keys() == {"text", "recall"}
        for name in ("loss", "error"):
            mean = sum(getattr(part, name) for part in point.parts.values()) / 2
            assert getattr(point, name) == pytest.approx(mean, abs=1e-6)  # each was rounded to seven digits
    assert all(run.parameters == parameters(EXPERIMENTS["text_and_recall"].config(run.variant)) for run in runs)


def parameters(config):
    """Of a model, without allocating it."""
    model = eqx.filter_eval_shape(sweep.ling3.init, config, key=jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(model))


@pytest.mark.slow
def test_loads_balance_themselves_in_training():
    experiment = EXPERIMENTS["text_and_recall"]
    changes = {"num_hidden_layers": 2, "layer_group_size": 2, "hidden_size": 32, "intermediate_size": 64}
    config = dataclasses.replace(experiment.config("Ling-3"), **changes)
    tiny = dataclasses.replace(experiment, variants={"tiny": config}, steps=4, warmup=1, points=2, rows=4, held_out=2)
    first, (model, point) = sweep.training(tiny, "tiny", 4e-3, seed=1)
    (bias,) = (np.asarray(own) / sweep.BIAS_RATE for own in expert_biases(balanced(model)))
    np.testing.assert_allclose(bias, np.round(bias), atol=1e-4)  # four steps up, down or, at a fair load, nowhere
    assert 1 <= np.abs(bias).max() < 4.5 and np.ptp(bias) > 1.5
    assert point.loss < first[1].loss and point.parts["text"].step == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_stored_run_begins_again_as_it_did():
    experiment = EXPERIMENTS["segment_reset"]
    runs = [run for run in sweep.read(RESULTS / "segment_reset.jsonl") if run.variant == "bound -5"]
    first, *others = [run for run in runs if run.seed != experiment.sweep_seed]
    _, point = next(sweep.training(experiment, first.variant, first.learning_rate, first.seed))
    # The same bits on the machine that stored it; on another one rounding begins a difference, and 35 steps spread it.
    # Other seeds are 0.004 and 0.055 off.
    assert abs(point.loss - first.curve[0].loss) < 0.001
    assert all(abs(point.loss - other.curve[0].loss) > 0.002 for other in others)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_parity_needs_eigenvalues_below_zero(tmp_path):
    """The claim of the notebook in half a minute: 16 bits, one layer, 160 steps."""
    file = tmp_path / "parity.jsonl"
    experiment = dataclasses.replace(TINY, seeds=(1, 2))
    runs = conduct(experiment, file)
    flips = {
        variant: [run.curve[-1].error for run in runs if run.variant == variant] for variant in experiment.variants
    }
    assert len(runs) == 6
    # Which seeds learn it in 160 steps depends on the rounding of sums, and so on the processor. With beta in [0, 2]
    # most do: on one processor all of four, to at most 0.002, on another one of two. With beta in [0, 1] none does.
    assert min(flips["beta in [0, 1]"]) > 0.2
    assert min(flips["beta in [0, 2]"]) < 0.05

    assert sweep.read(file) == runs
    before = file.read_bytes()
    assert conduct(experiment, file) == runs
    assert file.read_bytes() == before  # what is stored is not run again


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_layer_binds_pairs_by_its_convolution_alone():
    task = mqar(length=16, pairs=4, keys=8, values=8)
    experiment = dataclasses.replace(EXPERIMENTS["mqar"], task=task, layers=1, steps=160, points=4, held_out=128)
    error = {
        variant: sweep.run(experiment, variant, 1.6e-2, seed=1).curve[-1].error for variant in ("1:0", "1:0, no conv")
    }
    # Seen: 0.000 and 0.646. A key that knows nothing of its value leaves a guess among the four of the row, 0.75 wrong.
    assert error["1:0"] < 0.02
    assert error["1:0, no conv"] > 0.5


def test_the_rate_goes_up_in_a_line_and_down_to_nothing():
    rates = sweep.schedule(0.1, 4, 20)
    assert rates.shape == (20,)
    np.testing.assert_allclose(rates[:4], [0.025, 0.05, 0.075, 0.1], rtol=1e-6)  # float32
    assert np.all(np.diff(rates[3:]) < 0) and 0 < rates[-1] < 0.001


@pytest.mark.slow
def test_loss_and_error_are_of_the_places_asked_alone():
    task = mqar(length=16, pairs=4, keys=8, values=8)
    batch = sweep.stream(task, 0, range(1), 3)
    config = dataclasses.replace(EXPERIMENTS["mqar"], task=task, layers=1).config("0:1")
    model = sweep.ling3.init(config, key=jax.random.key(0))
    tokens, targets, mask = batch.tokens[0], batch.targets[0], batch.mask[0]
    loss, error = sweep.answer_loss(model, tokens, targets, mask)
    logits = np.asarray(model(tokens), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    asked = [(b, t) for b in range(3) for t in range(16) if batch.mask[0, b, t]]
    expected = -np.mean([log_p[b, t, targets[b, t]] for b, t in asked])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)  # a float32 sum of 12 terms
    assert float(error) == pytest.approx(np.mean([logits[b, t].argmax() != targets[b, t] for b, t in asked]))
    elsewhere = jnp.where(mask, targets, (targets + 1) % task.vocabulary)
    assert sweep.answer_loss(model, tokens, elsewhere, mask)[0] == loss


def test_the_best_rate_waits_for_the_whole_sweep():
    with pytest.raises(ValueError, match=r"parity, beta in \[0, 1\]: no run yet at the learning rates \[0.016\]"):
        sweep.best_rate([], TINY, "beta in [0, 1]")
