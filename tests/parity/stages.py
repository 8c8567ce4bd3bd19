"""ling3's forward pass taken apart, so that two models can be compared module by module."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ling3.cache import Span
from ling3.layers.moe import MoE
from ling3.model import Ling3ForCausalLM


@eqx.filter_jit
def ling3_stages(model: Ling3ForCausalLM, tokens: Int[Array, " seq"]) -> dict[str, Float[Array, "seq features"]]:
    """Each module's output for one sequence, under its published name; a router's is the weight of every expert."""
    seq = tokens.shape[0]
    span = Span(jnp.zeros(1, jnp.int32), jnp.full(1, seq, jnp.int32))
    stages = {}
    x = stages["model.word_embeddings"] = model.model.word_embeddings(tokens[None])
    for i, layer in enumerate(model.model.layers):
        at = f"model.layers.{i}"
        stages[f"{at}.attention"], _ = layer.attention(layer.input_layernorm(x), None, span)
        x = x + stages[f"{at}.attention"]
        h = layer.post_attention_layernorm(x)
        if isinstance(layer.mlp, MoE):
            chosen, weights = layer.mlp.gate(h[0])
            experts = jnp.zeros((seq, model.config.num_experts), weights.dtype)
            stages[f"{at}.mlp.gate"] = experts.at[jnp.arange(seq)[:, None], chosen].set(weights)
        stages[f"{at}.mlp"] = layer.mlp(h)
        x = stages[at] = x + stages[f"{at}.mlp"]
    x = stages["model.norm"] = model.model.norm(x)
    stages["lm_head"] = model.lm_head(x, jnp.float32)
    return {name: stage.reshape(seq, -1) for name, stage in stages.items()}
