"""Anthropic's published schema: each field and block of a request is honoured, ignored or refused by name."""

import asyncio
import itertools
import json
import pathlib
import re

import llm_comply
import pytest
from scripted_service import recited, transported
from tool_templates import TEMPLATES, tokenizer

from ling3.server.anthropic import (
    ClearThinking,
    ContextManagement,
    CountTokens,
    InputTool,
    JSONFormat,
    MessagesRequest,
    OutputConfig,
    ThinkingConfig,
    ToolChoice,
)
from ling3.server.anthropic_blocks import BLOCK_NAMES, FIELDS

SCHEMAS = json.loads((pathlib.Path(llm_comply.__file__).parent / "specs/anthropic.json").read_text(encoding="utf-8"))
SCHEMAS = SCHEMAS["components"]["schemas"]
PATHS = {"/v1/messages": "CreateMessageParams", "/v1/messages/count_tokens": "CountMessageTokensParams"}
MODELS = {
    "CreateMessageParams": MessagesRequest,
    "CountMessageTokensParams": CountTokens,
    "Tool": InputTool,
    "ToolChoiceAuto": ToolChoice,
    "ToolChoiceAny": ToolChoice,
    "ToolChoiceTool": ToolChoice,
    "ToolChoiceNone": ToolChoice,
    "ThinkingConfigEnabled": ThinkingConfig,
    "ThinkingConfigDisabled": ThinkingConfig,
    "ThinkingConfigAdaptive": ThinkingConfig,
    "OutputConfig": OutputConfig,
    "JsonOutputFormat": JSONFormat,
    "ContextManagementConfig": ContextManagement,
    "ClearThinking20251015": ClearThinking,
}
BLOCKS = {
    "RequestTextBlock": "text",
    "RequestThinkingBlock": "thinking",
    "RequestRedactedThinkingBlock": "redacted_thinking",
    "RequestToolUseBlock": "tool_use",
    "RequestToolResultBlock": "tool_result",
}
BOTH = ("user", "assistant")
USER = {"role": "user", "content": "Hi"}
CALLED = {"type": "tool_use", "id": "1", "name": "say", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
TOOL = {"name": "say", "input_schema": {"type": "object"}}
MESSAGES = [USER, {"role": "assistant", "content": [CALLED]}, {"role": "user", "content": [RESULT]}]
BASE = {"model": "nano", "messages": MESSAGES, "tools": [TOOL], "thinking": {"type": "adaptive"}}
NESTED = {
    "Tool": lambda more: {"tools": [{**TOOL, **more}]},
    "OutputConfig": lambda more: {"output_config": more},
    "ClearThinking20251015": lambda more: {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", **more}]}
    },
    "RequestTextBlock": lambda more: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}]
    },
    "RequestToolUseBlock": lambda more: {
        "messages": [USER, {"role": "assistant", "content": [{**CALLED, **more}]}, MESSAGES[2]]
    },
    "RequestToolResultBlock": lambda more: {
        "messages": [*MESSAGES[:2], {"role": "user", "content": [{**RESULT, **more}]}]
    },
}
"""How a request has each type that has fields which are ignored or refused."""


def properties(name):
    """The fields of a type, those of the beta among them."""
    return {**SCHEMAS.get(f"Beta{name}", {}).get("properties", {}), **SCHEMAS.get(name, {}).get("properties", {})}


def classes(name):
    """The fields of a type that are honoured, ignored and refused."""
    if name in BLOCKS:
        return {"type", *FIELDS[BLOCKS[name]]}, BLOCK_NAMES.ignored, BLOCK_NAMES.refused
    model = MODELS[name]
    return {field.alias or name for name, field in model.model_fields.items()}, model.names.ignored, model.names.refused


@pytest.mark.parametrize("name", [*MODELS, *BLOCKS])
def test_every_field_is_honoured_ignored_or_refused(name):
    tables, fields = classes(name), properties(name)
    assert fields
    for field in fields:
        assert sum(field in table for table in tables) == 1, field


def post(bodies, path="/v1/messages"):
    """The answers to bodies, each with the prompts that reached the engine."""
    made = tokenizer(TEMPLATES["tags"])

    async def answers():
        said = []
        for body in bodies:
            service = recited(made, "7")
            async with transported(service) as http:
                limit = {"max_tokens": 9} if path == "/v1/messages" else {}
                answer = await http.post(f"http://test{path}", json={**BASE, **limit, **body})
            said.append((answer, service.engine.prompts))
        return said

    return asyncio.run(answers())


def holds(name, made, path="/v1/messages"):
    """What is ignored changes nothing, and what is refused is named."""
    _, ignored, refused = classes(name)
    fields = [field for field in properties(name) if field in ignored or field in refused]
    (first, plain), *others = post([made({}), *(made({field: {"a": "b"}}) for field in fields)], path)
    assert first.status_code == 200, first.text
    for field, (answer, prompts) in zip(fields, others, strict=True):
        if field in ignored:
            assert answer.status_code == 200 and prompts == plain, (field, answer.text)
        else:
            message = answer.json()["error"]["message"]
            assert answer.status_code == 400 and f"{field} is not supported" in message


@pytest.mark.parametrize("path", PATHS)
def test_fields_of_a_request_behave_so(path):
    holds(PATHS[path], lambda more: more, path)


@pytest.mark.parametrize("name", NESTED)
def test_fields_of_parts_behave_so_too(name):
    holds(name, NESTED[name])


def test_other_blocks_and_tools_are_refused_by_name():
    others = {*SCHEMAS["BetaInputContentBlock"]["discriminator"]["mapping"]} - set(FIELDS)
    assert {"image", "document", "web_search_tool_result"} <= others
    given = [{"messages": [{"role": role, "content": [{"type": kind}]}]} for kind in others for role in BOTH]
    for body, (answer, _) in zip(given, post(given), strict=True):
        [block] = body["messages"][0]["content"]
        expected = f"messages.0.content.0.type is {block['type']}, which is not supported: expected text or "
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(expected), answer.text
    kinds = {each["$ref"].split("/")[-1] for each in properties("CreateMessageParams")["tools"]["items"]["oneOf"]}
    types = {properties(kind).get("type", {}).get("const") for kind in kinds} - {None}
    assert "bash_20250124" in types
    for answer, _ in post([{"tools": [{"type": kind, "name": "x"}]} for kind in types]):
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("tools.0.type: ")


def test_the_documentation_has_every_field_of_the_tables():
    page = (pathlib.Path(__file__).parents[2] / "docs/reference/http.md").read_text(encoding="utf-8")
    tables = [classes(name)[1:] for name in (*MODELS, *BLOCKS)]
    for name in itertools.chain.from_iterable(itertools.chain.from_iterable(tables)):
        assert re.search(rf"[`.]{name}`", page), name
