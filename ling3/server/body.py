"""Endpoints that read a body: bounded, strict JSON, checked by a pydantic model whose errors name the field."""

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
"""Bytes up to which a body is parsed at once; a longer one is, in its turn, on another thread."""
MOST_ERRORS = 64
"""Errors up to which they are looked at one by one."""
PARSER = ThreadPoolExecutor(1, "bodies")
"""One thread, as parsing keeps the interpreter: the event loop waits for one body, not for several."""

Model = TypeVar("Model", bound=Known)


class Post:
    """An endpoint: `answer` makes a response of a body, a `model`, and is cancelled if the client goes away."""

    def __init__(self, model: type[Known], answer: Callable[[Service, Any], Awaitable[Response]]):
        self.model, self._answer = model, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
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
    """The body as a `model`.

    ApiError 415 if it is not said to be JSON, 413 if it is too large, 400 for anything else that is wrong with it.
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
    """ApiError 415 without the type that a page of another origin cannot send unasked."""
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
    """What is wrong with a body, by the first field that is."""
    if error.error_count() > MOST_ERRORS:
        return ApiError(400, f"the body has {error.error_count()} wrong or unknown fields")
    param, reasons = None, []
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    for each in sorted(errors, key=lambda each: each["type"] == "missing"):  # what is there says more
        name = _name(each["loc"], value)
        if param is None and each["type"] == "extra_forbidden":
            return wrong(name, "is not supported", "unsupported_parameter")
        param = name if param is None else param
        reasons += [each["msg"]] if name == param and each["msg"] not in reasons else []
    return ApiError(400, f"{param}: {', or: '.join(reasons)}", param)


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
    """The JSON of a body; ApiError 400 for what is malformed, not finite or beyond the limits."""
    limits.check(content)
    try:
        return loaded(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ApiError(400, "the body is not UTF-8") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
