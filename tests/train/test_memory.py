"""The predicted memory of a fine-tuning: its arrays are those that exist, and recomputation saves what it should."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
import tiny_transformers
from tiny import TINY, open_model

import ling3
from ling3 import cli
from ling3.checkpoint.loading import planned
from ling3.checkpoint.names import structure
from ling3.train.fine_tuning import FineTuning, finetune
from ling3.train.memory import predict
from ling3.train.texts import TrainingText

SMALL = dataclasses.replace(TINY, num_hidden_layers=1, layer_group_size=1, first_k_dense_replace=0)
LORA = FineTuning(lora=2, targets=("q_b_proj", "o_proj"), steps=1, batch=2, tokens=64)


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [LORA, pytest.param(dataclasses.replace(LORA, lora=None, targets=None), marks=pytest.mark.slow)],
    ids=["lora", "full"],
)
def test_the_arrays_are_those_that_exist(monkeypatch, settings):
    """At each pass there are weights, trained arrays, their gradient, AdamW's averages and the batch, and no others."""
    model, module, seen = open_model(SMALL), importlib.import_module("ling3.train.loop"), []
    accumulated = module._accumulated
    before = {id(array) for array in jax.live_arrays()}

    def noted(given, sums):
        found = [array for array in jax.live_arrays() if id(array) not in before]
        seen.append(sum(array.nbytes for array in found) - bytes_of(given[2]))
        return accumulated(given, sums)

    monkeypatch.setattr(module, "_accumulated", noted)
    text = TrainingText(tuple(range(3, 35)), (False, *[True] * 31))
    finetune(model, [text, text], None, settings)
    found = predict(structure(SMALL, jnp.float32), settings, length=32)
    assert (found.rows, found.width) == (2, 32) and sum(found.weights.values()) == bytes_of(model)
    # Beside them are scalars: the loss, the number of learnt tokens, the step.
    assert seen[0] == pytest.approx(found.trained + found.gradient + found.moments, abs=256)
    assert found.peak == found.arrays + found.process and 0 < found.updating < found.arrays


@pytest.mark.slow
def test_layers_that_are_recomputed_keep_their_inputs_alone():
    """With twice the layers, memory grows by the layers' inputs; where activations are kept, by much more."""
    config = dataclasses.replace(tiny_transformers.open_model("llama").config, max_position_embeddings=1024)
    found = {}
    for layers in (2, 6):
        model = structure(dataclasses.replace(config, num_hidden_layers=layers), jnp.float32)
        for recompute in (True, False):
            settings = FineTuning(lora=2, targets=("q_proj",), tokens=1024, recompute=recompute)
            found[layers, recompute] = predict(model, settings)
    more, all_kept = (found[6, recompute].passing - found[2, recompute].passing for recompute in (True, False))
    inputs = found[6, True].inputs - found[2, True].inputs
    assert inputs == 4 * 1024 * 32 * 4 and found[6, False].inputs == 0
    assert inputs <= more < 1.5 * inputs < all_kept / 3


def test_the_command_line_predicts_before_it_reads_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ling3.train.memory._own_bytes", lambda *_: 1000)  # without compiling
    ling3.save(open_model(SMALL), tmp_path / "x")
    assert cli.main(["inspect", str(tmp_path / "x"), "--train", "--lora", "3", "--tokens", "64"]) == 0
    shown = capsys.readouterr().out
    assert "a step of fine-tuning, in passes of 1 x 64 tokens" in shown and "in all" in shown
    model = planned(tmp_path / "x")
    assert jax.tree.structure(model) == jax.tree.structure(ling3.load(tmp_path / "x"))
    assert [x.dtype for x in jax.tree.leaves(model)] == [x.dtype for x in jax.tree.leaves(ling3.load(tmp_path / "x"))]
    for words, said in (
        (["--lora", "3"], "--lora: for --train"),
        (["--train", "--full", "--lora", "3"], "--full trains all weights"),
        (["--train", "--kernels"], "give one of them"),
    ):
        assert cli.main(["inspect", str(tmp_path / "x"), *words]) == 2
        assert said in capsys.readouterr().err
