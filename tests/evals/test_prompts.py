"""Prompt files, read liberally and written in one form, and the prompts built from public files."""

import json

import pytest

from ling3.evals.answers import choice, number
from ling3.evals.nano_files import files
from ling3.evals.prompts import Question, read, write
from ling3.evals.public import from_gsm8k, from_mmlu_pro
from ling3.train.nano.problems import ask, exam, worked_examples

QUESTIONS = [Question("Question: 3 + 4?\nAnswer:", "7"), Question("多少？\u2028", "-1234.5")]


@pytest.fixture
def put(tmp_path):
    """Writes a file of this name and content, and returns its path."""

    def put(name, content):
        path = tmp_path / name
        if isinstance(content, (str, bytes)):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        elif name.endswith(".jsonl"):
            path.write_text("".join(f"{json.dumps(row)}\n" for row in content))
        else:
            path.write_text(json.dumps(content))
        return path

    return put


def test_what_is_written_is_read(tmp_path):
    write(tmp_path / "prompts.json", QUESTIONS)
    assert read(tmp_path / "prompts.json", number) == QUESTIONS
    assert json.loads((tmp_path / "prompts.json").read_text(encoding="utf-8"))[0] == {
        "prompt": "Question: 3 + 4?\nAnswer:",
        "answer": "7",
    }


ROWS = [{"prompt": "a", "answer": "3"}, {"prompt": "b", "answer": "4"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.json", ROWS),
        ("p.json", {"version": [1, {"data": []}], "data": ROWS}),
        ("p.jsonl", ROWS),
        ("p.json", '{"prompt": "a", "answer": "3"}\n\n{"prompt": "b", "answer": "4"}\n'),
        ("p.json", '\ufeff[{"prompt": "a", "answer": 3},\r\n {"prompt": "b", "answer": 4.0}]'),
        ("p.json", [{"origin_prompt": "a", "gold": "#### 3"}, {"question": "b", "reference": "2 + 2 = 4.\n#### 4"}]),
        (
            "p.json",
            [{"input": "a", "target": 3, "id": 7}, {"prompt": "b", "question": "c", "answer": 4, "gold": 5}],
        ),
    ],
)
def test_every_form_is_read(put, name, content):
    assert read(put(name, content), number) == [Question("a", "3"), Question("b", "4")]


def test_answers_are_read_as_the_model_s_are(put):
    path = put("p.jsonl", [{"prompt": "a", "answer": "$1,234.50"}])
    assert read(path, number) == [Question("a", "1234.5")]
    for gold in ("C", "(C)", "**C**", "C. Vitamin A", "C) I do", "C: E = mc^2", "#### C"):
        assert read(put("p.jsonl", [{"prompt": "a", "answer": gold}]), choice) == [Question("a", "C")]
    for gold, value in (("18 eggs", "18"), ("9 x 2 #### 18", "18"), (r"\boxed{18}", "18"), ("- 18", "18")):
        assert read(put("p.jsonl", [{"prompt": "a", "answer": gold}]), number) == [Question("a", value)]


@pytest.mark.parametrize(
    ("parse", "gold"),
    [
        *((number, gold) for gold in ("18 (= 6 x 3)", "3 or 4", "#### 3, 4", "12/25/2024")),
        *((choice, gold) for gold in ("Vitamin A", "A man", "K", "not B", "A car needs B.", 3)),
    ],
)
def test_an_answer_in_doubt_is_refused(put, parse, gold):
    """What a question expects is not to be guessed from its last number or letter."""
    path = put("p.jsonl", [{"prompt": "a", "answer": gold}])
    with pytest.raises(
        ValueError, match=f"line 1: the field 'answer' is .* expected an answer with one {parse.__name__}"
    ):
        read(path, parse)


def test_a_row_whose_options_would_not_be_shown(put):
    with pytest.raises(ValueError, match=r"line 1: a row of a data set, whose 'options' .* --questions"):
        read(put("p.jsonl", [mmlu(3)]), choice)
    assert read(put("p.jsonl", [{**mmlu(3), "prompt": "a"}]), choice) == [Question("a", "B")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "p.json",
            '[{"prompt": "a", "answer": "3"},\n\n {"answer": "4"}]',
            r"item 2 \(line 3\): the field 'prompt' .*",
        ),
        ("p.json", '{"n": 2,\n"data": [\n{"prompt": "a"}]}', r"item 1 \(line 3\): the field 'answer' .* is missing"),
        (
            "p.jsonl",
            '{"prompt": "a", "answer": "3"}\n{"prompt": ""}',
            "line 2: the field 'prompt' is '', expected",
        ),
        ("p.jsonl", '{"prompt": 5, "answer": "3"}', "line 1: the field 'prompt' is 5, expected a text"),
        ("p.jsonl", '{"prompt": "\\ud800", "answer": "3"}', "line 1: the field 'prompt' is .* lone surrogates"),
        (
            "p.jsonl",
            '{"prompt": "a", "answer": "none"}',
            "line 1: the field 'answer' is 'none', expected .* one number",
        ),
        ("p.jsonl", '{"prompt": "a", "answer": true}', "line 1: the field 'answer' is True"),
        ("p.jsonl", '{"prompt": "a", "answer": null}', "line 1: the field 'answer' is None"),
        ("p.jsonl", '{"prompt": "a", "answer": [3]}', r"line 1: the field 'answer' is \[3\]"),
        ("p.jsonl", '{"prompt": "a", "prompt": "b", "answer": 3}', "line 1: the same key twice: 'prompt'"),
        ("p.jsonl", '{"prompt": "a", "answer": "3"}\n{"pro', "line 2, column 2: no valid JSON .*; mend the line"),
        ("p.jsonl", '["a"]', r"line 1: found \['a'\], expected an object"),
        ("p.json", '[{"prompt": "a", "answer": "3"}, "b"]', r"item 2 \(line 1\): found 'b', expected an object"),
        ("p.json", '[{"prompt": "a", "answer": NaN}]', "NaN is not a JSON value"),
        ("p.json", "[1, 2", "no valid JSON"),
        ("p.json", "3", "found 3, expected a list"),
        ("p.json", '{\n"prompt": "a"}', "an object without 'data'"),
        ("p.json", '{"data": 3}', "found 3, expected a list"),
        ("p.json", "[]", "no question in it"),
        ("p.json", "", "no valid JSON"),
        ("p.jsonl", "\n", "no question in it"),
        ("p.json", b"\xff\xfe", "not UTF-8"),
        ("p.parquet", b"PAR1", "damaged, or no Parquet file"),
    ],
)
def test_a_malformed_file_is_named_by_line_and_field(put, name, content, message):
    path = put(name, content)
    with pytest.raises(ValueError, match=message) as raised:
        read(path, number)
    assert str(path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        read(tmp_path / "nowhere.json", number)


GSM8K = [
    {"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i:,}"}
    for i in (1, 2, 3, 4, 600)
]


def test_gsm8k_s_own_files(put):
    test, train = put("test.jsonl", GSM8K[4:]), put("train.jsonl", GSM8K[:4])
    (four,) = from_gsm8k(test, train)
    assert four.answer == "1200"
    assert four.prompt.startswith(
        "Question: What is 1 + 1?\nAnswer: 1 + 1 = 2. The answer is 2.\n\nQuestion: What is 2 + 2?\n"
    )
    assert four.prompt.endswith("The answer is 8.\n\nQuestion: What is 600 + 600?\nAnswer:")
    assert from_gsm8k(test, None, 0) == [Question("Question: What is 600 + 600?\nAnswer:", "1200")]
    with pytest.raises(ValueError, match=r"train.jsonl: 4 examples, but 5 shots"):
        from_gsm8k(test, train, 5)
    with pytest.raises(ValueError, match="no file of examples was given, but 4 shots"):
        from_gsm8k(test, None)
    for build in (from_gsm8k, from_mmlu_pro):
        with pytest.raises(ValueError, match="shots is -1, expected at least 0"):
            build(test, train, -1)
    with pytest.raises(ValueError, match="line 1: the field 'answer' is '2', expected a solution"):
        from_gsm8k(test, put("bad.jsonl", [{"question": "1 + 1?", "answer": "2"}]), 1)


def mmlu(i, category="physics", **others):
    options = [f"{i} m", f"{i + 1} m", "N/A"]
    return {"question": f"How far is {i}?", "options": options, "answer": "B", "category": category, **others}


def test_mmlu_pro_s_own_files(put):
    cot = "A: Let's think step by step. It is. The answer is (B)."
    validation = put("validation.json", [mmlu(i, c, cot_content=cot) for c in ("law", "physics") for i in range(2)])
    (question,) = from_mmlu_pro(put("test.jsonl", [mmlu(7)]), validation, 2)
    assert question.answer == "B"
    assert question.prompt == (
        "The following are multiple choice questions (with answers) about physics. Think step by step and then finish "
        'your answer with "the answer is (X)" where X is the correct letter choice.\n\n\n'
        "Question:\nHow far is 0?\nOptions:\nA. 0 m\nB. 1 m\n"
        "Answer: Let's think step by step. It is. The answer is (B).\n\n"
        "Question:\nHow far is 1?\nOptions:\nA. 1 m\nB. 2 m\n"
        "Answer: Let's think step by step. It is. The answer is (B).\n\n"
        "Question:\nHow far is 7?\nOptions:\nA. 7 m\nB. 8 m\n"
        "Answer: Let's think step by step."
    )
    with pytest.raises(ValueError, match=r"test.jsonl, line 1: 2 examples of the category 'physics' in .* 3 shots"):
        from_mmlu_pro(put("test.jsonl", [mmlu(7)]), validation, 3)
    with pytest.raises(ValueError, match="no file of examples was given, but 4 shots"):
        from_mmlu_pro(put("test.jsonl", [mmlu(7)]), None)
    bare = put("bare.jsonl", [mmlu(3)])
    (question,) = from_mmlu_pro(put("test.jsonl", [mmlu(7)]), bare, 1)
    assert "B. 4 m\nAnswer: The answer is (B).\n\nQuestion:" in question.prompt


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": "A. 3"}, "line 1: the field 'options' is 'A. 3', expected a list of texts"),
        ({"options": ["one", "N/A"]}, "line 1: the field 'options' is .* expected 2 to 10 texts"),
        ({"answer": "C"}, "line 1: the field 'answer' is 'C', expected a letter of its 2 options"),
        ({"answer": "?"}, "line 1: the field 'answer' is '\\?', expected an answer with one choice"),
        ({"category": 3}, "line 1: the field 'category' is 3"),
    ],
)
def test_a_malformed_row_of_mmlu_pro(put, changes, message):
    with pytest.raises(ValueError, match=message):
        from_mmlu_pro(put("test.jsonl", [{**mmlu(7), **changes}]), None, 0)


def test_nano_s_examination_as_files(tmp_path):
    alone, four_shot = files(tmp_path / "new", count=3)
    problems, examples = exam(3), worked_examples(3)
    assert read(alone, number) == [Question(ask(p), str(p.answer)) for p in problems]
    assert read(four_shot, number) == [Question(ask(p, e), str(p.answer)) for p, e in zip(problems, examples)]
