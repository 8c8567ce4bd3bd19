"""Engines over each tokenizer of `tokenizer_cases`."""

import functools

import jax
from tokenizer_cases import load

import ling3
from ling3.families.llama import LlamaConfig


@functools.cache
def engine(name):
    """Of a random Llama, which draws any token, and so parts of characters too."""
    tokenizer = load(name)
    config = LlamaConfig(
        vocab_size=-(-tokenizer.vocab_size // 128) * 128, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_theta=1e4, rope_scaling=None, tie_word_embeddings=False, initializer_range=0.02, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_ids, attention_bias=False, mlp_bias=False,
    )  # fmt: skip
    model = ling3.init(config, key=jax.random.key(0))
    return ling3.Engine(model, tokenizer, max_running_requests=2, max_model_len=64)
