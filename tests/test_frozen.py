"""Parity without torch: frozen answers of transformers' `BailingHybridForCausalLM` (see `frozen/make_frozen.py`)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ling3

CASES = sorted(path.parent for path in (Path(__file__).parent / "frozen").glob("*/expected.safetensors"))


@pytest.fixture(scope="module", params=CASES, ids=lambda path: path.name)
def case(request):
    """A model in fp32, and what transformers made of the same checkpoint."""
    expected = safetensors.numpy.load_file(request.param / "expected.safetensors")
    return ling3.load(request.param, dtype=jnp.float32), expected


def test_all_cases_are_here():
    assert [path.name for path in CASES] == ["flash-like", "no-bound", "tiny-like"]


def test_logits(case):
    model, expected = case
    logits = np.asarray(model(jnp.asarray(expected["tokens"])[None])[0])
    assert np.abs(logits - expected["logits"]).max() <= 2e-4


def test_greedy_continuations(case):
    model, expected = case
    lengths = (1, 9, 66)
    prompts = [expected["tokens"][:length].tolist() for length in lengths]
    new = ling3.generate(model, prompts, max_tokens=24, temperature=0.0, ignore_eos=True)
    assert new == [expected[f"greedy_after_{length}"].tolist() for length in lengths]
