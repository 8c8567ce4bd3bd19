"""Streams over HTTP, on every tokenizer: their texts are what is decoded after the prompt."""

import http_server
import openai
import pytest
from tokenizer_cases import MAKERS, after, load
from tokenizer_engines import engine

from ling3.engine.sampling_params import SamplingParams
from ling3.server.app import build
from ling3.server.service import Service

PROMPTS = ("the cat", "မြမာပ", "你好 😀 ")


@pytest.mark.parametrize("name", MAKERS)
def test_streams(name):
    tokenizer, made = load(name), engine(name)
    how = {"model": "m", "max_tokens": 12, "temperature": 1.0}
    with (
        http_server.listening(build(Service(made, tokenizer, "m"))) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client,
    ):
        for seed, prompt in enumerate(PROMPTS):
            ids = tokenizer.encode(prompt)
            for given in (prompt, ids[:-1]):
                params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
                (answer,) = made.generate([given], params)[0].outputs
                chunks = client.completions.create(prompt=given, stream=True, seed=seed, **how)
                text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
                whole = client.completions.create(prompt=given, seed=seed, **how).choices[0].text
                assert text == whole == after(tokenizer, ids if given is prompt else given, answer.token_ids)
