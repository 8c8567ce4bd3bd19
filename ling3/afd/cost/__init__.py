"""The cost of attention-FFN disaggregation, and when it pays: `model` has the bytes and operations of a decode step,
`deployment` the times of its stages on devices, and `simulation` the step's time under the operators' schedulers."""

from ling3.afd.cost.deployment import DecodeStep, Deployment, Filled, Stage, best, fullest, stages, step_time
from ling3.afd.cost.model import Block, ModelCost, Reads, distinct
from ling3.afd.cost.simulation import Interval, Outcome, simulate
from ling3.mesh.chips import H200, NIC, Hardware

__all__ = [
    "H200",
    "NIC",
    "Block",
    "DecodeStep",
    "Deployment",
    "Filled",
    "Hardware",
    "Interval",
    "ModelCost",
    "Outcome",
    "Reads",
    "Stage",
    "best",
    "distinct",
    "fullest",
    "simulate",
    "stages",
    "step_time",
]
