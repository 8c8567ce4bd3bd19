"""How far transformers' fp32 and ling3's are from the truth, which is `transformer_reference.py` in float64.

Each checkpoint has one row, the longest that `test_families.py` compares, and the shorter ones are its beginnings.
"""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import jax.numpy as jnp
import safetensors.numpy
import transformer_reference
from family_cases import CASES, LENGTHS, logits_of, tokens


def distances(case) -> tuple[np.ndarray, np.ndarray]:
    """|logit - true logit| of every token: of transformers, and of ling3."""
    weights = safetensors.numpy.load_file(case.directory / "model.safetensors")
    ids = tokens(max(LENGTHS))
    truth = transformer_reference.forward(weights, case.ours.config, ids)
    ours = np.asarray(case.ours(jnp.asarray([ids], jnp.int32))[0])
    return np.abs(logits_of(case.theirs, ids) - truth).ravel(), np.abs(ours - truth).ravel()


def test_ling3_is_as_close_to_the_truth_as_transformers(open_family, show):
    """In the median and at worst, over all checkpoints."""
    found = {name: distances(open_family(name)) for name in CASES}
    theirs, ours = (np.concatenate(each) for each in zip(*found.values(), strict=True))
    found["all"] = theirs, ours
    lines = [f"{'fp32 logits - truth, max (median)':46}{'transformers':>20}{'ling3':>20}"]
    for name, pair in found.items():
        cells = (f"{distance.max():.1e} ({np.median(distance):.1e})" for distance in pair)
        lines.append(f"{name:46}" + "".join(f"{cell:>20}" for cell in cells))
    show("\n".join(lines))
    assert theirs.max() <= 2e-4, "two readings of the model, which share no code"
    for name, pair in found.items():
        assert np.median(pair[1]) <= np.median(pair[0]), name
    assert ours.max() <= theirs.max()
