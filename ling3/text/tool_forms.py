"""Finds the form in which a chat template writes tool calls, by rendering one."""

import re
from collections.abc import Callable

from ling3.text.tool_calls import CALL_END, CALL_START, KEY, KEY_END, VALUE, VALUE_END, ToolForm

PROBE = "probe_tool"
CALL = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": {"key": "value"}}}
CONVERSATION = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "result", "tool_call_id": CALL["id"], "name": PROBE},
)
SHOWN = {"type": "function", "function": {"name": PROBE, "description": "A tool.", "parameters": {"type": "object"}}}
WRITTEN: dict[ToolForm, str] = {
    "tags": rf"{CALL_START}\s*{PROBE}\s*{KEY}key{KEY_END}\s*{VALUE}value{VALUE_END}\s*{CALL_END}",
    "json": rf'{CALL_START}\s*{{"name": ?"{PROBE}", ?"arguments": ?{{"key": ?"value"}}}}\s*{CALL_END}',
    "bare": rf'{{"name": ?"{PROBE}", ?"parameters": ?{{"key": ?"value"}}}}',
}


def tool_form(render: Callable[..., str]) -> ToolForm | None:
    """The form in which a chat template writes tool calls; None if it shows no tools, or uses another form.

    `render` takes messages and `tools`, as `ChatTemplate.render` does; if it raises ValueError, the form is None.
    """
    try:
        shown, written = (render(messages, tools=[SHOWN]) for messages in (CONVERSATION[:1], CONVERSATION))
    except ValueError:
        return None
    forms: list[ToolForm] = [form for form, pattern in WRITTEN.items() if re.search(pattern, written)]
    return forms[0] if forms and PROBE in shown else None
