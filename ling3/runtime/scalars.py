"""Checks of numbers that a caller passes: a bool is not a number, and a NumPy integer is a whole number."""

import numbers
import operator
from typing import Any


def is_whole(value: Any) -> bool:
    """True if `value` is a whole number; a bool is not one."""
    if type(value) is int:
        return True
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def is_real(value: Any) -> bool:
    """True if `value` is a real number; a bool is not one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
