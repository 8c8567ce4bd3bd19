"""`/openapi.json`, and what schemathesis makes of it."""

import asyncio

import http_server
import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

import ling3
from ling3.server.app import build
from ling3.server.fields import Chat
from ling3.server.service import Service

CHECKS = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
CHECKS.append(checks.response_schema_conformance)


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=64)


@pytest.fixture(scope="module")
def schema(engine):
    with http_server.listening(build(Service(engine, engine.tokenizer, "nano"))) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_what_is_described_is_answered_and_nothing_fails(schema, mode):
    for found in schema.get_all_operations():
        if mode is schemathesis.GenerationMode.NEGATIVE and not found.ok().body:
            continue  # nothing could be wrong with it

        @hypothesis.given(case=found.ok().as_strategy(generation_mode=mode))
        @hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
        def holds(case):
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "nano"  # no schema knows the name
            case.call_and_validate(checks=CHECKS)

        holds()


def test_the_description_is_made_from_routes_and_models(engine):
    async def asked():
        transport = httpx.ASGITransport(build(Service(engine, engine.tokenizer, "nano"), ["key"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/openapi.json", headers={"Authorization": "Bearer key"})

    said = asyncio.run(asked()).json()
    assert said["components"]["schemas"]["Chat"]["properties"].keys() == Chat.model_fields.keys()
    assert {"/health", "/v1/models", "/v1/models/{name}", "/tokenize", "/v1/completions"} <= said["paths"].keys()
    assert set(said["paths"]["/v1/chat/completions"]) == {"post"}
