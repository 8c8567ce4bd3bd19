"""A small checkpoint for replicas, and sources of models that kill their process."""

import dataclasses
import os
import pathlib
import signal
from typing import Any

import jax
import small_engine
from tiny import open_model

import ling3
from ling3.fleet.replica import Checkpoint
from ling3.serve import Engine
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

# As little to trace as a hybrid can have: each replica that is killed does it again.
CONFIG = dataclasses.replace(small_engine.CONFIG, num_hidden_layers=2, layer_group_size=2)
SETTINGS = {**small_engine.SETTINGS, "num_pages": 64, "token_paddings": (32,), "prefix_cache": False}
"""Of engines."""
ONE_CORE = {**SETTINGS, "cpus": 1}
"""Of fleets."""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""Of replicas: they share what is compiled."""
POISON = 13
"""A token that kills."""


def write(path: pathlib.Path) -> pathlib.Path:
    """A random model, with a tokenizer."""
    ling3.save(open_model(CONFIG), path)
    write_tokenizer(train_tokenizer([], 352), path, 256)
    return path


@dataclasses.dataclass(frozen=True)
class Deadly:
    """A checkpoint whose engine dies with its process of every prompt that begins with `POISON`."""

    path: str

    def tokenizer(self) -> Any:
        return Checkpoint(self.path, None, None).tokenizer()

    def load(self, tokenizer: Any, mesh: Any, rules: Any) -> Any:
        def stream_all(engine: Any, prompts: Any, *others: Any, original: Any = Engine.stream_all) -> Any:
            if any(prompt[0] == POISON for prompt in prompts):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(engine, prompts, *others)

        Engine.stream_all = stream_all
        return Checkpoint(self.path, None, None).load(tokenizer, mesh, rules)


@dataclasses.dataclass(frozen=True)
class Stillborn(Deadly):
    """A checkpoint that kills the process which loads it."""

    def load(self, tokenizer: Any, mesh: Any, rules: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
