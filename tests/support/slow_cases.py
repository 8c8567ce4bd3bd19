"""Which cases of a test a user's run leaves to `make slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slowly(cases: Iterable[Any], but: Collection[Any] = ()) -> list[Any]:
    """The cases, for `pytest.mark.parametrize`, of which a user's run takes some; a tuple has several arguments."""
    return [
        case if case in but else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]
