"""OpenAI's published schema, as the types of its client: each field is honoured, ignored or refused by name."""

import asyncio
import itertools
import pathlib
import re
import typing
from typing import Required

import httpx
import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from scripted_service import recited
from tool_templates import TEMPLATES, tokenizer
from typing_extensions import is_typeddict

from ling3.server.app import build
from ling3.server.custom_tools import ChatFormat, CustomTool, ResponseFormat, Syntax
from ling3.server.fields import Chat, Completion, Options
from ling3.server.known_fields import FieldNames
from ling3.server.messages import KNOWN, MESSAGE_NAMES, OF_ROLE, PART_NAMES
from ling3.server.response_items import FIELDS, ITEM_NAMES
from ling3.server.responses import Asked, CustomToolParam, Effort, FunctionTool, Text
from ling3.server.responses import Options as StreamOptions
from ling3.server.tools import Function, Tool

REQUIRED = (typing.Required, Required)
SCHEMAS = {
    "/v1/chat/completions": chats.CompletionCreateParamsStreaming,
    "/v1/completions": completions.CompletionCreateParamsStreaming,
    "/v1/responses": responses.ResponseCreateParamsStreaming,
}
MODELS = {"/v1/chat/completions": Chat, "/v1/completions": Completion, "/v1/responses": Asked}
TEXT, REFUSAL = {"type", "text"}, {"type", "refusal"}
KINDS = {
    "CompletionCreateParamsStreaming": [(Chat, Chat.names), (Completion, Completion.names)],
    "ResponseCreateParamsStreaming": [(Asked, Asked.names)],
    "ChatCompletionStreamOptionsParam": [(Options, Options.names)],
    "StreamOptions": [(StreamOptions, StreamOptions.names)],
    "ChatCompletionFunctionToolParam": [(Tool, Tool.names)],
    "FunctionDefinition": [(Function, Function.names)],
    "ChatCompletionCustomToolParam": [(CustomTool, CustomTool.names)],
    "CustomFormatText": [(ChatFormat, ChatFormat.names)],
    "CustomFormatGrammar": [(ChatFormat, ChatFormat.names)],
    "CustomFormatGrammarGrammar": [(Syntax, Syntax.names)],
    "ChatCompletionDeveloperMessageParam": [(KNOWN, MESSAGE_NAMES)],
    "ChatCompletionSystemMessageParam": [(KNOWN, MESSAGE_NAMES)],
    "ChatCompletionUserMessageParam": [(KNOWN, MESSAGE_NAMES)],
    "ChatCompletionAssistantMessageParam": [(OF_ROLE["assistant"], MESSAGE_NAMES)],
    "ChatCompletionToolMessageParam": [(OF_ROLE["tool"], MESSAGE_NAMES)],
    "ChatCompletionContentPartTextParam": [(TEXT, PART_NAMES)],
    "ChatCompletionContentPartRefusalParam": [(REFUSAL, PART_NAMES)],
    "ChatCompletionMessageFunctionToolCallParam": [({"id", "type", "function"}, FieldNames())],
    "ChatCompletionMessageCustomToolCallParam": [({"id", "type", "custom"}, FieldNames())],
    "ResponseInputTextParam": [(TEXT, PART_NAMES)],
    "ResponseInputTextContentParam": [(TEXT, PART_NAMES)],
    "ResponseOutputTextParam": [(TEXT, PART_NAMES)],
    "ResponseOutputRefusalParam": [(REFUSAL, PART_NAMES)],
    "FunctionToolParam": [(FunctionTool, FunctionTool.names)],
    "CustomToolParam": [(CustomToolParam, CustomToolParam.names)],
    "Text": [(ResponseFormat, ResponseFormat.names)],
    "Grammar": [(ResponseFormat, ResponseFormat.names)],
    "Reasoning": [(Effort, Effort.names)],
    "ResponseTextConfigParam": [(Text, Text.names)],
    "EasyInputMessageParam": [(FIELDS["message"], ITEM_NAMES)],
    "Message": [(FIELDS["message"], ITEM_NAMES)],
    "ResponseOutputMessageParam": [(FIELDS["message"], ITEM_NAMES)],
    "ResponseFunctionToolCallParam": [(FIELDS["function_call"], ITEM_NAMES)],
    "FunctionCallOutput": [(FIELDS["function_call_output"], ITEM_NAMES)],
    "ResponseCustomToolCallParam": [(FIELDS["custom_tool_call"], ITEM_NAMES)],
    "ResponseCustomToolCallOutputParam": [(FIELDS["custom_tool_call_output"], ITEM_NAMES)],
    "ResponseReasoningItemParam": [(FIELDS["reasoning"], ITEM_NAMES)],
}
"""The specification's types that a request may have, with the fields that are honoured and the names of the others."""

SAY = {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}}}
PATCH = {"name": "patch", "format": {"type": "text"}}
USER = {"role": "user", "content": "Hi"}
CALLED = {"id": "1", "type": "function", "function": {"name": "say", "arguments": "{}"}}
BASES = {
    "/v1/chat/completions": {
        "model": "nano",
        "messages": [USER, {"role": "assistant", "content": "a", "tool_calls": [CALLED]}],
        "tools": [{"type": "function", "function": SAY}, {"type": "custom", "custom": PATCH}],
    },
    "/v1/completions": {"model": "nano", "prompt": "Hi"},
    "/v1/responses": {
        "model": "nano",
        "input": [USER, {"type": "function_call", "call_id": "1", "name": "say", "arguments": "{}"}],
        "tools": [{"type": "function", **SAY}, {"type": "custom", **PATCH}],
    },
}
VALUES = {
    "logit_bias": {"5": 1},
    "logprobs": None,  # a number or a boolean, by the path
    "top_logprobs": None,  # with logprobs
    "echo": False,
    "messages": None,
    "tools": None,
    "input": None,
    "prompt": "Hi",
    "model": "nano",
    "include": ["reasoning.encrypted_content"],
    "background": False,
    "store": False,
    "truncation": "disabled",
    "reasoning": {"effort": "none", "summary": "auto", "context": "auto", "mode": "standard"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
}
"""Values of fields that are honoured, where the first one of their type does not do; None leaves the base's."""


def stripped(hint):
    while str(typing.get_origin(hint)).endswith(("Required", "NotRequired", "Annotated'>")):
        hint = typing.get_args(hint)[0]
    return hint


def types_of(hint):
    """The TypedDicts that a hint names, without theirs."""
    hint = stripped(hint)
    if is_typeddict(hint):
        return [hint]
    return [each for inner in typing.get_args(hint) if not isinstance(inner, (str, int)) for each in types_of(inner)]


def hints(kind):
    return typing.get_type_hints(kind, include_extras=True)


def example(hint):
    """A value of a hint, with what it needs alone."""
    hint = stripped(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_typeddict(hint):
        return {name: example(each) for name, each in hints(hint).items() if typing.get_origin(each) in REQUIRED}
    if origin is typing.Literal:
        return inner[0]
    if origin is dict:
        return {"a": "b"}
    if origin is typing.Union:
        return example(next(each for each in inner if each is not type(None)))
    if inner:
        return [example(inner[0])]
    return {str: "x", int: 1, float: 0.5, bool: True}.get(hint, "x")


def kinds_reached():
    """Every type of the specification that a request of text can have, by the ones that are known."""
    reached, left = {}, list(SCHEMAS.items())
    while left:
        path, kind = left.pop()
        if (path, kind) in reached:
            continue
        reached[path, kind] = kind.__name__ in KINDS
        if kind.__name__ in KINDS:
            refused = {name for _, names in KINDS[kind.__name__] for name in names.refused}
            for name, hint in hints(kind).items():
                left += [(path, each) for each in types_of(hint) if name not in refused]
    return reached


def honoured(fields):
    if isinstance(fields, set):
        return fields
    return {field.alias or name for name, field in fields.model_fields.items()}


def classes(path, kind):
    """The honoured fields of a type, and the tables of those ignored and refused."""
    [(fields, names)] = [
        each for each in KINDS[kind.__name__] if len(KINDS[kind.__name__]) == 1 or each[0] is MODELS[path]
    ]
    return honoured(fields), names.ignored, names.refused


KNOWN_KINDS = [(path, kind) for (path, kind), known in kinds_reached().items() if known]


@pytest.mark.parametrize(("path", "kind"), KNOWN_KINDS, ids=lambda each: getattr(each, "__name__", each))
def test_every_field_is_honoured_ignored_or_refused(path, kind):
    tables = classes(path, kind)
    for name in hints(kind):
        assert sum(name in table for table in tables) == 1, name
    for reason in (*tables[1].values(), *tables[2].values()):
        assert reason


def post(requests):
    """The answers to (path, body), each with the prompts and the parameters that reached the engine."""
    made = tokenizer(TEMPLATES["tags"])

    async def answers():
        said = []
        for path, body in requests:
            service = recited(made, "7")
            transport = httpx.ASGITransport(build(service), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                answer = await http.post(path, json=body)
            said.append((answer, service.engine.prompts, service.engine.params))
        return said

    return asyncio.run(answers())


@pytest.mark.parametrize("path", SCHEMAS)
def test_what_is_ignored_changes_nothing(path):
    kind, base = SCHEMAS[path], {**BASES[path], "seed": 1}
    base = base if path != "/v1/responses" else {**base, "temperature": 0}
    _, ignored, _ = classes(path, kind)
    bodies = [base, *({**base, name: example(hint)} for name, hint in hints(kind).items() if name in ignored)]
    (first, *plain), *others = post([(path, body) for body in bodies])
    assert first.status_code == 200 and len(others) >= 1
    for answer, *reached in others:
        assert answer.status_code == 200 and reached == plain, answer.text


@pytest.mark.parametrize("path", SCHEMAS)
def test_what_is_refused_is_named_with_the_reason(path):
    kind = SCHEMAS[path]
    _, _, refused = classes(path, kind)
    names = [name for name in hints(kind) if name in refused]
    for name, (answer, *_) in zip(
        names, post([(path, {**BASES[path], name: example(hints(kind)[name])}) for name in names]), strict=True
    ):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name and refused[name] in error["message"]


@pytest.mark.parametrize("path", SCHEMAS)
def test_what_is_honoured_is_taken(path):
    kind, base = SCHEMAS[path], BASES[path]
    names = [name for name in hints(kind) if name in classes(path, kind)[0]]
    values = {name: VALUES[name] if name in VALUES else example(hints(kind)[name]) for name in names}
    bodies = [{**base, **({name: value} if value is not None else {})} for name, value in values.items()]
    for name, (answer, *_) in zip(names, post([(path, body) for body in bodies]), strict=True):
        assert answer.status_code == 200, (name, answer.text)


NESTED = {
    "ChatCompletionUserMessageParam": lambda more: {"messages": [{**USER, **more}]},
    "ChatCompletionAssistantMessageParam": lambda more: {
        "messages": [USER, {"role": "assistant", "content": "a", **more}]
    },
    "ChatCompletionContentPartTextParam": lambda more: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **more}]}]
    },
    "ChatCompletionStreamOptionsParam": lambda more: {"stream": True, "stream_options": more},
    "StreamOptions": lambda more: {"stream": True, "stream_options": more},
    "ResponseOutputTextParam": lambda more: {
        "input": [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "a", **more}]}]
    },
    "ResponseFunctionToolCallParam": lambda more: {"input": [USER, {**BASES["/v1/responses"]["input"][1], **more}]},
    "ResponseReasoningItemParam": lambda more: {
        "input": [USER, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], **more}]
    },
    "ResponseOutputMessageParam": lambda more: {"input": [USER, {"role": "assistant", "content": "a", **more}]},
    "ResponseTextConfigParam": lambda more: {"text": more},
    "FunctionToolParam": lambda more: {"tools": [{"type": "function", **SAY, **more}]},
    "Reasoning": lambda more: {"reasoning": more},
}


@pytest.mark.parametrize(
    ("path", "kind"),
    [each for each in KNOWN_KINDS if each[1].__name__ in NESTED],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_fields_of_parts_behave_so_too(path, kind):
    build_body = NESTED[kind.__name__]
    base = {**BASES[path], "seed": 1, "temperature": 0}
    _, ignored, refused = classes(path, kind)
    [(first, *plain)] = post([(path, {**base, **build_body({})})])
    assert first.status_code == 200, first.text
    for name, hint in hints(kind).items():
        [(answer, *reached)] = post([(path, {**base, **build_body({name: example(hint)})})])
        if name in ignored:
            assert answer.status_code == 200 and reached == plain, (name, answer.text)
        elif name in refused:
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"].replace("]", "").endswith(name), error


def test_other_types_are_refused_by_name():
    """Messages, parts, items and tools that no text has: images, audio, files, and what OpenAI's own tools say."""
    fields = {"messages": "messages", "tools": "tools", "input": "input"}
    seen = 0
    for (path, kind), known in kinds_reached().items():
        given = example(kind)
        if known or ("type" not in given and "role" not in given):
            continue
        for field in fields:
            parents = hints(SCHEMAS[path]).get(field)
            if parents is not None and kind in types_of(parents):
                base = BASES[path]
                [(answer, *_)] = post([(path, {**base, field: [given] if field == "tools" else [*base[field], given]})])
                error = answer.json()["error"]
                assert answer.status_code == 400 and error["param"].startswith(field), (kind, error)
                seen += 1
    assert seen > 20


CONTENTS = [
    ("/v1/chat/completions", chats.ChatCompletionMessageParam, "messages"),
    ("/v1/responses", responses.ResponseInputParam, "input"),
]


@pytest.mark.parametrize(("path", "union", "field"), CONTENTS)
def test_parts_that_are_no_text_are_refused(path, union, field):
    parts = [each for message in types_of(union) for each in types_of(hints(message).get("content", str))]
    parts = [each for each in dict.fromkeys(parts) if each.__name__ not in KINDS and "type" in hints(each)]
    parts = [each for each in parts if each.__name__ not in ("Content", "Summary")]  # of thinking
    assert len(parts) >= 2
    for each in parts:
        [(answer, *_)] = post([(path, {**BASES[path], field: [{"role": "user", "content": [example(each)]}]})])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == f"{field}[0].content", each


CHOICES = {
    "ChatCompletionAllowedToolChoiceParam": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
    },
    "ChatCompletionNamedToolChoiceParam": {"type": "function", "function": {"name": "say"}},
    "ChatCompletionNamedToolChoiceCustomParam": {"type": "custom", "custom": {"name": "patch"}},
    "ToolChoiceAllowedParam": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "say"}]},
    "ToolChoiceFunctionParam": {"type": "function", "name": "say"},
    "ToolChoiceCustomParam": {"type": "custom", "name": "patch"},
}


@pytest.mark.parametrize("path", [path for path in SCHEMAS if "tool_choice" in hints(SCHEMAS[path])])
def test_every_choice_of_tools_is_taken_or_refused(path):
    kinds = types_of(hints(SCHEMAS[path])["tool_choice"])
    assert len(kinds) >= 3
    for kind in kinds:
        choice = CHOICES.get(kind.__name__, example(kind))
        [(answer, *_)] = post([(path, {**BASES[path], "tool_choice": choice})])
        assert answer.status_code == (200 if kind.__name__ in CHOICES else 400), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["param"] == "tool_choice"


def test_the_documentation_has_every_field_of_the_tables():
    page = (pathlib.Path(__file__).parents[2] / "docs/reference/http.md").read_text(encoding="utf-8")
    for _, names in itertools.chain.from_iterable(KINDS.values()):
        for name in (*names.ignored, *names.refused):
            assert re.search(rf"[`.]{name}`", page), name
