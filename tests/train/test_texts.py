"""Texts to learn from: of chats the assistant's turns alone, behind the prompts that inference has."""

import json

import pytest
from template_forms import LING, LLAMA, QWEN

import ling3
from ling3.text.chat_template import ChatTemplate
from ling3.train.texts import TrainingDataError, TrainingText, read_texts, runs

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who has the pens?"},
    {"role": "assistant", "content": "Kate has."},
    {"role": "user", "content": "And the books?"},
    {"role": "assistant", "content": "Leo has."},
    {"role": "user", "content": "Thanks!"},
]
ENDLESS = """{%- for m in messages -%}{{ m.role }}: {{ m.content }}
{% endfor -%}{%- if add_generation_prompt -%}assistant: {% endif -%}"""


def tokenizer(template=None):
    made = ling3.load_tokenizer("nano")
    if template is not None:
        made.chat_templates = {"default": ChatTemplate(template)}
    return made


def learnt(tok, text):
    return [tok.decode(ids, skip_special_tokens=False) for kept, ids in runs(text) if kept]


@pytest.mark.parametrize("template", [None, LLAMA])
def test_a_template_that_keeps_earlier_turns_makes_one_text_of_a_chat(template):
    tok = tokenizer(template)
    [text] = read_texts([{"messages": CHAT}], tok)
    assert learnt(tok, text) == ["Kate has.<|role_end|>", "Leo has.<|role_end|>"]
    for turn in (2, 4):  # each answer stands behind what inference would send
        prompt = tok.apply_chat_template(CHAT[:turn])
        assert list(text.ids[: len(prompt)]) == prompt and text.learnt[len(prompt)] and not text.learnt[len(prompt) - 1]


@pytest.mark.parametrize(("template", "how"), [(QWEN, {}), (QWEN, {"enable_thinking": False}), (LING, {})])
def test_a_template_that_changes_earlier_turns_makes_a_text_of_each_answer(template, how):
    tok = tokenizer(template)
    chat = [dict(each, reasoning_content="Hm.") if each["role"] == "assistant" else each for each in CHAT]
    if template == LING:
        how = {"enable_thinking": False}
    elif how:
        chat = CHAT  # a turn without reasoning, behind a prompt with closed thoughts
    texts = read_texts([{"messages": chat}], tok, **how)
    assert len(texts) == 2
    for text, turn in zip(texts, (2, 4), strict=True):
        prompt, answer = tok.apply_chat_template(chat[:turn], **how), chat[turn]["content"] + "<|role_end|>"
        assert list(text.ids[: len(prompt)]) == prompt
        thought = "<think>\nHm.\n</think>\n\n" if template == QWEN and not how else ""
        assert learnt(tok, text) == [thought + answer] and sum(text.learnt) == len(text.ids) - len(prompt)


def test_an_answer_always_ends():
    tok = tokenizer(ENDLESS)
    texts = read_texts([{"messages": CHAT}], tok)
    assert [learnt(tok, text) for text in texts] == [["Kate has.\n<|role_end|>"], ["Leo has.\n<|role_end|>"]]
    texts = read_texts([{"prompt": "One, two,", "completion": " three."}, {"text": "One, two."}], tok)
    assert learnt(tok, texts[0]) == [" three.<|role_end|>"]
    assert texts[1].learnt == (False, *[True] * (len(texts[1].ids) - 1)) and texts[1].ids[-1] == 1


def test_tools_reach_the_template():
    tok = tokenizer("{% if tools %}{{ tools[0].name }}{% endif %}" + LLAMA)
    [text] = read_texts([{"messages": CHAT[1:3], "tools": [{"name": "search"}]}], tok)
    assert tok.decode(text.ids).startswith("search")


def test_everything_wrong_is_named_by_line_and_field(tmp_path):
    file = tmp_path / "chats.jsonl"
    rows = [
        {"messages": CHAT},
        {"messages": CHAT[:2]},
        {"messages": CHAT[2:]},
        {"messages": [{"role": "user"}, CHAT[2]]},
        {"prompt": 3, "completion": "x"},
        {"chat": CHAT},
        [1],
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + '\n\n{"text": \n')
    with pytest.raises(TrainingDataError) as raised:
        read_texts(file, tokenizer())
    message = str(raised.value).replace(str(file), "F")
    for expected in (
        "F:2: messages: no turn of the assistant",
        "F:3: messages[0]: the assistant speaks first",
        "F:4: messages[0]: 'content' is missing",
        "F:5: prompt: found 3; expected a string",
        "F:6: text: found the fields chat; expected a string",
        "F:7: found [1]; expected",
        "F:9, column",
    ):
        assert expected in message, message
    assert "F:1:" not in message
    with pytest.raises(TrainingDataError, match=r"the rows: no rows; expected one JSON object a line"):
        read_texts([], tokenizer())
    with pytest.raises(TrainingDataError, match=r"messages\[2\]: the template's generation prompt ends with .*think"):
        read_texts([{"messages": CHAT}], tokenizer(LING))  # thinking on, and turns without thoughts
    with pytest.raises(TrainingDataError, match="no token to learn"):
        TrainingText((1, 2), (True, False), "F:1")
