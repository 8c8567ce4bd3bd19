"""The engine on it: bits that do not depend on company, streams, grammars, looking in and cutting out."""

import dataclasses
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
from real_texts import CHATS, PASSAGE, QUESTIONS

import ling3
from ling3.evals.perplexity import log_likelihoods

DRAWN = ling3.SamplingParams(max_tokens=48, temperature=0.8, top_p=0.95, seed=7, logprobs=2)
GREEDY = dataclasses.replace(DRAWN, temperature=0.0, top_p=1.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "tennis", "music"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Invent a person: name, age, hobbies. Answer in JSON."}]


def answer(output):
    """All of an answer that does not depend on the clock; floats compare bit for bit."""
    (completion,) = output.outputs
    return tuple(completion.token_ids), completion.text, completion.logprobs, completion.finish_reason


@pytest.fixture(scope="module")
def requests():
    """Chats of all lengths, a part of them with one long beginning, greedy and drawn."""
    prompts = [*([{"role": "user", "content": question}] for question in QUESTIONS[:6]), *CHATS[6:9]]
    prompts += [[{"role": "user", "content": f"{PASSAGE}\n\n{question}"}] for question in QUESTIONS[:4]]
    return [(prompt, (GREEDY, DRAWN)[i % 2]) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(make_engine, requests):
    """Each answer in an engine that serves nothing else, and keeps nothing."""
    lonely = make_engine(prefix_cache=False)
    return [answer(lonely.generate([prompt], params)[0]) for prompt, params in requests]


def test_any_company_and_order(engine, requests, alone):
    for seed in range(2):
        order = random.Random(seed).sample(range(len(requests)), len(requests))
        found = engine.generate([requests[i][0] for i in order], [requests[i][1] for i in order])
        assert list(map(answer, found)) == [alone[i] for i in order]
    assert engine.stats().cached_tokens > 0


def test_preempted(crowded, requests, alone):
    found = crowded.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    assert list(map(answer, found)) == alone
    assert crowded.stats().preemptions > 0


def test_arrivals(engine, requests, alone):
    times = np.cumsum(np.random.default_rng(0).exponential(0.05, len(requests))).tolist()
    prompts, params = zip(*requests, strict=True)
    deltas = list(engine.stream_all(list(prompts), list(params), arrivals=times))
    for i, expected in enumerate(alone):
        own = [delta for index, delta in deltas if index == i]
        assert answer(own[-1].output) == expected
        assert "".join(delta.text for delta in own) == expected[1]


def test_json_by_schema(engine, requests, alone):
    """Greedy and drawn, beside requests without grammars, whose bits stay."""
    held = [
        dataclasses.replace(GREEDY, max_tokens=96, structured=ling3.JSONSchema(SCHEMA)),
        dataclasses.replace(DRAWN, max_tokens=96, structured=ling3.JSONSchema(SCHEMA)),
        dataclasses.replace(GREEDY, structured=ling3.Choice(["yes", "no"])),
        dataclasses.replace(GREEDY, structured=ling3.Regex(r"[A-Z][a-z]+ is \d{2} years old\.")),
    ]
    prompts, params = map(list, zip(*requests, strict=True))
    found = engine.generate([*[ASKED] * len(held), *prompts], [*held, *params])
    assert list(map(answer, found[len(held) :])) == alone
    for output in found[:2]:
        person = json.loads(output.text)
        assert set(person) == set(SCHEMA["required"]) and 0 <= person["age"] <= 120 and len(person["name"]) <= 20
        assert set(person["hobbies"]) <= {"chess", "tennis", "music"} and output.finish_reason == "stop"
    assert found[2].text in ("yes", "no") and found[3].text.endswith(" years old.")
    assert [answer(output) for output in found[:4]] == [answer(engine.generate([ASKED], each)[0]) for each in held]


def test_a_capture_is_the_trace(engine, model, requests, alone):
    prompt, params = requests[0]
    layers = [0, 15, 29]
    (output,) = engine.generate([prompt], dataclasses.replace(params, capture=ling3.Capture(residual=layers)))
    assert answer(output) == alone[0]
    ids = [*output.prompt_token_ids, *output.token_ids]
    traced = ling3.trace(model, jnp.asarray([ids]), logit_lens=False)
    for layer in layers:
        norms = np.linalg.norm(output.captured.residual[layer], axis=-1)
        np.testing.assert_allclose(norms, np.asarray(traced.layers[layer].residual_norm[0]), rtol=1e-4)


def test_an_intervention_changes_its_request_alone(engine, requests, alone):
    prompts, params = map(list, zip(*requests, strict=True))
    silent = ling3.Intervention.set(29, "residual", 0.0)
    params[0] = dataclasses.replace(params[0], interventions=(silent,))
    found = list(map(answer, engine.generate(prompts, params)))
    assert found[1:] == alone[1:] and found[0] != alone[0]


def test_what_is_cut_was_needed(model, tokenizer):
    text = tokenizer.encode(PASSAGE)
    nats = -np.mean(log_likelihoods(model, text))
    for cut, least in ((ling3.ablate.no_rope(model), 1.0), (ling3.ablate.no_attention(model, [0]), 1.0)):
        assert -np.mean(log_likelihoods(cut, text)) > nats + least
