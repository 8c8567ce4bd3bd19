"""Data sets as the Hugging Face hub has them: MMLU-Pro's own columns, and files that are wrong or damaged."""

import random
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from ling3.evals import parquet_file
from ling3.evals.answers import choice, number
from ling3.evals.prompts import Question, read
from ling3.evals.public import from_gsm8k, from_mmlu_pro

SCHEMA = pa.schema(
    [
        ("question_id", pa.int64()),
        ("question", pa.string()),
        ("options", pa.list_(pa.string())),
        ("answer", pa.string()),
        ("answer_index", pa.int64()),
        ("cot_content", pa.string()),
        ("category", pa.string()),
        ("src", pa.string()),
    ]
)
"""The columns of MMLU-Pro's files."""


def row(i, cot=""):
    return {
        "question_id": i,
        "question": f"How far is {i}?",
        "options": [f"{i} m", f"{i + 1} m"],
        "answer": "B",
        "answer_index": 1,
        "cot_content": cot,
        "category": "physics",
        "src": "made up",
    }


@pytest.fixture
def put(tmp_path):
    """Writes rows, or a table, to a Parquet file of this name."""

    def put(name, content):
        table = content if isinstance(content, pa.Table) else pa.Table.from_pylist(content, SCHEMA)
        parquet.write_table(table, tmp_path / name)
        return tmp_path / name

    return put


def test_mmlu_pro_s_own_files(put):
    test = put("test.parquet", [row(7), row(8)])
    validation = put("validation.parquet", [row(0, "A: Let's think step by step. It is. The answer is (B).")])
    first, second = from_mmlu_pro(test, validation, 1)
    assert (first.answer, second.answer) == ("B", "B")
    assert first.prompt.endswith(
        "Question:\nHow far is 0?\nOptions:\nA. 0 m\nB. 1 m\n"
        "Answer: Let's think step by step. It is. The answer is (B).\n\n"
        "Question:\nHow far is 7?\nOptions:\nA. 7 m\nB. 8 m\nAnswer: Let's think step by step."
    )


def test_other_files(put):
    solution = pa.table({"question": ["1 + 1?"], "answer": ["1 + 1 = <<1+1=2>>2.\n#### 2"]})
    assert from_gsm8k(put("t.parquet", solution), None, 0) == [Question("Question: 1 + 1?\nAnswer:", "2")]
    assert read(put("p.parquet", pa.table({"prompt": ["a"], "answer": [3]})), number) == [Question("a", "3")]
    with pytest.raises(ValueError, match="row 1: a row of a data set, whose 'options'"):
        read(put("q.parquet", [row(7)]), choice)


def test_only_the_needed_columns_are_read(put):
    table = pa.Table.from_pylist([row(7)], SCHEMA).append_column("image", pa.array([b"\xff" * 1000]))
    (found,) = parquet_file.read(put("x.parquet", table), ("question", "options", "nonesuch"))
    assert found == {"question": "How far is 7?", "options": ["7 m", "8 m"]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"a": [1], "b": [2]}), "no column 'question', .*; there is a, b"),
        (pa.table({"question": ["a"], "options": [["x", "y"]]}), "row 1: the field 'category' is missing; there is qu"),
        (pa.table({"question": [b"a"]}), "the column 'question' is of binary, expected texts"),
        (pa.table({"options": [[["x"]]]}), "the column 'options' is of list<"),
        (pa.table([["a"], ["b"]], names=["question", "question"]), "the same column twice: 'question'"),
        (pa.Table.from_pylist([row(1), row(2) | {"options": None}], SCHEMA), "row 2: the field 'options' is None"),
        (pa.Table.from_pylist([row(1) | {"options": ["a", None]}], SCHEMA), "expected a list of texts"),
        (pa.Table.from_pylist([row(1) | {"question": None}], SCHEMA), "row 1: the field 'question' is None"),
        (pa.Table.from_pylist([], SCHEMA), "no question in it"),
    ],
)
def test_wrong_columns(put, table, message):
    path = put("test.parquet", table)
    with pytest.raises(ValueError, match=message) as raised:
        from_mmlu_pro(path, None, 0)
    assert str(path) in str(raised.value)


def test_damaged_files(put, tmp_path):
    whole = put("whole.parquet", [row(i) for i in range(40)]).read_bytes()
    path, rng = tmp_path / "damaged.parquet", random.Random(0)
    contents = [b"", b"PAR1", b'{"question": 1}', whole[:-1], whole[: len(whole) // 2]]
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 5, 20))):
            content[rng.randrange(len(content))] = rng.randrange(256)
        contents.append(bytes(content))
    refused = 0
    for content in contents:
        path.write_bytes(content)
        try:
            from_mmlu_pro(path, None, 0)
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"{path}"), content
    assert refused > 50
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"damaged, or no Parquet file \(.*\); fetch it again"):
        from_mmlu_pro(path, None, 0)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet"):
        from_mmlu_pro(tmp_path / "nowhere.parquet", None, 0)


def test_a_small_file_of_much_text(put, monkeypatch):
    """A dictionary page holds a repeated text once; the rows are counted as they are decoded."""
    path = put("x.parquet", pa.table({"question": ["x" * 100_000] * 1000}))
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(parquet_file, "MAX_BYTES", 10_000_000)
    with pytest.raises(ValueError, match=r"of 11,\d{3},\d{3} bytes or more .*; expected at most"):
        parquet_file.read(path, ["question"])
    monkeypatch.setattr(parquet_file, "MAX_ROWS", 999)
    with pytest.raises(ValueError, match="1,000 rows or more"):
        parquet_file.read(path, ["question"])


def test_without_pyarrow(put, monkeypatch):
    path = put("x.parquet", [row(7)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow, which is not installed: pip install 'ling3\[evals\]'"):
        from_mmlu_pro(path, None, 0)
