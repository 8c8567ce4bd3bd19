"""Parity without torch: frozen answers of transformers' models (see `frozen/make_frozen.py`)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exhaustive_cases import exhaustively

import ling3

FROZEN = Path(__file__).parent / "frozen"


CASES = ["tiny-like", *exhaustively(["flash-like", "no-bound", "kimi-linear"])]


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """A model in fp32, and what transformers made of the same checkpoint."""
    expected = safetensors.numpy.load_file(FROZEN / f"{request.param}.safetensors")
    return ling3.load(FROZEN / request.param, dtype=jnp.float32), expected


def test_logits(case):
    model, expected = case
    logits = np.asarray(model(jnp.asarray(expected["tokens"])[None])[0])
    assert np.abs(logits - expected["logits"]).max() <= 2e-4


@pytest.mark.slow
def test_greedy_continuations(case):
    model, expected = case
    lengths = (1, 9, 66)
    prompts = [expected["tokens"][:length].tolist() for length in lengths]
    new = ling3.generate(model, prompts, max_tokens=24, temperature=0.0, ignore_eos=True)
    assert new == [expected[f"greedy_after_{length}"].tolist() for length in lengths]
