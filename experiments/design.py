"""The design of the experiments: the small model, the variants of each task, and the budget of a run.

In the small model, a KDA layer's attention has 25,570 parameters and an MLA layer's 25,280; a variant that lacks a part
has a wider MLP instead, so that the variants of a task match within 1 %. `text_and_recall` compares architectures
instead: its variants are models of three families with 1.3 million parameters.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

import ling3
from experiments.tasks import TASKS, Task
from ling3.families.kimi_linear import KimiLinearConfig
from ling3.families.qwen3 import Qwen3Config
from ling3.layers.kda import KDA
from ling3.model import Mixer


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A task, the model's depth, its variants (configs, or changes to the small model's), and the budget of each run.

    `rows` is the batch size. `learning_rates` are swept with `sweep_seed`, and `more_rates` too for variants whose best
    rate was the lowest. The best rate of each variant is then run with each of `seeds`; only these runs are reported. A
    run is measured `points` times.
    """

    task: Task
    layers: int
    variants: dict[str, Any]
    steps: int
    rows: int = 16
    warmup: int = 40
    learning_rates: tuple[float, ...] = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
    sweep_seed: int = 0
    seeds: tuple[int, ...] = (1, 2, 3)
    points: int = 12
    more_rates: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    held_out: int = 256
    mixers: Mapping[str, Callable[[PRNGKeyArray], Mixer]] = dataclasses.field(default_factory=dict)
    """Other mixers in the place of a variant's KDA layers."""

    def rates(self, variant: str) -> tuple[float, ...]:
        """The learning rates that are swept for this variant."""
        return (*self.more_rates.get(variant, ()), *self.learning_rates)

    def config(self, variant: str) -> Any:
        """The config of a variant's model, of its family's class."""
        changes = self.variants[variant]
        if not isinstance(changes, dict):
            return changes
        return small(self.task.vocabulary, self.layers, **{"layer_group_size": ONLY_KDA} | changes)

    def model(self, variant: str, key: PRNGKeyArray) -> ling3.CausalLM:
        """A variant's model before training."""
        model, mixer = ling3.init(self.config(variant), key=key), self.mixers.get(variant)
        if mixer is None:
            return model
        layers = [
            dataclasses.replace(layer, attention=mixer(jax.random.fold_in(key, i)))
            if isinstance(layer.attention, KDA)
            else layer
            for i, layer in enumerate(model.model.layers)
        ]
        return eqx.tree_at(lambda m: m.model.layers, model, tuple(layers))


def small(vocabulary: int, layers: int, **changes: Any) -> ling3.Ling3Config:
    """A Ling-3 config with 64 channels, two heads and only dense MLPs."""
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
"""Values of `layer_group_size`, whose last layer in a group is MLA: with 8 no group is complete, with 1 all are MLA."""
DECAY_OFF = {"kda_decay": False, "intermediate_size": 86}
NO_CONV = {"kda_short_conv": False, "intermediate_size": 68}

LOWER = (1e-3, 2e-3)

MIXTURE = TASKS["text_and_recall"]()
COMMON = {
    "vocab_size": MIXTURE.vocabulary,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 16384,
    "initializer_range": 0.05,
}
HYBRID = COMMON | {
    "intermediate_size": 384,
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
"""Fields of both hybrids: three KDA layers to one MLA layer; the first layer has a dense MLP, the others experts."""
KDA_LAYERS = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 32}

ARCHITECTURES = {
    "Qwen3": Qwen3Config.from_dict(COMMON | {"intermediate_size": 612, "num_key_value_heads": 2, "head_dim": 32}),
    "Kimi-Linear": KimiLinearConfig.from_dict(HYBRID | {"moe_intermediate_size": 64, "linear_attn_config": KDA_LAYERS}),
    "Ling-3": ling3.Ling3Config(
        **HYBRID,
        layer_group_size=4,
        q_lora_rank=64,
        rope_theta=10000.0,
        moe_intermediate_size=60,
        moe_shared_expert_intermediate_size=60,
        eos_token_id=(),
        pad_token_id=None,
    ),
}
"""Configs of three families, all with 1.31 million parameters (within 0.3 %)."""

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
    "text_and_recall": Experiment(
        MIXTURE,
        layers=4,
        steps=400,
        rows=8,
        learning_rates=(2e-3, 4e-3, 8e-3, 1.6e-2),
        more_rates={"Qwen3": (5e-4, 1e-3)},
        points=10,
        held_out=32,
        variants=ARCHITECTURES,
    ),
}
