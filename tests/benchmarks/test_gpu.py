"""The GPU's report: every operator is probed, a wrong form is found, and what ends too early leaves what it had."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from benchmarks import gpu
from benchmarks.probes import examine, passed, probes
from benchmarks.registry import Setting
from ling3.execution import PLAIN
from ling3.ops.kda import kda_step


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The probes at toy sizes, by operator."""
    return {probe.operator: probe for probe in probes(Setting("toy", tmp_path_factory.mktemp("scratch")))}


def test_every_operator_is_probed(found):
    assert set(found) == {name for name, form in vars(PLAIN).items() if callable(form)}


def test_a_plain_form_passes(found):
    assert passed(examine(found["take_rows"], PLAIN))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda *x: kda_step(*x[:4], 1.01 * x[4], x[5]), "values"),
        (lambda *x: kda_step(*x[:5], x[5] + 1e-6 * jnp.mean(x[5], axis=0, keepdims=True)), "in_any_company"),
    ],
)
def test_a_wrong_form_is_found(found, wrong, what):
    told = examine(found["kda_step"], dataclasses.replace(PLAIN, kda_step=wrong))
    assert not passed(told)
    if what == "values":
        assert "of the largest number" in told["wrong"] and told["in_any_company"]
    else:
        assert "wrong" not in told and not told["in_any_company"] and told["same_again"]


@pytest.mark.slow
def test_what_is_cut_off_leaves_what_it_had(tmp_path):
    program = """
import sys, time, pathlib
from benchmarks.gpu import Report
from benchmarks.registry import Setting
report = Report(pathlib.Path(sys.argv[1]), 1.0, Setting("toy", pathlib.Path(sys.argv[1]).parent))
report.add("forms", "kda_step", {"values": "good"})
report.doing = "model: gpu/prefill-8192"
time.sleep(60)
"""
    path = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "time was over during model: gpu/prefill-8192" in done.stderr
    left = json.loads(path.read_text(encoding="utf-8"))
    assert left["forms"] == {"kda_step": {"values": "good"}}
    assert left["cut_off"] == "model: gpu/prefill-8192" and "complete" not in left


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_command(tmp_path, capsys):
    gpu.main(out=tmp_path / "report.json", scratch=tmp_path)
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert told["complete"] and told["scale"] == "toy" and told["machine"]["jax"]
    assert {part: len(told[part]) for part in ("forms", "model", "profile", "kernels")} == {
        "forms": 16,
        "model": 3,
        "profile": 1,
        "kernels": 3,
    }
    assert len(told["profile"]["decode, 1 row"]["kernels"]) == gpu.LONGEST
    assert "keep or delete" in capsys.readouterr().out
