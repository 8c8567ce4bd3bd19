"""Nano's exam as prompt files: `python -m ling3.evals.nano_files --out DIR`.

`alone.json` has held-out problems without examples, `four_shot.json` the same after four worked examples each. Commands
such as `ling3 eval gsm8k nano --prompts alone.json --out predictions.jsonl` read them.
"""

import pathlib

import tyro

from ling3.evals.prompts import Question, write
from ling3.train.nano.problems import ask, exam, worked_examples


def files(out: pathlib.Path, count: int = 500) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes both files, of `count` questions each, into the directory `out`, and returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    alone, four_shot = out / "alone.json", out / "four_shot.json"
    asked = exam(count)
    write(alone, [Question(ask(problem), str(problem.answer)) for problem in asked])
    shown = zip(asked, worked_examples(count), strict=True)
    write(four_shot, [Question(ask(problem, examples), str(problem.answer)) for problem, examples in shown])
    return alone, four_shot


if __name__ == "__main__":
    for path in tyro.cli(files):
        print(path)
