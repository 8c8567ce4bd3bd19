"""Request bodies: bounded, strict JSON, checked by a pydantic model whose errors name the field."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import itertools
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request

from ling3.runtime.quoting import printable
from ling3.server.errors import ApiError
from ling3.server.known_fields import ALLOW
from ling3.text.json_text import loaded

MOST_BYTES = 2**24
"""The largest body."""
DEEPEST = 64
"""The most levels of a body's JSON."""
STRINGS, BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL), re.compile(r"[\[\]{}]")

Model = TypeVar("Model", bound=pydantic.BaseModel)


async def read(request: Request, model: type[Model]) -> Model:
    """The body as a `model`; ApiError 413 if it is too large, 400 for anything else that is wrong with it."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise ApiError(413, f"the body has more than {MOST_BYTES} bytes", code="body_too_large")
    value = parse(bytes(content))
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    try:
        return model.model_validate(value, context={ALLOW: request.app.state.service.allow_unknown_fields})
    except pydantic.ValidationError as error:
        param, reasons = None, []
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        for each in sorted(errors, key=lambda each: each["type"] == "missing"):  # what is there says more
            name = _name(each["loc"], value)
            if param is None and each["type"] == "extra_forbidden":
                raise ApiError(400, f"{name} is not supported", name, "unsupported_parameter") from None
            param = name if param is None else param
            reasons += [each["msg"]] if name == param and each["msg"] not in reasons else []
        raise ApiError(400, f"{param}: {', or: '.join(reasons)}", param) from None


def _name(where: Sequence[int | str], value: Any) -> str:
    """The field of a body that an error is about, without the parts of its place that name types."""
    names = []
    for part in where:
        inner: Any = value
        known = part in inner if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if known:
            value = inner[part]
        if known or (part == where[-1] and isinstance(value, dict)):  # the last may be what is missing
            names.append(str(part))
    return printable(".".join(names), 80)


def parse(content: bytes) -> Any:
    """The JSON of a body; ApiError 400 for malformed, non-finite or deeply nested values."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    brackets = BRACKETS.findall(STRINGS.sub("", text))
    if max(itertools.accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0) > DEEPEST:
        raise ApiError(400, f"the body's JSON has more than {DEEPEST} levels")
    try:
        return loaded(text)
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
