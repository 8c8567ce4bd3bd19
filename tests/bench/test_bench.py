import dataclasses
import io
import json
import math
import shutil

import jax
import numpy as np
import pytest
import random_checkpoint
from rich.console import Console
from tiny import TINY

from ling3 import cli
from ling3.bench import measure as bench
from ling3.bench.measure import SampleRequest, arrivals, measure, random_requests, read_requests
from ling3.bench.report import BenchReport, Distribution, ServedRequest, in_flight, machine
from ling3.checkpoint import load
from ling3.serve import Engine
from ling3.text.tokenizer import load_tokenizer
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

SETTINGS = {
    "max_running_requests": 2,
    "page_size": 16,
    "num_pages": 8,
    "chunked_prefill_size": 16,
    "token_paddings": (16,),
    "max_model_len": 64,
    "decode_rows": 2,
    "decode_steps": 4,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of random weights with a tokenizer."""
    path = tmp_path_factory.mktemp("bench") / "model"
    config = dataclasses.replace(TINY, vocab_size=400, eos_token_id=(1,))
    random_checkpoint.write(path, config, random_checkpoint.draw(config, seed=0))
    write_tokenizer(train_tokenizer(["hello 你好"] * 3, 400), path, 512)
    return path


@pytest.fixture(scope="module")
def served(directory):
    return load(directory)


@pytest.fixture(scope="module")
def engine(directory, served):
    return Engine(served, load_tokenizer(directory), **SETTINGS)


# Ten tokens in three deltas, five in one, and one that failed.
SCRIPT = (
    ServedRequest(0.0, 100, ((0.5, 1), (0.9, 4), (1.4, 5)), 1.4, "length"),
    ServedRequest(1.0, 50, ((4.0, 5),), 4.5, "stop", 30),
    ServedRequest(2.0, 7, ((3.0, 3),), 5.0, "error"),
)


def report(served=SCRIPT, **changes):
    facts = {
        "served": served,
        "duration": 5.0,
        "request_rate": 2.0,
        "about": {"model": "some model", "parameters": 1234567, "dtype": "float32", "command": "ling3 bench it"},
        "engine": {"page_size": 16},
        "turns": {"steps": 3},
        "machine": machine(),
    }
    return BenchReport(**facts | changes)


def test_the_times_of_one_request():
    request = SCRIPT[0]
    assert (request.ttft, request.latency, request.output_tokens) == (0.5, 1.4, 10)
    assert request.tpot == pytest.approx(0.9 / 9)
    assert request.gaps == pytest.approx([0.4, 0.5])
    assert request.itl == pytest.approx([0.1] * 4 + [0.1] * 5)


def test_times_count_from_when_a_request_was_due():
    assert (SCRIPT[1].ttft, SCRIPT[1].latency) == (3.0, 3.5)


def test_a_request_of_one_token_has_no_time_between_tokens():
    one = ServedRequest(0.0, 3, ((0.25, 1),), 0.25, "length")
    assert (one.ttft, one.tpot, one.gaps, one.itl) == (0.25, None, [], [])
    none = ServedRequest(0.0, 3, (), 0.25, "error")
    assert (none.ttft, none.tpot, none.output_tokens, none.completed) == (None, None, 0, False)


def test_percentiles():
    spread = Distribution.of(list(range(101)))
    assert spread == Distribution(50.0, 50.0, 90.0, 99.0)
    assert dataclasses.astuple(Distribution.of([1.0, 2.0])) == pytest.approx((1.5, 1.5, 1.9, 1.99))
    assert Distribution.of([]) is None


def test_what_failed_counts_as_failed_and_for_nothing_else():
    found = report()
    assert (found.completed, found.failed, found.prompt_tokens, found.output_tokens) == (2, 1, 150, 15)
    assert (found.cached_tokens, found.cached_share) == (30, 0.2)
    assert found.output_throughput == 3.0
    assert found.total_token_throughput == 33.0
    assert found.request_throughput == 0.4
    assert found.concurrency == pytest.approx((1.4 + 3.5) / 5)
    assert found.latencies["ttft"].mean == pytest.approx(1.75)
    assert found.latencies["tpot"].p99 == pytest.approx((0.1 + 0.0) / 2, abs=0.05)


def test_load_over_time():
    times, requests, tokens = in_flight(SCRIPT[:2])
    assert times.tolist() == [0.0, 0.5, 0.9, 1.0, 1.4, 4.0, 4.5]
    assert requests.tolist() == [1, 1, 1, 2, 1, 1, 0]
    assert tokens.tolist() == [0, 101, 105, 105, 0, 55, 0]


def test_json():
    found = json.loads(json.dumps(report().to_dict(), allow_nan=False))
    assert found["command"] == "ling3 bench it" and "command" not in found["about"]
    assert found["machine"].keys() >= {"cpu", "cores", "backend", "device", "python", "jax", "ling3", "load_average"}
    assert found["machine"]["backend"] == "cpu" and found["machine"]["jax"] == jax.__version__
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "delta_gap_ms", "e2el_ms"):
        assert found[name].keys() == {"mean", "p50", "p90", "p99"}
    assert found["ttft_ms"] == {"mean": 1750.0, "p50": 1750.0, "p90": 2750.0, "p99": 2975.0}
    assert found["requests"][0] == {
        "due_s": 0.0,
        "prompt_tokens": 100,
        "cached_tokens": 0,
        "output_tokens": 10,
        "finish_reason": "length",
        "ttft_ms": 500.0,
        "tpot_ms": 100.0,
        "e2el_ms": 1400.0,
    }
    assert (found["cached_tokens"], found["cached_share"], found["requests"][1]["cached_tokens"]) == (30, 0.2, 30)
    assert report(request_rate=math.inf).to_dict()["request_rate"] is None


def test_json_without_a_finished_request():
    found = json.loads(json.dumps(report(SCRIPT[2:]).to_dict(), allow_nan=False))
    assert found["ttft_ms"] is None and found["output_throughput"] == 0.0 and found["failed"] == 1
    assert found["cached_share"] == 0.0


def shown(found):
    text = io.StringIO()
    Console(file=text, width=100).print(found)
    return text.getvalue()


def test_table():
    text = shown(report())
    assert "some model, 1,234,567 parameters, float32" in text
    assert "2 finished, 1 failed; 2 requests/s, Poisson" in text
    assert "prefix cache  30 of the prompts' tokens (20.0 %) were known" in text
    assert "prefix cache  off" in shown(report(engine={"prefix_cache": False}))
    row = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert row.split()[-4:] == ["1,750.00", "1,750.00", "2,750.00", "2,975.00"]
    assert next(line for line in shown(report(SCRIPT[2:])).splitlines() if line.startswith("ITL")).split()[-1] == "-"
    assert "all at once" in shown(report(request_rate=math.inf))


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_plot(tmp_path, suffix, magic):
    path = tmp_path / f"plot{suffix}"
    report().plot(path)
    assert path.read_bytes().startswith(magic) and path.stat().st_size > 5000


def test_plot_of_nothing(tmp_path):
    report(SCRIPT[2:]).plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_what_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match=r"ends in '.bmp', expected one of .png"):
        report().plot(tmp_path / "plot.bmp")
    with pytest.raises(ValueError, match=r"there is no directory .*nowhere"):
        report().plot(tmp_path / "nowhere" / "plot.png")


def test_arrivals():
    due = arrivals(4000, 20.0, seed=1)
    assert due[0] == 0.0 and (np.diff(due) >= 0).all()
    # 4000 gaps of mean and deviation 1/20: their sum is within five standard deviations of 200 s.
    assert abs(due[-1] - 200) < 5 * 200 / math.sqrt(4000)
    assert due.tolist() == arrivals(4000, 20.0, seed=1).tolist() != arrivals(4000, 20.0, seed=2).tolist()
    assert arrivals(3, math.inf).tolist() == [0.0, 0.0, 0.0]
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"request_rate is .* above 0"):
            arrivals(3, rate)


def test_random_requests():
    requests = random_requests(200, 50, (3, 5), (7, 7), seed=4)
    assert {len(request.prompt) for request in requests} == {3, 4, 5}
    assert {request.max_tokens for request in requests} == {7}
    assert {token for request in requests for token in request.prompt} == set(range(50))
    assert requests == random_requests(200, 50, (3, 5), (7, 7), seed=4) != random_requests(200, 50, (3, 5), (7, 7))
    shared = random_requests(200, 50, (3, 5), (7, 7), seed=4, shared_prefix=6)
    assert [request.prompt[6:] for request in shared] == [request.prompt for request in requests]
    assert len({tuple(request.prompt[:6]) for request in shared}) == 1
    with pytest.raises(ValueError, match="shared_prefix is -1 tokens, expected at least 0"):
        random_requests(2, 50, (3, 5), (7, 7), shared_prefix=-1)
    with pytest.raises(ValueError, match="input_len is from 5 to 3 tokens"):
        random_requests(2, 50, (5, 3), (7, 7))
    with pytest.raises(ValueError, match="output_len is from 0 to 7 tokens"):
        random_requests(2, 50, (3, 3), (0, 7))
    with pytest.raises(ValueError, match="number of requests is 0"):
        random_requests(0, 50, (3, 3), (7, 7))


def test_requests_from_a_file(tmp_path):
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("one\n\n{two}\n", encoding="utf-8")
    assert [request.prompt for request in read_requests(text, (4, 4), count=3)] == ["one", "{two}", "one"]
    lines.write_text('{"prompt": "one", "id": 1}\n{"prompt": [5, 6]}\n', encoding="utf-8")
    assert read_requests(lines, (4, 4)) == [SampleRequest("one", 4), SampleRequest([5, 6], 4)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}', r"line 2: found .* expected an object with a \"prompt\""),
        (b'["a"]', "line 1: found"),
        (b'{"prompt": ""}', "line 1: found"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2: no valid JSON"),
        (b"\n", "no prompt in it"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_file_without_prompts(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_requests(path, (4, 4))


@pytest.mark.thorough
def test_offline(engine, monkeypatch):
    """Everything is answered in full, nothing is compiled while the clock runs, and nothing is left behind."""
    compiled = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    def serve(*arguments, original=bench._serve):
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            return original(*arguments)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    monkeypatch.setattr(bench, "_serve", serve)
    requests = random_requests(7, 400, (3, 20), (2, 12), seed=3)
    found = measure(engine, requests, about={"model": "tiny"})
    assert compiled == []
    assert [request.output_tokens for request in found.served] == [request.max_tokens for request in requests]
    assert [request.prompt_tokens for request in found.served] == [len(request.prompt) for request in requests]
    assert found.completed == 7 and found.failed == 0
    assert found.duration == max(request.end for request in found.served)
    assert all(0 < request.ttft <= request.latency <= found.duration for request in found.served)
    assert found.turns["preemptions"] == 0 and found.turns["decode_calls"] > 0 and found.turns["prefill_calls"] >= 7
    assert found.engine["decode_steps"] == 4 and found.engine["num_pages"] == 8
    assert not engine.has_work and engine.stats().free_pages == 8


@pytest.mark.thorough
def test_prompts_find_what_earlier_ones_left(engine):
    """And nothing of what was served before the clock ran: each measurement begins cold."""
    requests = random_requests(4, 400, (3, 5), (2, 2), shared_prefix=33)
    for _ in range(2):
        found = measure(engine, requests)
        cached = [request.cached_tokens for request in found.served]
        # 32 of the 33 tokens are whole steps; the first two prompts go in side by side or one after the other.
        assert cached[0] == 0 and cached[2:] == [32, 32] and found.cached_tokens == sum(cached)
    again = measure(engine, [*requests[:1], *requests[:1]])
    assert again.served[1].cached_tokens == 32
    assert engine.stats().free_pages == 8


def test_online(engine, served):
    """Requests come when they are due, even if the queue is too short for all of them."""
    short = Engine(served, engine.tokenizer, engine.settings, max_queue=1)
    found = measure(short, random_requests(6, 400, (3, 8), (4, 4)), request_rate=200.0, seed=5)
    assert found.completed == 6
    assert [request.due for request in found.served] == arrivals(6, 200.0, seed=5).tolist()
    assert all(request.deltas[0][0] > request.due for request in found.served)
    assert found.to_dict()["request_rate"] == 200.0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (SampleRequest([], 4), "prompt 1 is empty"),
        (SampleRequest([400], 4), r"prompt 1, .* expected an id in \[0, 400\)"),
        (SampleRequest([3] * 61, 4), "prompt 1 has 61 tokens and max_tokens is 4"),
    ],
)
def test_what_the_engine_cannot_answer_is_said_first(engine, request_, message):
    before = engine.stats().steps
    with pytest.raises(ValueError, match=message):
        measure(engine, [SampleRequest([3], 4), request_])
    assert engine.stats().steps == before and not engine.has_work


def test_an_interrupted_measurement_leaves_nothing_behind(engine, monkeypatch):
    def stream_all(*arguments, original=engine.stream_all, **options):
        for count, delta in enumerate(original(*arguments, **options)):
            if count == 3:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(engine, "stream_all", stream_all)
    with pytest.raises(KeyboardInterrupt):
        measure(engine, random_requests(5, 400, (3, 8), (20, 20)))
    engine.step()
    assert not engine.has_work and engine.stats().free_slots == 2


OPTIONS = (
    *("--max-running-requests", 2, "--page-size", 16, "--num-pages", 8, "--chunked-prefill-size", 16),
    *("--token-paddings", 16, "--max-model-len", 64, "--decode-rows", 2, "--decode-steps", 4),
)


def run(capsys, *argv):
    code = cli.main(["bench", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(directory, tmp_path, capsys):
    prompts, numbers, picture = tmp_path / "prompts.txt", tmp_path / "numbers.json", tmp_path / "picture.png"
    prompts.write_text("hello\n你好 hello\n", encoding="utf-8")
    arguments = (directory, "--prompts", prompts, "--output-len", 3, "--num-prompts", 4, *OPTIONS)
    code, out, err = run(capsys, *arguments, "--json", numbers, "--plot", picture, "--request-rate", 500)
    assert (code, err) == (0, "")
    assert "4 finished, 0 failed; 500 requests/s, Poisson" in out and "TTFT" in out
    assert json.loads(numbers.read_text())["output_tokens"] == 12
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_prints_json(directory, capsys):
    code, out, err = run(
        capsys, directory, "--num-prompts", 3, "--input-len", "2:5", "--output-len", 3, *OPTIONS, "--json", "-"
    )
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["completed"] == 3 and found["request_rate"] is None
    assert found["about"]["model"] == str(directory) and found["about"]["dtype"] == "float32"
    assert all(2 <= request["prompt_tokens"] <= 5 for request in found["requests"])
    arguments = (directory, "--num-prompts", 3, "--input-len", 5, "--output-len", 3, "--shared-prefix", 16, *OPTIONS)
    found = json.loads(run(capsys, *arguments, "--json", "-")[1])
    assert (found["prompt_tokens"], found["requests"][2]["cached_tokens"]) == (63, 16)
    found = json.loads(run(capsys, *arguments, "--no-prefix-cache", "--json", "-")[1])
    assert (found["cached_tokens"], found["engine"]["prefix_cache"]) == (0, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input-len", "many"), "--input-len is 'many', expected a number of tokens, or a range such as 16:256"),
        (("--output-len", "4:2"), "output_len is from 4 to 2 tokens"),
        (("--num-prompts", 0), "the number of requests is 0"),
        (("--request-rate", 0), "request_rate is 0.0"),
        (("--json", "nowhere/numbers.json"), "there is no directory"),
        (("--plot", "picture.bmp"), "ends in '.bmp'"),
        (("--prompts", "no-such-file.txt"), "no-such-file.txt"),
        (("--decode-steps", 0), "decode_steps is 0"),
        (("--input-len", 100), "--input-len and --output-len are up to 108 tokens together, but a request has room"),
        (("--input-len", "1:1000000000"), "up to 1,000,000,008 tokens together"),
        (("--prompts", "p.txt", "--output-len", 64), "--output-len and a prompt are up to 65 tokens together"),
        (("--seed", -1), "--seed is -1, expected a whole number >= 0"),
        (("--shared-prefix", 49), "--shared-prefix, --input-len and --output-len are up to 65 tokens together"),
        (("--shared-prefix", -1), "--shared-prefix is -1, expected a whole number >= 0"),
        (("--shared-prefix", 8, "--prompts", "p.txt"), "--shared-prefix is for random prompts"),
        (("--num-prompts", 10**9), "16,000,000,000 tokens in all, expected at most"),
    ],
)
def test_command_with_senseless_options(directory, capsys, arguments, message):
    code, out, err = run(capsys, directory, *OPTIONS, "--input-len", 8, "--output-len", 8, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ling3: error: ") and message in err and "Traceback" not in err


def test_texts_need_a_tokenizer(directory, tmp_path, capsys):
    shutil.copy(directory / "config.json", tmp_path)
    code, _, err = run(capsys, tmp_path / "config.json", "--prompts", "prompts.txt")
    assert code == 2 and "tokenizer.json is missing" in err


def test_so_many_streams_at_a_time(engine, directory, capsys):
    requests = random_requests(7, 400, (3, 8), (4, 9))
    found = measure(engine, requests, concurrency=2)
    assert [request.output_tokens for request in found.served] == [request.max_tokens for request in requests]
    assert found.load == "2 at a time" and 1 < found.concurrency <= 2
    assert all(request.due > 0 for request in found.served[2:]) and engine.stats().free_slots == 2
    sizes = ("--num-prompts", 3, "--input-len", 5, "--output-len", 3, "--concurrency", 1, 2)
    code, out, err = run(capsys, directory, *sizes, *OPTIONS)
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines() if line.lstrip()[:1].isdigit()] == [
        ["1", "3", "0"],
        ["2", "3", "0"],
    ]
    with pytest.raises(ValueError, match="the concurrency is 0"):
        measure(engine, requests, concurrency=0)
