"""What is compared: the small model, the variants of each task, and the budget of a run.

A KDA layer of this model has 25,570 parameters in its attention and an MLA layer 25,280; a variant that lacks a part
has a wider MLP instead. So the variants of a task match within 1 %.
"""

import dataclasses
from typing import Any

import ling3
from experiments.tasks import TASKS, Task


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A task, the model's depth, its variants as changes to the config, and the budget of each run.

    `rows` are the sequences of a batch. `learning_rates` are swept with `sweep_seed`, and `more_rates` for the variants
    whose best of these was the lowest; the best of each variant is then run with each of `seeds`, and those runs alone
    are reported. A run is measured `points` times.
    """

    task: Task
    layers: int
    variants: dict[str, dict[str, Any]]
    steps: int
    rows: int = 16
    warmup: int = 40
    learning_rates: tuple[float, ...] = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
    sweep_seed: int = 0
    seeds: tuple[int, ...] = (1, 2, 3)
    points: int = 12
    more_rates: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    held_out: int = 256

    def rates(self, variant: str) -> tuple[float, ...]:
        """The learning rates that are swept for a variant."""
        return (*self.more_rates.get(variant, ()), *self.learning_rates)

    def config(self, variant: str) -> ling3.Ling3Config:
        """The model of a variant."""
        changes = {"layer_group_size": ONLY_KDA} | self.variants[variant]
        return small(self.task.vocabulary, self.layers, **changes)


def small(vocabulary: int, layers: int, **changes: Any) -> ling3.Ling3Config:
    """A Ling-3 of 64 channels and two heads, dense throughout."""
    return ling3.Ling3Config(
        **{
            "vocab_size": vocabulary,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "first_k_dense_replace": layers,
            "num_attention_heads": 2,
            "head_dim": 32,
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 24,
            "v_head_dim": 32,
            "rope_theta": 10000.0,
            "max_position_embeddings": 128,
            "initializer_range": 0.1,
            "eos_token_id": (),
            "pad_token_id": None,
        }
        | changes
    )


ONLY_KDA, ONLY_MLA = 8, 1
"""Values of `layer_group_size`: more layers than there are, and every layer the last of its group."""
DECAY_OFF = {"kda_decay": False, "intermediate_size": 86}
NO_CONV = {"kda_short_conv": False, "intermediate_size": 68}

LOWER = (1e-3, 2e-3)

EXPERIMENTS = {
    "segment_reset": Experiment(
        TASKS["segment_reset"](),
        layers=2,
        steps=420,
        variants={
            "bound -5": {"kda_lower_bound": -5.0},
            "bound -1": {"kda_lower_bound": -1.0},
            "bound -0.1": {"kda_lower_bound": -0.1},
            "bound -0.01": {"kda_lower_bound": -0.01},
            "softplus": {"kda_lower_bound": None},
            "decay off": DECAY_OFF,
        },
    ),
    "mqar": Experiment(
        TASKS["mqar"](),
        layers=4,
        steps=360,
        more_rates={"0:1": LOWER},
        variants={
            "1:0": {},
            "3:1": {"layer_group_size": 4},
            "1:1": {"layer_group_size": 2},
            "0:1": {"layer_group_size": ONLY_MLA},
            "1:0, no conv": NO_CONV,
        },
    ),
    "parity": Experiment(
        TASKS["parity"](),
        layers=2,
        steps=420,
        more_rates={"beta in [0, 1]": LOWER, "MLA": LOWER},
        variants={
            "beta in [0, 1]": {},
            "beta in [0, 2]": {"kda_allow_neg_eigval": True},
            "MLA": {"layer_group_size": ONLY_MLA},
        },
    ),
    "palindrome": Experiment(
        TASKS["palindrome"](),
        layers=2,
        steps=480,
        more_rates={"MLA": LOWER},
        variants={
            "KDA": {},
            "decay off": DECAY_OFF,
            "1:1": {"layer_group_size": 2},
            "MLA": {"layer_group_size": ONLY_MLA},
        },
    ),
}
