"""Fine-tunes a model on texts: a LoRA adapter, or all weights; resumable, to the same bits."""

import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, Scalar

from ling3.adapters import Adapter, new_adapter, with_adapter
from ling3.checkpoint import replacing
from ling3.checkpoint.adapters import save_adapter
from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.checkpoint.saving import save
from ling3.engine.origins import checksums
from ling3.execution import Execution
from ling3.formats.matrix import QuantizedMatrix
from ling3.model import CausalLM
from ling3.train.fsdp import Fsdp
from ling3.train.learnt_loss import recomputed, summed_loss
from ling3.train.loop import Batch, Optimization, TrainState, descend, loss_of, mtp_loss
from ling3.train.loss_plot import draw_losses
from ling3.train.micro_batches import fingerprint, learnt_tokens, micro_batches, step_texts, steps_of
from ling3.train.packing import leak
from ling3.train.saved_state import PLOT, STATE, SavedState
from ling3.train.texts import TrainingDataError, TrainingText


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """How to fine-tune: what is trained, on how many texts a step, and how fast (AdamW; warm-up, then cosine to 0)."""

    lora: int | None = 16
    """The rank of a LoRA adapter, the only part that is trained then; None trains all weights."""
    alpha: float | None = None
    """The adapter's alpha; by default its rank, a scale of 1."""
    targets: str | tuple[str, ...] | None = None
    """The modules that the adapter changes, by names of transformers or their ends; by default all but lm_head."""
    epochs: float = 3.0
    """How often each text is learnt, unless `steps` is given."""
    steps: int | None = None
    """The number of steps of the optimizer."""
    batch: int = 8
    """Texts in a step; one step of an epoch may have fewer."""
    tokens: int = 2048
    """Tokens of a forward and backward pass, padding included; a step takes as many passes as its texts need."""
    packing: bool | None = None
    """Put several texts into a row, which no layer mixes; False gives each a row. By default where all layers can."""
    learning_rate: float | None = None
    """The highest learning rate; by default 2e-4 for an adapter and 1e-5 for all weights."""
    warmup: int | None = None
    """Steps in which the learning rate grows from 0; by default 3 % of all."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """The largest norm of the gradient, which is scaled down to it."""
    recompute: bool = True
    """Recompute each layer in the backward pass, which then keeps only the layers' inputs (gradient checkpointing)."""
    eval_share: float = 0.0
    """The share of the texts, drawn by the seed, that are held out to measure the loss on."""
    eval_every: int = 50
    """Steps between two measurements on held-out texts."""
    save_every: int = 50
    """Steps between two saved states, from which a killed training continues."""
    seed: int = 0
    """Draws the adapter's first weights, the order of the texts, and the held-out ones."""

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of its range."""
        least = {"lora": 1, "steps": 1, "batch": 1, "tokens": 1, "eval_every": 1, "save_every": 1, "warmup": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name}: found {value}; expected at least {bound}")
        for name in ("epochs", "clip", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: found {value}; expected more than 0")
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"eval_share: found {self.eval_share}; expected a share from 0 to below 1")

    def optimization(self, texts: int) -> Optimization:
        """The optimizer for this number of texts to learn from."""
        each = steps_of(texts, self.batch)
        steps = max(1, round(self.epochs * each)) if self.steps is None else self.steps
        rate = self.learning_rate or (1e-5 if self.lora is None else 2e-4)
        warmup = min(round(0.03 * steps), steps - 1) if self.warmup is None else self.warmup
        decay = {"weight_decay": self.weight_decay, "clip": self.clip, "b2": 0.999}
        return Optimization(steps, "adamw", rate, warmup, part="all", **decay)


class TextLoss(eqx.Module):
    """The part of a batch in the mean loss of all learnt tokens of a step."""

    base: CausalLM | None
    """The model whose adapter is trained; None: all weights are."""
    total: Float[Array, ""]
    """The learnt tokens of the step."""
    recompute: bool = eqx.field(static=True)

    def __call__(self, trained: Any, batch: Batch, execution: Execution | None = None) -> Float[Scalar, ""]:
        """The loss of the next token, in nats, to whose gradient that of multi-token prediction is added."""
        model = trained if self.base is None else with_adapter(self.base, trained)
        model = recomputed(model) if self.recompute else model
        loss = summed_loss(model, batch, execution) / self.total
        if self.base is not None or not model.mtp:
            return loss
        share = jnp.sum(batch.weights[:, 1:]) / self.total
        ahead = share * mtp_loss(model, batch, execution)
        return loss + ahead - jax.lax.stop_gradient(ahead)


_loss_of = eqx.filter_jit(loss_of)


def first_state(model: CausalLM, settings: FineTuning, texts: int, fsdp: Fsdp | None = None) -> TrainState:
    """The first state of an adapter or of all weights, for a number of texts."""
    optimization = settings.optimization(texts)
    if settings.lora is None:
        return TrainState.of_weights(model, optimization, fsdp)
    key, how = jax.random.key(settings.seed), {"alpha": settings.alpha, "targets": settings.targets}
    return TrainState.first(new_adapter(model, rank=settings.lora, key=key, **how), optimization.descent())


@dataclasses.dataclass(frozen=True)
class FineTuned:
    """The result of a fine-tuning: the model that learnt, its adapter if there is one, and the log."""

    model: CausalLM
    """The model with the adapter beside its weights, or with all weights trained."""
    adapter: Adapter | None
    log: list[dict[str, Any]]
    """A point for each step: step, tokens, seconds, learning_rate, loss (mean of its learnt tokens, nats), and
    eval_loss where that was measured."""


def finetune(
    model: CausalLM,
    texts: Sequence[TrainingText],
    out: str | os.PathLike[str] | None = None,
    settings: FineTuning | None = None,
    *,
    eval_texts: Sequence[TrainingText] = (),
    mesh: Mesh | None = None,
) -> FineTuned:
    """Fine-tunes a copy of `model` on the learnt tokens of `texts` (from `read_texts`).

    By default a LoRA adapter is trained in float32 beside weights that stay as they are, quantized or not (QLoRA,
    arXiv 2305.14314). With `lora=None` all weights are trained in the dtype that they have, with the routers' biases
    balanced and a multi-token-prediction layer learning along. With a `mesh`, which is for all weights, these, the
    optimizer's state and the texts are sharded along its axis `data`.

    The result goes to the directory `out`, which must be empty: an adapter as PEFT writes it, or a checkpoint with its
    tokenizer. `out/training` has the log, the plot of the loss and, until the result is written, the state: called
    again with the same arguments after it was killed, the function continues to the same bits.

    Raises TrainingDataError for texts that do not fit the model, ValueError for settings that do not suit it,
    CheckpointError if `out` is taken or holds an unfinished training of another kind, and FloatingPointError if the
    loss is not finite.
    """
    settings = FineTuning() if settings is None else settings
    check_settings(model, settings, mesh)
    settings = _with_packing(model, settings)
    texts, held_out = _split(texts, eval_texts, settings)
    _check_texts([*texts, *held_out], model)
    target = None if out is None else pathlib.Path(out).expanduser().resolve()
    if target is not None:
        check_target(target)
    run = _Run(model, texts, held_out, settings, None if mesh is None else Fsdp(mesh), target)
    state = run.train()
    adapter = None if settings.lora is None else state.trained
    tuned = state.model(model) if adapter is None else with_adapter(model, adapter)
    if target is not None:
        save(tuned, target, overwrite=True) if adapter is None else save_adapter(adapter, target, overwrite=True)
        run.saved.finish()
    return FineTuned(tuned, adapter, run.log)


@dataclasses.dataclass
class _Run:
    """One fine-tuning: the model, the texts, the log, and the state on disk."""

    model: CausalLM
    texts: Sequence[TrainingText]
    held_out: Sequence[TrainingText]
    settings: FineTuning
    fsdp: Fsdp | None
    target: pathlib.Path | None

    def __post_init__(self) -> None:
        self.devices, self.log = 1 if self.fsdp is None else self.fsdp.devices, []
        facts = {
            **{name: value for name, value in vars(self.settings).items() if name != "save_every"},
            "texts": fingerprint(self.texts),
            "held-out texts": fingerprint(self.held_out),
            "the model's weights": hashlib.sha256(repr(checksums(self.model)).encode()).hexdigest(),
            "the model's config": repr(self.model.config),
            "devices": self.devices,
        }
        self.saved = SavedState(pathlib.Path() if self.target is None else self.target / replacing.TRAINING, facts)
        self.optimization = self.settings.optimization(len(self.texts))

    def train(self) -> TrainState:
        """Takes the steps that are left."""
        state, done = first_state(self.model, self.settings, len(self.texts), self.fsdp), 0
        if self.target is not None:
            done, self.log, state = self.saved.load(state)
            state = state if self.fsdp is None else self.fsdp.place(state)
        if not self.log and self.held_out:
            self.log.append({"step": 0, "eval_loss": self.measured(state)})
        before = self.log[-1] if self.log else {}
        self.tokens, self.begin = before.get("tokens", 0), time.monotonic() - before.get("seconds", 0.0)
        steps = range(done + 1, self.optimization.steps + 1)
        return descend(state, self.learnt, steps, self.report, title="fine-tuning")

    def learnt(self, step: int) -> tuple[TextLoss, list[Batch]]:
        """The loss and the micro-batches of a step."""
        how = self.settings
        texts = step_texts(self.texts, step, how.batch, how.seed, bool(how.packing))
        self.tokens += sum(len(text.ids) for text in texts)
        return self.objective(texts)

    def objective(self, texts: Sequence[TrainingText]) -> tuple[TextLoss, list[Batch]]:
        """The mean loss of the learnt tokens of some texts, and their micro-batches."""
        how, total = self.settings, jnp.asarray(float(learnt_tokens(texts)))
        loss = TextLoss(None if how.lora is None else self.model, total, how.recompute and self.fsdp is None)
        return loss, micro_batches(texts, how.tokens, self.devices, bool(how.packing))

    def measured(self, state: TrainState) -> float:
        """The mean loss of the learnt tokens of the held-out texts."""
        loss, batches = self.objective(self.held_out)
        return sum(float(_loss_of(state.trained, state.rows(batch), self.fsdp, loss)) for batch in batches)

    def report(self, step: int, loss: float, state: TrainState, gradient: PyTree) -> None:
        """Adds a step to the log, and writes the state where that is due."""
        rate, is_last = float(jnp.asarray(self.optimization.schedule()(step - 1))), step == self.optimization.steps
        point = {"step": step, "tokens": self.tokens, "learning_rate": rate, "loss": loss}
        if self.held_out and (is_last or step % self.settings.eval_every == 0):
            point["eval_loss"] = self.measured(state)
        self.log.append({**point, "seconds": round(time.monotonic() - self.begin, 3)})
        if self.target is not None and (is_last or step % self.settings.save_every == 0):
            self.saved.save(step, self.log, state)
            draw_losses(self.log, self.saved.directory / PLOT)


def check_settings(model: CausalLM, settings: FineTuning, mesh: Mesh | None) -> None:
    """Raises ValueError for settings that do not suit the model or the mesh."""
    if settings.lora is not None and mesh is not None:
        raise ValueError("lora: an adapter is trained on one device; leave out mesh, or train all weights (lora=None)")
    if settings.lora is None and (settings.alpha is not None or settings.targets is not None):
        raise ValueError("alpha and targets are of an adapter; give its rank too (lora)")
    if settings.lora is None:
        nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, QuantizedMatrix))
        if any(isinstance(node, QuantizedMatrix) for node in nodes):
            raise ValueError(
                "the model is quantized, and its weights cannot be trained; train an adapter (lora=16), or load the "
                "model with dequantize=True"
            )


def _with_packing(model: CausalLM, settings: FineTuning) -> FineTuning:
    """The settings, with `packing` decided. Raises ValueError if it is wanted, and a layer mixes a row's texts."""
    if settings.packing is False:
        return settings
    why = leak(model)
    if why is not None and settings.packing:
        raise ValueError(f"packing: {why}; give each text a row (packing=False, or None where that is so)")
    return dataclasses.replace(settings, packing=why is None)


def _split(
    texts: Sequence[TrainingText], eval_texts: Sequence[TrainingText], settings: FineTuning
) -> tuple[list[TrainingText], list[TrainingText]]:
    """The texts to learn from, and the held-out ones."""
    if not settings.eval_share:
        return list(texts), list(eval_texts)
    if eval_texts:
        raise ValueError("eval_share holds texts out, and eval_texts are given too: give one of them")
    count = max(1, round(settings.eval_share * len(texts)))
    order = np.random.default_rng(settings.seed).permutation(len(texts))
    chosen = set(order[:count].tolist())
    return ([text for i, text in enumerate(texts) if i not in chosen], [texts[i] for i in sorted(chosen)])


def _check_texts(texts: Sequence[TrainingText], model: CausalLM) -> None:
    """Raises TrainingDataError for texts that are too long for the model, or have tokens that it does not have."""
    context, vocab = model.config.max_position_embeddings, model.config.vocab_size
    problems = [
        f"{text.source}: {len(text.ids):,} tokens; expected at most the model's context, {context:,}: shorten it"
        for text in texts
        if len(text.ids) > context
    ]
    problems += [
        f"{text.source}: the token id {max(text.ids)}; expected less than {vocab}: the tokenizer is another model's"
        for text in texts
        if not 0 <= min(text.ids) <= max(text.ids) < vocab
    ]
    if not texts:
        problems.append("there are no texts to learn from")
    if problems:
        raise TrainingDataError("\n".join(problems))


def check_target(directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if the directory of a result has anything but the state of a training."""
    target = pathlib.Path(directory).expanduser()
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give a directory for the result")
    there = {path.name for path in target.iterdir()} - {replacing.WORK, replacing.TRAINING}
    if there and not (target / replacing.TRAINING / STATE).exists():
        raise CheckpointError(f"{target}: is not empty; give another directory")
