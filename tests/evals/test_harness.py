"""The adapter for lm-evaluation-harness: against `model(tokens)`, the engine, and in the harness's own tasks."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# ruff: noqa: E402
# What needs the harness is imported once it is known to be there.

os.environ["HF_DATASETS_OFFLINE"] = "1"
lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra evals)")
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tiny import widened

from ling3.engine.sampling_params import SamplingParams
from ling3.evals.harness import Ling3LM
from ling3.train.nano.problems import ask, exam

LENGTH = 256


@pytest.fixture(scope="module")
def lm():
    return Ling3LM("nano", dtype="float32", max_length=LENGTH, max_gen_toks=100, max_running_requests=4)


def instances(kind, *arguments):
    return [Instance(kind, {}, each, i, task_name="test", doc_id=i) for i, each in enumerate(arguments)]


def scored(model, ids):
    """ln p of each token but the first, and whether it is the likeliest, by one forward pass; the padding at the end,
    which keeps to one shape, is after all that counts."""
    padded = [*ids[:-1], *[0] * (LENGTH + 1 - len(ids))]
    logits = model(jnp.asarray([padded], jnp.int32))[0, : len(ids) - 1]
    scores = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(len(ids) - 1), ids[1:]]
    return scores.astype(np.float64), np.asarray(jnp.argmax(logits, axis=-1)) == ids[1:]


@pytest.fixture(scope="module")
def rounding(lm):
    """How far a token's score in float32 is, at most, from the equations' own: of a text that nano finds unlikely."""
    ids = [lm.eot_token_id, *list(range(3, 90)) * 2]
    with jax.enable_x64(True):
        exact, _ = scored(widened(lm.model), ids)
    return np.abs(scored(lm.model, ids)[0] - exact).max()


def test_loglikelihoods_are_those_of_the_model(lm, rounding):
    """Within 1e-5, or within the rounding of two float32 sums where that is more: a score of -63 has an ulp of 4e-6."""
    problems = exam(6)
    pairs = [(ask(p), f" {p.solution}") for p in problems]
    pairs += [("", "Question: 1"), ("Answer: ", "3 + 4"), (ask(problems[0]), " 5 - 2 = 9. The answer is 9.")]
    found = lm.loglikelihood(instances("loglikelihood", *pairs))
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        before = lm.tok_encode(context.rstrip()) or [lm.eot_token_id]
        ids = [*before, *lm.tok_encode(context + continuation)[len(before) if context else 0 :]]
        scores, best = scored(lm.model, ids)
        own = scores[len(before) - 1 :]
        assert abs(score - own.sum()) < max(1e-5, 2 * rounding * len(own)), "what is promised"
        assert greedy == best[len(before) - 1 :].all()
    assert [greedy for _, greedy in found[:6]].count(True) >= 5 and not found[-1][1]


def test_a_context_that_is_too_long_loses_its_beginning(lm, rounding):
    context, continuation = list(range(3, 90)) * 8, [5, 6, 7]
    ((score, _),) = lm._loglikelihood_tokens([(None, context, continuation)])
    scores, _ = scored(lm.model, [*context, *continuation][-LENGTH - 1 :])
    assert abs(score - scores[-3:].sum()) < 3 * 2 * rounding
    with pytest.raises(ValueError, match="a continuation of 257 tokens, where max_length is 256"):
        lm._loglikelihood_tokens([(None, [3], [4] * (LENGTH + 1))])
    assert lm._loglikelihood_tokens([(None, [3], [])]) == [(0.0, True)]


def test_a_rolling_likelihood_is_that_of_the_whole_text(lm, rounding):
    texts = [ask(exam(1)[0]), "x", "", " ".join(ask(p) + p.solution for p in exam(7))]
    found = lm.loglikelihood_rolling(instances("loglikelihood_rolling", *[(text,) for text in texts]))
    for text, score in zip(texts[:2], found, strict=False):
        scores, _ = scored(lm.model, [lm.eot_token_id, *lm.tok_encode(text)])
        assert abs(score - scores.sum()) < len(scores) * 2 * rounding
    assert found[2] == 0.0
    # By the harness's own windows, each scored by one forward pass.
    windows = [
        make_disjoint_window(window)
        for window in get_rolling_token_windows(lm.tok_encode(texts[3]), lm.eot_token_id, LENGTH, 1)
    ]
    assert len(windows) >= 2
    expected = sum(score for score, _ in lm._loglikelihood_tokens([(None, *window) for window in windows]))
    assert abs(found[3] - expected) < 1e-3, "some 300 terms, each within 1e-6 or so"


def test_texts_are_the_engine_s(lm):
    problems = exam(3)
    options = {"until": ["The answer", "\n\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 40}
    found = lm.generate_until(instances("generate_until", *[(ask(p), options) for p in problems]))
    assert lm._engine is not None
    alone = lm._engine.generate([ask(p) for p in problems], SamplingParams(max_tokens=40))
    assert found == [answer.text.partition("The answer")[0] for answer in alone]
    assert all("=" in text for text in found)
    (short,) = lm.generate_until(instances("generate_until", ("Question: ", {"until": "", "max_new_tokens": 2})))
    assert short == lm._engine.generate("Question: ", SamplingParams(max_tokens=2))[0].text


def test_a_prompt_that_is_too_long_loses_its_beginning(lm, caplog):
    long, options = "Question: " + "1 + " * 200, {"until": [], "max_gen_toks": 8}
    (text,) = lm.generate_until(instances("generate_until", (long, options)))
    assert "1 of 1 prompts are too long" in caplog.text
    ids = lm.tok_encode(long)[8 - LENGTH :]
    assert text == lm._engine.generate([ids], SamplingParams(max_tokens=8))[0].text
    with pytest.raises(ValueError, match=r"max_tokens is 256: .* room for 256"):
        lm.generate_until(instances("generate_until", ("a", {"until": [], "max_gen_toks": 256})))


def test_options_that_the_engine_has_not(lm):
    with pytest.raises(ValueError, match=r"generation_kwargs: .*'num_beams'"):
        lm.generate_until(instances("generate_until", ("a", {"until": [], "num_beams": 4})))


def test_chats(lm):
    turn = [{"role": "user", "content": "3 + 4?"}]
    assert lm.apply_chat_template(turn) == lm.tokenizer.apply_chat_template(turn, tokenize=False)
    assert lm.apply_chat_template(turn, add_generation_prompt=False).endswith("3 + 4?<|role_end|>")
    assert lm.chat_template(True) == lm.tokenizer.chat_template.source and lm.chat_template() is None
    assert "nano" in lm.tokenizer_name and "/" not in lm.tokenizer_name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "half"}, "dtype is 'half', expected one of auto, float32, bfloat16"),
        ({"thinking": "no"}, "thinking is 'no', expected one of auto, on, off"),
        ({"max_length": 4096}, "max_length is 4096"),
    ],
)
def test_senseless_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Ling3LM("nano", **options)


def test_two_of_the_harness_s_own_tasks(lm, tmp_path):
    """GSM8K's and ARC's task files as the harness ships them, on nano's held-out problems: only the data is ours."""
    problems = exam(12)
    words, choices = tmp_path / "words.jsonl", tmp_path / "choices.jsonl"
    with words.open("w") as gsm8k, choices.open("w") as arc:
        for i, problem in enumerate(problems):
            answer = f"{' '.join(map(str, problem.steps))}\n#### {problem.answer}"
            gsm8k.write(json.dumps({"question": problem.question, "answer": answer}) + "\n")
            others = [p.solution for p in problems if p.solution != problem.solution][:3]
            texts = [*others[: i % 4], problem.solution, *others[i % 4 :]]
            labels = list("ABCD")
            row = {
                "question": problem.question,
                "choices": {"text": texts, "label": labels},
                "answerKey": labels[i % 4],
            }
            arc.write(json.dumps(row) + "\n")
    shipped = Path(lm_eval.__file__).parent / "tasks"
    for name, source, data in (("gsm8k", "gsm8k/gsm8k.yaml", words), ("arc_easy", "arc/arc_easy.yaml", choices)):
        # JSON is YAML.
        local = {
            "include": str(shipped / source),
            "task": f"{name}_local",
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")},
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "num_fewshot": 0,
        }
        (tmp_path / f"{name}_local.yaml").write_text(json.dumps(local))
    results = simple_evaluate(
        model=lm,
        tasks=["gsm8k_local", "arc_easy_local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    found = results["results"]
    assert found["gsm8k_local"]["exact_match,flexible-extract"] >= 10 / 12, "nano answers nine in ten"
    assert found["gsm8k_local"]["exact_match,strict-match"] == 0.0, "it writes no ####"
    assert found["arc_easy_local"]["acc,none"] >= 10 / 12
    assert len(results["samples"]["gsm8k_local"]) == 24  # twelve questions, by two filters
