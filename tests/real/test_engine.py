"""SmolLM2 in the engine: the promise in every company, streams, and texts of a form, in a vocabulary of 49,152."""

import json

import pytest

pytest.importorskip("gguf", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("torch", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("transformers", reason="these tests need the extra `real`: `make real` installs it")

from small_engine import answer, crowd
from smollm2_texts import PASSAGE, QUESTIONS

import ling3

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["human", "robot"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
KINDS = (
    ling3.SamplingParams(max_tokens=16, logprobs=2),
    ling3.SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=3, logprobs=1),
    ling3.SamplingParams(max_tokens=24, ignore_eos=True, repetition_penalty=1.1, logprobs=0),
    ling3.SamplingParams(max_tokens=24, structured=ling3.JSONSchema(PERSON), temperature=0.7, seed=1, logprobs=1),
)


@pytest.fixture(scope="module")
def requests(tokenizer):
    """Chats of every kind of sampling, with one long system prompt in every second one."""
    made = []
    for i, question in enumerate(QUESTIONS[:6]):
        system = [{"role": "system", "content": PASSAGE}] if i % 2 else []
        ids = tokenizer.apply_chat_template([*system, {"role": "user", "content": question}])
        made.append((tuple(ids), KINDS[i % len(KINDS)]))
    return made


def served(engine, requests):
    outputs = engine.generate([list(ids) for ids, _ in requests], [params for _, params in requests])
    return [answer(output.outputs[0]) for output in outputs]


@pytest.fixture(scope="module")
def expected(alone, requests):
    """Each request's answer alone."""
    assert max(len(ids) for ids, _ in requests) > 128  # several chunks
    return [answer(alone(*request).outputs[0]) for request in requests]


def test_in_company_and_in_another_order(engine, requests, expected):
    assert served(engine, requests) == expected
    assert served(engine, requests[::-1]) == expected[::-1]


def test_after_a_known_prefix(engine, requests, expected):
    served(engine, requests)
    outputs = engine.generate([list(ids) for ids, _ in requests], [params for _, params in requests])
    assert max(output.cached_tokens for output in outputs) >= 128
    assert [answer(output.outputs[0]) for output in outputs] == expected


def test_after_preemption(new_engine, tokenizer, alone):
    """Four answers that grow to 24 pages, of which there are 17."""
    long = ling3.SamplingParams(max_tokens=48, ignore_eos=True, logprobs=1)
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS[:4]]
    crowded = new_engine(prefix_cache=False)
    crowd(crowded, slots=4, pages=17)
    expected = [answer(alone(tuple(ids), long).outputs[0]) for ids in chats]
    assert served(crowded, [(ids, long) for ids in chats]) == expected
    assert crowded.stats().preemptions > 0


def test_streams_are_whole_texts(engine, tokenizer, requests, expected):
    say = "Repeat exactly: 日本語 😀 naïve"
    emoji = tuple(tokenizer.apply_chat_template([{"role": "user", "content": say}]))
    params = ling3.SamplingParams(max_tokens=24, temperature=1.5, seed=2)
    for ids, how in [*requests[:4], (emoji, params)]:
        deltas = list(engine.stream(list(ids), how))
        output = deltas[-1].output
        assert "".join(delta.text for delta in deltas) == output.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == tuple(output.token_ids)
        assert output.text == tokenizer.decode(output.token_ids)


def test_json_by_schema(engine):
    chat = [{"role": "user", "content": "Describe a person as JSON, with name, age and kind."}]
    kinds = [
        ling3.SamplingParams(max_tokens=80, temperature=t, seed=seed, structured=ling3.JSONSchema(PERSON))
        for seed, t in enumerate((0.0, 1.0, 1.5))
    ]
    for output in engine.generate([chat] * len(kinds), kinds):
        assert output.finish_reason == "stop", output.error
        found = json.loads(output.text)
        assert list(found) == ["name", "age", "kind"] and 0 <= found["age"] <= 150 and len(found["name"]) <= 20
        assert found["kind"] in ("human", "robot")


def test_other_forms(engine):
    chat = [{"role": "user", "content": "Is Paris in France? Answer yes or no."}]
    forms = {"choice": ling3.Choice(["yes", "no"]), "regex": ling3.Regex("[0-9]{4}-[0-9]{2}")}
    for name, form in forms.items():
        (output,) = engine.generate([chat], ling3.SamplingParams(max_tokens=20, structured=form))
        assert output.finish_reason == "stop", output.error
        assert output.text in ("yes", "no") if name == "choice" else len(output.text) == 7
