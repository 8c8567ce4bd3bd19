"""The stored runs of an experiment, as tables and figures read them: the sweep, the reported seeds, and their means."""

from pathlib import Path

import numpy as np
from jaxtyping import Float

from experiments import sweep
from experiments.design import Experiment


class Reported:
    """The runs of an experiment that `file` has: those of the sweep by variant, and those with fresh seeds.

    A run without wrong answers counts as if half an answer were wrong, so that errors have geometric means.
    """

    def __init__(self, experiment: Experiment, file: Path):
        self.experiment = experiment
        self.runs = sweep.read(file)
        self.variants = list(experiment.variants)
        of = {variant: [run for run in self.runs if run.variant == variant] for variant in self.variants}
        self.swept = {variant: [run for run in of[variant] if run.seed == experiment.sweep_seed] for variant in of}
        self.reported = {variant: [run for run in of[variant] if run.seed in experiment.seeds] for variant in of}
        rows = experiment.task.batch(sweep.HELD_OUT, 0, experiment.held_out)
        self.asked = int(rows.mask.sum())
        """Answers that a measurement on the way asks for."""
        self.asked_finally = self.asked * sweep.FINAL
        """Answers that the last measurement of a reported run asks for."""

    def errors(self, variant: str) -> Float[np.ndarray, " seeds"]:
        """The share of wrong answers at the end, of each seed."""
        finals = [run.final for run in self.reported[variant] if run.final is not None]
        return np.array([max(final.error, 0.5 / self.asked_finally) for final in finals])

    def error(self, variant: str) -> float:
        """The geometric mean of the errors over the seeds."""
        return float(np.exp(np.log(self.errors(variant)).mean()))

    def losses(self, variant: str) -> Float[np.ndarray, " seeds"]:
        """The loss at the end in nats per answer, of each seed."""
        return np.array([run.final.loss for run in self.reported[variant] if run.final is not None])

    def loss(self, variant: str) -> float:
        """The geometric mean of the losses over the seeds."""
        return float(np.exp(np.log(self.losses(variant)).mean()))

    def steps_to_90(self, variant: str) -> list[int | None]:
        """For each seed, the first measured step with at most 10 % of wrong answers, or None."""
        return [run.steps_to_90 for run in self.reported[variant]]
