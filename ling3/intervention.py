"""Interventions: arrays inside a forward pass that are changed while it runs, for steering and causal tracing.

A layer's modules name the arrays that can be changed, its *sites* (`Span.site`):

    embeddings                  [hidden]              the model's token embeddings, of no layer
    attended, added             [hidden]              outputs of attention and feed-forward, added to the residual
    residual                    [hidden]              the residual stream after the layer; of several [streams, hidden]
    gate                        [heads(, value)]      the attention's output gate
    decay, beta                 [heads(, key)]        log decay, in nats, and writing strength: KDA's, Gated DeltaNet's
    heads                       [heads, value]        each head's input to the output projection
    router                      [experts]             the experts that a token goes through, and their weights
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, no_type_check

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32

from ling3.cache import Span
from ling3.ops.precision import wide
from ling3.runtime.quoting import shown
from ling3.runtime.recorder import SILENT, Recorder
from ling3.runtime.scalars import is_real, is_whole

OF_HEADS = ("gate", "decay", "beta", "heads")
"""Sites whose first axis counts heads."""
SITES: dict[str, str] = {
    "embeddings": "embeddings",
    **{name: f"layers.{{}}.{name}" for name in ("attended", "added", "residual")},
    **{name: f"layers.{{}}.attention.{name}" for name in OF_HEADS},
    "router": "layers.{}.mlp.router",
}
"""The recorder's path of each site, by name; {} is the layer's 0-based number."""
ALL = -1
"""The head number that means all heads."""


class Intervention(eqx.Module):
    """One change of a forward pass, made by `add`, `set`, `expert` or `patch`.

    It applies to tokens at positions from `from_position` on, or only at `positions`; these are absolute and count from
    0. Several interventions at one site apply in order, each to the result of those before it. A program is compiled
    for the layer, the site and the kind of change: other values, positions, heads and experts run in the same program.

    The constructors raise ValueError for arguments that fit no model. Functions that take interventions raise it for
    those that do not fit their model: a missing layer or site, a wrong width, a head or an expert out of range.
    """

    value: Float[Array | np.ndarray, "rows values *shape"]  # one value for all positions, or one for each
    start: Int32[Array | np.ndarray, " rows"]
    positions: Int32[Array | np.ndarray, "rows positions"] | None  # None: all from `start` on; -1 means no position
    part: Int32[Array | np.ndarray, " rows"]  # the head or expert
    layer: int = eqx.field(static=True)
    site: str = eqx.field(static=True)
    adds: bool = eqx.field(static=True)

    @staticmethod
    def add(
        layer: SupportsIndex | None,
        vector: Any,
        *,
        site: str = "residual",
        head: SupportsIndex | None = None,
        from_position: SupportsIndex = 0,
        positions: Sequence[SupportsIndex] | None = None,
    ) -> "Intervention":
        """x + vector: steers the residual stream after a layer, or another `site` (for all heads, or one `head`)."""
        return _made(layer, site, vector, head, from_position, positions, adds=True)

    @staticmethod
    def set(
        layer: SupportsIndex | None,
        site: str,
        value: Any,
        *,
        head: SupportsIndex | None = None,
        from_position: SupportsIndex = 0,
        positions: Sequence[SupportsIndex] | None = None,
    ) -> "Intervention":
        """Replaces the array of a site by `value`, a number or an array of the site's shape.

        With a `head`, only that head's part. A gate of 1 has no effect, and `heads` of 0 remove a head's output. A
        decay is a logarithm in nats, at most 0, and 0 forgets nothing.
        """
        return _made(layer, site, value, head, from_position, positions, adds=False)

    @staticmethod
    def expert(
        layer: SupportsIndex,
        expert: SupportsIndex,
        weight: float,
        *,
        from_position: SupportsIndex = 0,
        positions: Sequence[SupportsIndex] | None = None,
    ) -> "Intervention":
        """Replaces the router's weight of an expert of a MoE layer; 0 turns the expert off.

        If a token did not choose the expert, it replaces the token's last choice, unless the weight is 0. The other
        weights do not change.
        """
        if not (is_real(weight) and np.isfinite(weight)):
            raise ValueError(f"intervention: weight is {shown(weight)}, expected a finite number")
        return _made(layer, "router", weight, expert, from_position, positions, adds=False)

    @staticmethod
    def patch(
        layer: SupportsIndex | None,
        values: Any,
        positions: Sequence[SupportsIndex] | None = None,
        *,
        site: str = "residual",
        head: SupportsIndex | None = None,
    ) -> "Intervention":
        """Replaces activations by those of another run, `[positions, …]`: causal tracing (arXiv 2202.05262, §2).

        `values` are those at `positions`, by default the first ones, as `Completion.captured` and `trace` give them.
        """
        count = np.shape(values)[0] if np.ndim(values) else 0
        positions = range(count) if positions is None else positions
        if count == 0 or count != len(positions):
            raise ValueError(
                f"intervention: values have the shape {np.shape(values)}, expected a value for each of "
                f"{len(positions)} positions along the first axis"
            )
        return _made(layer, site, values, head, 0, positions, adds=False, each=True)

    @property
    def path(self) -> str:
        """The path under which a recorder finds the site."""
        return SITES[self.site].format(self.layer)

    def settled(self, shapes: Mapping[str, tuple[int, ...]]) -> "Intervention":
        """This intervention prepared for a model with sites of these `shapes`: its values get the site's full shape.

        The number of positions is padded to a power of two, so that few programs are compiled. Raises ValueError if the
        intervention does not fit the model.
        """
        shape = self._shape(shapes)
        if self.site == "router":
            shape = ()
        value = _broadcast(self.value, shape, self)
        positions = self.positions
        if positions is not None and (missing := (1 << (positions.shape[1] - 1).bit_length()) - positions.shape[1]):
            positions = _numpy(positions).pad(positions, ((0, 0), (0, missing)), constant_values=-1)
            if value.shape[1] > 1:
                value = _numpy(value).pad(value, ((0, 0), (0, missing), *[(0, 0)] * len(shape)))
        return Intervention(value, self.start, positions, self.part, self.layer, self.site, self.adds)

    def _shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The site's shape for one token; raises ValueError if the model lacks the site, the head or the expert."""
        shape = shapes.get(self.path)
        if shape is None:
            layers = sum(path.endswith(".residual") for path in shapes)
            if self.layer >= layers:
                raise ValueError(f"intervention: layer is {self.layer}, expected one in [0, {layers})")
            having = [i for i in range(layers) if SITES[self.site].format(i) in shapes]
            where = f"those that have: {', '.join(map(str, having))}" if having else "none has"
            raise ValueError(f"intervention: layer {self.layer} has no {self.site}; {where}")
        if isinstance(self.part, Tracer):
            return shape
        if self.site in (*OF_HEADS, "router") and self.part[0] >= shape[0]:
            what = "expert" if self.site == "router" else "head"
            raise ValueError(
                f"intervention: {what} is {int(self.part[0])}, expected one in [0, {shape[0]}), those of layer "
                f"{self.layer}"
            )
        return shape

    def applied(self, x: Any, span: Span) -> Any:
        """Applies the intervention to its site's array; returns the array that the pass continues with."""
        if self.site == "router":
            chosen, weights = x
            return self._routed(chosen, weights, span)
        where = self._where(span, x.shape[1])
        index = (*where.shape, *[1] * (x.ndim - 2))
        held = where.reshape(index)
        if self.site in OF_HEADS:
            own = (jnp.arange(x.shape[2], dtype=jnp.int32)[None] == self.part[:, None]) | (self.part == ALL)[:, None]
            held = held & own.reshape(own.shape[0], 1, -1, *[1] * (x.ndim - 3))
        value = jnp.asarray(self.value)
        if value.shape[1] > 1:
            value = jnp.broadcast_to(value, (x.shape[0], *value.shape[1:]))
            value = jnp.take_along_axis(value, self._index(span, x.shape[1]).reshape(index), axis=1)
        dtype = wide(x.dtype)
        value = value.astype(dtype) + x.astype(dtype) if self.adds else value
        return jnp.where(held, value.astype(x.dtype), x)

    def _routed(
        self, chosen: Int32[Array, "tokens top_k"], weights: Float[Array, "tokens top_k"], span: Span
    ) -> tuple[Int32[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
        batch = span.start.shape[0]
        seq = chosen.shape[0] // batch
        each = lambda x: jnp.repeat(jnp.broadcast_to(jnp.asarray(x), (batch,)), seq)[:, None]  # noqa: E731
        expert, weight = each(self.part), each(self.value[:, 0]).astype(weights.dtype)
        own = chosen == expert
        last = (jnp.arange(chosen.shape[1], dtype=jnp.int32) == chosen.shape[1] - 1)[None] & (weight != 0)
        place = jnp.where(jnp.any(own, axis=1, keepdims=True), own, last)
        place = place & self._where(span, seq).reshape(-1, 1)
        return jnp.where(place, expert, chosen), jnp.where(place, weight, weights)

    def _where(self, span: Span, seq: int) -> Bool[Array, "batch seq"]:
        """True for the tokens of the span that it applies to; False for padding."""
        at, valid = span.positions(seq), span.valid(seq)
        if self.positions is None:
            return valid & (at >= jnp.asarray(self.start)[:, None])
        return valid & jnp.any(at[:, :, None] == jnp.asarray(self.positions)[:, None], axis=-1)

    def _index(self, span: Span, seq: int) -> Int32[Array, "batch seq"]:
        """The index of each token's position in `positions`; 0 if it is not among them."""
        hits = span.positions(seq)[:, :, None] == jnp.asarray(self.positions)[:, None]
        return jnp.argmax(hits, axis=-1).astype(jnp.int32)


def _made(
    layer: Any,
    site: Any,
    value: Any,
    part: Any,
    from_position: Any,
    positions: Any,
    *,
    adds: bool,
    each: bool = False,
) -> Intervention:
    """The checked intervention; with `each`, the value's first axis is the positions."""
    layer = 0 if site == "embeddings" and layer is None else layer
    positions = None if positions is None else list(positions)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    problems = _problems_of_site(site, part)
    numbers = (("layer", layer), ("from_position", from_position), ("expert" if site == "router" else "head", part))
    problems += [
        f"{name} is {shown(number)}, expected a whole number >= 0"
        for name, number in numbers
        if not (_is_place(number) or (number is None and name == "head"))
    ]
    if positions is not None and from_position:
        problems.append("from_position and positions are both given, expected one of them")
    if positions is not None and not (positions and all(map(_is_place, positions))):
        problems.append(f"positions are {shown(positions)}, expected whole numbers >= 0")
    elif positions is not None and len(set(positions)) < len(positions):
        problems.append(f"positions are {shown(positions)}, expected each once")
    problems += _problems_of_value(value, array, at_most_0=site == "decay" and not adds)
    if problems:
        raise ValueError("intervention: " + "; ".join(problems))
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    array = array.astype(jax.dtypes.canonicalize_dtype(wide(array.dtype) if floating else np.float32))
    array = array[None] if each else array[None, None]
    if part is not None and site in OF_HEADS and array.ndim > 2:
        array = array[:, :, None]  # with an axis for the heads
    places = None if positions is None else np.asarray([positions], np.int32)
    first, own = (np.asarray([number], np.int32) for number in (from_position, ALL if part is None else part))
    return Intervention(array, first, places, own, int(layer), str(site), adds)


def _is_place(number: Any) -> bool:
    return is_whole(number) and 0 <= int(number) < 2**31


def _problems_of_site(site: Any, part: Any) -> list[str]:
    if site not in SITES:
        return [f"site is {shown(site)}, expected one of {', '.join(SITES)}"]
    if site == "router" and part is None:
        return ["site is 'router', expected another: Intervention.expert sets the weight of an expert"]
    if part is not None and site not in (*OF_HEADS, "router"):
        return [f"head is {shown(part)}, expected None: {site} has no heads, which {', '.join(OF_HEADS)} have"]
    return []


def _problems_of_value(value: Any, array: Any, at_most_0: bool) -> list[str]:
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        return [f"the value is {shown(value)}, expected numbers"]
    if isinstance(value, Tracer):
        return []
    if not np.isfinite(np.asarray(array, np.float64)).all():
        return ["the value has numbers that are not finite"]
    return ["a decay is above 0, expected nats of at most 0"] if at_most_0 and (np.asarray(array) > 0).any() else []


def _broadcast(
    value: Float[Array | np.ndarray, "rows values *shape"], shape: tuple[int, ...], of: Intervention
) -> Float[Array | np.ndarray, "rows values *wider"]:
    """Broadcasts values to a site's shape; raises ValueError if they do not fit."""
    own = value.shape[2:]
    if len(own) > len(shape) or any(n not in (1, size) for n, size in zip(own[::-1], shape[::-1], strict=False)):
        wanted = "a number" if not shape else f"a number or an array of the shape {shape}"
        raise ValueError(
            f"intervention: the value at {of.site} of layer {of.layer} has the shape {own}, expected {wanted}"
        )
    value = value.reshape(*value.shape[:2], *[1] * (len(shape) - len(own)), *own)
    return _numpy(value).broadcast_to(value, (*value.shape[:2], *shape))


def _numpy(x: Any) -> Any:
    """The library for an array: NumPy on the host, so that no program is compiled."""
    return np if isinstance(x, np.ndarray) else jnp


def settled(model: Any, interventions: Any) -> tuple[Intervention, ...]:
    """Interventions checked against a model and prepared for it; raises ValueError for those that do not fit it."""
    if not isinstance(interventions, (list, tuple)) or not all(isinstance(x, Intervention) for x in interventions):
        raise ValueError(f"interventions are {shown(interventions)}, expected a list of ling3.Intervention")
    if not interventions:
        return ()
    shapes = sites(model)
    return tuple(each.settled(shapes) for each in interventions)


def stacked(rows: Sequence[Sequence[Intervention]], places: Sequence[int], count: int) -> tuple[Intervention, ...]:
    """Stacks the interventions of several rows, all of the same structure, at `places` among `count` rows."""

    def placed(*own: np.ndarray) -> np.ndarray:
        out = np.zeros((count, *own[0].shape[1:]), own[0].dtype)
        out[list(places)] = np.concatenate(own)
        return out

    return jax.tree.map(placed, *(tuple(each) for each in rows))


def structure(interventions: Sequence[Intervention]) -> Any:
    """The key of the program for some interventions: rows whose interventions have the same key may share a call."""
    leaves, tree = jax.tree.flatten(tuple(interventions))
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def recorder(interventions: Sequence[Intervention], watch: bool = False) -> Recorder:
    """A recorder that applies interventions to a pass; without any, with `watch`, one that only records."""
    if not interventions:
        return Recorder() if watch else SILENT

    def edit(path: str, x: Any, span: Span) -> Any:
        for each in interventions:
            if each.path == path:
                x = each.applied(x, span)
        return x

    return Recorder(edit=edit)


def takes_interventions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function(model, …, interventions=())`: checks and prepares these, outside of compiled programs."""

    @no_type_check
    @functools.wraps(function)
    def call(model, *args, interventions=(), **kwargs):
        if not isinstance(interventions, tuple) or interventions:
            kwargs["interventions"] = settled(model, interventions)
        return function(model, *args, **kwargs)

    return call


def sites(model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each array that a model records for a token, by path; for a router, the shape of its scores."""
    leaves, tree = jax.tree.flatten(model)
    return _sites(tree, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves))


@functools.lru_cache(maxsize=16)
def _sites(tree: Any, leaves: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    def shown(model: Any) -> dict[str, Any]:
        seen = Recorder()
        model.watched(jnp.zeros((1, 2), jnp.int32), Span.whole(1, 2, recorder=seen))
        return seen.values

    found = {}
    for path, x in jax.eval_shape(shown, jax.tree.unflatten(tree, leaves)).items():
        if path.endswith(".mlp.scores"):
            found[path] = found[path.replace("scores", "router")] = x.shape[1:]
        elif isinstance(x, jax.ShapeDtypeStruct) and ".mlp." not in path:
            found[path] = x.shape[2:]
    return found
