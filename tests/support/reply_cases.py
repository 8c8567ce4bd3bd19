"""Ugly replies, each with how it is read and what it says: (reasoning, content, calls as (name, arguments))."""

TOOLS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "say": {"properties": {"text": {"type": "string"}, "loud": {"type": "boolean"}}},
    "set": {
        "$defs": {"Mood": {"enum": ["1", "2"]}},
        "properties": {
            "mood": {"$ref": "#/$defs/Mood"},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["number", "string"]},
            "what": {},
        },
    },
}


def value(key, text):
    """A call of `set` with one argument."""
    return f"<tool_call>set<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"


def say(text):
    """A call of `say`."""
    return f"<tool_call>say<arg_key>text</arg_key><arg_value>{text}</arg_value></tool_call>"


TAGS = {"tools": TOOLS, "form": "tags"}
OPEN = {**TAGS, "thinking": True}
BARE = {"tools": TOOLS, "form": "bare"}
ADD = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"
)
LINES = ADD.replace("><", ">\n<").replace("add<", "add\n<").replace("<tool_call>", "<tool_call>\n")
CASES = [
    ("hello\n", {}, ("", "hello\n", [])),
    ("a < b <think> c", {}, ("", "a < b <think> c", [])),
    ("<think>\nhm\n</think>\n\nyes", {}, ("hm", "yes", [])),
    (" <think>hm", {}, ("hm", "", [])),
    ("hm</think>yes", {"thinking": True}, ("hm", "yes", [])),
    ("hm, no end", {"thinking": True}, ("hm, no end", "", [])),
    ("hm</thin", {"thinking": True}, ("hm</thin", "", [])),
    ("yes</think>", {}, ("", "yes</think>", [])),
    (ADD, {}, ("", ADD, [])),
    (ADD, TAGS, ("", "", [("add", '{"a": 1, "b": 2}')])),
    (LINES, TAGS, ("", "", [("add", '{"a": 1, "b": 2}')])),
    (f"Sure.\n{ADD}\n{LINES}\n", TAGS, ("", "Sure.", [("add", '{"a": 1, "b": 2}')] * 2)),
    (f"hm\n{ADD}\nso</think>yes", OPEN, ("hmso", "yes", [("add", '{"a": 1, "b": 2}')])),
    (f"hm {ADD}", OPEN, ("hm ", "", [("add", '{"a": 1, "b": 2}')])),
    ("<tool_call>add</tool_call>", TAGS, ("", "", [("add", "{}")])),
    ("<tool_call>not a call</tool_call>!", TAGS, ("", "<tool_call>not a call</tool_call>!", [])),
    ("<tool_call>ad", TAGS, ("", "<tool_call>ad", [])),
    ("<tool_c", TAGS, ("", "<tool_c", [])),
    (
        '<tool_call>say<arg_key>text</arg_key><arg_value>"x"\n</arg</arg_value></tool_call>',
        TAGS,
        ("", "", [("say", '{"text": "\\"x\\"\\n</arg"}')]),
    ),
    ("<tool_call>say<arg_key>text</arg_key><arg_value>half", TAGS, ("", "", [("say", '{"text": "half')])),
    ("<tool_call>say<arg_key>loud</arg_key><arg_value>True</arg_value>", TAGS, ("", "", [("say", '{"loud": true}')])),
    # Tags inside values, and values that are no JSON.
    (say('print("</tool_call>")'), TAGS, ("", "", [("say", '{"text": "print(\\"</tool_call>\\")"}')])),
    (say('x = "</arg_value>" + y'), TAGS, ("", "", [("say", '{"text": "x = \\"</arg_value>\\" + y"}')])),
    (say("</arg_value>\n </arg_v<arg_key>"), TAGS, ("", "", [("say", '{"text": "</arg_value>\\n </arg_v<arg_key>"}')])),
    (say("</tool_call>") + ADD, TAGS, ("", "", [("say", '{"text": "</tool_call>"}'), ("add", '{"a": 1, "b": 2}')])),
    ("<tool_call>say<arg_key>text</arg_key><arg_value>x</tool_call>\n", TAGS, ("", "", [("say", '{"text": "x"}')])),
    ("<tool_call>say<arg_key>text</arg_key><arg_value>x</arg_value>\n</to", TAGS, ("", "", [("say", '{"text": "x"}')])),
    (
        value("what", '{"k": "</arg_value></tool_call>", "l": "</arg_value><arg_key>"}'),
        TAGS,
        ("", "", [("set", '{"what": {"k": "</arg_value></tool_call>", "l": "</arg_value><arg_key>"}}')]),
    ),
    (
        value("what", '"an end that never comes') + ADD + "so",
        TAGS,
        ("", "so", [("set", '{"what": "\\"an end that never comes"}'), ("add", '{"a": 1, "b": 2}')]),
    ),
    (value("size", "1e999"), TAGS, ("", "", [("set", '{"size": "1e999"}')])),
    (value("what", "[1e999]"), TAGS, ("", "", [("set", '{"what": "[1e999]"}')])),
    (value("what", '"\\ud83d"'), TAGS, ("", "", [("set", '{"what": "\ufffd"}')])),
    (value("mood", "1"), TAGS, ("", "", [("set", '{"mood": "1"}')])),
    (value("name", "null"), TAGS, ("", "", [("set", '{"name": null}')])),
    (value("name", "12"), TAGS, ("", "", [("set", '{"name": "12"}')])),
    (value("size", "12"), TAGS, ("", "", [("set", '{"size": 12}')])),
    (value("size", "null"), TAGS, ("", "", [("set", '{"size": "null"}')])),
    (value("what", "12"), TAGS, ("", "", [("set", '{"what": 12}')])),
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\""}}}\n</tool_call>',
        TAGS,
        ("", "", [("add", '{"a": 1, "b": {"c": "}\\""}}')]),
    ),
    (
        '<tool_call>{"name": "set", "arguments": {"what": "</tool_call>", "size": 1e999, "name": "\\ud83d\\x"}}'
        "</tool_call>",
        TAGS,
        ("", "", [("set", '{"what": "</tool_call>", "size": "1e999", "name": "\ufffd\\\\x"}')]),
    ),
    (
        '<tool_call>{"arguments": {"size": NaN,}, "name": "set"}</tool_call>',
        TAGS,
        ("", "", [("set", '{"size": "NaN"}')]),
    ),
    ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}</tool_call>', TAGS, ("", "", [("add", '{"a": 1}')])),
    ('<tool_call>{"name": "add", "arguments": {"a": 1', TAGS, ("", "", [("add", '{"a": 1')])),
    ('<tool_call>{"na', TAGS, ("", '<tool_call>{"na', [])),
    ('{"name": "add", "parameters": {"a": 1}}', BARE, ("", "", [("add", '{"a": 1}')])),
    (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "say", "parameters": {}}',
        BARE,
        ("", "", [("add", '{"a": 1}'), ("say", "{}")]),
    ),
    (
        '{"name": "set", "parameters": {"size": 1e999, "what": "\\ud83d{"}}; {"name": "say", "parameters": {}}',
        BARE,
        ("", "", [("set", '{"size": "1e999", "what": "\ufffd{"}'), ("say", "{}")]),
    ),
    ('{"name": "Bob", "age": 3}', BARE, ("", '{"name": "Bob", "age": 3}', [])),
    (' {"x": [1, 2]} and so on', BARE, ("", ' {"x": [1, 2]} and so on', [])),
    ('so: {"name": "add", "parameters": {}}', BARE, ("", 'so: {"name": "add", "parameters": {}}', [])),
]
