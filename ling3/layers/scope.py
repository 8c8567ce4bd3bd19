"""Names for profiles: a module's operations appear under the field that holds it, so a profile reads like the tree."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, no_type_check

import equinox as eqx
import jax

Method = TypeVar("Method", bound=Callable[..., Any])
_Tree = TypeVar("_Tree")


def scoped(method: Method) -> Method:
    """Decorates a method so that its operations appear under its module's `name` in a profile (`jax.named_scope`)."""

    @functools.wraps(method)
    def within(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(self.name or type(self).__name__):
            return method(self, *args, **kwargs)

    return within  # type: ignore[return-value]


@no_type_check  # called for every field of every module
def with_names(node: _Tree, name: str = "") -> _Tree:
    """The tree, with the `name` of each module that has one set to the name of the field that holds it."""
    if isinstance(node, tuple | list):
        return type(node)(with_names(item, name) for item in node)
    if not isinstance(node, eqx.Module):
        return node
    named = copy.copy(node)
    for field in dataclasses.fields(node):
        value = name if field.name == "name" else with_names(getattr(node, field.name), field.name)
        object.__setattr__(named, field.name, value)  # modules are frozen
    return named
