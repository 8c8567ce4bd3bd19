"""Builds few-shot prompts from the public files of GSM8K and MMLU-Pro (Parquet, JSONL or a JSON list)."""

import os
import re
from collections.abc import Sequence

from ling3.evals.answers import LETTERS, choice, number
from ling3.evals.prompts import DataRow, Question, expected, rows

STOP = ("Question:",)
"""The stop string of these prompts, because a base model continues with another question."""

SHOTS = 4
"""Worked examples before each question."""

GSM8K = ("question", "answer")
MMLU_PRO = ("question", "options", "answer", "category", "cot_content")

THOUGHT = "Let's think step by step."


def from_gsm8k(
    questions: str | os.PathLike[str], examples: str | os.PathLike[str] | None, shots: int = SHOTS
) -> list[Question]:
    """GSM8K prompts (Cobbe et al., arXiv 2110.14168): each question after the first `shots` examples.

    `questions` is `test.jsonl`, `examples` `train.jsonl`. Rows have `question` and `answer`, a solution with the number
    after `####`. Examples end with "The answer is 18." (Wei et al., arXiv 2201.11903) and lose the calculator notes
    `<<9*2=18>>`. Raises ValueError naming file, line (in Parquet, row) and field, or if there are too few examples.
    """
    worked = "".join(f"{_asked(row)} {_solved(row)}\n\n" for row in _first(examples, shots, GSM8K))
    return [Question(f"{worked}{_asked(row)}", expected(row, number, "answer")) for row in rows(questions, GSM8K)]


def _asked(row: DataRow) -> str:
    return f"Question: {row.text('question').strip()}\nAnswer:"


def _solved(row: DataRow) -> str:
    solution, mark, answer = row.text("answer").rpartition("####")
    if not mark:
        raise row.error("answer", "a solution with its number after ####")
    return f"{re.sub('<<[^<>]*>>', '', solution).strip()} The answer is {answer.strip()}."


def from_mmlu_pro(
    questions: str | os.PathLike[str], examples: str | os.PathLike[str] | None, shots: int = SHOTS
) -> list[Question]:
    """MMLU-Pro prompts (Wang et al., arXiv 2406.01574): each question after the first `shots` of its category.

    The wording is that of the authors' script. Rows have `question`, `options` (up to ten), `answer` (a letter) and
    `category`; examples, the rows of the validation set, have `cot_content` as well. Raises ValueError naming file,
    line and field, or if a category has too few examples.
    """
    by_category: dict[str, list[DataRow]] = {}
    for row in _given(examples, shots, MMLU_PRO):
        by_category.setdefault(row.text("category"), []).append(row)
    built = []
    for row in rows(questions, MMLU_PRO):
        category = row.text("category")
        shown = by_category.get(category, [])[:shots]
        if len(shown) < shots:
            raise ValueError(
                f"{row.where}: {len(shown)} examples of the category {category!r:.80} in {examples}, but {shots} shots "
                "are to be shown; give fewer shots, or the whole validation set"
            )
        built.append(Question(_introduced(category, shown, row), _letter(row)))
    return built


def _introduced(category: str, shown: Sequence[DataRow], row: DataRow) -> str:
    task = (
        f"The following are multiple choice questions (with answers) about {category}. Think step by step and then "
        'finish your answer with "the answer is (X)" where X is the correct letter choice.\n\n\n'
    )
    worked = "".join(f"{_offered(example)} {_thought(example)}\n\n" for example in shown)
    return f"{task}{worked}{_offered(row)} {THOUGHT}"


def _offered(row: DataRow) -> str:
    options = "".join(f"{letter}. {option}\n" for letter, option in zip(LETTERS, _options(row)))
    return f"Question:\n{row.text('question').strip()}\nOptions:\n{options}Answer:"


def _thought(row: DataRow) -> str:
    if "cot_content" not in row.fields:
        return f"The answer is ({_letter(row)})."
    return row.text("cot_content").strip().removeprefix("A: ")


def _options(row: DataRow) -> list[str]:
    """The options, without the "N/A" that rows are padded with."""
    options = row.fields[row.name(("options",))]
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise row.error("options", "a list of texts")
    options = [option for option in options if option != "N/A"]
    if not 2 <= len(options) <= len(LETTERS):
        raise row.error("options", f"2 to {len(LETTERS)} texts")
    return options


def _letter(row: DataRow) -> str:
    letter = expected(row, choice, "answer")
    if LETTERS.index(letter) >= len(_options(row)):
        raise row.error("answer", f"a letter of its {len(_options(row))} options")
    return letter


def _first(examples: str | os.PathLike[str] | None, shots: int, columns: Sequence[str]) -> list[DataRow]:
    found = _given(examples, shots, columns)[:shots]
    if len(found) < shots:
        raise ValueError(
            f"{examples}: {len(found)} examples, but {shots} shots are to be shown; give fewer shots, or more examples"
        )
    return found


def _given(examples: str | os.PathLike[str] | None, shots: int, columns: Sequence[str]) -> list[DataRow]:
    """The rows of `examples`, which is not read if there are no shots."""
    if shots < 0:
        raise ValueError(f"shots is {shots}, expected at least 0")
    if shots and examples is None:
        raise ValueError(f"no file of examples was given, but {shots} shots are to be shown; give one, or no shots")
    return [] if examples is None or not shots else rows(examples, columns)
