"""Bodies that would take a server's time or memory: malformed, wrong, and right but large."""

import json

MEBI = 2**20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Hi"}]


def _json(**fields):
    return json.dumps({"model": "nano", **fields}, separators=(",", ":"), ensure_ascii=False).encode()


def _called(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*QUESTION, {"role": "assistant", "tool_calls": [call]}]


BODIES = {
    "a string without end": lambda: (COMPLETIONS, b'{"model":"nano","prompt":"' + b'\\"' * (8 * MEBI - 20)),
    "brackets": lambda: (CHAT, b"[" * (16 * MEBI)),
    "wrong items": lambda: (COMPLETIONS, _json(prompt=[{}] * 200_000)),
    "wrong values": lambda: (COMPLETIONS, _json(prompt=[None] * 1_000_000)),
    "ids": lambda: (COMPLETIONS, _json(prompt=[[1000] * 8_000] * 128)),
    "ids of one prompt": lambda: (COMPLETIONS, _json(prompt=[1000] * 1_000_000)),
    "a long text": lambda: (COMPLETIONS, _json(prompt="Sam has 3 pens. " * (MEBI // 16 - 4))),
    "long texts": lambda: (COMPLETIONS, _json(prompt=["Sam has 3 pens. " * 8_000] * 128)),
    "messages": lambda: (CHAT, _json(messages=QUESTION * 32_000)),
    "a longer text": lambda: (COMPLETIONS, _json(prompt="Sam has 3 pens. " * (MEBI // 4 - 4))),
    "long messages": lambda: (CHAT, _json(messages=[{"role": "user", "content": "界" * MEBI}] * 2)),
    "a long message": lambda: (CHAT, _json(messages=[{"role": "user", "content": "ab" * (2 * MEBI - 99)}])),
    "items": lambda: ("/v1/responses", _json(input=QUESTION * 32_000)),
    "blocks": lambda: (
        "/v1/messages",
        _json(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 32_000}], max_tokens=4),
    ),
    "biases": lambda: (CHAT, _json(messages=QUESTION, logit_bias={str(i): 1 for i in range(130_000)})),
    "wrong biases": lambda: (CHAT, _json(messages=QUESTION, logit_bias={str(i): "" for i in range(65_000)})),
    "ends": lambda: (CHAT, _json(messages=QUESTION, stop_token_ids=[7] * 1_000_000)),
    "unknown fields": lambda: (CHAT, _json(messages=QUESTION, **{f"x{i}": 1 for i in range(130_000)})),
    "arguments": lambda: (CHAT, _json(messages=_called('{"a":[' + "{}," * (MEBI // 2) + "1]}"))),
    "variables": lambda: (CHAT, _json(messages=QUESTION, chat_template_kwargs={"a": [[{}] * 10] * 2_900})),
    "a text to tokenize": lambda: ("/tokenize", _json(prompt="a" * MEBI)),
    "ids to detokenize": lambda: ("/detokenize", _json(tokens=[1000] * 1_000_000)),
    "choices": lambda: (CHAT, _json(messages=QUESTION, stop=["a"] * 130_000)),
}
"""Each as a function that makes its path and content."""
