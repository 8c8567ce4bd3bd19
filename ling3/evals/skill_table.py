"""Mechanisms against skills: the share of right answers to each skill of nano's, of a model and of its ablations.

A cell is measured on the same held-out texts in every row. What a cut costs is `loss`: the whole model's share of right
answers minus the cut one's.
"""

import dataclasses
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from rich.table import Table

from ling3.bench.report import check_plot, machine
from ling3.evals.ablations import Ablation, ProblemRows
from ling3.evals.run import Score
from ling3.evals.skills import check_skills, skill_scores
from ling3.model import CausalLM
from ling3.runtime.progress import progress
from ling3.text.tokenizer import Tokenizer
from ling3.train.nano.skills import SKILLS

CALIBRATION_SEED = 2028
"""Of the training texts that gates are averaged over."""
CALIBRATION_TOKENS = 256
"""Tokens of each of them, at most."""


@dataclasses.dataclass(frozen=True)
class SkillRow:
    """One model: what was cut, and its score in each skill."""

    name: str
    formula: str
    scores: Mapping[str, Score]


@dataclasses.dataclass(frozen=True)
class SkillTable:
    """The whole model first, then its ablations; `print` it with rich, take `to_dict()`, or `plot` it."""

    rows: tuple[SkillRow, ...]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def loss(self, row: SkillRow, skill: str) -> float:
        """By how much less of the skill's answers are right than in the whole model."""
        return self.rows[0].scores[skill].accuracy - row.scores[skill].accuracy

    def to_dict(self) -> dict[str, Any]:
        """The table in plain values, for JSON."""
        rows = [
            {**vars(row), "scores": {name: score.to_dict() for name, score in row.scores.items()}} for row in self.rows
        ]
        return {**self.about, "machine": machine(), "rows": rows}

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("ablation")
        for name in self.rows[0].scores:
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(row.name, *(f"{score.accuracy:.3f}" for score in row.scores.values()))
        return table

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the losses as a map, a row for each ablation and a column for each skill.

        PNG, PDF or SVG; raises ValueError for other file names, as `bench.report.check_plot` does.
        """
        check_plot(path)
        from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

        skills, cuts = list(self.rows[0].scores), self.rows[1:]
        losses = np.array([[self.loss(row, skill) for skill in skills] for row in cuts])
        losses = losses.reshape(len(cuts), len(skills))
        figure = Figure(figsize=(3.2 + 0.75 * len(skills), 1.6 + 0.27 * len(cuts)), layout="constrained")
        image = draw_losses(figure.subplots(), [row.name for row in cuts], skills, losses)
        figure.colorbar(image, label="right answers lost, of 100")
        figure.suptitle(f"{self.about.get('model', 'A model')} with one mechanism cut out")
        figure.savefig(pathlib.Path(path), dpi=160)


def draw_losses(
    axes: Any,
    rows: Sequence[str],
    skills: Sequence[str],
    losses: Float[np.ndarray, "rows skills"],
    notes: Mapping[tuple[int, int], str] = types.MappingProxyType({}),
) -> Any:
    """Draws losses as a map, in points of a hundred, into matplotlib's `axes`; NaN is left grey. Returns the image.

    `notes` are small words beneath a cell's number, by row and column.
    """
    image = axes.imshow(100 * np.ma.masked_invalid(losses), vmin=0, vmax=100, cmap="Blues", aspect="auto")
    axes.set_facecolor("0.93")
    for (i, j), loss in np.ndenumerate(losses):
        if np.isfinite(loss):
            look = {"ha": "center", "color": "white" if loss > 0.5 else "black"}
            note = notes.get((i, j))
            axes.text(j, i, round(100 * loss), va="bottom" if note else "center", **look)
            axes.text(j, i, note or "", va="top", fontsize=6.5, **look)
    axes.set_xticks(range(len(skills)), skills, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    return image


def compare_skills(
    model: CausalLM,
    tokenizer: Tokenizer,
    chosen: Sequence[Ablation],
    names: Sequence[str],
    *,
    questions: int = 200,
    report: Callable[[SkillRow], None] = lambda row: None,
) -> SkillTable:
    """The table: the whole model first, then each of the `chosen`, on `questions` held-out texts of each skill.

    `report` is called with each row as it is measured; then all that JAX has compiled in this process is dropped
    (`jax.clear_caches`). Raises ValueError for a name that is no skill's.
    """
    check_skills(names)
    calibration = _calibration(tokenizer, names)
    variants = [("whole", "", model), *((a.name, a.formula, a.cut(model, calibration)) for a in chosen)]
    rows: list[SkillRow] = []
    with progress("ablations", len(variants)) as advance:
        for name, formula, variant in variants:
            rows.append(SkillRow(name, formula, skill_scores(variant, tokenizer, names, questions)))
            report(rows[-1])
            advance(1)
            jax.clear_caches()  # no other ablation runs these programs, and Linux maps only so many of a process's
    return SkillTable(tuple(rows))


def _calibration(tokenizer: Tokenizer, names: Sequence[str], each: int = 8) -> ProblemRows:
    """Some training texts of every skill, from their beginnings."""
    streams = [SKILLS[name].texts(CALIBRATION_SEED, "train") for name in names]
    texts = [next(stream) for stream in streams for _ in range(each)]
    encoded = [tokenizer.encode(text.prompt + text.answer)[:CALIBRATION_TOKENS] for text in texts]
    tokens = np.zeros((len(encoded), max(map(len, encoded))), np.int32)
    valid = np.zeros(tokens.shape, bool)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)], valid[row, : len(ids)] = ids, True
    return ProblemRows(jnp.asarray(tokens), jnp.asarray(valid), jnp.asarray(valid))
