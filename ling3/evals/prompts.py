"""Prompt files: questions with their answers. Errors name the file, the item, its line and the field."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from ling3.evals import parquet_file
from ling3.evals.answers import GOLD, Parser
from ling3.runtime import strict_json
from ling3.runtime.quoting import printable

PROMPT = ("prompt", "origin_prompt", "question", "input")
"""Names of the field with the text to continue; the first that an object has is used."""
ASKED_ALONE = ("question", "input")
"""The names among `PROMPT` that data sets use for a question without its options."""
ANSWER = ("answer", "target", "gold", "reference")
"""Names of the field with the expected answer; the first that an object has is used."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt as the model reads it, and the expected answer in its canonical spelling."""

    prompt: str
    answer: str


@dataclasses.dataclass(frozen=True)
class DataRow:
    """One object of a data file, with its place for error messages."""

    where: str
    fields: dict[str, Any]

    def text(self, *names: str) -> str:
        """The first field of these `names` that the row has. Raises ValueError unless it is a non-empty text."""
        name = self.name(names)
        value = self.fields[name]
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, "a text that is not empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(name, "Unicode text without lone surrogates") from None
        return value

    def name(self, names: Sequence[str]) -> str:
        """The first of `names` that the row has. Raises ValueError if it has none."""
        found = next((name for name in names if name in self.fields), None)
        if found is None:
            others = f" (or {', '.join(map(repr, names[1:]))})" if len(names) > 1 else ""
            there = printable(", ".join(self.fields) or "none", 200)
            raise ValueError(f"{self.where}: the field {names[0]!r}{others} is missing; there is {there}")
        return found

    def error(self, name: str, expected: str) -> ValueError:
        """A ValueError to raise for a field `name` that is not as `expected`."""
        return ValueError(f"{self.where}: the field {name!r} is {self.fields[name]!r:.60}, expected {expected}")


def read(path: str | os.PathLike[str], parse: Parser) -> list[Question]:
    """The questions of a prompt file; `parse` must find an answer in each.

    In its canonical form the file is a JSON list of objects, `[{"prompt": "Question: …", "answer": "18"}, …]`. An
    object with that list as its `data` is accepted too, and one object per line (JSONL), and Parquet (`*.parquet`). An
    answer may be a number, or a text such as GSM8K's whose answer follows `####`. `PROMPT` and `ANSWER` list other
    names for the two fields; further fields are ignored. The prompt is given to the model unchanged, with any worked
    examples in it. Raises ValueError for anything else, and OSError for a file that cannot be read.
    """
    questions = []
    for row in rows(path, (*PROMPT, *ANSWER, "options")):
        prompt = row.text(*PROMPT)
        if row.name(PROMPT) in ASKED_ALONE and "options" in row.fields:
            raise ValueError(
                f"{row.where}: a row of a data set, whose 'options' the model would not see; give the file as "
                "--questions, or to from_mmlu_pro, which puts them into the prompt"
            )
        questions.append(Question(prompt, expected(row, parse, *ANSWER)))
    return questions


def expected(row: DataRow, parse: Parser, *names: str) -> str:
    """The answer in the first of the fields `names`, as `parse` spells it. Raises ValueError if it is ambiguous."""
    name = row.name(names)
    value = row.fields[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = str(value) if number else row.text(name)
    answer = GOLD.get(parse, parse)(text.rpartition("####")[2])
    if answer is None:
        raise row.error(name, f"an answer with one {parse.__name__}, alone or after ####")
    return answer


def write(path: str | os.PathLike[str], questions: Iterable[Question]) -> None:
    """Writes a prompt file in its canonical form."""
    text = json.dumps([dataclasses.asdict(question) for question in questions], ensure_ascii=False, indent=1)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def rows(path: str | os.PathLike[str], columns: Sequence[str]) -> list[DataRow]:
    """The objects of a JSON list, of an object's `data`, or of JSONL (empty lines are skipped).

    For a Parquet file, its rows with those of the `columns` that it has. Raises ValueError if there are no rows.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() == ".parquet":
        found = [DataRow(f"{path}, row {i}", row) for i, row in enumerate(parquet_file.read(path, columns), 1)]
        return _not_empty(path, found)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from error
    return _not_empty(path, _lines(path, text) if _is_jsonl(path, text) else _items(path, text))


def _not_empty(path: pathlib.Path, found: list[DataRow]) -> list[DataRow]:
    if not found:
        raise ValueError(f"{path}: no question in it, expected a list of objects, or an object a line")
    return found


def _is_jsonl(path: pathlib.Path, text: str) -> bool:
    """True if the file's name ends in .jsonl, or if its first line is a complete object without `data`."""
    try:
        first = json.loads(text.lstrip().partition("\n")[0])
    except ValueError:
        first = None
    return path.suffix.lower() == ".jsonl" or (isinstance(first, dict) and "data" not in first)


def _lines(path: pathlib.Path, text: str) -> list[DataRow]:
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            found.append(DataRow(where, _object(strict_json.parse_line(line, where), where)))
    return found


def _items(path: pathlib.Path, text: str) -> list[DataRow]:
    value = strict_json.parse(text, str(path))
    if isinstance(value, dict) and "data" not in value:
        raise ValueError(f"{path}: an object without 'data'; expected a list of objects, or an object a line")
    items = value["data"] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise ValueError(f"{path}: found {items!r:.60}, expected a list of objects, or an object a line")
    where = [f"{path}, item {i} (line {line})" for i, line in enumerate(_line_numbers(text, len(items)), 1)]
    return [DataRow(place, _object(item, place)) for item, place in zip(items, where, strict=True)]


def _line_numbers(text: str, count: int) -> list[int]:
    """The line on which each of `count` items begins, in valid JSON that is a list or an object with one as `data`."""
    decode = json.JSONDecoder().raw_decode
    place = _after(text, 0)
    if text[place] == "{":
        key, place = decode(text, _after(text, place + 1))
        while key != "data":
            _, place = decode(text, _after(text, place))
            key, place = decode(text, _after(text, place))
        place = _after(text, place)
    place = _after(text, place + 1)
    numbers, line, counted = [], 1, 0
    for _ in range(count):
        line, counted = line + text.count("\n", counted, place), place
        numbers.append(line)
        place = _after(text, decode(text, place)[1])
    return numbers


def _after(text: str, place: int) -> int:
    """The first place from `place` on that is neither blank nor a comma or colon between values."""
    while place < len(text) and text[place] in " \t\r\n,:":
        place += 1
    return place


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: found {value!r:.60}, expected an object with {PROMPT[0]!r} and {ANSWER[0]!r}")
    return value
