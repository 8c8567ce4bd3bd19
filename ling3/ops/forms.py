"""The choice between an operator's plain form and a platform's kernel, made for each input.

A platform's form has the plain form's arguments, results and errors. If its kernel does not suit an input, it gives a
reason and calls the plain form. `ling3 inspect --kernels` shows the reasons, as does the logger `ling3.forms` at DEBUG.
"""

import logging

LOG = logging.getLogger("ling3.forms")
RUNS = "its kernel runs"


def runs(operator: str, reason: str | None) -> bool:
    """True if an operator's kernel runs, because there is no `reason` against it. Logs the decision."""
    LOG.debug("%s: %s", operator, reason or RUNS)
    return reason is None
