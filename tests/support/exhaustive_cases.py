"""Which cases of a law `make test` leaves to `make thorough`, and which both leave to `make exhaustive`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)


def exhaustively(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, all but those in `but` exhaustive; a tuple has several arguments."""
    return _marked(cases, but, EXHAUSTIVE)


def thoroughly(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, all but those in `but` thorough; a tuple has several arguments."""
    return _marked(cases, but, (pytest.mark.thorough,))


def _marked(cases: Iterable[Any], but: Collection[Any], marks: Collection[pytest.MarkDecorator]) -> list[Any]:
    return [
        case if case in but else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for case in cases
    ]
