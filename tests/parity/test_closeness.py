"""How far transformers' fp32 and ling3's are from the truth, which is `reference.py` in float64.

Each checkpoint has one row, the longest that `test_parity.py` compares, and the shorter ones are its beginnings.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

from cases import CONFIGS, LENGTHS, LOGITS, first_divergence


def distances(case, model: str, other: str) -> np.ndarray:
    """|logit - other logit| of every token."""
    return np.abs(case.logits(model, max(LENGTHS)) - case.logits(other, max(LENGTHS))).ravel()


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_agrees_with_the_equations(open_case, name):
    """Each stage to 1e-4, fp32's rounding through the whole depth: two readings of the model, no shared code."""
    case = open_case(name)
    truth = {stage: array for stage, array in case.truth_stages.items() if not stage.endswith(".margin")}
    assert first_divergence(case.stages("transformers", len(case.tokens)), truth, tolerance=1e-4) is None


def test_ling3_is_as_close_to_the_truth_as_transformers(open_case, show):
    """In the median and at worst, over all checkpoints."""
    pairs = (("transformers", "truth"), ("ling3", "truth"), ("ling3", "transformers"))
    cases = [open_case(name) for name in CONFIGS]
    with ThreadPoolExecutor(2) as pool:  # most of the time is compilation, which leaves Python's lock
        list(pool.map(lambda case: case.logits("ling3", max(LENGTHS)), cases))
    found = {pair: {case.name: distances(case, *pair) for case in cases} for pair in pairs}
    for per_case in found.values():
        per_case["all"] = np.concatenate(list(per_case.values()))
    lines = [f"{'fp32 logits, max (median)':26}" + "".join(f"{' - '.join(pair):>24}" for pair in pairs)]
    for name in (*CONFIGS, "all"):
        cells = (f"{found[pair][name].max():.1e} ({np.median(found[pair][name]):.1e})" for pair in pairs)
        lines.append(f"{name:26}" + "".join(f"{cell:>24}" for cell in cells))
    show("\n".join(lines))
    theirs, ours = found["transformers", "truth"]["all"], found["ling3", "truth"]["all"]
    assert np.median(ours) <= np.median(theirs)
    assert ours.max() <= theirs.max()
    assert found["ling3", "transformers"]["all"].max() <= LOGITS
