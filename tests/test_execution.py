"""How a model runs is an argument: it reaches every operator, and changes nothing of what the model computes."""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import thoroughly
from tiny import TINY, open_model

import ling3
from ling3.execution import PLAIN, Execution
from ling3.ops.kda import kda_step
from ling3.ops.kda_chunks import chunk_kda

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 96, size=(2, 40)), jnp.int32)


def watched(**forms):
    """An execution whose forms note what they are called with."""
    calls = []

    def noting(name, form):
        def call(*arrays, **settings):
            calls.append((name, settings))
            return form(*arrays, **settings)

        return call

    forms = {name: noting(name, form) for name, form in forms.items()}
    return dataclasses.replace(Execution.default(), **forms), calls


@pytest.mark.parametrize(
    "execution", thoroughly([PLAIN, Execution(chunk_size=32), Execution.default("gpu")], but=[PLAIN])
)
def test_it_changes_no_number(execution):
    model = open_model(TINY)
    np.testing.assert_allclose(model(TOKENS, execution), model(TOKENS), atol=2e-5)


def test_the_chunk_size_reaches_the_operator():
    execution, calls = watched(chunk_kda=chunk_kda)
    execution = dataclasses.replace(execution, chunk_size=64)
    eqx.filter_eval_shape(open_model(TINY), TOKENS, execution)
    assert [settings["chunk_size"] for _, settings in calls] == [64] * 2
    with pytest.raises(ValueError, match="chunk_size is 24, expected 16 or that times a power of two"):
        Execution(chunk_size=24)


@pytest.mark.slow
def test_the_engine_and_generate_run_on_it():
    model = open_model(TINY)
    expected = ling3.generate(model, [[5, 6, 7]], max_tokens=4, ignore_eos=True)
    execution, calls = watched(kda_step=kda_step)
    assert ling3.generate(model, [[5, 6, 7]], max_tokens=4, ignore_eos=True, execution=execution) == expected
    traced = len(calls)
    engine = ling3.Engine(model, max_running_requests=1, num_pages=2, max_model_len=64, execution=execution)
    (output,) = engine.generate([5, 6, 7], ling3.SamplingParams(max_tokens=4, ignore_eos=True))
    assert list(output.token_ids) == expected[0] and len(calls) > traced > 0
