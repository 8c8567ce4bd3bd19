"""What checks types at run time takes a function for."""

import inspect

import jaxtyping
import pytest

from ling3.runtime.checks import typed


def test_a_parameter_that_only_the_signature_has_is_not_asked_for():
    """Ray adds one, for its tracing, to the signature of each method of an actor."""

    def successor(count: int, *, step: int = 1) -> int:
        return count + step

    signature = inspect.signature(successor)
    added = inspect.Parameter("_ray_trace_ctx", inspect.Parameter.KEYWORD_ONLY, default=None)
    successor.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])
    assert (typed(successor)(3), typed(successor)(3, step=2)) == (4, 5)
    with pytest.raises(jaxtyping.TypeCheckError, match="argument 'count'"):
        typed(successor)("3")
