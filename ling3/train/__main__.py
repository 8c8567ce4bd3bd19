"""`python -m ling3.train --out DIRECTORY`: train the *nano* checkpoint, examine it and draw its loss curve."""

import json
from pathlib import Path

import tyro

from ling3.train.nano.curve import draw
from ling3.train.nano.recipe import Recipe, make

NANO = Recipe()


def main(out: Path, recipe: Recipe = NANO, questions: int = 500) -> None:
    """Train nano from scratch, on word problems made from the recipe's seed.

    Args:
        out: the new checkpoint's directory.
        recipe: by default that of the shipped checkpoint.
        questions: how many held-out problems to ask in the end.
    """
    record = make(out, recipe, questions)
    draw(record["curve"], out / "loss.png")
    print(json.dumps(record["exact_answers"]))


if __name__ == "__main__":
    tyro.cli(main)
