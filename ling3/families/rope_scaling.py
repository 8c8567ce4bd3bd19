"""RoPE scaling for long contexts as a `config.json` states it: default, linear, dynamic, YaRN, and Llama 3's."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from ling3.families.config_fields import check, field, pick
from ling3.layers.rope import Rope


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The `rope_scaling` of a `config.json` (`rope_parameters` in transformers 5), under its field names.

    With f_i = theta^(-2i/head_dim):
        linear    f_i / factor
        dynamic   f_i, as it scales only beyond max_position_embeddings, which ling3 never exceeds
        yarn      f_i / factor for slow pairs, f_i for fast ones, and a ramp between (arXiv 2309.00071, §3.2); queries
                  and keys are multiplied by 0.1 ln(factor) + 1 (or by what `attention_factor` or the mscales say)
        llama3    f_i / factor below low_freq_factor turns in the original context, f_i above high_freq_factor of them
    """

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"] = field(aliases=("type",))
    factor: float = field(ge=1)
    original_max_position_embeddings: int | None = field(None, ge=1)
    low_freq_factor: float | None = field(None, gt=0)
    high_freq_factor: float | None = field(None, gt=0)
    beta_fast: float | None = field(None, gt=0)
    beta_slow: float | None = field(None, gt=0)
    mscale: float | None = field(None, gt=0)
    mscale_all_dim: float | None = field(None, gt=0)
    attention_factor: float | None = field(None, gt=0)
    truncate: bool | None = field(None)

    def __post_init__(self) -> None:
        check(self, self._misfits)

    def _misfits(self) -> Iterable[str]:
        needed = {"llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")}
        for name in needed.get(self.rope_type, ()):
            if getattr(self, name) is None:
                yield f"{name}: not in this config; expected a number, as rope_type is {self.rope_type}; add it"
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low is not None and high is not None and low >= high:
            yield f"high_freq_factor: found {high}; expected more than low_freq_factor, {low}; correct one of them"

    def rope(self, theta: float, head_dim: int, context: int) -> Rope:
        """The rotation for heads of `head_dim` channels in a model of at most `context` tokens."""
        plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
        original = self.original_max_position_embeddings or context
        if self.rope_type == "linear":
            return _rope(plain / self.factor)
        if self.rope_type == "llama3":
            turns = original * plain / (2 * math.pi)
            low, high = self.low_freq_factor or 1.0, self.high_freq_factor or 4.0
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            return _rope((1 - smooth) * plain / self.factor + smooth * plain)
        if self.rope_type == "yarn":
            return _rope(self._ramped(plain, theta, head_dim, original), self._magnitude())
        return _rope(plain)

    def _ramped(self, plain: Any, theta: float, head_dim: int, original: int) -> Any:
        """YaRN's frequencies, with a ramp from `beta_fast` to `beta_slow` turns of a pair within `original` tokens."""

        def pair(turns: float) -> float:
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = pair(self.beta_fast or 32.0), pair(self.beta_slow or 1.0)
        if self.truncate is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - first) / (last - first if last != first else 0.001), 0, 1)
        return ramp * plain / self.factor + (1 - ramp) * plain

    @property
    def score_factor(self) -> float:
        """The factor of MLA's scores: (0.1 mscale_all_dim ln(factor) + 1)², or 1 without that field (DeepSeek-V3)."""
        return 1.0 if self.mscale_all_dim is None else self._scale(self.mscale_all_dim) ** 2

    def _magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    def _scale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """The fields as in `config.json`, without those that are None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def read_partial_scaling(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`read_scaling` for a family with a `partial_rotary_factor`.

    The mrope fields say which channels take the positions of height and width in an image, which a text does not have.
    """
    dropped = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
    given = {name: raw[name] for name in ("rope_scaling", "rope_parameters") if raw.get(name) is not None}
    kept = {
        name: {key: value for key, value in own.items() if key not in dropped} if isinstance(own, Mapping) else own
        for name, own in given.items()
    }
    return read_scaling(kept, problems)


def read_scaling(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """A file's RoPE scaling, under either of its two names; None for RoPE's default kind."""
    given = pick(raw, ("rope_scaling", "rope_parameters"), problems)
    if not isinstance(given, Mapping):
        return given
    own = dict(given)
    own.pop("rope_theta", None)
    if own.get("rope_type", own.get("type")) == "yarn":
        own.pop("finetuned", None)  # in YaRN's first checkpoints; how the model was trained changes nothing here
    if own.pop("partial_rotary_factor", 1.0) != 1.0:
        problems.append("rope_scaling.partial_rotary_factor: expected 1; in ling3 every channel of a head is rotated")
    if all(own.get(name) in (None, "default") for name in ("rope_type", "type")):
        return None
    return own


def _rope(frequencies: Any, magnitude: float = 1.0) -> Rope:
    return Rope(tuple(frequencies.tolist()), magnitude)
