"""Connections that bring no request: bounded in their number, their size and their time, before a key is asked for."""

import contextlib
import json
import socket
import time
import urllib.parse

import http_server
import httpx
import pytest

TIMEOUT = 3
DESCRIPTORS = 256
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    """A server that asks for a key and may have few descriptors."""
    # The hard limit as well, as the server raises the soft one to it.
    with http_server.process(
        "--api-key", "key", "--timeout", str(TIMEOUT), first=f"ulimit -n {DESCRIPTORS}"
    ) as started:
        yield started


@pytest.fixture
def connect(server):
    """Opens a connection that is closed at the end."""
    where = urllib.parse.urlsplit(server.url)
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection((where.hostname, where.port), 20))


def healthy(server):
    begin = time.perf_counter()
    answer = httpx.get(f"{server.url}/health", timeout=10)
    return answer.status_code == 200 and time.perf_counter() - begin < 2


def rest(connection):
    """What comes until the server ends the connection."""
    came = b""
    with contextlib.suppress(ConnectionError):
        while some := connection.recv(2**16):
            came += some
    return came


def error(answer):
    head, body = answer.split(b"\r\n\r\n", 1)
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_head_that_does_not_end_is_given_up(server, connect):
    """Also one that goes on byte by byte, and a connection without a byte."""
    silent, half, slow = connect(), connect(), connect()
    begin = time.monotonic()
    for each in (half, slow):
        each.sendall(POST + b"x: ")
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - begin < TIMEOUT - 0.5:
            slow.sendall(b"a")
            time.sleep(0.1)
    for each in (half, slow):
        assert error(rest(each))[0] == 408
    assert rest(silent) == b"" and TIMEOUT - 1 < time.monotonic() - begin < TIMEOUT + 3


def test_a_head_that_does_not_end_is_given_up_after_an_answer(server, connect):
    one = connect()
    one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        answer += one.recv(2**16)
    one.sendall(b"GET /health HTTP/1.1\r\n")
    assert error(rest(one))[0] == 408


@pytest.mark.parametrize("sent", [b"x: " + b"a" * 2**17, b"x: a\r\n" * 2**15, b"GET /" + b"a" * 2**17])
def test_a_head_that_is_too_large_is_refused(server, connect, sent):
    large = connect()
    with contextlib.suppress(ConnectionError):
        large.sendall((b"" if sent.startswith(b"GET") else POST) + sent)
    status, said = error(rest(large))
    assert status == 431 and "65536 bytes" in said["message"]


def test_a_client_of_anthropics_protocol_is_refused_in_its_form(server, connect):
    large = connect()
    with contextlib.suppress(ConnectionError):
        large.sendall(POST.replace(b"completions", b"messages") + b"x: " + b"a" * 2**17)
    said = json.loads(rest(large).split(b"\r\n\r\n", 1)[1])
    assert said["type"] == "error" and said["error"]["type"] == "invalid_request_error" and said["request_id"] is None


def test_a_head_as_large_as_clients_have_is_taken(server, connect):
    one = connect()
    one.sendall(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\ncookie: " + b"a" * 60_000 + b"\r\nconnection: close\r\n\r\n"
    )
    assert rest(one).startswith(b"HTTP/1.1 200")


def test_trailers_are_bounded(server, connect):
    one = connect()
    with pytest.raises(ConnectionError):
        one.sendall(POST + b"Transfer-Encoding: chunked\r\nAuthorization: Bearer key\r\n\r\n0\r\n")
        for _ in range(400):
            one.sendall(b"x: " + b"a" * 2**16)
            time.sleep(0.001)


def test_a_body_without_a_key_is_not_read_for_ever(server, connect):
    """The answer comes before the body, which then has as much time as a head."""
    one = connect()
    one.sendall(POST + b"Content-Length: 1000000000\r\n\r\n")
    assert one.recv(2**12).startswith(b"HTTP/1.1 401")
    begin = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - begin < TIMEOUT + 5:
            one.sendall(b" " * 100)
            time.sleep(0.02)
    assert time.monotonic() - begin < TIMEOUT + 2


def test_what_is_no_http_gets_an_error_as_all_others(server, connect):
    one = connect()
    one.sendall(b"\x16\x03\x01\r\n\r\n")
    assert error(rest(one))[0] == 400


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", POST + b"Content-Length: 9\r\nAuthorization: Bearer key\r\n\r\n{"]
)
def test_connections_without_a_request_leave_room_for_others(server, connect, sent):
    """Twice as many as there may be descriptors: the oldest are ended, and the server answers all the while."""
    many = []
    for i in range(2 * DESCRIPTORS):
        each = connect()
        with contextlib.suppress(ConnectionError):
            each.sendall(sent)
        many.append(each)
        if i % 100 == 99:
            assert healthy(server)
    assert healthy(server)
    many[0].settimeout(1)
    assert many[0] is not None and rest(many[0]) == b""
    assert healthy(server) and "Traceback" not in "\n".join(server.lines)
