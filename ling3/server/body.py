"""Endpoints that read a JSON body: its size is limited, a pydantic model validates it, and errors name the field."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pydantic
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ling3.runtime.quoting import printable
from ling3.server import limits
from ling3.server.errors import ApiError, wrong
from ling3.server.known_fields import ALLOW, Known
from ling3.server.service import Service
from ling3.text.json_text import loaded

SHORT = 2**16
"""Bodies of up to this many bytes are parsed in the event loop; longer ones on `PARSER`'s thread."""
MOST_ERRORS = 64
"""With more validation errors than this, only their number is reported."""
PARSER = ThreadPoolExecutor(1, "bodies")
"""One thread only: parsing holds the GIL, so several threads would block the event loop for longer."""

Model = TypeVar("Model", bound=Known)


class Post:
    """An endpoint that validates the body as a `model` and passes it to `answer`, which a disconnect cancels."""

    def __init__(self, model: type[Known], answer: Callable[[Service, Any], Awaitable[Response]]):
        self.model, self._answer = model, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, calls `answer` and sends its response."""
        request = Request(scope, receive)
        service: Service = request.app.state.service
        asked: Any = await read(request, self.model)
        service.check_model(asked.model)

        async def answered() -> None:
            response = await self._answer(service, asked)
            await response(scope, receive, send)

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work, watch = asyncio.create_task(answered()), asyncio.create_task(gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, watch):
                each.cancel()


async def read(request: Request, model: type[Model]) -> Model:
    """Reads a request's body and validates it as a `model`.

    Raises ApiError 415 if the Content-Type is not JSON, 413 if the body is too large, and 400 for any other problem.
    """
    _check_type(request)
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > limits.MOST_BYTES:
            raise ApiError(413, f"the body has more than {limits.MOST_BYTES} bytes", code="body_too_large")
    allow: bool = request.app.state.service.allow_unknown_fields
    if len(content) <= SHORT:
        return _validated(bytes(content), model, allow)
    return await asyncio.get_running_loop().run_in_executor(PARSER, _validated, bytes(content), model, allow)


def _check_type(request: Request) -> None:
    """Raises ApiError 415 unless the type is JSON, which other origins' pages cannot send without a CORS preflight."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        message = f"the Content-Type is {printable(given, 80) or 'missing'}, expected application/json"
        raise ApiError(415, message, code="unsupported_media_type")


def _validated(content: bytes, model: type[Model], allow: bool) -> Model:
    value = parse(content)
    if not isinstance(value, dict):
        raise ApiError(400, "the body is no JSON object")
    model.names.check(value, None)
    try:
        return model.model_validate(value, context={ALLOW: allow})
    except pydantic.ValidationError as error:
        raise _refusal(error, value) from None


def _refusal(error: pydantic.ValidationError, value: dict[str, Any]) -> ApiError:
    """The error for an invalid body, about its first wrong field."""
    if error.error_count() > MOST_ERRORS:
        return ApiError(400, f"the body has {error.error_count()} wrong or unknown fields")
    param, reasons = None, []
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    for each in sorted(errors, key=lambda each: each["type"] == "missing"):  # missing fields last
        name = _name(each["loc"], value)
        if param is None and each["type"] == "extra_forbidden":
            return wrong(name, "is not supported", "unsupported_parameter")
        param = name if param is None else param
        reasons += [each["msg"]] if name == param and each["msg"] not in reasons else []
    return ApiError(400, f"{param}: {', or: '.join(reasons)}", param)


def _name(where: Sequence[int | str], value: Any) -> str:
    """The dotted name of the field that an error is about: `where` without the parts that name types."""
    names = []
    for part in where:
        inner: Any = value
        known = part in inner if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if known:
            value = inner[part]
        if known or (part == where[-1] and isinstance(value, dict)):  # the last part may be a missing field
            names.append(str(part))
    return printable(".".join(names), 80)


def parse(content: bytes) -> Any:
    """Parses a body's JSON. Raises ApiError 400 if it is malformed, has non-finite numbers or exceeds the limits."""
    limits.check(content)
    try:
        return loaded(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
