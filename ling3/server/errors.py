"""Errors in the form that the request's client expects: OpenAI's, or Anthropic's."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pydantic
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ling3.server import log

MESSAGES = "/v1/messages"
"""The path of Anthropic's protocol; errors of it and of the paths below it have that protocol's form."""
OVERLOADED = 529
"""Anthropic's status for a server that takes no requests now, in place of 503."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    **TYPES,
    403: "permission_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


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


class AnthropicErrorObject(pydantic.BaseModel):
    """The type and the message of an error in the form of Anthropic's protocol."""

    type: str
    message: str


class AnthropicErrorBody(pydantic.BaseModel):
    """The body of a response that reports an error to a client of Anthropic's protocol."""

    type: Literal["error"] = "error"
    error: AnthropicErrorObject
    request_id: str | None


class ApiError(Exception):
    """An error to be sent as a response of `status`, in the form of the request's protocol."""

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
        """The error as OpenAI's JSON object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = ErrorObject(message=str(self), type=kind, param=self.param, code=self.code)
        return ErrorBody(error=error).model_dump()

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error as Anthropic's JSON object, with the id of the request that the current task answers, if any."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        entry = log.current.get()
        error = AnthropicErrorObject(type=kind, message=str(self))
        return AnthropicErrorBody(error=error, request_id=entry and entry.request_id).model_dump()

    def response(self, scope: Scope) -> Response:
        """The error as a response to a request, with its status and headers."""
        headers = dict(self.headers or {})
        if not in_anthropics_form(scope):
            return JSONResponse(self.body, self.status, headers=headers)
        return JSONResponse(self.anthropic_body, OVERLOADED if self.status == 503 else self.status, headers=headers)


class Guarded:
    """Middleware that calls the app only if none of the `refusals` returns an error for the request's scope."""

    def __init__(self, app: ASGIApp, *refusals: Callable[[Scope], ApiError | None]):
        self._app, self._refusals = app, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app, or sends the first error."""
        errors = (refusal(scope) for refusal in self._refusals if scope["type"] == "http")
        error = next((error for error in errors if error is not None), None)
        await (self._app if error is None else error.response(scope))(scope, receive, send)


def in_anthropics_form(scope: Scope) -> bool:
    """Whether errors of a request have Anthropic's form: its path is that protocol's, or its client is."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return speaks_anthropics(path) or any(name == b"anthropic-version" for name, _ in scope["headers"])


def speaks_anthropics(path: str) -> bool:
    """Whether a path belongs to Anthropic's protocol."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def wrong(field: str, what: str, code: str | None = None) -> ApiError:
    """An ApiError 400 about a field; the message begins with the field's name."""
    return ApiError(400, f"{field} {what}", field, code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error of a chat in the names of another protocol: `names` has them by the chat's names of the fields."""
    message, param = str(error), error.param
    theirs = "" if param is None else re.split(r"[.\[]", param)[0]
    if param is not None and theirs in names:
        message = re.sub(rf"\b(?:{re.escape(param)}|{theirs}\b)", names[theirs], message)
        param = names[theirs]
    return ApiError(error.status, message, param, error.code, error.headers)


def _unicode(text: str) -> str:
    """Escapes lone surrogates, which names given by a client may have."""
    return text.encode("utf-8", "backslashreplace").decode()
