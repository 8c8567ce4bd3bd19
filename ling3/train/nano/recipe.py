"""*nano*'s recipe: its config, its training data, and the run that writes the checkpoint.

The model has Ling-3's pattern, three KDA layers to one MLA layer; each skill in the training mixture needs some of its
mechanisms. `without` trains a model that lacks a mechanism from the start, because a trained model may rely on one that
it did not need.
"""

import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro
from tokenizers import Tokenizer

from ling3.checkpoint import load
from ling3.checkpoint.saving import save
from ling3.families import init
from ling3.families.ling3 import with_mtp_layers
from ling3.families.ling3_config import Ling3Config
from ling3.layers.kda import KDA, bias_of_rate
from ling3.layers.linear import Linear
from ling3.layers.moe import MoE
from ling3.model import CausalLM
from ling3.text.tokenizer import load_tokenizer
from ling3.train.loop import Optimization, Progress, train
from ling3.train.nano.mixture import TEXTS, BatchShape, batches, corpus
from ling3.train.nano.skills.exam import right_answers
from ling3.train.tokenizer import END_OF_TEXT, END_OF_TURN, train_tokenizer, write_tokenizer

BEGINNING = BatchShape(count=12, length=256, shares={"recall of many": 0.4, "copying": 0.3, "positions": 0.3})
"""The first phase: tasks whose answers are in the text. Two runs with easier recall here, or none, ended with an MLA
layer that did nothing (`experiments/README.md`)."""

SHORT = BatchShape(
    count=12,
    length=256,
    shares={
        "problems": 0.18,
        "chat": 0.07,
        "drills": 0.13,
        "recall": 0.10,
        "resets": 0.06,
        "copying": 0.12,
        "facts": 0.20,
        "tracking": 0.04,
        "positions": 0.10,
    },
)
LONG = BatchShape(count=2, length=1536, shares={"long_recall": 0.75, "examples": 0.25})

WITHOUT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "KDA": {"attention": "mla"},
    "MLA": {"attention": "kda"},
    "KDA output gate": {"kda_output_gate": "none"},
    "MLA output gate": {"mla_output_gate": "none"},
    "decay": {"kda_decay": False},
    **{f"bound -{nats:g}": {"kda_lower_bound": -nats} for nats in (0.1, 1.0, 10.0, 20.0)},
    "bound": {"kda_lower_bound": None},
    "beta": {"kda_beta": 1.0},
    "short convolution": {"kda_short_conv": False},
    "RoPE": {"mla_rope": False},
    "routed experts": {"first_k_dense_replace": 4},
    "several experts": {"num_experts_per_tok": 1},
    "routing bias": {"moe_router_enable_expert_bias": False},
    "shared expert": {"num_shared_experts": 0},
}
"""Mechanisms that can be left out, with the config fields that do so. Without `bound`, the softplus law remains."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings that determine nano; the defaults are those of the shipped checkpoint."""

    seed: int = 0
    steps: int = 3600
    """Steps of training on the `cycle`, after those of the beginning."""
    learning_rate: float = 0.008
    weight_decay: float = 0.5
    warmup: int = 100
    vocab_size: int = 1280
    without: str = "nothing"
    """The mechanism that the model lacks, a key of `WITHOUT`: KDA, MLA, "KDA output gate", decay, "bound -1", …"""
    beginning: int = 800
    """Steps of a separate first training, on `first`, whose learning rate decays to zero."""
    beginning_rate: float = 0.012
    predictor: int = 1200
    """Steps of a last training, in which the model stays as it is, of the multi-token-prediction layer; 0 for none."""
    first: Annotated[BatchShape, tyro.conf.Fixed] = BEGINNING
    quiet: bool = True
    """Whether to start from `quieted` weights."""
    cycle: Annotated[tuple[BatchShape, ...], tyro.conf.Fixed] = (SHORT, SHORT, SHORT, LONG)
    """The shapes of the batches, in turn."""
    changes: Annotated[Mapping[str, Any], tyro.conf.Fixed] = dataclasses.field(default_factory=dict)
    """Changes to the config's fields, for a model of another size."""

    def __post_init__(self) -> None:
        if self.without not in WITHOUT:
            raise ValueError(f"without is {self.without!r}, expected one of {', '.join(WITHOUT)}")

    def trainings(self) -> list[tuple[Optimization, tuple[BatchShape, ...]]]:
        """The optimizer settings and batch shapes of the beginning, if there is one, and of the main training."""

        def optimization(steps: int, rate: float) -> Optimization:
            warmup = min(self.warmup, steps - 1)
            return Optimization(steps, learning_rate=rate, weight_decay=self.weight_decay, warmup=warmup)

        beginning = (optimization(self.beginning, self.beginning_rate), (self.first,)) if self.beginning else None
        whole = optimization(self.steps, self.learning_rate), self.cycle
        return [whole] if beginning is None else [beginning, whole]

    def config(self, tokenizer: Tokenizer) -> Ling3Config:
        """The config: Ling-3's pattern at a size that trains on two cores."""
        end_of_text, end_of_turn = tokenizer.encode(END_OF_TEXT + END_OF_TURN).ids
        fields: dict[str, Any] = {
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "layer_group_size": 4,
            "first_k_dense_replace": 0,
            "num_attention_heads": 4,
            "head_dim": 32,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
            "num_experts": 32,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "n_group": 8,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "initializer_range": 0.05,
            "eos_token_id": (end_of_turn, end_of_text),
            "pad_token_id": end_of_text,
        }
        changes = WITHOUT[self.without]
        if self.without == "routed experts":  # the dense MLP is as large as the shared expert
            changes = changes | {"intermediate_size": fields["moe_shared_expert_intermediate_size"]}
        return Ling3Config(**{**fields, **changes, **self.changes})


LOCAL, LASTING = (2.5, 4.4), (0.001, 0.09)
"""Initial decays in nats per token: of local channels, which forget within a token, and of lasting ones, whose
half-lives are 8 to 700 tokens."""


def quieted(model: CausalLM) -> CausalLM:
    """Initializes half of KDA's heads with fast decays, and the others and all MLPs so that they add nothing yet.

    At initialization, a long-lived state adds noise that depends on all previous tokens to the residual stream, and
    the layers above hardly learn in this noise. So the heads with slow decays begin with zeros in `o_proj`, and MLPs
    and experts with zeros in `down_proj`.
    """
    mixers = [layer.attention for layer in model.model.layers]
    quiet = [_quiet(mixer) if isinstance(mixer, KDA) else mixer for mixer in mixers]
    model = eqx.tree_at(lambda model: [layer.attention for layer in model.model.layers], model, quiet)
    return eqx.tree_at(_outputs, model, replace_fn=jnp.zeros_like)


def _outputs(model: CausalLM) -> list[Any]:
    """The `down_proj` weights of all MLPs and experts."""
    parts: list[Any] = []
    for mlp in (layer.mlp for layer in model.model.layers):
        parts += [mlp.experts, mlp.shared_experts] if isinstance(mlp, MoE) else [mlp]
    return [part.down_proj.weight for part in parts if part is not None]


def _quiet(kda: KDA) -> KDA:
    if kda.dt_bias is None or not isinstance(kda.o_proj, Linear):  # without a decay no head is local
        return kda
    assert kda.A_log is not None
    lasting, bound = kda.dt_bias.size // 2, kda.lower_bound
    rates = jnp.concatenate([jnp.geomspace(*LASTING, lasting), jnp.linspace(*LOCAL, kda.dt_bias.size - lasting)])
    if bound is not None:
        rates = jnp.minimum(rates, -0.9 * bound)
    biases = bias_of_rate(rates, jnp.repeat(jnp.exp(kda.A_log), kda.dt_bias.size // kda.A_log.size), bound)
    weight = kda.o_proj.weight.at[:, :lasting].set(0)
    return eqx.tree_at(lambda kda: (kda.dt_bias, kda.o_proj.weight), kda, (biases, weight))


def shares_right(model: CausalLM, tokenizer: Any, names: list[str], count: int) -> dict[str, float]:
    """The share of right answers to the first `count` held-out texts of each name (an eighth for long texts)."""
    shares = {}
    for name in names:
        texts = TEXTS[name].exam(count if TEXTS[name].longest <= 256 else -(-count // 8))
        shares[name] = sum(right_answers(model, tokenizer, texts)) / len(texts)
    return shares


def as_stored(model: CausalLM) -> CausalLM:
    """The model in the dtypes of `init` for bfloat16: bfloat16 matrices, float32 norms and the like."""
    like = functools.partial(init, mtp=bool(model.mtp), dtype=jnp.bfloat16)
    stored = eqx.filter_eval_shape(like, model.config, key=jax.random.key(0))
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), model, stored)


def predicting(
    model: CausalLM, tokenizer: Tokenizer, recipe: Recipe, report: Callable[[Progress, CausalLM], None]
) -> CausalLM:
    """The model with a multi-token-prediction layer, trained on the skills' texts; the model's own weights stay."""
    whole = init(with_mtp_layers(model.config, 1), key=jax.random.key(recipe.seed), mtp=True)
    whole = dataclasses.replace(whole, model=model.model, lm_head=model.lm_head)
    optimization, cycle = recipe.trainings()[-1]
    optimization = dataclasses.replace(optimization, steps=recipe.predictor, part="mtp")
    return train(whole, batches(tokenizer, cycle, recipe.seed + 11), optimization, every=100, report=report)


def make(out: Path, recipe: Recipe, questions: int = 500, every: int = 200) -> dict[str, Any]:
    """Trains the model, writes it to directory `out` in the published layout, and returns its `training.json`.

    Every `every` steps, 64 held-out texts of each skill in the mixture are asked (8 of long ones). If such a step is a
    multiple of 1,000, and after each training, the checkpoint on disk is replaced. Progress goes to stderr.
    """
    start = time.monotonic()
    record: dict[str, Any] = {"recipe": json.loads(json.dumps(dataclasses.asdict(recipe))), "curve": []}
    trained = train_tokenizer(corpus(recipe.seed), recipe.vocab_size)
    model = init(recipe.config(trained), key=jax.random.key(recipe.seed))
    model = quieted(model) if recipe.quiet else model
    record["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))

    def write(model: CausalLM) -> None:
        save(as_stored(model), out, overwrite=True)
        write_tokenizer(trained, out, model.config.max_position_embeddings)
        (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")

    write(model)  # reports an unsuitable directory now, not after the first thousand steps
    tokenizer = load_tokenizer(out)
    mixed = {name for rows in recipe.cycle for name, share in rows.shares.items() if share > 0}
    names = [name for name in TEXTS if name in mixed]

    def report(before: dict[str, float], progress: Progress, model: CausalLM) -> None:
        point = {name: value + before.get(name, 0) for name, value in dataclasses.asdict(progress).items()}
        point = {name: round(value, 5) for name, value in point.items()}
        record["curve"].append(point | {"right": shares_right(model, tokenizer, names, 64)})
        right = ", ".join(f"{name} {share:.2f}" for name, share in record["curve"][-1]["right"].items())
        print(f"step {point['step']} of {total}: loss {progress.loss:.4f}; {right}", file=sys.stderr)
        if point["step"] % 1000 == 0 or point["step"] in ends:
            write(model)

    def report_predictor(progress: Progress, _: CausalLM) -> None:
        record["predictor"] = [*record.get("predictor", []), dataclasses.asdict(progress)]
        print(f"step {progress.step} of the predictor: loss {progress.loss:.4f}", file=sys.stderr)

    *_, total = ends = list(itertools.accumulate(optimization.steps for optimization, _ in recipe.trainings()))
    for optimization, cycle in recipe.trainings():
        last = record["curve"][-1] if record["curve"] else {}
        before = {name: last.get(name, 0) for name in ("step", "tokens", "seconds")}
        texts = batches(trained, cycle, recipe.seed + 1)
        model = train(model, texts, optimization, every=every, report=functools.partial(report, before))
    if recipe.predictor:
        model = predicting(load(out, dtype=jnp.float32), trained, recipe, report_predictor)
        write(model)
    record["minutes"] = round((time.monotonic() - start) / 60, 1)
    record["right"] = shares_right(load(out), tokenizer, names, questions)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


NANO = Recipe()
