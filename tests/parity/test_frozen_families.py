"""The numbers that the user's tests hold the families to are transformers' still."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

from family_cases import logits_of, reopened
from tiny_transformers import CASES, FROZEN, GREEDY, POSITIONS, TOKENS, VOCAB, write


@pytest.mark.parametrize("name", CASES)
def test_frozen_numbers(name, tmp_path):
    write(name, tmp_path)
    model = reopened(tmp_path)
    logits, ids = logits_of(model, TOKENS), list(TOKENS)
    for _ in range(12):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    table = logits[np.ix_(POSITIONS, VOCAB)]
    print(f'"{name}": {np.round(table, 6).tolist()}\n"{name}": {ids[len(TOKENS) :]}')  # what FROZEN and GREEDY have
    np.testing.assert_allclose(FROZEN[name], table, atol=1e-5)
    assert GREEDY[name] == ids[len(TOKENS) :]
