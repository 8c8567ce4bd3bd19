"""The type checker of every function in the package: beartype, at work from a function's first call on."""

from collections.abc import Callable
from typing import Any

import beartype

# An int is a fine float.
WRITTEN = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the types of its arguments and its result checked.

    A check is code that beartype writes, in half a millisecond, when it is first needed: a process calls only some of
    the functions that it imports.
    """
    check = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if check is None:
            check = WRITTEN(function)
        return check(*args, **kwargs)

    return call
