import pathlib

import huggingface_hub
import pytest
from huggingface_hub import errors

from ling3 import hub


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


def test_a_hub_id_is_fetched_by_pattern(tmp_path, monkeypatch):
    def snapshot_download(repo_id, *, allow_patterns):
        assert (repo_id, allow_patterns) == ("owner/name", ["*.json"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.resolve("owner/name", ("*.json",)) == tmp_path


def refused(kind):
    # Without a response: its type belongs to whichever client this version of huggingface_hub uses.
    return kind.__new__(kind, "the server's words")


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (refused(errors.RepositoryNotFoundError), FileNotFoundError, "no such repository"),
        (refused(errors.GatedRepoError), PermissionError, "is gated: accept its terms"),
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
