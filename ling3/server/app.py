"""The ASGI app: its endpoints, and errors as JSON wherever they come from."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import hmac
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ling3.server import chat, completions, page, tokens
from ling3.server.errors import ApiError
from ling3.server.running import Service


def build(service: Service, api_keys: Sequence[str] = ()) -> ASGIApp:
    """The app over a service; with `api_keys`, all but / and /health wants one of them."""
    routes = [
        Route("/v1/chat/completions", chat.answer, methods=["POST"]),
        Route("/v1/completions", completions.answer, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _fault}
    app = Starlette(routes=routes, exception_handlers=handlers)  # pyright: ignore[reportArgumentType]
    app.state.service = service
    inner = Keys(app, api_keys) if api_keys else app
    return Starlette(routes=[Route("/health", _health), Route("/", page.answer), Mount("/", inner)])


class Keys:
    """Asks for an API key."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what has a key."""
        app = self._app
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
            if not any([hmac.compare_digest(given, key) for key in self._keys]):  # noqa: C419 -- all are compared
                app = ApiError(401, "no valid API key was given", code="invalid_api_key").response()
        await app(scope, receive, send)


def _listed(service: Service) -> dict[str, object]:
    length = service.engine.max_model_len
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "ling3",
        "max_model_len": length,
    }


async def _models(request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [_listed(request.app.state.service)]})


async def _model(request: Request) -> Response:
    service: Service = request.app.state.service
    service.check_model(request.path_params["name"])
    return JSONResponse(_listed(service))


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    return ApiError(error.status_code, error.detail, headers=error.headers).response()


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _fault(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed").response()
