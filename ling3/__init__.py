"""Ling-3: a hybrid of Kimi Delta Attention and gated MLA over a sparse mixture of experts, in JAX and Equinox."""

import sys
import types
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ling3.version import __version__

if TYPE_CHECKING:
    from ling3.adapters import Adapter, AdapterError, LowRankUpdate, merge_adapter, new_adapter, with_adapter
    from ling3.cache import Cache, CacheSpec, KDAState, Paged, Span
    from ling3.checkpoint import CheckpointError, load, save
    from ling3.checkpoint.adapters import load_adapter, save_adapter
    from ling3.checkpoint.quantizing import quantize
    from ling3.engine.capture import Capture, Captured, Routing
    from ling3.engine.outputs import Completion, Delta, Logprob, RequestOutput, Stats, Timings
    from ling3.engine.sampling_params import SamplingParams
    from ling3.engine.settings import EngineSettings
    from ling3.engine.snapshots import Snapshot
    from ling3.engine.structured import Choice, Grammar, JSONObject, JSONSchema, Regex
    from ling3.execution import Execution
    from ling3.families import Family, init, register_family
    from ling3.families.ling3_config import ConfigError, Ling3Config
    from ling3.fleet import Fleet, FleetError
    from ling3.generate import generate
    from ling3.interpret import ablate
    from ling3.interpret.look import Look, look
    from ling3.interpret.trace import Trace, trace
    from ling3.intervention import Intervention
    from ling3.model import CausalLM, Decoder, DecoderLayer, Mixer
    from ling3.mtp import mtp_logits
    from ling3.runtime.parameters import ParameterError
    from ling3.score import score
    from ling3.serve import Engine, QueueFull
    from ling3.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
    from ling3.train.fine_tuning import finetune as finetune

__all__ = [
    "Adapter",
    "AdapterError",
    "Cache",
    "CacheSpec",
    "Capture",
    "Captured",
    "CausalLM",
    "CheckpointError",
    "Choice",
    "Completion",
    "ConfigError",
    "Decoder",
    "DecoderLayer",
    "Delta",
    "Engine",
    "EngineSettings",
    "Execution",
    "Family",
    "Fleet",
    "FleetError",
    "Grammar",
    "Intervention",
    "JSONObject",
    "JSONSchema",
    "KDAState",
    "Ling3Config",
    "Logprob",
    "Look",
    "LowRankUpdate",
    "Mixer",
    "Paged",
    "ParameterError",
    "QueueFull",
    "Regex",
    "RequestOutput",
    "Routing",
    "SamplingParams",
    "Snapshot",
    "Span",
    "Stats",
    "Timings",
    "Tokenizer",
    "TokenizerError",
    "Trace",
    "__version__",
    "ablate",
    "generate",
    "init",
    "load",
    "load_adapter",
    "load_tokenizer",
    "look",
    "merge_adapter",
    "mtp_logits",
    "new_adapter",
    "quantize",
    "register_family",
    "save",
    "save_adapter",
    "score",
    "trace",
    "with_adapter",
]

# The public names and the modules that define them. They are imported when first used, so that the command line
# answers `--help`, a wrong option and Ctrl-C without waiting for JAX.
_MODULES = {
    "adapters": ("Adapter", "AdapterError", "LowRankUpdate", "merge_adapter", "new_adapter", "with_adapter"),
    "intervention": ("Intervention",),
    "cache": ("Cache", "CacheSpec", "KDAState", "Paged", "Span"),
    "checkpoint": ("CheckpointError", "load", "save"),
    "checkpoint.adapters": ("load_adapter", "save_adapter"),
    "checkpoint.quantizing": ("quantize",),
    "families.ling3_config": ("ConfigError", "Ling3Config"),
    "execution": ("Execution",),
    "families": ("Family", "init", "register_family"),
    "fleet": ("Fleet", "FleetError"),
    "generate": ("generate",),
    "model": ("CausalLM", "Decoder", "DecoderLayer", "Mixer"),
    "mtp": ("mtp_logits",),
    "engine.capture": ("Capture", "Captured", "Routing"),
    "engine.outputs": ("Completion", "Delta", "Logprob", "RequestOutput", "Stats", "Timings"),
    "engine.sampling_params": ("SamplingParams",),
    "engine.settings": ("EngineSettings",),
    "engine.snapshots": ("Snapshot",),
    "engine.structured": ("Choice", "Grammar", "JSONObject", "JSONSchema", "Regex"),
    "runtime.parameters": ("ParameterError",),
    "score": ("score",),
    "serve": ("Engine", "QueueFull"),
    "text.tokenizer": ("Tokenizer", "TokenizerError", "load_tokenizer"),
    "interpret.look": ("Look", "look"),
    "interpret.trace": ("Trace", "trace"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
# Not in `__all__`, so that `from ling3 import *` needs no extra.
_MODULE_OF["finetune"] = "train.fine_tuning"
# Packages and modules whose functions check the types of their arguments and results: those with arrays, and what a
# user calls. In the others, many functions run for every token or tensor, and take less time than a check would.
_CHECKED = (
    *("ops", "layers", "formats", "model", "mtp", "cache", "execution", "intervention", "mesh", "families"),
    *("adapters", "checkpoint.adapters"),
    *("generate", "score", "serve", "interpret", "train", "evals", "bench", "fleet.fleet", "text.tokenizer"),
    *("checkpoint.copying", "checkpoint.gguf_arrays", "checkpoint.gguf_file", "checkpoint.loading"),
    *("checkpoint.quantizing", "checkpoint.repacking", "checkpoint.safetensors_file", "checkpoint.saving"),
    *("checkpoint.scales", "engine.at_end", "engine.capture"),
    *("engine.filters", "engine.forward", "engine.front", "engine.grammars", "engine.intake", "engine.masks"),
    *("engine.origins", "engine.plans", "engine.pool", "engine.runner", "engine.sampling", "engine.snapshots"),
    "engine.verification",
    *("afd.attention_worker", "afd.ffn_worker", "afd.messages", "afd.operators", "afd.plan", "afd.system"),
)


class _Package(types.ModuleType):
    """The type of this package, which keeps `generate` a function although a submodule has this name."""

    def __setattr__(self, name: str, value: Any) -> None:
        # After importing a submodule, Python sets it as an attribute of its package.
        if name not in _MODULE_OF or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


class _InstallHook:
    """A finder that installs jaxtyping's import hook before the first module that is to be checked."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.removeprefix("ling3.") not in _CHECKED:
            return None
        sys.meta_path.remove(self)
        import importlib.util  # noqa: PLC0415

        import jaxtyping  # noqa: PLC0415

        from ling3.runtime import checks  # noqa: PLC0415

        if not jaxtyping.config.jaxtyping_disable:  # set by JAXTYPING_DISABLE
            checks.install([f"ling3.{name}" for name in _CHECKED])
        # The search that is under way does not see the new hook, so start another one.
        return importlib.util.find_spec(fullname)


def leave_types_unchecked() -> None:
    """Removes `_InstallHook`, so that imports take less time; has no effect once the hook is installed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _InstallHook)]


sys.modules[__name__].__class__ = _Package
sys.meta_path.insert(0, _InstallHook())

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public name, or a submodule, when it is first used."""
        if name in _MODULE_OF:
            value = getattr(import_module(f"ling3.{_MODULE_OF[name]}"), name)
            globals()[name] = value
            return value
        if name == "ablate":
            return import_module("ling3.interpret.ablate")
        missing = AttributeError(f"module 'ling3' has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:
            return import_module(f"ling3.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"ling3.{name}":
                raise
            raise missing from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
