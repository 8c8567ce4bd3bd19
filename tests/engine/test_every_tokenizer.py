"""An engine's texts, on every tokenizer: the deltas make up what is decoded after the prompt."""

import pytest
from exhaustive_cases import exhaustively
from tokenizer_cases import MAKERS, after, load
from tokenizer_engines import engine

from ling3.engine.sampling_params import SamplingParams

PROMPTS = ("the cat", "မြမာပ", "你好 😀 ", "a b\n")


@pytest.mark.thorough
@pytest.mark.parametrize("name", exhaustively(MAKERS, but=["sentencepiece", "smollm2"]))
def test_streams_are_what_is_decoded_after_the_prompt(name):
    tokenizer, made = load(name), engine(name)
    for seed, prompt in enumerate(PROMPTS):
        for cut in (0, 1, 2):
            ids = tokenizer.encode(prompt)
            ids = ids[: len(ids) - cut] or ids
            deltas = [*made.stream(ids, SamplingParams(max_tokens=12, temperature=1.0, seed=seed))]
            (answer,) = deltas[-1].output.outputs
            text = after(tokenizer, ids, answer.token_ids)
            assert "".join(delta.text for delta in deltas) == answer.text == text
