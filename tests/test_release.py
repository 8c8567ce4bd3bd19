"""What a release consists of agrees: versions, Pythons, and the commands of workflows and Dockerfile."""

import pathlib
import re
import tomllib

import pytest
import yaml

import ling3

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def jobs():
    return [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()]


def targets(text):
    """The targets of `make` that a text's lines call."""
    return set(re.findall(r"^ *make ([a-z]+)", text, re.MULTILINE))


def called():
    """The targets that workflows call, with those of a matrix."""
    found = set()
    for job in jobs():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        found |= targets(commands)
        if "make ${{ matrix.target }}" in commands:
            found |= set(job["strategy"]["matrix"]["target"])
    return found


def test_the_version_is_one():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    [readme] = re.findall(r"version = \{(.*?)\}", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert cited["version"] == readme == ling3.__version__
    assert (cited["license"], cited["authors"]) == (PROJECT["license"], PROJECT["authors"])


def test_the_pythons_are_those_that_workflows_run():
    minors = [re.findall(r":: (3\.\d+)$", line) for line in PROJECT["classifiers"]]
    pythons = [minor for found in minors for minor in found]
    [tested] = [
        job["strategy"]["matrix"]["python"] for job in jobs() if "python" in job.get("strategy", {}).get("matrix", {})
    ]
    assert pythons == tested == ["3.11", "3.12", "3.13"] and PROJECT["requires-python"] == ">=3.11,<3.14"
    assert re.findall(r"^ARG PYTHON=(.*)$", DOCKERFILE, re.MULTILINE) == [pythons[-1]]


def test_workflows_call_what_a_change_must_pass_and_every_target_exists():
    rules = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
    assert called() == targets((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    written = targets((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert "wheel" in written and called() | written <= rules
    assert set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()) == rules


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())


def test_the_image_serves_nano_as_a_user_who_may_not_change_it():
    instructions = re.sub(r"\\\n", "", DOCKERFILE)
    last = dict(re.findall(r"^([A-Z]+) (.*)$", instructions, re.MULTILINE))
    assert (last["USER"], last["EXPOSE"]) == ("1000", "8000") and "http://127.0.0.1:8000/health" in last["HEALTHCHECK"]
    assert (last["ENTRYPOINT"], last["CMD"]) == ('["ling3"]', '["serve", "nano", "--host", "0.0.0.0"]')
    assert re.findall(r'pip install "\.\[(\w+)\]"', DOCKERFILE) == ["serve"]
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for copied in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() and f"!{name.partition('/')[0]}" in allowed for name in copied.split())
