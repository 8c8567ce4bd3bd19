"""Options for the model of a command, and loading its weights and tokenizer."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from ling3.cli.devices import Devices
from ling3.cli.options import Common, DirectoryOption, WholeNumber
from ling3.cli.terminal import count

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jaxtyping import DTypeLike

    from ling3.mesh import Rules
    from ling3.model import CausalLM
    from ling3.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading(Common):
    """Options for weights, and for how errors are shown."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the matrices; auto is the stored one, and bfloat16 for random weights."""
    random_weights: bool = False
    """Draw random weights. MODEL may then be a directory without weights, or a config.json; without a tokenizer,
    prompts of `ling3 generate` are token ids, as in -p "5 17 3"."""
    weights_seed: WholeNumber = None
    """With --random-weights: their seed; by default 0."""
    adapter: DirectoryOption = None
    """Run the model with this LoRA adapter: a directory that PEFT or ling3 wrote, or a hub id."""

    def source(self, model: str, devices: "Devices | None" = None, speculation: object = None) -> "ModelSource":
        """Where MODEL and its tokenizer come from. A hub branch is resolved to a commit at once.

        With the `speculation` "mtp" the model keeps its multi-token-prediction layers.
        """
        from ling3.checkpoint import hub

        path, seed = model, None
        if self.random_weights:
            seed = self.weights_seed or 0
            if not 0 <= seed < 2**32:
                raise ValueError(f"--weights-seed is {seed}, expected a whole number in [0, 2**32)")
            file = pathlib.Path(path)
            path = str(file.parent) if _is_config(file) else path
        elif self.weights_seed is not None:
            raise ValueError("--weights-seed is for --random-weights")
        commit, mtp = hub.pin(path, self.revision), speculation == "mtp"
        return ModelSource(model, path, commit, self.dtype, seed, devices, mtp, self.adapter)


def _is_config(path: pathlib.Path) -> bool:
    return path.suffix == ".json" and path.is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precise(Loading):
    """Options for checkpoint and weights, and for how errors are shown."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a command's model and tokenizer come from; both are of the same commit."""

    name: str
    """MODEL as the user gave it."""
    path: str
    """The path for `ling3.load`: the directory, if a config.json was given."""
    revision: str | None
    """The commit of a hub id."""
    dtype: str
    seed: int | None
    """The seed of random weights; None for the checkpoint's weights."""
    devices: Devices | None = None
    """How the model is sharded; None for one device."""
    mtp: bool = False
    """True keeps the checkpoint's multi-token-prediction layers."""
    adapter: str | None = None
    """The directory or hub id of a LoRA adapter to run the model with; None for none."""

    def config(self) -> Any:
        """Reads the model's configuration, without its weights."""
        from ling3.checkpoint import hub
        from ling3.families import read_config

        given = pathlib.Path(self.name)
        return read_config(given if _is_config(given) else hub.resolve(self.path, ("config.json",), self.revision))

    def tokenizer(self) -> "Tokenizer":
        """Loads the tokenizer. Raises FileNotFoundError if there is none."""
        from ling3.text.tokenizer import load_tokenizer

        return load_tokenizer(self.path, revision=self.revision)

    def tokenizer_if_any(self) -> "Tokenizer | None":
        """Loads the tokenizer; returns None if the checkpoint has none."""
        try:
            return self.tokenizer()
        except FileNotFoundError:
            return None

    def load(
        self, tokenizer: "Tokenizer | None", mesh: "Mesh | None" = None, rules: "Rules | None" = None
    ) -> "CausalLM":
        """Loads the model, on `mesh` if it is given, else on the mesh of `devices`, and applies the adapter.

        Raises ValueError if the tokenizer does not fit the model.
        """
        import jax.numpy as jnp

        from ling3 import checkpoint
        from ling3.adapters import with_adapter
        from ling3.checkpoint.adapters import load_adapter
        from ling3.runtime import compilation_cache

        compilation_cache.switch_on()
        dtype = None if self.dtype == "auto" else jnp.dtype(self.dtype)
        if mesh is None and self.devices is not None:
            mesh, rules = self.devices.mesh() or (None, None)
        if self.seed is None:
            how = {"mesh": mesh, "rules": rules, "mtp": self.mtp}
            model = checkpoint.load(self.path, dtype, revision=self.revision, **how)
        else:
            model = self._random(self.seed, jnp.dtype(jnp.bfloat16) if dtype is None else dtype, mesh, rules)
        if tokenizer is not None:
            tokenizer.check_fits(model.config.vocab_size)
        return model if self.adapter is None else with_adapter(model, load_adapter(model, self.adapter))

    def _random(self, seed: int, dtype: "DTypeLike", mesh: "Mesh | None", rules: "Rules | None") -> "CausalLM":
        """A model with random weights. Raises ValueError if these do not fit in the free memory."""
        import jax

        from ling3.checkpoint.names import structure
        from ling3.engine.memory import free_bytes
        from ling3.families import init

        config = self.config()
        arrays = jax.tree.leaves(structure(config, dtype))
        # Each array is drawn in float32: its random bits, their values and the scaled values are in memory at once.
        needed = sum(array.size * array.dtype.itemsize for array in arrays) + 12 * max(array.size for array in arrays)
        if needed > (free := free_bytes()):
            raise ValueError(
                f"{self.name}: drawing {count(sum(array.size for array in arrays))} weights in "
                f"{dtype} takes {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free: give a smaller "
                "config.json, or a narrower --dtype"
            )
        return init(config, key=jax.random.key(seed), dtype=dtype, mesh=mesh, rules=rules, mtp=self.mtp)

    def follow(self, before: "Callable[[CausalLM], Any] | None" = None) -> None:
        """Runs the engine in a process that is not the first; `before` is called with the model first."""
        from ling3.serve import Engine

        tokenizer = self.tokenizer_if_any()
        model = self.load(tokenizer)
        engine = Engine(model, tokenizer)
        if before is not None:
            before(model)
        engine.follow()

    def introduce(self, model: "CausalLM", console: Console) -> None:
        """Prints the model's name, size and dtype, and the platform."""
        import jax

        self.say(model.parameters, model.dtype.name, jax.default_backend(), console)

    def say(self, parameters: int, dtype: str, where: str, console: Console) -> None:
        """Prints the model's name, size and dtype, and where it runs."""
        kind = "parameters" if self.seed is None else "random parameters"
        console.print(Text(f"{self.name}: {count(parameters)} {kind}, {dtype}, on {where}", "bold"), soft_wrap=True)


def follow(command: Any) -> None:
    """Runs a command's engine in a process that is not the first."""
    command.common.source(command.model, command.devices).follow()
