"""The checkpoint in the package: its tokenizer, its size, and what it answers to problems it has not seen."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ling3
from ling3.families.ling3_config import Ling3Config
from ling3.train.nano.exam import exact_answers, examine
from ling3.train.nano.problems import ask, chat_prompt, exam, worked_examples
from ling3.train.nano.recipe import NANO as RECIPE
from ling3.train.nano.recipe import shares_right
from ling3.train.nano.skills import SKILLS

NANO = Path(ling3.__file__).parent / "checkpoints" / "nano"


@pytest.fixture(scope="module")
def model():
    return ling3.load("nano")


@pytest.fixture(scope="module")
def tokenizer():
    return ling3.load_tokenizer("nano")


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_byte_has_a_token(tokenizer):
    for text in ("".join(map(chr, range(256))), "日本語 𝄞 é\u0301", "\x00\ufffd"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("before", ["", " ", "= ", "$", "\n", "x", "("])
def test_a_number_is_one_token_wherever_it_stands(tokenizer, before):
    for number in map(str, range(100)):
        assert tokenizer.encode(f"{before}{number}.")[-2] == tokenizer.encode(number)[0]
        assert len(tokenizer.encode(number)) == 1


def test_a_prompt_and_its_completion_meet_at_a_token_border(tokenizer):
    for problem in exam(20):
        whole = tokenizer.encode(f"{ask(problem)} {problem.solution}")
        assert whole == tokenizer.encode(ask(problem)) + tokenizer.encode(f" {problem.solution}")


def test_the_chat_template_is_ling_3s(tokenizer):
    problem = exam(1)[0]
    turns = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert prompt == chat_prompt(problem)
    thinking = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert "detailed thinking on<|role_end|>" in thinking
    assert thinking.endswith("<role>ASSISTANT</role>\n<think>")
    turns = [{"role": "system", "content": "Be kind."}, *turns, {"role": "assistant", "content": "5"}]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=False, tokenize=False) == (
        "<role>SYSTEM</role>Be kind.\ndetailed thinking off<|role_end|>"
        f"<role>HUMAN</role>{problem.question}<|role_end|>"
        "<role>ASSISTANT</role>\n<think></think>5<|role_end|>"
    )


def test_it_has_every_mechanism_and_fits_eight_mebibytes(model):
    config = model.config
    assert isinstance(config, Ling3Config)
    kinds = [(config.attention_kind(layer), config.mlp_kind(layer)) for layer in range(config.num_hidden_layers)]
    assert kinds == [*[("kda", "moe")] * 3, ("mla", "moe")]
    assert config.n_group > config.topk_group > 1
    assert config.q_lora_rank
    assert (NANO / "model.safetensors").stat().st_size <= 8 * 2**20
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) < 4_100_000
    assert all(np.any(np.asarray(layer.mlp.gate.expert_bias)) for layer in model.model.layers)


def test_its_record_is_that_of_the_recipe_in_the_code():
    record = json.loads((NANO / "training.json").read_text())
    assert record["recipe"] == json.loads(json.dumps(dataclasses.asdict(RECIPE)))
    assert record["curve"][-1]["step"] == RECIPE.beginning + RECIPE.steps
    assert set(record["right"]) == set(SKILLS)
    assert record["right"]["problems"] >= 0.95
    assert record["right"]["examples"] >= 0.90


@pytest.mark.slow
def test_it_answers_held_out_texts_of_its_skills_as_its_record_says(model, tokenizer):
    record = json.loads((NANO / "training.json").read_text())
    short = [name for name, skill in SKILLS.items() if skill.longest <= 256]
    for name, share in shares_right(model, tokenizer, short, 64).items():
        before = record["curve"][-1]["right"][name]  # to the same texts, in float32
        assert share == pytest.approx(before, abs=3 / 64), name


@pytest.mark.slow
def test_its_layer_that_predicts_a_token_more_guesses_most_tokens_of_answers(tokenizer):
    model = ling3.load("nano", dtype=jnp.float32, mtp=True)
    right = []
    for text in SKILLS["problems"].exam(16):
        prompt, answer = tokenizer.encode(text.prompt), tokenizer.encode(text.answer)
        guesses = ling3.mtp_logits(model, jnp.asarray([[*prompt, *answer, *[0] * (128 - len(prompt + answer))]]))[0]
        right += [int(guesses[len(prompt) + i - 2].argmax()) == token for i, token in enumerate(answer)]
    assert np.mean(right) > 0.9


@pytest.mark.slow
def test_it_answers_problems_it_has_not_seen(model, tokenizer):
    asked = exam(40)
    right = exact_answers(model, tokenizer, [ask(problem) for problem in asked], [p.answer for p in asked], batch=40)
    assert np.mean(right) >= 0.9


@pytest.mark.slow
@pytest.mark.optimized
def test_it_works_step_by_step_and_stops(model, tokenizer):
    problem = exam(1)[0]
    (reply,) = ling3.generate(model, [tokenizer.encode(ask(problem, worked_examples(1)[0]))], max_tokens=64)
    assert reply[-1] in model.config.eos_token_id
    assert re.fullmatch(r" (\d+ [-+×] \d+ = \d+\. )+The answer is \d+\.", tokenizer.decode(reply))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.exhaustive
def test_the_whole_exam(model, tokenizer):
    shares = examine(model, tokenizer, 500)
    assert shares["alone"] >= 0.95
    assert shares["after_four_examples"] >= 0.90
    assert shares["chat"] >= 0.95
