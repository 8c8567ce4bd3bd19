"""The state of a fine-tuning on disk, from which it continues with the same bits after it was killed anywhere.

Beside the result, in `DIR/training`, are `state.json` (the step, the settings, the log so far), `state.safetensors`
(weights or adapter, and the optimizer's state), `log.jsonl` and `loss.png`. The first two are replaced atomically, and
removed once the result is written.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ling3.checkpoint import replacing, safetensors_file
from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.checkpoint.saving import write_file
from ling3.runtime import strict_json
from ling3.runtime.quoting import shown

_Tree = TypeVar("_Tree")
STATE, TENSORS, LOG, PLOT = "state.json", "state.safetensors", "log.jsonl", "loss.png"


@dataclasses.dataclass(frozen=True)
class SavedState:
    """The directory with the state of one training; `facts` are all that its bits depend on, by name."""

    directory: pathlib.Path
    facts: Mapping[str, Any]

    def load(self, tree: _Tree) -> tuple[int, list[dict[str, Any]], _Tree]:
        """The step, the log and the arrays of the saved state; 0, no log and `tree` itself without one.

        Raises CheckpointError, naming each fact, if the state is of another training.
        """
        if self.directory.is_dir():
            replacing.recover(self.directory)
        if not (self.directory / STATE).exists():
            return 0, [], tree
        state = strict_json.read(self.directory / STATE, largest=2**30)
        before, now = state["facts"], json.loads(json.dumps(self.facts))
        changed = [
            f"{name}: found {shown(now.get(name))}; expected {shown(before.get(name))}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise CheckpointError(
                f"{self.directory}: holds an unfinished training with other settings, a changed model or changed "
                "data; continue it with the same ones, or give another directory\n" + "\n".join(changed)
            )
        stored = safetensors_file.open_file(self.directory / TENSORS)

        def read(path: tuple, array: Any) -> Any:
            if not eqx.is_array(array):
                return array
            tensor = stored[jax.tree_util.keystr(path)]
            return jnp.asarray(tensor.array())

        return state["step"], state["log"], jax.tree_util.tree_map_with_path(read, tree)

    def save(self, step: int, log: list[dict[str, Any]], tree: Any) -> None:
        """Writes the state after a step, then the log. Atomic: a killed process leaves this state or the one before."""
        leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))[0]
        arrays = {jax.tree_util.keystr(path): np.asarray(jnp.array(array, copy=True)) for path, array in leaves}
        total = sum(array.nbytes for array in arrays.values())
        with (
            replacing.advised(self.directory, f"a training state of {total:,} bytes"),
            replacing.workspace(self.directory) as new,
        ):
            specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
            safetensors_file.write(new / TENSORS, specs, arrays.__getitem__)
            state = {"step": step, "facts": dict(self.facts), "log": log}
            write_file(new / STATE, (json.dumps(state, indent=1) + "\n").encode())
            there = {path.name for path in self.directory.iterdir()} if self.directory.is_dir() else set()
            replacing.commit(new, self.directory, sorted(there & {STATE, TENSORS}))
        lines = "".join(json.dumps(point) + "\n" for point in log)
        (self.directory / LOG).write_text(lines, encoding="utf-8")

    def finish(self) -> None:
        """Removes the state, once the result is written; the log and the plot stay."""
        for name in (STATE, TENSORS):
            (self.directory / name).unlink(missing_ok=True)
