"""`ling3 serve` as a process: its log, its limits, clients that go away, and its end."""

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.parse

import http_server
import httpx
import pytest
from scripted_service import recited

import ling3
from ling3.server.app import build
from ling3.server.service import Service

KEYS = ["first-key", "second-key"]
JSON = {"Content-Type": "application/json"}
HEADERS = {"Authorization": "Bearer second-key"}
CHAT = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
ASKED = {"model": "nano", "messages": CHAT, "temperature": 0, "max_tokens": 40}
LONG = {**ASKED, "n": 4, "max_tokens": 1900, "ignore_eos": True, "stream": True}
PATH = "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n\n".join(KEYS) + "\n")
    options = ("--api-key-file", str(keys), "--allow-origin", "https://page.test", "--max-queue", "4")
    with http_server.process(*options) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=2048)


def running(client):
    """Completions that run or wait."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("ling3_num_requests"))


def eventually(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_error(answer, status):
    error = answer.json()["error"]
    return answer.status_code == status and set(error) == {"message", "type", "param", "code"} and error["message"]


def test_the_log_has_a_line_of_json_for_each_request(server, client):
    ids = ("mine-1", "mine-2")
    answer = client.post(PATH, json=ASKED, headers={"x-request-id": ids[0]}).json()
    refused = client.post(f"{PATH}?key=hidden", json={**ASKED, "model": "\n"}, headers={"x-request-id": ids[1]})
    good, bad = map(server.logged, ids)
    tokens = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    assert good.items() >= {"method": "POST", "path": PATH, "status": 200, **tokens}.items() and good["seconds"] > 0
    assert bad["status"] == 404 and refused.headers["x-request-id"] == ids[1]
    log = "\n".join(server.lines)
    assert not [
        secret for secret in (*KEYS, "pens", "hidden", answer["choices"][0]["message"]["content"]) if secret in log
    ]


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, '"}', "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_request_id_that_is_not_plain_is_replaced(client, given):
    answer = client.get("/health", headers={"x-request-id": given.encode("latin-1")})
    assert answer.headers["x-request-id"].startswith("req_")


def test_every_error_is_openais_object(client):
    assert is_error(client.get("/nothing"), 404) and is_error(client.get(PATH), 405)
    assert is_error(client.post("/health"), 405) and is_error(client.delete("/v1/models"), 405)
    assert is_error(client.post(PATH, content=b'{"model": "\xff"}', headers=JSON), 400)
    assert is_error(client.post(PATH, content=b"{", headers=JSON), 400)
    assert is_error(client.get("/v1/models/%ff%00"), 404) and is_error(client.post(PATH, content=b"{}"), 415)
    assert is_error(client.post(PATH, content=b" " * (2**24 + 1), headers=JSON), 413)
    assert is_error(client.post(PATH, json={**ASKED, "stop": ["a"] * 65}), 400)
    assert is_error(client.post(PATH, json={**ASKED, "stop": "a" * 257}), 400)
    assert is_error(client.post(PATH, json={**ASKED, "n": 17}), 400)
    assert is_error(client.post("/v1/completions", json={"model": "nano", "prompt": ["a"] * 129}), 400)
    assert is_error(client.post(PATH, json={**ASKED, "n": 16}), 400)  # more than ever have room in the queue
    full = client.post("/v1/completions", json={"model": "nano", "prompt": ["a"] * 9})
    assert is_error(full, 429) and full.headers["retry-after"] == "1"


def test_each_key_of_the_file_is_taken_and_no_other(server):
    for key, status in ((KEYS[0], 200), (KEYS[1], 200), (KEYS[0][:-1], 401), ("first-key\n\n", 401)):
        answer = httpx.get(
            f"{server.url}/v1/models", headers={"Authorization": b"Bearer " + urllib.parse.quote(key).encode()}
        )
        assert answer.status_code == status
    assert is_error(answer, 401) and answer.headers["www-authenticate"] == "Bearer"
    assert (
        httpx.get(f"{server.url}/metrics").status_code == 401 and httpx.get(f"{server.url}/health").status_code == 200
    )


def test_only_pages_of_the_origin_that_is_allowed_may_ask(engine, client):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for origin, allowed in (("https://page.test", True), ("https://other.test", False)):
        before = client.options(PATH, headers={"Origin": origin, **asks})
        assert (before.headers.get("access-control-allow-origin") == origin) is allowed
        answer = client.get("/nothing", headers={"Origin": origin})
        assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
    closed = asyncio.run(ask(build(service(engine)), "GET", "/v1/models", headers={"Origin": "https://page.test"}))
    assert "access-control-allow-origin" not in closed.headers


def test_a_client_that_goes_away_frees_its_slots(server, client):
    """Amid its body, amid the stream, and before the first byte while all slots are taken."""
    where = urllib.parse.urlsplit(server.url)
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: "
    with socket.create_connection((where.hostname, where.port)) as raw:
        raw.sendall(f'{head}1000\r\nx-request-id: half\r\n\r\n{{"model"'.encode())
    assert server.logged("half")["status"] == 499
    with client.stream("POST", PATH, json=LONG, headers={"x-request-id": "stream"}) as answer:
        lines = answer.iter_lines()  # whose end would close the connection
        next(lines)
        body = json.dumps({**LONG, "n": 2, "stream": False})
        with socket.create_connection((where.hostname, where.port)) as raw:
            raw.sendall(f"{head}{len(body)}\r\nx-request-id: unread\r\n\r\n{body}".encode())
            eventually(lambda: running(client) == 6)
        assert server.logged("unread")["status"] == 499
        eventually(lambda: running(client) == 4)
    assert server.logged("stream")["status"] == 499
    eventually(lambda: running(client) == 0)
    assert client.post(PATH, json=ASKED).status_code == 200


def test_health_is_told_at_once_under_load(server, client):
    asked = {"json": {**LONG, "n": 2, "max_tokens": 400}}
    streams = [threading.Thread(target=client.post, args=(PATH,), kwargs=asked) for _ in range(4)]
    for stream in streams:
        stream.start()
    eventually(lambda: running(client) == 8)
    seconds = []
    for _ in range(10):
        begin = time.perf_counter()
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        seconds.append(time.perf_counter() - begin)
    assert max(seconds) < 2 and running(client) > 0
    for stream in streams:
        stream.join()


def test_sigterm_lets_running_requests_end_and_no_traceback_was_logged(server, client):
    with client.stream("POST", PATH, json={**LONG, "max_tokens": 800}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        assert is_error(client.post(PATH, json=ASKED), 503)
        rest = list(lines)
    reasons = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in rest if line.startswith("data: {")]
    assert reasons.count("length") == 4 and rest[-2] == "data: [DONE]"
    assert server.ended(10) == 0 and "Traceback" not in "\n".join(server.lines)


@pytest.mark.parametrize(("numbers", "status"), [((signal.SIGTERM,), 0), ((signal.SIGINT, signal.SIGINT), 130)])
def test_an_end_without_waiting(numbers, status):
    """SIGTERM ends what still runs after the drain, with an error that says so; a second SIGINT ends the process."""
    with http_server.process("--drain", "30" if status else "0") as server, httpx.Client(timeout=60) as client:
        with client.stream("POST", server.url + PATH, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            for number in numbers:
                server.signal(number)
                if status:
                    eventually(lambda: unhealthy(server))
            if status:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
            else:
                rest = [line for line in lines if line]
                assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["error"]["code"] == "shutting_down"
        assert server.ended(10) == status and "Traceback" not in "\n".join(server.lines)


def unhealthy(server):
    """True once the drain has begun, or the process has ended."""
    try:
        return httpx.get(f"{server.url}/health").status_code == 503
    except httpx.TransportError:
        return True


def service(engine):
    return Service(engine, engine.tokenizer, "nano")


async def ask(app, method, path, **what):
    """What an app answers, without a socket."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.request(method, path, **what)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(engine, stream):
    app = build(service(engine), timeout=0.05)
    answer = asyncio.run(ask(app, "POST", PATH, json={**LONG, "stream": stream}))
    if stream and answer.status_code == 200:
        *_, last, done = (line for line in answer.text.splitlines() if line)
        assert done == "data: [DONE]" and json.loads(last[6:])["error"]["code"] == "timeout"
    else:
        assert is_error(answer, 504) and answer.json()["error"]["code"] == "timeout"
    eventually(lambda: engine.stats().running + engine.stats().waiting == 0)


@pytest.mark.parametrize(
    ("path", "asked", "last"),
    [
        (PATH, {"messages": CHAT, **USAGE}, ['"finish_reason": "stop"', '"completion_tokens"']),
        ("/v1/completions", {"prompt": "a", **USAGE}, ['"finish_reason": "stop"', '"completion_tokens"']),
        ("/v1/responses", {"input": "a"}, ["response.output_text.done", "response.completed"]),
    ],
)
def test_all_events_of_a_delta_are_sent_at_once(engine, path, asked, last):
    """The beginning with the first, and the usage with the last; then the end of the body."""
    said, sent = "one two three", []
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    content = json.dumps({"model": "nano", "stream": True, **asked}).encode()
    received = [{"type": "http.request", "body": content}]

    async def receive():
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    asyncio.run(build(recited(engine.tokenizer, said))(scope, receive, send))
    bodies = [message["body"].decode() for message in sent[1:]]
    assert len(bodies) == len(engine.tokenizer.encode(said)) + 1
    assert all(each in bodies[-2] for each in last)
    assert not any(each in body for each in last for body in bodies[:-2])


def test_a_body_that_does_not_come_is_not_waited_for(engine):
    async def slow():
        yield b'{"model":'
        await asyncio.sleep(60)

    answer = asyncio.run(ask(build(service(engine), timeout=0.05), "POST", PATH, content=slow(), headers=JSON))
    assert is_error(answer, 408) and answer.headers["connection"] == "close"


def test_an_engine_that_has_ended_is_unhealthy():
    engine = ling3.Engine.from_pretrained("nano", max_running_requests=1, max_model_len=64)
    app = build(service(engine))
    assert asyncio.run(ask(app, "GET", "/health")).status_code == 200
    engine._actor._inbox.put(None)
    engine._actor._thread.join()
    for method, path, body in (("GET", "/health", None), ("POST", PATH, ASKED), ("GET", "/metrics", None)):
        assert is_error(asyncio.run(ask(app, method, path, json=body)), 503)


def test_an_engine_that_compiles_is_healthy_for_a_while(engine, monkeypatch):
    """Its thread takes no message meanwhile."""
    served, go = service(engine), threading.Event()
    app, deaf = build(served), threading.Thread(target=engine._actor.call, args=(lambda loop: go.wait(),))
    deaf.start()
    monkeypatch.setattr("ling3.server.service.ANSWER", 0.05)
    assert asyncio.run(ask(app, "GET", "/health")).status_code == 200
    monkeypatch.setattr("ling3.server.service.PATIENCE", 0.01)
    assert is_error(asyncio.run(ask(app, "GET", "/health")), 503)
    go.set()
    deaf.join()
    assert asyncio.run(ask(app, "GET", "/health")).status_code == 200
