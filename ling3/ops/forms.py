"""The choice between an operator's plain form and a platform's form of it, input by input.

A platform's form has the plain form's arguments, results and errors, and says why it does not suit an input: the plain
form then takes its place. `ling3 inspect --kernels` shows the reasons, as does the log `ling3.forms` at debug.
"""

import logging

LOG = logging.getLogger("ling3.forms")
RUNS = "its kernel runs"


def runs(operator: str, reason: str | None) -> bool:
    """True if an operator's kernel runs: if there is no `reason` against it. Logs which form runs, and why."""
    LOG.debug("%s: %s", operator, reason or RUNS)
    return reason is None
