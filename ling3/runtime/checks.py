"""The checks of types at run time: beartype's, in a scope of jaxtyping's where axes are named."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import reprlib
import typing
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import beartype
import beartype.door
import beartype.roar
import equinox as eqx
import jaxtyping

# An int is accepted as a float.
CONF = beartype.BeartypeConf(is_pep484_tower=True)
WRITTEN = beartype.beartype(conf=CONF)


class TypeCheckError(jaxtyping.TypeCheckError, jaxtyping.AnnotationError):
    """jaxtyping's error in one line: which argument, what was found, what was expected.

    To any error but an AnnotationError, jaxtyping adds a print of every argument, such as the whole model.
    """


def typed(what: Any) -> Any:
    """A function that checks its arguments and its result, or a dataclass that checks its fields.

    A dataclass with `__no_type_check__` stays as it is.
    jaxtyping gives every call a scope for the names of axes, which takes fifty times as long as a check; so only
    functions that name axes get one.
    """
    if isinstance(what, type):
        unchecked = getattr(what, "__no_type_check__", False) or hasattr(what.__init__, "is_typed")
        if dataclasses.is_dataclass(what) and not unchecked:
            what.__init__ = typed(what.__init__)
        return what
    check = None

    @functools.wraps(what)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if check is None:
            check = _checking(what)
        return check(*args, **kwargs)

    call.is_typed = True  # pyright: ignore[reportAttributeAccessIssue]
    return call


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the types of its arguments and its result checked.

    beartype takes half a millisecond to generate a check. It does so at the first call, as a process calls only a few
    of the functions that it imports.
    """
    check = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal check
        if check is None:
            check = WRITTEN(function)
        try:
            return check(*args, **kwargs)
        except beartype.roar.BeartypeCallHintViolation as error:
            raise TypeCheckError(_problem(error, function, args, kwargs)) from None

    return call


def _checking(function: Any) -> Callable[..., Any]:
    """`function` with checks, which are written once for its code: a function within another is new at every call."""
    key = function.__module__, function.__qualname__, function.__code__
    annotations, add = _KNOWN.get(key, (None, None))
    if add is None or annotations != function.__annotations__:
        add = _scoped if _names_axes(function) else _unscoped(function)
        _KNOWN[key] = function.__annotations__, add
    return add(function)


_KNOWN: dict[tuple[str, str, CodeType], tuple[dict[str, Any], Callable[..., Any]]] = {}
"""Of each function's code its annotations, and what adds their checks."""


def _names_axes(function: Any) -> bool:
    """True if a type of jaxtyping's is among the annotations, or if they cannot be evaluated."""
    try:
        return any(map(_is_jaxtyping, typing.get_type_hints(function, include_extras=True).values()))
    except Exception:
        return True


def _is_jaxtyping(hint: Any) -> bool:
    inner = hint if isinstance(hint, list) else typing.get_args(hint)
    return getattr(hint, "__module__", "").startswith("jaxtyping") or any(map(_is_jaxtyping, inner))


def _scoped(function: Any) -> Callable[..., Any]:
    return jaxtyping.jaxtyped(function, typechecker=checked)


def _unscoped(like: Any) -> Callable[..., Any]:
    """What adds to a function the checks of the signature and the types that `like` has."""
    hints = typing.get_type_hints(like, include_extras=True)
    result = checked(_stub(like, "(value): return value", {"return": hints.pop("return", Any)}))
    parameters = [
        parameter.replace(
            annotation=parameter.empty, default=parameter.default if parameter.default is parameter.empty else None
        )
        for parameter in inspect.signature(like).parameters.values()
        if parameter.name in like.__code__.co_varnames  # Ray adds one to the signatures of an actor's methods
    ]
    stub = _stub(like, f"{inspect.Signature(parameters)}: pass", hints)
    stub.__defaults__, stub.__kwdefaults__ = like.__defaults__, like.__kwdefaults__
    arguments = checked(stub)

    def add(function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments(*args, **kwargs)
            return result(function(*args, **kwargs))

        return call

    return add


def _stub(like: Any, rest: str, hints: dict[str, Any]) -> Any:
    """A function of the name of `like`, with other types: beartype reads signatures off the code."""
    scope: dict[str, Any] = {}
    exec(f"def stub{rest}", scope)
    stub = scope["stub"]
    stub.__annotations__, stub.__module__ = hints, like.__module__
    stub.__name__, stub.__qualname__ = like.__name__, like.__qualname__
    return stub


def _problem(error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What is wrong with a call. `function` is jaxtyping's wrapper, which returns the result of the call again."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    where = f"{function.__module__}.{function.__qualname__}"
    if isinstance(error, beartype.roar.BeartypeCallHintReturnViolation):
        values = iter([("the result", function(*args, **kwargs), signature.return_annotation)])
    else:
        values = _arguments(signature, bound)
    for what, value, hint in values:
        if not beartype.door.is_bearable(value, hint, conf=CONF):
            return f"{where}: {what} is {_shown(value)}; expected {_expected(hint, bound.arguments)}"
    return f"{where}: {error}"  # of a list, beartype looks at one item, and each time at another


def _arguments(signature: inspect.Signature, bound: inspect.BoundArguments) -> Iterator[tuple[str, Any, Any]]:
    """The name of each argument in messages, its value and its type."""
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.annotation is inspect.Parameter.empty:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            several = [(f"argument '*{name}[{i}]'", item) for i, item in enumerate(value)]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            several = [(f"argument '{key}'", item) for key, item in value.items()]
        else:
            several = [(f"argument '{name}'", value)]
        yield from ((what, item, parameter.annotation) for what, item in several)


def _shown(value: Any) -> str:
    """An array as `f32[2,3]`, a module by its class's name, anything else cut to a readable length."""
    if isinstance(value, eqx.Module):
        return type(value).__name__
    return eqx.tree_pformat(value) if hasattr(value, "dtype") else reprlib.repr(value)


def _expected(hint: Any, arguments: dict[str, Any]) -> str:
    """The type as it is written, with the sizes of the axes that are known."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)  # no names of modules
    sizes = {field: f"{{{field}}}".format(**arguments) for field in re.findall(r"{([\w.\[\]]+)", text)}
    with contextlib.redirect_stdout(io.StringIO()) as bindings:
        jaxtyping.print_bindings()
    for line in bindings.getvalue().splitlines():
        axis, _, size = line.partition("=")
        if re.search(rf"\b{axis}\b", text) and size:
            sizes[axis] = size
    known = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    return f"{text}, where {known}" if known else text
