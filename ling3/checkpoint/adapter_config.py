"""`adapter_config.json`: which modules an adapter changes, and by how much, as PEFT writes it."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ling3.adapters.selection import Named, Selection, by_pattern
from ling3.families.config_fields import Only, check, field, read

NAME = "adapter_config.json"


def _names(value: Any) -> Named:
    """A list of names, or a string that is a regular expression. Raises TypeError or ValueError."""
    return _pattern(value) if isinstance(value, str) else _strings(value)


def _pattern(text: str) -> str:
    """The text, which must be a regular expression. Raises ValueError."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression ({error})") from error
    return text


def _strings(value: Any) -> tuple[str, ...]:
    """A tuple of strings from a list of them. Raises TypeError."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError("no list of strings")
    return tuple(value)


def _patterns(admits: Callable[[Any], bool]) -> Callable[[Any], tuple[tuple[str, Any], ...]]:
    """A function that makes pairs, in the file's order, of an object of regular expressions and values."""

    def pairs(value: Any) -> tuple[tuple[str, Any], ...]:
        items = tuple(value.items()) if isinstance(value, Mapping) else tuple(value)
        for pattern, own in items:
            if not (_pattern(pattern) and admits(own)):
                raise TypeError("a value of another type")
        return items

    return pairs


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**64


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _optional(convert: Callable[[Any], Any], absent: Any) -> Callable[[Any], Any]:
    """`convert`, but `absent` for null."""
    return lambda value: absent if value is None else convert(value)


def _indices(value: Any) -> tuple[int, ...]:
    """A tuple of layers, from one index or a list of them. Raises TypeError."""
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in each):
        raise TypeError("no indices")
    return each


def _ends(value: Any) -> tuple[str, ...]:
    """Names of the list of layers, from one name or a list of them. Raises TypeError or ValueError."""
    each = (value,) if isinstance(value, str) else _strings(value)
    return tuple(_pattern(pattern) for pattern in each if pattern)


_NAMES = "a list of names of modules, or a regular expression"


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The fields of an `adapter_config.json` that decide what an adapter computes (PEFT 0.21). Raises ConfigError."""

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    peft_type: Literal["LORA"] = field()
    target_modules: Named = field(convert=_names, expected=_NAMES)
    r: int = field(ge=1, le=2**20, absent=8)
    lora_alpha: float = field(absent=8.0)
    use_rslora: bool = field(absent=False)
    exclude_modules: Named = field((), convert=_optional(_names, ()), expected=f"{_NAMES}, or null")
    layers_to_transform: tuple[int, ...] = field(
        (), convert=_optional(_indices, ()), expected="a list of indices of layers, one index, or null"
    )
    layers_pattern: tuple[str, ...] = field(
        (), convert=_optional(_ends, ()), expected="a list of names of lists of layers, one name, or null"
    )
    rank_pattern: tuple[tuple[str, int], ...] = field(
        (),
        convert=_optional(_patterns(_is_rank), ()),
        expected="an object of regular expressions for ends of names and ranks, or null",
    )
    alpha_pattern: tuple[tuple[str, float], ...] = field(
        (),
        convert=_optional(_patterns(_is_number), ()),
        expected="an object of regular expressions for ends of names and numbers, or null",
    )
    base_model_name_or_path: str | None = field(None)

    def __post_init__(self) -> None:
        check(self, lambda: ())

    @staticmethod
    def from_dict(raw: object, source: str) -> "AdapterConfig":
        """Reads the config from a JSON object, accounting for every field; errors name `source`."""
        return read(AdapterConfig, raw, source, only=ONLY, harmless=HARMLESS, telling=re.compile(""))

    @property
    def selection(self) -> Selection:
        """The rules for which modules have an adapter."""
        limits = self.layers_to_transform, self.layers_pattern
        return Selection(self.target_modules, self.exclude_modules, *limits)

    def rank(self, name: str) -> int:
        """The rank of the update of the module of this name."""
        return by_pattern(dict(self.rank_pattern), name, self.r)

    def alpha(self, name: str) -> float:
        """The alpha of the update of the module of this name."""
        return float(by_pattern(dict(self.alpha_pattern), name, self.lora_alpha))


def _off(law: str, *more: Any) -> Only:
    """A feature that must be off: null, false, empty, or one of `more`."""
    return Only((None, False, [], {}, *more), law)


ONLY = {
    "bias": Only(("none", None), "an adapter has no biases"),
    "lora_bias": _off("an adapter has no biases"),
    "use_dora": _off("no update has a magnitude (DoRA)"),
    "use_qalora": _off("no update pools its inputs (QALoRA)"),
    "use_bdlora": _off("no update is block-diagonal"),
    "modules_to_save": _off("an adapter replaces no module"),
    "target_parameters": _off("an adapter changes no stacked parameters, such as routed experts"),
    "trainable_token_indices": _off("an adapter changes no rows of the embedding"),
    "layer_replication": _off("no layer is repeated"),
    "alora_invocation_tokens": _off("an adapter is active at every token"),
    "arrow_config": _off("adapters are not routed"),
    "kasa_config": _off("an update has two factors"),
    "velora_config": _off("an update has two factors"),
    "monteclora_config": _off("an update has two factors"),
}
"""Fields of features that change the function, and that ling3 does not compute."""

HARMLESS = (
    *("auto_mapping", "inference_mode", "peft_version", "revision", "task_type"),
    *("ensure_weight_tying", "fan_in_fan_out", "init_lora_weights", "lora_dropout", "qalora_group_size"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config", "megatron_core"),
)
"""Fields that change nothing once an adapter is trained."""
