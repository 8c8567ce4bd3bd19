"""Options of commands: which model, and its weights and tokenizer, loaded."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from ling3.cli.devices import Devices
from ling3.cli.options import Common, WholeNumber
from ling3.cli.terminal import count

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jaxtyping import DTypeLike

    from ling3.mesh import Rules
    from ling3.model import CausalLM
    from ling3.text.tokenizer import Tokenizer

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading(Common):
    """Options for weights, and for how errors are shown."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The matrices' type; auto is as stored, and bfloat16 for random weights."""
    random_weights: bool = False
    """Draw weights at random. MODEL may then be a directory without weights, or a config.json; where it has no
    tokenizer, prompts of `ling3 generate` are token ids, as in -p "5 17 3"."""
    weights_seed: WholeNumber = None
    """With --random-weights: what they are drawn from; 0 without it."""

    def source(self, model: str, devices: "Devices | None" = None) -> "ModelSource":
        """Where MODEL and its tokenizer come from; a branch of the hub is resolved to a commit now."""
        from ling3.checkpoint import hub

        path, seed = model, None
        if self.random_weights:
            seed = self.weights_seed or 0
            if not 0 <= seed < 2**32:
                raise ValueError(f"--weights-seed is {seed}, expected a whole number in [0, 2**32)")
            file = pathlib.Path(path)
            path = str(file.parent) if file.is_file() else path
        elif self.weights_seed is not None:
            raise ValueError("--weights-seed is for --random-weights")
        return ModelSource(model, path, hub.pin(path, self.revision), self.dtype, seed, devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precise(Loading):
    """Options for checkpoint and weights, and for how errors are shown."""

    dtype: Literal["auto", "float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a command's model and tokenizer come from, both of one commit."""

    name: str
    """MODEL, as it was given."""
    path: str
    """`ling3.load`'s path; the directory if a config.json was given."""
    revision: str | None
    """The commit, for a hub id."""
    dtype: str
    seed: int | None
    """What random weights are drawn from; None for the checkpoint's own."""
    devices: Devices | None = None
    """Where the model lies; None for one device."""

    def config(self) -> Any:
        """The model's configuration, without its weights."""
        from ling3.checkpoint import hub
        from ling3.families import read_config

        given = pathlib.Path(self.name)
        return read_config(given if given.is_file() else hub.resolve(self.path, ("config.json",), self.revision))

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer; FileNotFoundError if there is none."""
        from ling3.text.tokenizer import load_tokenizer

        return load_tokenizer(self.path, revision=self.revision)

    def tokenizer_if_any(self) -> "Tokenizer | None":
        """The tokenizer, or None for a checkpoint without one."""
        try:
            return self.tokenizer()
        except FileNotFoundError:
            return None

    def load(
        self, tokenizer: "Tokenizer | None", mesh: "Mesh | None" = None, rules: "Rules | None" = None
    ) -> "CausalLM":
        """The model, which has to fit the tokenizer; on a mesh if one is given, or else where `devices` says."""
        import jax.numpy as jnp

        from ling3 import checkpoint
        from ling3.runtime import compilation_cache

        compilation_cache.switch_on()
        dtype = None if self.dtype == "auto" else jnp.dtype(self.dtype)
        if mesh is None and self.devices is not None:
            mesh, rules = self.devices.mesh() or (None, None)
        if self.seed is None:
            model = checkpoint.load(self.path, dtype, revision=self.revision, mesh=mesh, rules=rules)
        else:
            model = self._random(self.seed, jnp.dtype(jnp.bfloat16) if dtype is None else dtype, mesh, rules)
        if tokenizer is not None:
            tokenizer.check_fits(model.config.vocab_size)
        return model

    def _random(self, seed: int, dtype: "DTypeLike", mesh: "Mesh | None", rules: "Rules | None") -> "CausalLM":
        """A model of random weights; ValueError if they do not fit into the free memory."""
        import jax

        from ling3.checkpoint.names import structure
        from ling3.engine.memory import free_bytes
        from ling3.families import init

        config = self.config()
        arrays = jax.tree.leaves(structure(config, dtype))
        # Each array is drawn in float32: its random bits, their values, and these scaled are there at once.
        needed = sum(array.size * array.dtype.itemsize for array in arrays) + 12 * max(array.size for array in arrays)
        if needed > (free := free_bytes()):
            raise ValueError(
                f"{self.name}: drawing {count(sum(array.size for array in arrays))} weights in "
                f"{dtype} takes {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free: give a smaller "
                "config.json, or a narrower --dtype"
            )
        return init(config, key=jax.random.key(seed), dtype=dtype, mesh=mesh, rules=rules)

    def follow(self, before: "Callable[[CausalLM], Any] | None" = None) -> None:
        """This process's part in what the first one does with the model, `before` it asks the engine anything."""
        from ling3.serve import Engine

        tokenizer = self.tokenizer_if_any()
        model = self.load(tokenizer)
        engine = Engine(model, tokenizer)
        if before is not None:
            before(model)
        engine.follow()

    def introduce(self, model: "CausalLM", console: Console) -> None:
        """Prints which model runs on which devices."""
        import jax

        self.say(model.parameters, model.dtype.name, jax.default_backend(), console)

    def say(self, parameters: int, dtype: str, where: str, console: Console) -> None:
        """Says how large the model is."""
        kind = "parameters" if self.seed is None else "random parameters"
        console.print(Text(f"{self.name}: {count(parameters)} {kind}, {dtype}, on {where}", "bold"), soft_wrap=True)


def follow(command: Any) -> None:
    """The part of a process that is not the first in a command."""
    command.common.source(command.model, command.devices).follow()
