"""The memory that a fine-tuning needs, predicted from shapes: its programs are compiled, and no weight is read."""

import dataclasses
import pathlib
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ling3.model import CausalLM
from ling3.train.fine_tuning import FineTuning, TextLoss, check_settings, first_state
from ling3.train.learnt_loss import logits_at_once
from ling3.train.loop import Batch, TrainState, accumulate, update
from ling3.train.micro_batches import rows_of, width_of


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a step of fine-tuning on one device, with passes of `rows` texts, padded to `width` tokens.

    A step alternates between two programs: the forward and backward pass of some texts, and AdamW's update. The
    temporaries of one are never there at the same time as those of the other.
    """

    rows: int
    width: int
    weights: dict[str, int]
    """The model's arrays as they are loaded, by dtype."""
    trained: int
    """The adapter, or the copy of all weights that learns."""
    gradient: int
    """The sum of the passes' gradients."""
    moments: int
    """AdamW's two averages for each trained number."""
    inputs: int
    """The layers' inputs, which the backward pass keeps if layers are recomputed; part of `passing`."""
    logits: int
    """The logits that exist at once, once; part of `passing` too."""
    passing: int
    """Temporaries and results of the forward and backward pass, by XLA's plan."""
    updating: int
    """Temporaries and results of the update, by XLA's plan."""
    process: int
    """Python, JAX and compiled programs: the memory of the process that predicted this, which had no other arrays."""

    @property
    def arrays(self) -> int:
        """The most bytes that arrays take at once."""
        return sum(self.weights.values()) + self.trained + self.gradient + self.moments + self.larger

    @property
    def larger(self) -> int:
        """The temporaries and results of the program that needs more of them."""
        return max(self.passing, self.updating)

    @property
    def peak(self) -> int:
        """The most memory that the process has at once."""
        return self.arrays + self.process

    def to_dict(self) -> dict[str, Any]:
        """The prediction in plain values, for JSON."""
        return dataclasses.asdict(self) | {"arrays": self.arrays, "peak": self.peak}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        yield Text(f"a step of fine-tuning, in passes of {self.rows} x {self.width:,} tokens", style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        kinds = ", ".join(f"{name} {_mb(size)}" for name, size in sorted(self.weights.items()))
        table.add_row("weights", _mb(sum(self.weights.values())), kinds)
        table.add_row("what is trained", _mb(self.trained), "")
        table.add_row("its gradient", _mb(self.gradient), "")
        table.add_row("AdamW's averages", _mb(self.moments), "")
        kept = f"with layer inputs of {_mb(self.inputs)}, and logits of {_mb(self.logits)} at once"
        table.add_row("forward and backward pass", _mb(self.passing), kept)
        table.add_row("or update", _mb(self.updating), "the larger one of the two counts")
        table.add_row("Python, JAX and programs", _mb(self.process), "as in this process")
        table.add_row("in all", _mb(self.peak), "")
        yield table


def predict(model: CausalLM, settings: FineTuning | None = None, length: int | None = None) -> TrainingMemory:
    """Predicts the memory of `finetune(model, …)`; of the model the structure is enough (`jax.ShapeDtypeStruct`).

    The passes are of texts that are all as long as the longest, `length` tokens: by default `settings.tokens`, one text
    a pass, which needs the most; with several texts in a row, a pass has no more tokens. Both programs of a step are
    compiled, which takes as long as in the first step.

    Raises ValueError for settings that do not suit the model, as `finetune` does.
    """
    settings = FineTuning() if settings is None else settings
    check_settings(model, settings, None)
    length = min(settings.tokens, model.config.max_position_embeddings) if length is None else length
    width = width_of(length)
    rows = rows_of(width, settings.tokens, settings.batch)

    def first(model: CausalLM) -> tuple[TrainState, TextLoss, Batch, PyTree]:
        state = first_state(model, settings, settings.batch)
        base = None if settings.lora is None else model
        batch = Batch(jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows, width)))
        return state, TextLoss(base, jnp.zeros(()), settings.recompute), batch, state.zeros()

    state, loss, batch, gradient = eqx.filter_eval_shape(first, model)
    passing = _own_bytes(lambda sums, *given: accumulate(given, sums), ((loss.total, gradient), loss, state, batch), 0)
    updating = _own_bytes(update, (gradient, state), 1)
    tokens, hidden = rows * width, model.model.norm.weight.shape[0] * model.dtype.itemsize
    return TrainingMemory(
        rows=rows,
        width=width,
        weights=_by_dtype(model),
        trained=_bytes(state.trained),
        gradient=_bytes(gradient),
        moments=_bytes(state.moments),
        inputs=tokens * hidden * len(model.model.layers) if settings.recompute else 0,
        logits=4 * model.config.vocab_size * logits_at_once(model, batch),
        passing=passing,
        updating=updating,
        process=_resident(),
    )


def _own_bytes(function: Callable[..., Any], arguments: tuple[Any, ...], donated: int) -> int:
    """Bytes of a program's temporaries, and of its results that do not take the place of arguments."""
    found: Any = jax.jit(function, donate_argnums=(donated,)).lower(*arguments).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def _by_dtype(model: CausalLM) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(model):
        sizes[str(leaf.dtype)] = sizes.get(str(leaf.dtype), 0) + leaf.size * leaf.dtype.itemsize
    return sizes


def _bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _resident() -> int:
    """The bytes of memory of this process; where the system does not say, the most that it has had."""
    status = pathlib.Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
