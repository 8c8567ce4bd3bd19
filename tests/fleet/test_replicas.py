"""A fleet beside one engine: the same answers, and the same file, whatever dies."""

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

# What needs Ray is imported once it is known to be there, and Ray by the fleet, which keeps it quiet.

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed (the extra fleet)", allow_module_level=True)

import fleet_models
import small_engine
from fleet_models import CONFIG, ENVIRONMENT, ONE_CORE, POISON, SETTINGS, Deadly, Stillborn
from tiny import open_model

import ling3
from ling3 import cli
from ling3.cli import descendants
from ling3.evals.answers import number
from ling3.evals.predictions import fingerprint
from ling3.evals.prompts import Question, write
from ling3.evals.run import evaluate, prepare
from ling3.fleet import FleetError, cluster, places, work

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),  # Ray is started after JAX was used here
]

PROMPTS = [[7, 8, 9], "2 + 3?", list(range(20, 65)), [11], [{"role": "user", "content": "4?"}], [12, 14]] * 3
PARAMS = [
    ling3.SamplingParams(max_tokens=10 + i, ignore_eos=True, logprobs=2, temperature=i % 3 / 2, seed=i, n=1 + i % 2)
    for i in range(len(PROMPTS))
]
KILLS = 10


@pytest.fixture(scope="module", autouse=True)
def ray():
    """Ray on this machine, with room for two fleets."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # Replicas import `fleet_models`.
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ray = cluster.library()
        cluster.join_cluster(ray, None, 4)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return fleet_models.write(tmp_path_factory.mktemp("fleet") / "model")


@pytest.fixture(scope="module")
def engine(directory):
    return ling3.Engine.from_pretrained(directory, **SETTINGS)


@pytest.fixture(scope="module")
def fleet(directory):
    with ling3.Fleet(directory, 2, **ONE_CORE) as fleet:
        yield fleet


def told(outputs):
    """All of the answers that does not depend on the clock."""
    return [
        (output.prompt, list(output.prompt_token_ids), [(*small_engine.answer(c), c.seed) for c in output.outputs])
        for output in outputs
    ]


def timeless(path):
    return sorted(json.dumps({**json.loads(line), "timings": None}) for line in path.read_text().splitlines())


def test_the_answers_are_those_of_one_engine(fleet, engine):
    answers, expected = fleet.generate(PROMPTS, PARAMS), engine.generate(PROMPTS, PARAMS)
    assert told(answers) == told(expected)
    assert [output.request_id for output in answers] == [output.request_id for output in expected]
    assert {type(output) for output in answers} == {ling3.RequestOutput}
    assert told(fleet.generate("2 + 3?", PARAMS[0])) == told(engine.generate("2 + 3?", PARAMS[0]))
    assert fleet.generate([]) == [] and fleet.settings == engine.settings
    assert fleet.fingerprint == fingerprint(open_model(CONFIG))
    stats = fleet.stats()
    assert stats.waiting == stats.running == 0 and stats.submitted == sum(stats.finished.values()) > 0
    assert len({process.pid for process in fleet.processes()}) == 2 and "2 replicas" in repr(fleet)


def test_completions_come_as_they_finish_and_leaving_them_ends_the_rest(fleet, engine):
    long = dataclasses.replace(PARAMS[0], max_tokens=200)
    deltas = fleet.stream_all([[7], [8], [9]], [long, dataclasses.replace(long, max_tokens=1, n=2), long])
    (first, one), (second, two) = next(deltas), next(deltas)
    assert first == second == 1 and (one.index, one.output, two.index) == (0, None, 1)
    assert [one.text, two.text] == [completion.text for completion in two.output.outputs]
    with pytest.raises(RuntimeError, match="at work for another caller"):
        fleet.generate([[7]])
    deltas.close()
    assert told(fleet.generate([[7]], PARAMS[0])) == told(engine.generate([[7]], PARAMS[0]))


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ([[7], [400]], None),
        ([[7], []], None),
        ([[7]], ling3.SamplingParams(max_tokens=1000)),
        ([[7]], [ling3.SamplingParams()] * 2),
        ([[7]], ling3.SamplingParams(stop_token_ids=[400])),
    ],
)
def test_bad_prompts_are_refused_as_an_engine_does_before_any_work(fleet, engine, prompts, params):
    before = fleet.stats().submitted
    with pytest.raises(ValueError) as expected:
        engine.generate(prompts, params)
    with pytest.raises(ValueError) as raised:
        fleet.generate(prompts, params)
    assert str(raised.value) == str(expected.value) and fleet.stats().submitted == before


def test_ten_deaths_lose_no_line_and_double_none(directory, engine, tmp_path):
    """Replicas are killed at random: any of them, at any time, also while it loads."""
    rng, killed = random.Random(0), set()
    questions = [Question(f"{'more ' * (i % 3)}{i}?", str(i % 4)) for i in range(120)]
    asked = prepare(engine.tokenizer, questions)
    params = ling3.SamplingParams(max_tokens=40, ignore_eos=True)
    due = sorted(rng.sample(range(90), KILLS))

    def kill():
        living = [process.pid for process in fleet.processes() if process.pid not in killed]
        if living:
            killed.add(victim := rng.choice(living))
            os.kill(victim, signal.SIGKILL)

    def answered(score, total):
        if len(killed) < KILLS and score.total >= due[len(killed)]:
            threading.Timer(rng.uniform(0, 0.1), kill).start()

    with ling3.Fleet(directory, 2, **ONE_CORE) as fleet:
        score = evaluate(fleet, asked, number, tmp_path / "fleet", params=params, on_answer=answered)
    assert len(killed) == KILLS
    assert score == evaluate(engine, asked, number, tmp_path / "engine", params=params)
    lines = (tmp_path / "fleet").read_text().splitlines()
    assert sorted(json.loads(line)["index"] for line in lines) == list(range(120))
    assert timeless(tmp_path / "fleet") == timeless(tmp_path / "engine")


def test_a_prompt_that_kills_its_replicas_is_named(directory, monkeypatch):
    monkeypatch.setattr(work, "IN_COMPANY", 1)
    monkeypatch.setattr(work, "ALONE", 1)
    prompts = [[7], [8], [POISON], [9]]
    with ling3.Fleet(Deadly(str(directory)), 2, **ONE_CORE) as fleet:
        with pytest.raises(FleetError, match="prompt 2 was alone with 1 replicas, and each of them died"):
            fleet.generate(prompts, PARAMS[0])
        assert len(fleet.generate([[7], [8]], PARAMS[0])) == 2, "the fleet is whole again"


def test_a_replica_that_dies_before_it_can_answer_is_not_replaced_for_ever(directory, monkeypatch):
    monkeypatch.setattr(places, "MOST_LOSSES", 2)
    with pytest.raises(FleetError, match=r"it died 2 times before it could answer: .*worker process has died"):
        ling3.Fleet(Stillborn(str(directory)), 1, **ONE_CORE)


def test_what_a_replica_cannot_load_ends_all(directory, tmp_path):
    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ling3.CheckpointError) as expected:
        ling3.load(tmp_path)
    with pytest.raises(ling3.CheckpointError) as raised:
        ling3.Fleet(tmp_path, 2, **ONE_CORE)
    assert str(raised.value) == str(expected.value)


def test_what_is_compiled_is_compiled_in_the_warmup(directory):
    with ling3.Fleet(directory, 1, **ONE_CORE) as fleet:
        fleet.warmup()
        before = fleet.stats().compile_seconds
        assert before > 0 and fleet.generate(PROMPTS[:6], PARAMS[:6]) and fleet.stats().compile_seconds == before
        deltas = fleet.stream_all([[7], [8]], PARAMS[0])
        next(deltas)
        with pytest.raises(RuntimeError, match="at work for another caller"):
            fleet.warmup()
    deltas.close()
    with pytest.raises(RuntimeError, match="the fleet is closed"):
        fleet.generate([[7]])


def test_a_replica_spans_devices(directory, engine):
    with ling3.Fleet(directory, 1, mesh=(1, 2), **ONE_CORE) as fleet:
        answers = fleet.generate(PROMPTS[:6], PARAMS[:6])
    expected = engine.generate(PROMPTS[:6], PARAMS[:6])
    assert [output.token_ids for output in answers] == [output.token_ids for output in expected]


def test_so_does_one_of_a_command(directory, capsys):
    options = ["generate", str(directory), "--max-tokens", "8", "--json", "-p", "1 + 1?", "-p", "2 + 3?"]
    assert cli.main(options) == 0
    expected = capsys.readouterr().out
    assert cli.main([*options, "--replicas", "2", "--tp", "2"]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.skipif(not descendants.PROCESSES.is_dir(), reason="processes are found in /proc")
def test_ctrl_c_ends_all_of_it(directory, tmp_path):
    """While answers come: whatever was started for the command is gone with it, and what was written stays."""
    write(tmp_path / "prompts.json", [Question(f"{i} + 1?", "1") for i in range(1000)])
    options = ["eval", "gsm8k", str(directory), "--prompts", str(tmp_path / "prompts.json"), "--replicas", "2"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the child's, were it ignored here
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ling3.cli", *options, "--max-tokens", "200", "--out", str(tmp_path / "out")],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    until = time.monotonic() + 300
    while not ((tmp_path / "out").exists() and (tmp_path / "out").read_bytes().count(b"\n") > 4):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.2)
    assert len(session(process.pid)) > 6, "Ray's own processes, and the replicas"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith("\ninterrupted\n") and "Traceback" not in err
    until = time.monotonic() + 20
    while session(process.pid) and time.monotonic() < until:
        time.sleep(0.2)
    assert not session(process.pid)
    lines = (tmp_path / "out").read_text().splitlines()[:-1]
    assert len({json.loads(line)["index"] for line in lines}) == len(lines) >= 4


def session(leader):
    """The names of the processes in a session that still run."""
    names = []
    for file in descendants.PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = file.read_text(errors="replace").rpartition(")")
            state, _, _, number = rest.split()[:4]
            if int(number) == leader and state not in "ZX":
                names.append(name)
    return names


def test_a_run_of_one_engine_is_taken_up_by_a_fleet(directory, tmp_path, capsys):
    """By the commands: results alone on stdout, and the file of one engine."""
    prompts, out, whole = (tmp_path / name for name in ("prompts.json", "out", "whole"))
    write(prompts, [Question(f"{i} + 1?", str(i % 4)) for i in range(12)])
    options = ["eval", "gsm8k", str(directory), "--prompts", str(prompts), "--max-tokens", "16", "--out"]
    assert cli.main([*options, str(whole)]) == 0
    expected = capsys.readouterr().out
    assert cli.main([*options, str(out), "--limit", "5"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "ling3.cli", *options, str(out), "--replicas", "2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, expected), done.stderr
    assert "float32, on 2 × cpu" in done.stderr and timeless(out) == timeless(whole)


def test_generate_prints_what_one_engine_says(directory, capsys, caplog, monkeypatch):
    """One of these replicas waits for room all the while, and that is said; here of both, at once."""
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    options = ["generate", str(directory), "--max-tokens", "8", "--temperature", "1", "--json", "--logprobs", "1"]
    options += itertools.chain.from_iterable(("-p", f"{i} + 1?") for i in range(5))
    assert cli.main(options) == 0
    expected = capsys.readouterr().out
    assert cli.main([*options, "--replicas", "2"]) == 0
    assert capsys.readouterr().out == expected and "replicas wait for room: each takes 2 CPU, and free" in caplog.text
