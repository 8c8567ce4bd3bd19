"""The chat templates of a checkpoint, and the one that renders: as in transformers."""

import json

import pytest
from tokenizer_cases import byte_level
from transformers import AutoTokenizer

import ling3

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
ONE, TWO, TOOLS = (
    f"{name} {{{{ messages[0].content }}}}{{{{ tools | length if tools else 0 }}}}" for name in ("one", "two", "tools")
)
LIST = [{"name": "tool_use", "template": TOOLS}, {"name": "default", "template": ONE}]
# What stands in tokenizer_config.json, and in files.
PLACES = {
    "a string": (ONE, {}),
    "a list": (LIST, {}),
    "a list without tool_use": ([{"name": "rag", "template": TWO}, {"name": "default", "template": ONE}], {}),
    "a list without default": ([{"name": "tool_use", "template": TOOLS}], {}),
    "a file before a string": (ONE, {"chat_template.jinja": TWO}),
    "a file before a list": (LIST, {"chat_template.jinja": TWO}),
    "named files": (None, {"chat_template.jinja": TWO, "additional_chat_templates/tool_use.jinja": TOOLS}),
    "named files before a list": (LIST, {"additional_chat_templates/rag.jinja": TWO}),
    "a named file for tools only": (ONE, {"additional_chat_templates/tool_use.jinja": TOOLS}),
}


@pytest.mark.parametrize("tools", [None, [], [TOOL]], ids=["no tools", "empty tools", "a tool"])
@pytest.mark.parametrize("place", PLACES)
def test_the_template_that_renders(place, tools, tmp_path):
    field, files = PLACES[place]
    byte_level(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = field
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    theirs, ours = AutoTokenizer.from_pretrained(str(tmp_path)), ling3.load_tokenizer(tmp_path)
    given = {} if tools is None else {"tools": tools}
    try:
        wanted = theirs.apply_chat_template(HELLO, tokenize=False, **given)
    except ValueError:
        with pytest.raises(ValueError, match="none is the default one"):
            ours.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=False, **given)
    else:
        assert ours.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=False, **given) == wanted
