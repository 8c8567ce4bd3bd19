"""The documentation's app under Ray Serve: its answers are the engine's."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import ling3

pytest.importorskip("ray.serve", reason="Ray Serve is not installed (the extra fleet)")
pytest.importorskip("starlette", reason="starlette is not installed (the extra serve)")

PAGE = pathlib.Path(ling3.__file__).parents[1] / "docs/reference/http.md"
ASKED = {"model": "nano", "prompt": [60, 70, 80], "temperature": 0, "max_tokens": 8, "ignore_eos": True, "seed": 1}
ASK = """
import httpx

url, asked = "http://127.0.0.1:8000", {asked}
answers = [httpx.post(url + "/v1/completions", json=asked, timeout=120).json()["choices"][0]["text"] for _ in range(4)]
with httpx.stream("POST", url + "/v1/completions", json={{**asked, "stream": True}}, timeout=120) as stream:
    chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {{")]
answers.append("".join(chunk["choices"][0]["text"] for chunk in chunks))
said = [answers, httpx.get(url + "/health").status_code, httpx.get(url + "/nothing").json()]
pathlib.Path(sys.argv[1]).write_text(json.dumps(said))
serve.shutdown()
"""


def test_the_documented_app_answers_as_the_engine_does(tmp_path):
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ray" in each]
    script, said = tmp_path / "served.py", tmp_path / "said.json"
    script.write_text("import json, pathlib, sys\n" + block + ASK.format(asked=ASKED))
    run = subprocess.run(
        [sys.executable, str(script), str(said)], check=False, capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0, run.stderr[-4000:]
    answers, health, missing = json.loads(said.read_text())
    engine = ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=256)
    expected = engine.generate([ASKED["prompt"]], ling3.SamplingParams(max_tokens=8, ignore_eos=True))[0].text
    assert answers == [expected] * 5 and health == 200 and missing["error"]["type"] == "not_found_error"
