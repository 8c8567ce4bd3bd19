"""A small checkpoint for replicas, and a source of models that kill their process."""

import dataclasses
import os
import pathlib
import signal
from typing import Any

import small_engine

import ling3
from ling3.fleet.replica import Checkpoint
from ling3.serve import Engine
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

SETTINGS = {**small_engine.SETTINGS, "num_pages": 64}
POISON = 13
"""A token that kills."""


def write(path: pathlib.Path) -> pathlib.Path:
    """The model of `small_engine`, with a tokenizer."""
    ling3.save(small_engine.model(), path)
    write_tokenizer(train_tokenizer([], 352), path, 256)
    return path


@dataclasses.dataclass(frozen=True)
class Deadly:
    """A checkpoint whose engine dies with its process of every prompt that begins with `POISON`."""

    path: str

    def tokenizer(self) -> Any:
        return Checkpoint(self.path, None, None).tokenizer()

    def load(self, tokenizer: Any) -> Any:
        def stream_all(engine: Any, prompts: Any, *others: Any, original: Any = Engine.stream_all) -> Any:
            if any(prompt[0] == POISON for prompt in prompts):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(engine, prompts, *others)

        Engine.stream_all = stream_all
        return Checkpoint(self.path, None, None).load(tokenizer)
