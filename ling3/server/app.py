"""The ASGI app: routes, API keys, and JSON responses for errors of every kind."""

import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Scope

from ling3.runtime.quoting import printable
from ling3.server import anthropic, chat, completions, fields, openapi, page, responses, tokens
from ling3.server.body import Post
from ling3.server.errors import MESSAGES, ApiError, Guarded
from ling3.server.observed import Observed
from ling3.server.origins import Hosts, Origins
from ling3.server.service import Service

POSTS = {
    "/v1/chat/completions": Post(fields.Chat, chat.answer),
    "/v1/completions": Post(fields.Completion, completions.answer),
    "/v1/responses": Post(responses.Asked, responses.answer),
    MESSAGES: Post(anthropic.MessagesRequest, anthropic.answer),
    f"{MESSAGES}/count_tokens": Post(anthropic.CountTokens, anthropic.count_tokens),
    "/tokenize": Post(tokens.Tokenize, tokens.tokenize),
    "/detokenize": Post(tokens.Detokenize, tokens.detokenize),
}
ELSEWHERE = {"embed": "embeddings: it continues texts", "rerank": "scores of documents: it continues texts"}
"""Words in the paths of what other servers have, and why it is not served here."""


def build(
    service: Service,
    api_keys: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    timeout: float | None = None,
    hosts: Hosts | None = None,
) -> ASGIApp:
    """Builds the ASGI app over a service.

    With `api_keys`, requests for every path but / and /health need one of them; raises ValueError for a blank key. With
    `hosts`, requests for these paths need one of them in their Host header. Browser pages may send requests from the
    same host and from `allow_origins` ("*" is any). A request that takes more than `timeout` seconds, from the end of
    its headers to the last byte of its answer, ends in an error.
    """
    routes = [
        *(Route(path, post, methods=["POST"]) for path, post in POSTS.items()),
        Route("/v1/models", _models),
        Route("/v1/models/{name:path}", _model),
        Route("/tokenizer_info", tokens.about),
        Route("/metrics", _metrics, include_in_schema=False),
        Route("/openapi.json", _description, include_in_schema=False),
    ]
    health = Route("/health", Health)
    guarded = Mount("/", Guarded(Router(routes), Origins(hosts, allow_origins).refusal, _keyed(api_keys)))
    handlers = {ApiError: _api_error, HTTPException: _http_error, ClientDisconnect: _gone, Exception: _fault}
    whole = Starlette(routes=[health, Route("/", page.answer), guarded], exception_handlers=handlers)  # pyright: ignore[reportArgumentType]
    whole.state.service = service
    whole.state.description = openapi.document([*routes, health], {path: post.model for path, post in POSTS.items()})
    app: ASGIApp = whole
    if allow_origins:
        exposed = ["x-request-id", "request-id", "retry-after"]
        app = CORSMiddleware(app, allow_origins, ["GET", "POST"], ["*"], expose_headers=exposed, max_age=3600)
    return Observed(app, service, timeout)


def _keyed(keys: Sequence[str]) -> Callable[[Scope], ApiError | None]:
    """Builds a check that refuses requests without one of the keys, if any. Raises ValueError for a blank key."""
    if not all(key.strip() for key in keys):
        raise ValueError("an API key is blank")
    digests = [_digest(key.encode()) for key in keys]

    def refusal(scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [_digest(bearer if scheme.lower() == b"bearer" else b""), _digest(headers.get(b"x-api-key", b""))]
        known = [hmac.compare_digest(each, key) for each in given for key in digests]  # all are compared
        if not digests or any(known):
            return None
        return ApiError(401, "no valid API key was given", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    return refusal


def _digest(key: bytes) -> bytes:
    """A hash of fixed length, so that comparing keys takes constant time."""
    return hashlib.sha256(key).digest()


def _listed(service: Service, name: str) -> dict[str, object]:
    about = {"id": name, "object": "model", "created": service.created, "owned_by": "ling3"}
    about |= {} if service.adapter(name) is None else {"parent": service.name}
    return {**about, "max_model_len": service.engine.max_model_len}


async def _models(request: Request) -> Response:
    service: Service = request.app.state.service
    return JSONResponse({"object": "list", "data": [_listed(service, name) for name in service.names]})


async def _model(request: Request) -> Response:
    service: Service = request.app.state.service
    name: str = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(_listed(service, name))


async def _metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    stats = await service.stats()
    if stats is None:
        raise ApiError(503, "the engine does not answer", code="engine_silent")
    page, kind = service.metrics.page(stats, request.headers.get("accept", ""))
    return Response(page, headers={"Content-Type": kind})


async def _description(request: Request) -> Response:
    return JSONResponse(request.app.state.description)


class Health(HTTPEndpoint):
    """The `/health` endpoint. It answers other methods with 405; a plain route would leave them to the mounted app."""

    async def get(self, request: Request) -> Response:
        """Answers with status ok; raises ApiError 503 if the server cannot take requests."""
        service: Service = request.app.state.service
        await service.check_health()
        return JSONResponse({"status": "ok", **service.condition()})


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response(request.scope)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = error.detail
    if error.status_code == 404:
        path = printable(request.url.path, 80)
        why = next((f"the model has no {what}; " for word, what in ELSEWHERE.items() if word in path), "")
        message = f"{path} is not served: {why}POST requests go to {', '.join(POSTS)}"
    return ApiError(error.status_code, message, headers=error.headers).response(request.scope)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _fault(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed").response(request.scope)
