"""Whether a row of a training batch can hold several texts: no mixer may look from one into another."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ling3.cache import Span
from ling3.execution import Execution
from ling3.model import CausalLM, Mixer


def leak(model: CausalLM) -> str | None:
    """Why rows of several texts (`Span.text_starts`) do not suit a model: its first mixer that mixes them; or None.

    Each kind of mixer computes a row of two texts. If the gradient of the second text's outputs by the first one's
    inputs is not exactly 0, texts leak into one another.
    """
    layers = {f"layers.{i}": layer.attention for i, layer in enumerate(model.model.layers)}
    layers |= {f"mtp.{i}": layer.attention for i, layer in enumerate(model.mtp)}
    known = set()
    for name, mixer in layers.items():
        if mixer is None or (kind := jax.tree.structure(mixer)) in known:
            continue
        known.add(kind)
        x = jax.random.normal(jax.random.key(0), (1, 4, model.model.norm.weight.shape[0])).astype(model.dtype)
        try:
            reached = _reached(mixer, x)
        except ValueError as error:
            return f"{name}: {error}"
        if np.any(np.asarray(reached) != 0):
            return f"{name}: {type(mixer).__name__} mixes the texts of a row, which `Span.text_starts` tells apart"
    return None


@eqx.filter_jit
def _reached(mixer: Mixer, x: Float[Array, "1 4 hidden"]) -> Float[Array, "1 2 hidden"]:
    """The gradient of the outputs of a row's second text by the inputs of the first, where both have two tokens."""
    starts = jnp.asarray([[0, 0, 2, 2]], jnp.int32)
    span = dataclasses.replace(Span.whole(1, 4, Execution.default()), text_starts=starts)
    return jax.grad(lambda x: jnp.sum(jnp.sin(mixer(x, None, span)[0][:, 2:])).astype(jnp.float32))(x)[:, :2]
