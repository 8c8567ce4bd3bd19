"""Modules under their former names, for one release."""

import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "bench_report": "bench.report",
    "chat_template": "text.chat_template",
    "compilation_cache": "runtime.compilation_cache",
    "config": "families.ling3_config",
    "export": "checkpoint.saving",
    "hub": "checkpoint.hub",
    "inspect": "interpret.inspect",
    "outputs": "engine.outputs",
    "params": "engine.sampling_params",
    "problems": "train.nano.problems",
    "sampling": "engine.sampling",
    "tokenizer": "text.tokenizer",
    "trace": "interpret.trace",
    "weights": "checkpoint.names",
}


class Moved:
    """A loader that returns the module of another name."""

    def __init__(self, now: str):
        self.now = now

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module. Python now sets the spec of the former name on it; `exec_module` sets the own one again."""
        module = import_module(self.now)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's spec; its code has run already."""
        module.__spec__ = self.spec


class MovedFinder:
    """Finds modules by their former names, with a DeprecationWarning."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec for a former name; None for any other."""
        package, _, name = fullname.partition(".")
        if package != "ling3" or name not in MODULES:
            return None
        now = f"ling3.{MODULES[name]}"
        warnings.warn(f"{fullname} is now {now}; the old name goes with the next release", DeprecationWarning, 2)
        loader: Any = Moved(now)
        return ModuleSpec(fullname, loader)
