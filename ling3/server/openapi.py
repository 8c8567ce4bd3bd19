"""`/openapi.json`: describes the endpoints, from their routes and the models of their bodies."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from ling3.server.errors import AnthropicErrorBody, ErrorBody, speaks_anthropics
from ling3.version import __version__

Models = Mapping[str, type[pydantic.BaseModel]]
SCHEMA = "#/components/schemas/{model}"


def document(routes: Sequence[BaseRoute], bodies: Models) -> dict[str, Any]:
    """The description in OpenAPI 3.1; `bodies` has the pydantic model for each path that reads a body."""
    models = [*dict.fromkeys(bodies.values()), ErrorBody, AnthropicErrorBody]
    found, schemas = models_json_schema([(model, "validation") for model in models], ref_template=SCHEMA)
    places = {model: place for (model, _), place in found.items()}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            methods = sorted((route.methods or {"GET"}) - {"HEAD"})
            path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
            paths[path] = {method.lower(): _operation(route, path, bodies, places) for method in methods}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ling3", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "anthropic_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"anthropic_key": []}],
    }


def _operation(route: Route, path: str, bodies: Models, places: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": "_".join(re.findall(r"\w+", path))}
    if names := re.findall(r"{(\w+)}", path):
        at = {"in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [{"name": name, **at} for name in names]
    if (model := bodies.get(path)) is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": places[model]}}}
    streams = model is not None and "stream" in model.model_fields
    kinds = ("application/json", "text/event-stream") if streams else ("application/json",)
    error = {"application/json": {"schema": places[AnthropicErrorBody if speaks_anthropics(path) else ErrorBody]}}
    operation["responses"] = {
        "200": {"description": "The answer.", "content": {kind: {} for kind in kinds}},
        "default": {"description": "What was wrong.", "content": error},
    }
    return operation
