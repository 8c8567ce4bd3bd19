"""ling3's forward pass, module by module, so that two models can be compared there."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ling3.cache import Span
from ling3.execution import Execution
from ling3.layers.moe import MoE
from ling3.model import CausalLM
from ling3.runtime.recorder import Recorder


@eqx.filter_jit
def ling3_stages(model: CausalLM, tokens: Int[Array, " seq"]) -> dict[str, Float[Array, "seq features"]]:
    """Each module's output for one sequence, under its published name; a router's is the weight of every expert."""
    (seq,), seen = tokens.shape, Recorder()
    logits = model.watched(tokens[None], Span.whole(1, seq, Execution.default(), seen))
    stages = {"model.word_embeddings": seen.values["embeddings"]}
    for i, layer in enumerate(model.model.layers):
        at, own = f"model.layers.{i}", seen.of(f"layers.{i}")
        stages[f"{at}.attention"] = own["attended"]
        if isinstance(layer.mlp, MoE):
            routed = seen.of(f"layers.{i}.mlp")
            chosen, weights = routed["router"]
            experts = jnp.zeros((seq, model.config.num_experts), weights.dtype)
            stages[f"{at}.mlp.gate"] = experts.at[jnp.arange(seq)[:, None], chosen].set(weights)
        stages[f"{at}.mlp"], stages[at] = own["added"], own["residual"]
    stages |= {"model.norm": seen.values["hidden"], "lm_head": logits}
    return {name: stage.reshape(seq, -1) for name, stage in stages.items()}
