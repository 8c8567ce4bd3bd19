"""Errors in the form that OpenAI's clients expect."""

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
    """The field that the error is about."""
    code: str | None


class ErrorBody(pydantic.BaseModel):
    """The body of a response that reports an error."""

    error: ErrorObject


class ApiError(Exception):
    """An error to be sent as a response of `status` with OpenAI's error object."""

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
        """The error as the JSON object of a response."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = ErrorObject(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorBody(error=error).model_dump()

    def response(self) -> Response:
        """The error as a response, with its status and headers."""
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


class Guarded:
    """Middleware that calls the app only if none of the `refusals` returns an error for the request's scope."""

    def __init__(self, app: ASGIApp, *refusals: Callable[[Scope], ApiError | None]):
        self._app, self._refusals = app, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app, or sends the first error."""
        errors = (refusal(scope) for refusal in self._refusals if scope["type"] == "http")
        error = next((error for error in errors if error is not None), None)
        await (self._app if error is None else error.response())(scope, receive, send)


def wrong(field: str, what: str, code: str | None = None) -> ApiError:
    """An ApiError 400 about a field; the message begins with the field's name."""
    return ApiError(400, f"{field} {what}", field, code)


def _unicode(text: str) -> str:
    """Escapes lone surrogates, which names given by a client may have."""
    return text.encode("utf-8", "backslashreplace").decode()
