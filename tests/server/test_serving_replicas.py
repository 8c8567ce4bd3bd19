"""`ling3 serve --replicas`: the answers of one engine, and a replica that is killed."""

import json
import os
import pathlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import http_server
import httpx
import pytest
from random_adapters import random_adapter

import ling3
from ling3 import cli

PATH = "/v1/completions"
PROMPTS = [[60 + i, 70, 80] for i in range(8)]
BODY = {"max_tokens": 12, "temperature": 1, "ignore_eos": True, "seed": 5}
LONG = {**BODY, "model": "nano", "prompt": [60, 70, 80], "max_tokens": 1500, "stream": True}
WHOLE = {"replicas": {"ready": 2, "of": 2}, "status": "ok"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "0"), "--replicas is 0, expected at least 1"),
        (("--replicas", "2", "--nnodes", "1"), "--nnodes is for one model over several machines"),
    ],
)
def test_senseless_options(options, message, capsys, monkeypatch):
    monkeypatch.setattr("ling3.cli.devices.Machines.connect", lambda devices: False)
    assert cli.main(["serve", "nano", *options]) == 2
    assert message in capsys.readouterr().err


def replicas_of(server):
    """The process ids of a server's replicas."""
    found = []
    for directory in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = (directory / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == server.process.pid and "spawn_main" in (directory / "cmdline").read_text():
                found.append(int(directory.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def eventually(true, seconds=240):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def streamed(client, body):
    """A client's stream: the text, and the error that ended it."""
    text = ""
    with client.stream("POST", PATH, json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                said = json.loads(line[6:])
                if "error" in said:
                    return text, said["error"]["code"]
                text += said["choices"][0]["text"]
    return text, None


@pytest.mark.thorough
@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="processes are found in /proc")
def test_two_replicas_answer_as_one_engine_also_after_one_is_killed(tmp_path):
    adapter = random_adapter(ling3.load("nano"), size=0.6, seed=1)
    ling3.save_adapter(adapter, tmp_path / "a")
    engine = ling3.Engine.from_pretrained(
        "nano", max_running_requests=4, max_model_len=2048, adapters={"a": tmp_path / "a"}
    )

    def said(body, adapter=None):
        given = {name: body[name] for name in ("max_tokens", "temperature", "ignore_eos", "seed")}
        return engine.generate([body["prompt"]], ling3.SamplingParams(**given, adapter=adapter))[0].text

    with (
        http_server.process("--replicas", "2", "--lora-modules", f"a={tmp_path / 'a'}") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
        ThreadPoolExecutor(16) as threads,
    ):
        asked = [({**BODY, "prompt": prompt}, name) for prompt in PROMPTS for name in ("nano", "a")]

        def answers():
            texts = threads.map(lambda each: client.post(PATH, json={**each[0], "model": each[1]}).json(), asked)
            return [text["choices"][0]["text"] for text in texts]

        expected = [said(body, None if name == "nano" else name) for body, name in asked]
        assert answers() == expected and client.get("/health").json() == WHOLE
        wrong = client.post(PATH, json={**BODY, "model": "nano", "prompt": [10**6]})
        assert wrong.status_code == 400 and "1000000" in wrong.json()["error"]["message"]

        streams = [threads.submit(streamed, client, LONG) for _ in range(8)]
        eventually(lambda: "ling3_num_requests_running 8.0" in client.get("/metrics").text)
        (first, _) = before = replicas_of(server)
        os.kill(first, signal.SIGKILL)
        ended = [stream.result() for stream in streams]
        whole = said(LONG)
        assert {code for _, code in ended} == {None, "engine_error"}
        assert all(text == whole if code is None else whole.startswith(text) for text, code in ended)
        eventually(lambda: client.get("/health").json() == WHOLE)
        assert len(replicas_of(server)) == 2 and first not in replicas_of(server) and answers() == expected

        server.signal(signal.SIGTERM)
        assert server.ended(60) == 0
        assert not [pid for pid in (*before, *replicas_of(server)) if pathlib.Path(f"/proc/{pid}").exists()]
        log = "\n".join(server.lines)
        assert f"(process {first}) died" in log and "Traceback" not in log
