"""Captures: arrays from inside the model that an engine returns with a request's answer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int32

from ling3.intervention import SITES
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole

PATHS = {
    **{name: SITES[name] for name in ("residual", "attended", "added", "heads")},
    **{f"{name}s": SITES[name] for name in ("gate", "decay", "beta")},
    "state_norms": "layers.{}.attention.state_norm",
    "router": SITES["router"],
}
"""The recorder's path for each field of `Capture`; {} is the layer's 0-based number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """The arrays to return with a request's answer, as `SamplingParams(capture=…)`.

    Each field is True for all layers that have such an array, or the numbers of some layers. Capturing does not change
    the answer's bits: after its last token, a second request prefills prompt and new tokens again, in chunks. So the
    arrays equal those of `ling3.trace` for the complete sequence, up to rounding. The request's interventions apply
    here too.

    Raises ValueError that names every invalid field.
    """

    # A type check would come before `__post_init__`, whose errors say what to do.
    __no_type_check__ = True

    residual: bool | Sequence[int] = False
    """The residual stream after a layer, [tokens, hidden] (of several streams [tokens, streams, hidden])."""
    attended: bool | Sequence[int] = False
    """The output that the layer's attention adds to the stream, [tokens, hidden]."""
    added: bool | Sequence[int] = False
    """The output that its feed-forward adds, [tokens, hidden]."""
    heads: bool | Sequence[int] = False
    """Each head's input to the attention's output projection, after the gate, [tokens, heads, value]."""
    gates: bool | Sequence[int] = False
    """The attention's output gate, [tokens, heads, value] for KDA and [tokens, heads] for MLA."""
    decays: bool | Sequence[int] = False
    """KDA's log decay, in nats, [tokens, heads, key]."""
    betas: bool | Sequence[int] = False
    """KDA's writing strength, [tokens, heads]."""
    state_norms: bool | Sequence[int] = False
    """The Frobenius norm of KDA's state after each token, [tokens, heads]."""
    router: bool | Sequence[int] = False
    """The experts that a MoE layer's router chose, their weights and every expert's score: a `Routing`."""

    def __post_init__(self) -> None:
        problems = []
        for name in PATHS:
            layers = getattr(self, name)
            if isinstance(layers, bool):
                continue
            if not isinstance(layers, (list, tuple, range)) or not all(is_whole(i) and i >= 0 for i in layers):
                problems.append(f"{name} is {shown(layers)}, expected True, False or the numbers of layers")
                continue
            object.__setattr__(self, name, tuple(sorted({int(i) for i in layers})))
        if not problems and not any(getattr(self, name) for name in PATHS):
            problems.append(f"nothing is asked for, expected one of {', '.join(PATHS)}")
        if problems:
            raise ValueError("capture: " + "; ".join(problems))

    def paths(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """The recorder's paths of the requested arrays; `shapes` has the shape of each array that the model records.

        Raises ValueError for a layer that is out of range or has no such array, and for True if no layer has one.
        """
        found, layers = [], sum(path.endswith(".residual") for path in shapes)
        for name, path in PATHS.items():
            asked = getattr(self, name)
            having = [i for i in range(layers) if path.format(i) in shapes]
            if asked is True and not having:
                raise ValueError(f"capture: {name} is True, and no layer of this model has any")
            wanted = having if asked is True else asked or ()
            for i in wanted:
                if i >= layers:
                    raise ValueError(f"capture: {name} has layer {i}, expected layers in [0, {layers})")
                if i not in having:
                    raise ValueError(f"capture: layer {i} has no {name}; those that have: {having}")
            found += [path.format(i) for i in wanted]
            if name == "router":
                found += [path.format(i).replace("router", "scores") for i in wanted]
        return tuple(found)


class Routing(NamedTuple):
    """The routing of each token by one MoE layer."""

    chosen: Int32[np.ndarray, "tokens top_k"]  # best first
    weights: Float[np.ndarray, "tokens top_k"]  # including the routed scaling factor
    scores: Float[np.ndarray, "tokens experts"]  # before any bias


@dataclasses.dataclass(frozen=True)
class Captured:
    """The captured arrays, on the host: for each field, arrays by the layer's 0-based number.

    Their first axis counts all tokens of the prompt and then of the answer, including the last token, which generating
    did not put through the model. Floats have the dtypes in which the model computes.
    """

    tokens: int
    """The number of tokens of prompt and answer together."""
    residual: Mapping[int, Float[np.ndarray, "tokens *streams hidden"]]
    attended: Mapping[int, Float[np.ndarray, "tokens hidden"]]
    added: Mapping[int, Float[np.ndarray, "tokens hidden"]]
    heads: Mapping[int, Float[np.ndarray, "tokens heads value"]]
    gates: Mapping[int, Float[np.ndarray, "tokens heads *value"]]
    decays: Mapping[int, Float[np.ndarray, "tokens heads key"]]
    betas: Mapping[int, Float[np.ndarray, "tokens heads"]]
    state_norms: Mapping[int, Float[np.ndarray, "tokens heads"]]
    router: Mapping[int, Routing]

    @staticmethod
    def joined(tokens: int, chunks: Sequence[Mapping[str, Any]]) -> "Captured":
        """Joins the arrays of consecutive chunks, given by path; together these have `tokens` tokens."""
        whole = jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)
        fields: dict[str, dict[int, Any]] = {name: {} for name in PATHS}
        names = {pattern: name for name, pattern in PATHS.items()}
        for path, found in whole.items():
            _, layer, site = path.split(".", 2)
            if (name := names.get(f"layers.{{}}.{site}")) is not None:
                fields[name][int(layer)] = found
        for layer, (chosen, weights) in fields["router"].items():
            fields["router"][layer] = Routing(chosen, weights, whole[f"layers.{layer}.mlp.scores"])
        return Captured(tokens, **fields)

    def __repr__(self) -> str:
        held = [f"{name} of layers {', '.join(map(str, own))}" for name in PATHS if (own := getattr(self, name))]
        return f"<Captured: {self.tokens} tokens, {'; '.join(held)}>"
