"""Request bodies: bounded, strict JSON, checked by a pydantic model whose errors name the field."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import itertools
import json
import re
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request

from ling3.runtime.quoting import printable
from ling3.server.errors import ApiError

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
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        unknown = first["type"] == "extra_forbidden"
        names = [str(part) for part in first["loc"] if unknown or isinstance(part, int) or part in model.model_fields]
        param = printable(".".join(names), 80)
        if unknown:
            raise ApiError(400, f"{param} is not supported", param, "unsupported_parameter") from None
        raise ApiError(400, f"{param}: {first['msg']}", param or None) from None


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
        return json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
