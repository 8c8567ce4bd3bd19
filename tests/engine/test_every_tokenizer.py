"""An engine's texts, on every tokenizer: the deltas make up what is decoded after the prompt."""

import functools

import jax
import pytest
from slow_cases import slowly
from tokenizer_cases import MAKERS, load

import ling3
from ling3.engine.sampling_params import SamplingParams
from ling3.families.llama import LlamaConfig

PROMPTS = ("the cat", "မြမာပ", "你好 😀 ", "a b\n")


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


@pytest.mark.parametrize("name", slowly(MAKERS, but=["sentencepiece"]))
def test_streams_are_what_is_decoded_after_the_prompt(name):
    tokenizer, made = load(name), engine(name)
    for seed, prompt in enumerate(PROMPTS):
        for cut in (0, 1, 2):
            ids = tokenizer.encode(prompt)
            ids = ids[: len(ids) - cut] or ids
            deltas = [*made.stream(ids, SamplingParams(max_tokens=12, temperature=1.0, seed=seed))]
            (answer,) = deltas[-1].output.outputs
            before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *answer.token_ids])
            while not whole.startswith(before):
                assert before.endswith("\ufffd")
                before = before[:-1]
            assert "".join(delta.text for delta in deltas) == answer.text == whole[len(before) :]
