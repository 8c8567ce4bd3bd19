import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import hub_server
import huggingface_hub
import pytest
import random_checkpoint
from huggingface_hub import errors
from tiny import TINY

from ling3.checkpoint import hub
from ling3.train.tokenizer import train_tokenizer, write_tokenizer


def test_an_existing_directory_wins(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/name", ["*"]) == pathlib.Path("owner/name")
    assert hub.resolve(tmp_path, ["*"]) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/owner", ["*"]) == tmp_path / "owner"


@pytest.mark.parametrize(
    "path", ["./x", "/nonesuch/x", "~/nonesuch", "~nonesuch/x", "a/b/c", "..", "a\\b", pathlib.Path("a")]
)
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(path, tmp_path, monkeypatch):
    below = tmp_path / "a-directory-of-its-own"
    below.mkdir()
    monkeypatch.chdir(below)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hub, "_download", lambda *args: pytest.fail("asked the hub"))
    if path == "..":
        assert hub.resolve(path, ["*"]) == pathlib.Path("..")
        return
    with pytest.raises(FileNotFoundError, match="no checkpoint directory at /"):
        hub.resolve(path, ["*"])


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        hub.resolve(tmp_path / "model.safetensors", ["*"])


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_name_at_all(path):
    with pytest.raises(ValueError, match="names no checkpoint"):
        hub.resolve(path, ["*"])


def test_nano_is_always_the_one_in_the_package(tmp_path, monkeypatch):
    (tmp_path / "nano").mkdir()
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    (package / "checkpoints" / "nano").mkdir(parents=True)
    monkeypatch.setattr(hub.importlib.resources, "files", lambda name: package)
    assert hub.resolve("nano", ["*"]) == package / "checkpoints" / "nano"
    (package / "checkpoints" / "nano").rmdir()
    with pytest.raises(FileNotFoundError, match="reinstall"):
        hub.resolve("nano", ["*"])


def test_published_configurations_are_in_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in hub.resolve("tiny", ["*"]).iterdir()] == ["config.json"]
    (tmp_path / "flash").mkdir()
    assert hub.resolve("flash", ["*"]) == pathlib.Path("flash"), "a directory of that name is meant"


def test_a_hub_id_is_fetched_by_pattern(tmp_path, monkeypatch):
    def snapshot_download(repo_id, *, revision, allow_patterns):
        assert (repo_id, revision, allow_patterns) == ("owner/name", "v1", ["*.json"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("owner/name", ("*.json",), "v1") == tmp_path


def test_a_revision_is_for_the_hub(tmp_path):
    for path in ("nano", tmp_path):
        assert hub.pin(path) is None
        with pytest.raises(ValueError, match=r"revision: found 'main' for .*, which is no hub repository"):
            hub.pin(path, "main")
    with pytest.raises(ValueError, match="revision: found '', expected a branch"):
        hub.pin("owner/name", "")


def refused(kind):
    # Without a response: its type belongs to whichever client this version of huggingface_hub uses.
    return kind.__new__(kind, "the server's words")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (refused(errors.RepositoryNotFoundError), FileNotFoundError, "no such repository"),
        (refused(errors.GatedRepoError), PermissionError, "is gated: accept its terms"),
        (refused(errors.RevisionNotFoundError), FileNotFoundError, "has no revision 'main': give one of its branches"),
        (refused(errors.HfHubHTTPError), FileNotFoundError, "from the hub failed"),
        (errors.LocalEntryNotFoundError("not cached"), FileNotFoundError, "the hub cannot be reached"),
        (OSError("disk full"), FileNotFoundError, "failed: disk full"),
    ],
)
def test_what_the_hub_says_is_told_plainly(error, expected, message, monkeypatch):
    def snapshot_download(repo_id, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(expected, match=message) as raised:
        hub.resolve("owner/name", ["*"])
    assert "owner/name" in str(raised.value)


def test_offline():
    with pytest.raises(FileNotFoundError, match="the hub cannot be reached"):
        hub.resolve("owner/name-that-nobody-has", ["*"])


def test_a_name_that_the_hub_does_not_allow():
    with pytest.raises(ValueError, match=r"neither a directory .* nor a hub id"):
        hub.resolve("a name", ["*"])


VISIT = """
import json, sys
import huggingface_hub
import numpy as np
import ling3
from ling3 import cli
from ling3.checkpoint import hub
from ling3.cli.loading import Loading

class Seen(ling3.Engine):
    def __init__(self, model, tokenizer, *others, **more):
        self.both = model, tokenizer

def of(model, tokenizer):
    return [tokenizer.directory.name, float(np.asarray(model.lm_head.weight)[0, 0])]

def refusal(call):
    try:
        call()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"

one, other = sys.argv[1:]
seen = {
    "an engine": of(*Seen.from_pretrained("owner/name").both),
    "a tag": of(ling3.load("owner/name", revision="v1"), ling3.load_tokenizer("owner/name", revision="v1")),
    "a commit": of(*Seen.from_pretrained("owner/name", revision=other).both),
}
huggingface_hub.constants.HF_HUB_OFFLINE = True
seen["an engine from the hub's cache"] = of(*Seen.from_pretrained("owner/name").both)
huggingface_hub.constants.HF_HUB_OFFLINE = False
source = Loading(revision="draft").source("owner/name")
seen["a command"] = of(source.load(source.tokenizer()), source.tokenizer())
drawn = Loading(revision="config-only", random_weights=True).source("owner/name")
seen["random weights"] = drawn.load(None).config.vocab_size
seen["a revision that is not there"] = refusal(lambda: ling3.load("owner/name", revision="v2"))
seen["a repository that is not there"] = refusal(lambda: ling3.load("owner/another", revision="v1"))
seen["inspected"] = [cli.main(["inspect", "owner/name", "--revision", revision, "--json"]) for revision in ("v1", "v2")]
print(json.dumps(seen), file=sys.stderr)
"""


@pytest.mark.slow
def test_one_commit_for_weights_and_tokenizer_of_a_branch_that_moves(tmp_path):
    one, other, bare = "1" * 40, "2" * 40, "3" * 40
    backend = train_tokenizer(["hello"] * 3, 400)
    config = dataclasses.replace(TINY, vocab_size=400)
    first = {}
    for seed, commit in enumerate((one, other, bare)):
        weights = random_checkpoint.draw(config, seed)
        random_checkpoint.write(tmp_path / commit, config, weights)
        write_tokenizer(backend, tmp_path / commit, 400)
        (tmp_path / commit / "tokenizer_config.json").write_text(json.dumps({"a commit of its own": seed}))
        first[commit] = float(weights["lm_head.weight"][0, 0])
    (tmp_path / bare / "model.safetensors").unlink()
    commits = {commit: tmp_path / commit for commit in (one, other, bare)}
    with hub_server.serving(commits, {"main": one, "draft": one, "v1": one, "config-only": bare}) as server:
        server.next = {"main": other, "draft": other}
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "JAX_PLATFORMS": "cpu",
        }
        done = subprocess.run(
            [sys.executable, "-c", VISIT, one, other], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    *_, last = done.stderr.splitlines()
    seen = json.loads(last)
    assert server.refs["main"] == server.refs["draft"] == other, "the branches have moved"
    for what in ("an engine", "a tag", "an engine from the hub's cache", "a command"):
        assert seen[what] == [one, first[one]], what
    assert seen["a commit"] == [other, first[other]]
    assert seen["random weights"] == 400
    assert seen["a revision that is not there"] == (
        "FileNotFoundError: the hub repository 'owner/name' has no revision 'v2': give one of its branches, tags or "
        "commits"
    )
    assert "no such repository on the hub" in seen["a repository that is not there"]
    assert seen["inspected"] == [0, 2]
