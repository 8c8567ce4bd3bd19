"""`python -m ling3.train --out DIRECTORY`: trains the *nano* checkpoint, runs its exams and plots its curve."""

import json
from pathlib import Path

import tyro

from ling3.train.nano.curve import draw_curve
from ling3.train.nano.recipe import NANO, Recipe, make


def main(out: Path, recipe: Recipe = NANO, questions: int = 500, every: int = 200) -> None:
    """Train nano from scratch, on texts made from the recipe's seed.

    Args:
        out: directory of the new checkpoint.
        recipe: how to train; by default as the shipped checkpoint was trained.
        questions: held-out texts of each skill in the final exam; an eighth of them for skills with long texts.
        every: steps between two points of the curve.
    """
    record = make(out, recipe, questions, every)
    draw_curve(record["curve"], out / "loss.png")
    print(json.dumps(record["right"]))


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.SuppressFixed,))
