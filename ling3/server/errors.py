"""Errors as OpenAI's clients expect them."""

from collections.abc import Callable, Mapping
from typing import Any

import pydantic
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorObject(pydantic.BaseModel):
    """An error in the form of OpenAI's protocol."""

    message: str
    type: str
    param: str | None
    """The field that it is about."""
    code: str | None


class ErrorBody(pydantic.BaseModel):
    """The body of an answer that is an error."""

    error: ErrorObject


class ApiError(Exception):
    """An answer of `status` with OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(_unicode(message))
        param = None if param is None else _unicode(param)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The error as the JSON object of an answer."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = ErrorObject(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorBody(error=error).model_dump()

    def response(self) -> Response:
        """The error as an answer with its status."""
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


class Guarded:
    """An app that answers a request only if none of the `refusals` has an error for its scope."""

    def __init__(self, app: ASGIApp, *refusals: Callable[[Scope], ApiError | None]):
        self._app, self._refusals = app, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or refuses by the first error."""
        errors = (refusal(scope) for refusal in self._refusals if scope["type"] == "http")
        error = next((error for error in errors if error is not None), None)
        await (self._app if error is None else error.response())(scope, receive, send)


def wrong(field: str, what: str, code: str | None = None) -> ApiError:
    """The error 400 of a field, whose name begins the message."""
    return ApiError(400, f"{field} {what}", field, code)


def _unicode(text: str) -> str:
    """The text with lone surrogates, which a client's names may have, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
