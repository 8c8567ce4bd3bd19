"""Small configurations and models for tests, with open gates so that a leaked state changes tokens."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp

import ling3
from ling3.layers.kda import KDA
from ling3.layers.moe import MoE

# One layer of each kind: KDA with a dense MLP, KDA with experts, MLA with experts.
TINY = ling3.Ling3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    layer_group_size=3,
    first_k_dense_replace=1,
    num_attention_heads=2,
    head_dim=8,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=2048,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=16,
    n_group=4,
    topk_group=2,
    initializer_range=0.2,
    eos_token_id=(2,),
    pad_token_id=0,
)
# With two of KDA and experts, for tests that tell layers apart by their numbers.
DEEP = dataclasses.replace(TINY, num_hidden_layers=4, layer_group_size=4)
FLASH = dataclasses.replace(
    DEEP,
    layer_group_size=2,
    q_lora_rank=None,
    expert_swiglu_limit_list=(0.0, 0.5, 0.5, 0.0),
    share_expert_swiglu_limit_list=(0.0, 0.5, 0.0, 0.5),
)
# Published vocabularies are multiples of 128, and so fill every word of a mask and every row of a tile.
ALIGNED = dataclasses.replace(TINY, vocab_size=128)
UNBOUNDED = dataclasses.replace(TINY, kda_lower_bound=None)


@functools.cache
def open_model(config: ling3.Ling3Config = TINY, seed: int = 0, dtype=jnp.float32) -> ling3.CausalLM:
    """A random model whose decays are spread over the whole range and whose routing biases choose."""
    key = jax.random.key(seed)
    model = ling3.init(config, key=key, dtype=dtype)

    def spread(node, path_key):
        if isinstance(node, KDA):
            bias = jax.random.normal(path_key, node.dt_bias.shape) - 1.0
            return eqx.tree_at(lambda n: n.dt_bias, node, bias)
        if isinstance(node, MoE):
            bias = 0.5 * jax.random.normal(path_key, node.gate.expert_bias.shape) - 0.5
            return eqx.tree_at(lambda n: n.gate.expert_bias, node, bias)
        return node

    layers = tuple(
        eqx.tree_at(
            lambda n: (n.attention, n.mlp),
            layer,
            (
                spread(layer.attention, jax.random.fold_in(key, 2 * i)),
                spread(layer.mlp, jax.random.fold_in(key, 2 * i + 1)),
            ),
        )
        for i, layer in enumerate(model.model.layers)
    )
    return eqx.tree_at(lambda m: m.model.layers, model, layers)


def widened(model: ling3.CausalLM) -> ling3.CausalLM:
    """The same weights in float64, in which it computes then; under `jax.enable_x64(True)`."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf, model)
