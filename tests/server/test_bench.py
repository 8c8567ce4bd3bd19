"""`ling3 bench --base-url`: a server measured by a client, with the engine's own workload and words."""

import asyncio
import io
import json

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

import ling3
from ling3 import cli
from ling3.bench import measure as local
from ling3.bench.levels import Levels
from ling3.bench.measure import SampleRequest, random_requests
from ling3.bench.remote import RemoteServer, Stream, events, measure_server
from ling3.bench.report import BenchReport


@pytest.fixture(scope="module")
def url(nano_app, serving):
    engine = ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512, max_queue=6)
    with serving(nano_app(engine, ["secret"])) as address:
        yield f"{address}/v1"


def sse(*chunks):
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"


def chunk(text, reason=None):
    return {"choices": [{"text": text, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}


def test_events_are_read_however_they_are_cut():
    said = b": a comment\r\n" + sse(chunk("äh"), chunk("b", "stop")).replace(b"\n", b"\r\n")
    for cut in range(1, len(said)):
        blocks = list(enumerate(said[i : i + cut] for i in range(0, len(said), cut)))
        assert [event for _, event in events(blocks)] == [chunk("äh"), chunk("b", "stop")]


def test_tokens_are_those_of_usage_and_not_chunks():
    blocks = [(1.0, sse(chunk("a"))), (2.0, sse(chunk("bcde"))), (3.0, sse(chunk("fgh", "length"), USAGE))]
    served = Stream(0.5, blocks, 3.5).served()
    assert served.deltas == ((1.0, 1), (2.0, 4), (3.0, 3)) and served.output_tokens == 8
    assert (served.ttft, served.tpot, served.finish_reason, served.prompt_tokens) == (0.5, 2 / 7, "length", 3)
    many = [(float(i), sse(chunk("x"))) for i in range(30)]
    assert sum(n for _, n in Stream(0.0, [*many, (30.0, sse(chunk("", "stop"), USAGE))]).served().deltas) == 8


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (sse(chunk("a"), USAGE), "the stream ended early"),
        (sse(chunk("a", "stop")), "the stream has no usage"),
        (sse(chunk("a"), {"error": {"message": "broken"}}), "broken"),
        (sse(chunk("a"), {"error": "broken"}), "broken"),
        (b"data: {\n\n", "the stream is not OpenAI's"),
        (b"data: [1]\n\n", "the stream is not OpenAI's"),
        (sse({"choices": [3]}), "the stream is not OpenAI's"),
        (b"", "the stream ended early"),
    ],
)
def test_a_stream_that_is_not_whole_has_failed(body, error):
    served = Stream(0.0, [(1.0, body)], 1.0).served()
    assert (served.completed, served.error) == (False, error)


def test_the_work_is_that_of_the_engines_own_measurement(nano, url):
    requests = random_requests(7, 600, (3, 20), (2, 12), seed=3)
    mine = local.measure(nano, requests)
    found = measure_server(RemoteServer(url, api_key="secret"), requests, concurrency=4)
    for name in ("prompt_tokens", "output_tokens", "finish_reason"):
        assert [getattr(each, name) for each in found.served] == [getattr(each, name) for each in mine.served]
    assert found.completed == 7 and found.errors == {} and found.about["model"] == "nano"
    assert all(0 <= each.due < each.deltas[0][0] <= each.end <= found.duration for each in found.served)
    assert all(each.ttft > 0 for each in found.served)
    assert found.concurrency <= 4


def test_what_is_refused_counts_as_failed(url):
    """A queue of six: of forty at once six are answered at least."""
    server = RemoteServer(url, "nano", "secret")
    found = measure_server(server, random_requests(40, 600, (3, 5), (300, 300)))
    assert found.errors == {"status 429: the queue is full: try again": found.failed}
    assert 6 <= found.completed < 40 and found.output_tokens == 300 * found.completed
    text = io.StringIO()
    Console(file=text, width=100).print(found)
    assert f"{found.failed} × status 429: the queue is full" in text.getvalue() and "all at once" in text.getvalue()


def test_conversations(url):
    requests = [SampleRequest("Sam has 3 pens.", 5)] * 2
    assert measure_server(RemoteServer(url, api_key="secret", chat=True), requests, request_rate=50).completed == 2
    with pytest.raises(ValueError, match="a conversation takes texts"):
        measure_server(RemoteServer(url, api_key="secret", chat=True), random_requests(2, 99, (3, 3), (2, 2)))


def test_other_servers_and_their_faults(serving):
    answers = iter([sse(chunk("a", "stop"), USAGE), b"data: {", sse(chunk("a", "stop"), USAGE)])

    async def completions(request):
        assert "ignore_eos" not in await request.json()
        return PlainTextResponse(next(answers))

    async def models(request):
        return JSONResponse({"data": []})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    with serving(Starlette(routes=routes)) as address:
        requests = [SampleRequest("a", 8)] * 2
        found = measure_server(RemoteServer(f"{address}/v1", "m"), requests, concurrency=1, ignore_eos=False)
        assert (found.completed, found.errors) == (1, {"the stream ended early": 1})
        with pytest.raises(ValueError, match="lists no model: name it"):
            measure_server(RemoteServer(f"{address}/v1"), requests)
        with pytest.raises(ValueError, match=r"status 404; expected the address of /v1"):
            measure_server(RemoteServer(address), requests)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (RemoteServer("http://127.0.0.1:9/v1"), "expected the address of /v1"),
        (RemoteServer("http://127.0.0.1:9/v1", "nano"), "127.0.0.1:9"),
        (RemoteServer("nowhere", "nano"), "nowhere: "),
        (RemoteServer("http://[", "nano"), "http"),
    ],
)
def test_no_server(server, message):
    with pytest.raises(ValueError, match=message):
        measure_server(server, [SampleRequest("a", 1)])


def run(capsys, *argv):
    code = cli.main(["bench", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(url, capsys, tmp_path, monkeypatch):
    sizes = ("--input-len", 4, "--output-len", 3, "--num-prompts", 5)
    monkeypatch.setattr("sys.argv", ["ling3", "bench", "--base-url", url, "--api-key", "secret"])
    plot, numbers = tmp_path / "levels.png", tmp_path / "levels.json"
    where = ("--base-url", url, "--api-key", "secret")
    code, out, err = run(capsys, "nano", *where, *sizes, "--concurrency", 1, 3, "--plot", plot, "--json", numbers)
    assert (code, err) == (0, "")
    rows = [line.split()[:3] for line in out.splitlines() if line.lstrip()[:1].isdigit()]
    assert rows == [["1", "5", "0"], ["3", "5", "0"]]
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = json.loads(numbers.read_text())["levels"]
    assert [level["about"]["concurrency"] for level in found] == [1, 3]
    assert [level["output_tokens"] for level in found] == [15, 15] and [level["cached_tokens"] for level in found] == [
        0,
        0,
    ]
    assert "secret" not in numbers.read_text() and "--api-key KEY" in found[0]["command"]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    code, out, err = run(capsys, "--base-url", url, *sizes, "--json", "-")
    assert (code, err) == (0, "") and json.loads(out)["completed"] == 5
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    code, out, err = run(capsys, "--base-url", url, *sizes)
    assert code == 2 and "status 401" in err and "other" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "MODEL is missing"),
        (("nano", "--concurrency", 0), "the concurrency is 0"),
        (("nano", "--chat"), "--chat is for --base-url"),
        (("--base-url", "http://127.0.0.1:9/v1", "--page-size", 16), "--page-size is for an engine here"),
        (("--base-url", "http://127.0.0.1:9/v1", "--tp", 2), "--tp is for an engine here"),
        (("--base-url", "http://127.0.0.1:9/v1", "--concurrency", 0), "the concurrency is 0"),
        (("--base-url", "u", "--concurrency", 2, "--request-rate", 3), "exclude each other"),
    ],
)
def test_command_with_senseless_options(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and message in err


def test_failures_are_shown_for_each_level():
    served = Stream(0.0, [], 1.0, "status 500").served()
    about = {"model": "m", "base_url": "u", "endpoint": "completions", "concurrency": 2, "client_cpu": 0.1}
    machine = {"cpu": "c", "cores": 2, "device": "cpu"}
    report = BenchReport([served], 1.0, float("inf"), about, {}, {}, machine)
    text = io.StringIO()
    Console(file=text, width=100).print(Levels([report]))
    assert "1 × status 500, 2 at a time" in text.getvalue()


def test_many_clients_wait_at_once(serving):
    """No pool of connections holds requests back."""
    waiting, most = 0, 0

    async def completions(request):
        nonlocal waiting, most
        waiting, body = waiting + 1, await request.json()
        most = max(most, waiting)
        await asyncio.sleep(0.3 if body["max_tokens"] > 2 else 0)
        waiting -= 1
        return PlainTextResponse(sse(chunk("a", "stop"), USAGE))

    with serving(Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])) as address:
        assert measure_server(RemoteServer(f"{address}/v1", "m"), [SampleRequest("a", 8)] * 120).completed == 120
    assert most == 120
