"""The forms of an operator, and the choice between its plain form and a platform's kernel, made for each input.

A form has the arguments, the result and the errors that the operator's Protocol states. If a platform's kernel does not
suit an input, its form gives a reason and calls the plain one. `ling3 inspect --kernels` shows the reasons, as does the
logger `ling3.forms` at DEBUG.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

LOG = logging.getLogger("ling3.forms")
RUNS = "its kernel runs"
_Protocol = TypeVar("_Protocol")


def form_of(operator: type[_Protocol]) -> Callable[[Callable[..., Any]], _Protocol]:
    """Declares a function as a form of an operator, whose Protocol states the types of its arguments and its result.

    A form names its parameters as the Protocol does, and annotates only further ones of its own. The types are checked
    as those of annotated functions are: where the import hook has wrapped the function.
    """
    stated = inspect.get_annotations(inspect.unwrap(operator.__call__))

    def declared(function: Callable[..., Any]) -> Any:
        form = inspect.unwrap(function)
        own = dict.fromkeys((*inspect.signature(form).parameters, "return")) | form.__annotations__
        form.__annotations__ = {name: stated[name] if hint is None else hint for name, hint in own.items()}
        if form is function:
            return form
        # Only a process that checks types pays for this import.
        from ling3.runtime import checks  # noqa: PLC0415

        return checks.rechecked(form)

    return declared


def runs(operator: str, reason: str | None) -> bool:
    """True if an operator's kernel runs, because there is no `reason` against it. Logs the decision."""
    LOG.debug("%s: %s", operator, reason or RUNS)
    return reason is None
