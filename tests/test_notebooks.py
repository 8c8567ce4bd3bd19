"""The form of the notebooks: what one needs, what one learns, and exercises whose solutions are hidden."""

import pathlib
import re

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("[0-9]*.py"))
SOLUTION = re.compile(r"<details><summary>Solution</summary>\n\n(.*?)\n\n</details>", re.DOTALL)


def prose(path):
    """The text of each markdown cell, without the comment signs."""
    cells = re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = [cell.removeprefix(" [markdown]\n") for cell in cells if cell.startswith(" [markdown]\n")]
    return [re.sub(r"^# ?", "", text, flags=re.MULTILINE) for text in texts]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 13


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_opens_with_what_is_needed_and_what_is_learned(path):
    opening = prose(path)[0]
    assert opening.startswith("# ")
    (needed,) = re.findall(r"^\*\*You need\*\*: (.+?)\n\n", opening, re.DOTALL | re.MULTILINE)
    (learned,) = re.findall(r"^\*\*Afterwards you can\*\* (.+?)\n(?:\n|\Z)", opening, re.DOTALL | re.MULTILINE)
    assert re.search(r"^\*\*It takes\*\* .+ on two cores, and \d\.\d GB of memory\.$", opening, re.MULTILINE)
    assert opening.index(needed) < opening.index(learned) and len((needed + learned).splitlines()) <= 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_ends_with_two_or_three_exercises_each_with_a_hidden_solution(path):
    texts = prose(path)
    sections = re.split(r"^## ", "\n".join(texts), flags=re.MULTILINE)
    assert [section.splitlines()[0] for section in sections].index("Exercises") == len(sections) - 1
    exercises = re.split(r"^\*\*(\d)\.\*\* ", sections[-1], flags=re.MULTILINE)[1:]
    assert exercises[::2] in (["1", "2"], ["1", "2", "3"])
    for question in exercises[1::2]:
        (solution,) = SOLUTION.findall(question)
        assert question.index("<details>") > 0 and solution.strip()
        assert question.count("<details>") == question.count("</details>") == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_python_in_solutions_is_python(path):
    for block in re.findall(r"^```python\n(.*?)^```", "\n".join(prose(path)), re.DOTALL | re.MULTILINE):
        compile(block, path.name, "exec")
