"""Ling-3: a hybrid of Kimi Delta Attention and gated MLA over a sparse mixture of experts, in JAX and Equinox."""

import sys
import types
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ling3.runtime import moved
from ling3.version import __version__

if TYPE_CHECKING:
    from ling3.cache import Cache, CacheSpec, KDAState, Paged, Span
    from ling3.checkpoint import CheckpointError, load, save
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
    from ling3.runtime.parameters import ParameterError
    from ling3.serve import Engine, QueueFull
    from ling3.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer

__all__ = [
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
    "load_tokenizer",
    "look",
    "quantize",
    "register_family",
    "save",
    "trace",
]

# The public names and the modules that define them. They are imported when first used, so that the command line
# answers `--help`, a wrong option and Ctrl-C without waiting for JAX.
_MODULES = {
    "intervention": ("Intervention",),
    "cache": ("Cache", "CacheSpec", "KDAState", "Paged", "Span"),
    "checkpoint": ("CheckpointError", "load", "save"),
    "checkpoint.quantizing": ("quantize",),
    "families.ling3_config": ("ConfigError", "Ling3Config"),
    "execution": ("Execution",),
    "families": ("Family", "init", "register_family"),
    "fleet": ("Fleet", "FleetError"),
    "generate": ("generate",),
    "model": ("CausalLM", "Decoder", "DecoderLayer", "Mixer"),
    "engine.capture": ("Capture", "Captured", "Routing"),
    "engine.outputs": ("Completion", "Delta", "Logprob", "RequestOutput", "Stats", "Timings"),
    "engine.sampling_params": ("SamplingParams",),
    "engine.settings": ("EngineSettings",),
    "engine.snapshots": ("Snapshot",),
    "engine.structured": ("Choice", "Grammar", "JSONObject", "JSONSchema", "Regex"),
    "runtime.parameters": ("ParameterError",),
    "serve": ("Engine", "QueueFull"),
    "text.tokenizer": ("Tokenizer", "TokenizerError", "load_tokenizer"),
    "interpret.look": ("Look", "look"),
    "interpret.trace": ("Trace", "trace"),
}
# Former names, for one release.
_RENAMED = {"LatentCache": "Paged", "Ling3ForCausalLM": "CausalLM", "Ling3Model": "Decoder"}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
# What the command line imports before it knows what to do: no arrays, so no checks of their shapes.
_WITHOUT_ARRAYS = (
    *("__main__", "cli", "engine", "engine.sampling_params", "engine.settings", "engine.structured"),
    *("runtime", "version"),
)


class _Package(types.ModuleType):
    """This package, whose `generate` and `trace` are functions although submodules have these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        # After importing a submodule, Python sets it as an attribute of its package.
        if name not in _MODULE_OF or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


class _InstallHook:
    """A finder that installs the import hook for checks of shapes and types, before the first module with arrays."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        package, _, module = fullname.partition(".")
        if package != "ling3" or module in _WITHOUT_ARRAYS or module.startswith(("cli.", "runtime.")):
            return None
        sys.meta_path.remove(self)
        import importlib.util  # noqa: PLC0415

        import jaxtyping  # noqa: PLC0415

        # Settings too: a type check would come before `__post_init__`, look at one item of a list, and name no remedy.
        from ling3.engine import sampling_params, settings  # noqa: F401, PLC0415
        from ling3.runtime import import_hook  # noqa: PLC0415

        if not jaxtyping.config.jaxtyping_disable:  # by JAXTYPING_DISABLE
            import_hook.install("ling3")
        # The search that is under way goes through the finders as they were without the hook.
        return importlib.util.find_spec(fullname)


def leave_types_unchecked() -> None:
    """Leaves out the hook, with which importing takes longer; without effect once it is installed."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _InstallHook)]


sys.modules[__name__].__class__ = _Package
sys.meta_path[:0] = [_InstallHook(), moved.MovedFinder]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public name, or a submodule, imported when it is first used."""
        if name in _MODULE_OF:
            value = getattr(import_module(f"ling3.{_MODULE_OF[name]}"), name)
            globals()[name] = value
            return value
        if name in _RENAMED:
            words = f"ling3.{name} is now ling3.{_RENAMED[name]}; the old name goes with the next release"
            warnings.warn(words, DeprecationWarning, stacklevel=2)
            return __getattr__(_RENAMED[name])
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
