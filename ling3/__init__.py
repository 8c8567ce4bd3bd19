"""Ling-3: a hybrid of Kimi Delta Attention and gated MLA over a sparse mixture of experts, in JAX and Equinox."""

import warnings

# Before the hook: what is first imported beneath a hooked module, Python compiles once more for itself.
import equinox as _equinox  # noqa: F401
from jaxtyping import install_import_hook as _install_import_hook

from ling3 import checks as _checks  # noqa: F401

# Shapes and types are checked in every session, but for the command line's without --debug.
_install_import_hook("ling3", "ling3.checks.checked")

from ling3 import ablate  # noqa: E402
from ling3.cache import Cache, KDAState, Paged, Span  # noqa: E402
from ling3.checkpoint import CheckpointError, load, save  # noqa: E402
from ling3.config import ConfigError, Ling3Config  # noqa: E402
from ling3.execution import Execution  # noqa: E402
from ling3.families import Family, init, register_family  # noqa: E402
from ling3.generate import generate  # noqa: E402
from ling3.model import DecoderLayer, Ling3ForCausalLM, Ling3Model, Mixer  # noqa: E402
from ling3.outputs import Completion, Delta, Logprob, RequestOutput, Stats, Timings  # noqa: E402
from ling3.params import SamplingParams  # noqa: E402
from ling3.serve import Engine, QueueFull  # noqa: E402
from ling3.tokenizer import Tokenizer, TokenizerError, load_tokenizer  # noqa: E402
from ling3.trace import Trace, trace  # noqa: E402
from ling3.version import __version__  # noqa: E402

__all__ = [
    "Cache",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DecoderLayer",
    "Delta",
    "Engine",
    "Execution",
    "Family",
    "KDAState",
    "Ling3Config",
    "Ling3ForCausalLM",
    "Ling3Model",
    "Logprob",
    "Mixer",
    "Paged",
    "QueueFull",
    "RequestOutput",
    "SamplingParams",
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
    "register_family",
    "save",
    "trace",
]

_RENAMED = {"LatentCache": "Paged"}


def __getattr__(name: str) -> object:
    """The former names of what has another one now, for one release."""
    if name in _RENAMED:
        warnings.warn(
            f"ling3.{name} is now ling3.{_RENAMED[name]}; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module 'ling3' has no attribute {name!r}")
