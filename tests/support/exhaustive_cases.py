"""Which cases of a law the tests of a change leave to `make exhaustive`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def exhaustively(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, all but those in `but` exhaustive; a tuple has several arguments."""
    return [
        case if case in but else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=EXHAUSTIVE)
        for case in cases
    ]
