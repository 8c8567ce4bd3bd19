"""Tiny models of the families whose GGUF files arrange arrays otherwise than the published checkpoints."""

import dataclasses

import equinox as eqx
import jax
import tiny_transformers

import ling3
from ling3.families import family_of

ARCHITECTURES = {
    "deepseek-v3": "deepseek2",
    "glm5-next": "glm5-next",
    "qwen3-next": "qwen3next",
    "qwen3.5": "qwen35",
    "qwen3.5-moe": "qwen35moe",
}
"""The cases of `tiny_transformers`, and their `general.architecture`."""
_SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 320}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_POOLED = {**_LATENT, "index_head_dim": 32, "hc_mult": 4, "index_topk": 16}
_LINEAR = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def model_of(name, predicted=0, **changes):
    """A model with random numbers in every array, and with `predicted` layers of multi-token prediction.

    `changes` are fields of its config.
    """
    config = tiny_transformers.open_model(name).config
    own = {"deepseek-v3": {**_LATENT, "head_dim": 16}, "glm5-next": _POOLED}.get(name, _LINEAR)
    if name == "glm5-next":
        linear = dataclasses.replace(config.linear_attn_config, num_heads=4, head_dim=32)
        changes = {"linear_attn_config": linear, **changes}
    sizes = {**_SIZES, **own, **_EXPERTS, "mlp_only_layers": ()}
    known = {key: size for key, size in sizes.items() if hasattr(config, key)}
    config = dataclasses.replace(config, **{**known, **changes})
    if predicted:
        config = family_of(config).with_mtp_layers(config, predicted)
    model = ling3.init(config, key=jax.random.key(0), mtp=predicted > 0)
    keys = iter(jax.random.split(jax.random.key(1), 200))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape) if eqx.is_array(x) else x, model)
