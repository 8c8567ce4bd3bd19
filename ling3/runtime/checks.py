"""Type checks at run time, by beartype, within jaxtyping's scopes for the names of axes."""

import contextlib
import inspect
import io
import os
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
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

    It is an AnnotationError too, as jaxtyping adds a printout of every argument, even the model, to all other errors.
    """


def install(modules: Sequence[str]) -> Any:
    """Installs jaxtyping's import hook: functions and dataclasses of these modules and packages check their types.

    The hook opens a scope for axis names in each call, which takes 15 µs: it is for modules with arrays. Unchecked
    modules that these import are cached as bytecode under the same tag, so the tag depends on the list `modules`.
    """
    return jaxtyping.install_import_hook(modules, f"{__name__}.checker({zlib.crc32(repr(modules).encode())})")


def checker(_: int) -> Callable[..., Any]:
    """Returns `checked`. jaxtyping tags bytecode by the expression for the checker, so the argument changes the tag."""
    return checked


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that the types of its arguments and its result are checked.

    beartype takes half a millisecond to generate a check. That happens at the first call, as a process calls only a few
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


def rechecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function as the import hook does, for annotations that it got after the hook."""
    return jaxtyping.jaxtyped(function, typechecker=checked)


def _problem(error: Exception, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The message for a call that fails. `function` is jaxtyping's stub, which gets and returns the call's result."""
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    where = f"{function.__module__}.{function.__qualname__}"
    if isinstance(error, beartype.roar.BeartypeCallHintReturnViolation):
        values = iter([("the result", function(*args, **kwargs), signature.return_annotation)])
    else:
        values = _arguments(signature, bound)
    for what, value, hint in values:
        if not beartype.door.is_bearable(value, hint, conf=CONF):
            expected = _expected(hint, bound.arguments)
            return f"{where}: {what} is {_shown(value)}; expected {expected}{_advice(value, expected)}"
    return f"{where}: {error}"  # beartype checks one random item of a list, and now found no wrong one


def _advice(value: Any, expected: str) -> str:
    """Advice on the mistakes that newcomers make most; empty for others."""
    if expected == "CausalLM" and isinstance(value, str | os.PathLike):
        return f"; load it: ling3.load({str(value)!r})"
    if "Key[Array" in expected:
        return "; give a key: jax.random.key(0)"
    if "Int[Array, 'batch seq']" not in expected:
        return ""
    if isinstance(value, str):
        return "; give the ids of the text: jnp.array([tokenizer.encode(text)])"
    if not hasattr(value, "dtype"):
        return "; give ids as an array: jnp.array([[1, 2, 3]])"
    return "; a single sequence is a batch of one: tokens[None]" if value.ndim == 1 else ""


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
    """The type as it is written in the source, with the sizes of the axes that are known."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", text)  # without the names of modules
    sizes = {field: f"{{{field}}}".format(**arguments) for field in re.findall(r"{([\w.\[\]]+)", text)}
    with contextlib.redirect_stdout(io.StringIO()) as bindings:
        jaxtyping.print_bindings()
    for line in bindings.getvalue().splitlines():
        axis, _, size = line.partition("=")
        if re.search(rf"\b{axis}\b", text) and size:
            sizes[axis] = size
    known = ", ".join(f"{axis} = {size}" for axis, size in sizes.items())
    return f"{text}, where {known}" if known else text
