"""Clients that know nothing of ling3: lm-evaluation-harness, llm-comply, and curl as the documentation has it."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import http_server
import pytest
from scripted_service import recited
from tool_templates import TEMPLATES, tokenizer

os.environ["HF_DATASETS_OFFLINE"] = "1"
import llm_comply
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Suite
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from ling3.evals.harness import Ling3LM
from ling3.serve import Engine
from ling3.server.app import build
from ling3.server.service import Service
from ling3.train.nano.problems import ask, exam

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ("docs/reference/http.md",)
LENGTH = 256
CALL = "<tool_call>get_weather<arg_key>location</arg_key><arg_value>San Francisco</arg_value></tool_call>"


@pytest.fixture(scope="module")
def lm():
    return Ling3LM("nano", dtype="float32", max_length=LENGTH, max_gen_toks=64, max_running_requests=4)


@pytest.fixture(scope="module")
def url(lm):
    engine = Engine(lm.model, lm.tokenizer, max_running_requests=4, max_model_len=LENGTH)
    with http_server.listening(build(Service(engine, lm.tokenizer, "nano"))) as address:
        yield address


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of texts and one of choices, on nano's held-out problems."""
    folder, problems = tmp_path_factory.mktemp("tasks"), exam(6)
    rows = [
        {
            "question": ask(problem),
            "answer": str(problem.answer),
            "choices": [problem.solution, problems[i - 1].solution, f"{problem.solution} No."],
        }
        for i, problem in enumerate(problems)
    ]
    (folder / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0, "doc_to_text": "{{question}}"}
    data["dataset_kwargs"] = {
        "data_files": {"test": str(folder / "problems.jsonl")},
        "cache_dir": str(folder / "cache"),
    }
    number = {
        "name": "number",
        "filter": [{"function": "regex", "regex_pattern": r"answer is (-?\d+)"}, {"function": "take_first"}],
    }
    texts = {
        "task": "texts",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 64, "do_sample": False},
        "filter_list": [number],
        "metric_list": [{"metric": "exact_match"}],
    }
    choices = {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    for task in (texts, choices):
        (folder / f"{task['task']}.yaml").write_text(json.dumps({**data, **task}))  # JSON is YAML
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(model, tasks, names, **how):
    found = simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, **how)
    assert found is not None
    answers = {name: [each["resps"] for each in found["samples"][name]] for name in names}
    return {name: found["results"][name] for name in names}, answers


def scores(results):
    return {
        name: {key: x for key, x in each.items() if "," in key and "stderr" not in key}
        for name, each in results.items()
    }


def test_local_completions_scores_as_the_adapter_does(lm, url, tasks):
    arguments = {"model": "nano", "base_url": f"{url}/v1/completions", "max_length": LENGTH, "num_concurrent": 4}
    for size in (1, 3):
        remote = evaluated(
            "local-completions", tasks, ["texts", "choices"], model_args={**arguments, "batch_size": size}
        )
        here = evaluated(lm, tasks, ["texts", "choices"])
        assert scores(remote[0]) == scores(here[0]) and scores(here[0])["texts"]["exact_match,number"] >= 5 / 6
        assert remote[1]["texts"] == here[1]["texts"]
        for far, near in zip(remote[1]["choices"], here[1]["choices"], strict=True):
            assert [float(x[0][0]) for x in far] == pytest.approx([float(x[0][0]) for x in near], abs=1e-4)


def test_local_chat_completions_scores_as_the_adapter_does(lm, url, tasks):
    arguments = {"model": "nano", "base_url": f"{url}/v1/chat/completions", "max_length": LENGTH, "num_concurrent": 4}
    how = {"apply_chat_template": True}
    remote = evaluated("local-chat-completions", tasks, ["texts"], model_args=arguments, **how)
    here = evaluated(lm, tasks, ["texts"], **how)
    assert remote[1] == here[1] and scores(remote[0]) == scores(here[0])


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")  # the suite's own
@pytest.mark.parametrize(
    ("suite", "tool", "image", "thinking", "passed"),
    [
        ("openai-chat", "chat-tool-calling", "chat-image-input", None, 7),
        ("open-responses", "tool-calling", "image-input", ("reasoning-summary", "gpt-5"), 12),
        ("anthropic", "anth-tool-calling", "anth-image-input", ("anth-thinking-display", "claude-4"), 8),
    ],
)
def test_llm_comply_finds_nothing_wrong_but_that_there_are_no_images(
    url, monkeypatch, suite, tool, image, thinking, passed
):
    monkeypatch.setattr("ling3.engine.intake.draw_seed", lambda: 0)  # nano says the same every time
    found = complied(url, suite)
    # Nano was never shown a tool, and its arguments find no end: what is read of a call is tested with one.
    del found[tool]
    with http_server.listening(build(recited(tokenizer(TEMPLATES["tags"]), CALL))) as caller:
        found |= complied(caller, suite, tool)
    if thinking is not None:  # which the suite tests by the names of models that think
        name, model = thinking
        service = recited(tokenizer(TEMPLATES["tags"]), "hm</think>7")
        service.name = model
        with http_server.listening(build(service)) as thinker:
            found |= complied(thinker, suite, name, model=model)
    assert found.pop(image)[0] == "HTTP 400 (expected [200])"
    assert len(found) == passed and not any(found.values())


def complied(url, suite, *only, model="nano"):
    """The errors of each test of the suite that is not skipped."""
    config = ComplianceConfig(base_url=f"{url}/v1", api_key="none", model=model, filter_ids=list(only) or None)
    name = {"open-responses": "openresponses"}.get(suite, suite.replace("-", "_"))
    spec = SpecLoader(str(pathlib.Path(llm_comply.__file__).parent / f"specs/{name}.json"))
    results = Suite(config, get_tests(suite), spec).run_all().results
    return {each.id: each.errors for each in results if each.status.value != "skipped"}


def commands(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for block in blocks if block.startswith("curl ")]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("page", "command"), [(page, each) for page in PAGES for each in commands(page)])
def test_the_documentations_commands_run_as_written(url, page, command):
    """At the port of this server; nano is asked what it knows."""
    command = command.replace("http://127.0.0.1:8000", url)
    run = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    assert run.returncode == 0 and "3 + 4 = 7. The answer is 7." in run.stdout, run.stdout + run.stderr
    assert "-H 'Content-Type: application/json'" in command


def test_the_pages_client_runs_as_written(url, capsys):
    page = (ROOT / "docs/how_to/chat_front_end.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code.replace("http://127.0.0.1:8000", url), {})
    assert capsys.readouterr().out.strip() == "3 + 4 = 7. The answer is 7."
