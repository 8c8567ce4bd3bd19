"""Who may ask: content types, names of the server, origins of pages, and keys."""

import asyncio
import json
import subprocess
import sys

import http_server
import httpx
import pytest

from ling3.server.app import build
from ling3.server.origins import Hosts
from ling3.server.service import Service

ASKED = json.dumps({"model": "nano", "prompt": "Sam", "max_tokens": 2})
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with http_server.process("--allow-host", "chat.example", "--allow-origin", "https://page.test") as started:
        yield started


@pytest.fixture(scope="module")
def port(server):
    return server.url.rpartition(":")[2]


def post(server, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}/v1/completions", content=ASKED, headers={**JSON, **given}, timeout=60)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"]
)
def test_json_is_taken(server, kind):
    assert post(server, Content_Type=kind).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/plain; application/json"]
)
def test_what_a_page_may_send_unasked_is_refused(server, kind):
    answer = post(server, Content_Type=kind)
    assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


def test_a_body_without_a_type_is_refused(server):
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=b"{}")
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST", "chat.example", "Chat.Example."])
def test_names_of_the_server_are_taken_with_any_port(server, port, host):
    for each in (host, f"{host}:{port}", f"{host}:443"):
        assert post(server, Host=each).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "["],
)
def test_other_hosts_are_refused(server, host):
    answer = post(server, Host=host)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    assert httpx.get(f"{server.url}/v1/models", headers={"Host": host}).status_code == 403
    assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200


def test_the_servers_pages_and_those_that_are_allowed_may_ask(server, port):
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert post(server, Host=f"{host}:{port}", Origin=f"http://{host}:{port}").status_code == 200
    assert post(server, Origin="https://page.test").status_code == 200
    assert post(server, Host="chat.example", Origin="https://chat.example").status_code == 200
    assert post(server, Origin="https://chat.example").status_code == 200  # a proxy may write another Host
    assert "script" in httpx.get(server.url, headers={"Host": "localhost"}).text


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:1", "https://page.test.evil.example", "http://page.test", "["],
)
def test_other_origins_are_refused(server, origin):
    answer = post(server, Origin=origin)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in answer.headers


def test_a_server_on_all_addresses_is_asked_by_address_or_by_the_machines_name(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Machine")
    for wild in ("0.0.0.0", "::"):
        hosts = Hosts.of(wild, ["api.example:8000"])
        taken = ("10.0.0.1:80", "[fe80::1]:80", "machine", "localhost", "api.example")
        assert all(map(hosts.has, taken)) and not any(map(hosts.has, ("evil.example", "1.evil.example", "")))
    one = Hosts.of("192.168.1.2")
    assert one.has("192.168.1.2:80") and one.has("localhost") and not one.has("192.168.1.3") and not one.has("machine")
    assert Hosts.of("127.0.0.1", ["*"]).has("evil.example")
    with pytest.raises(ValueError, match="--allow-host"):
        Hosts.of("127.0.0.1", [""])


def answered(app, path, **headers):
    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_an_app_in_another_server_has_any_name_and_no_other_origin(nano):
    app = build(Service(nano, nano.tokenizer, "nano"))
    assert answered(app, "/v1/models").status_code == 200
    assert answered(app, "/v1/models", Origin="https://test").status_code == 200
    assert answered(app, "/v1/models", Origin="http://evil.example").status_code == 403


def test_two_hosts_are_refused(nano):
    app = build(Service(nano, nano.tokenizer, "nano"), hosts=Hosts.of("127.0.0.1"))
    sent, got = [], {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b""}
    got["headers"] = [(b"host", b"localhost"), (b"host", b"evil.example")]

    async def send(message):
        sent.append(message)

    asyncio.run(app(got, lambda: asyncio.sleep(60), send))
    assert sent[0]["status"] == 403


def test_a_key_needs_its_scheme(nano):
    app = build(Service(nano, nano.tokenizer, "nano"), ["key"])
    for given, status in (("Bearer key", 200), ("bearer key", 200), ("key", 401), ("Basic key", 401), ("Bearer", 401)):
        assert answered(app, "/v1/models", Authorization=given).status_code == status


@pytest.mark.parametrize("key", ["", " ", "\t\n"])
def test_a_blank_key_is_refused_at_the_start(nano, key):
    with pytest.raises(ValueError, match="blank"):
        build(Service(nano, nano.tokenizer, "nano"), ["key", key])
    command = [sys.executable, "-m", "ling3", "serve", "nano", "--port", "0", "--api-key", key]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2 and "--api-key is blank" in run.stderr
