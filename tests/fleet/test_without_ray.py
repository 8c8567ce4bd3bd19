"""What needs Ray says so."""

import sys

import pytest

import ling3
from ling3 import cli

MISSING = r"a fleet needs Ray, which is not installed: pip install 'ling3\[fleet\]'"


@pytest.fixture
def no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.usefixtures("no_ray")
def test_a_fleet_names_the_extra():
    with pytest.raises(ValueError, match=MISSING):
        ling3.Fleet("nano", replicas=2)


@pytest.mark.usefixtures("no_ray")
def test_commands_name_it_too(capsys):
    assert cli.main(["generate", "nano", "-p", "hello", "--replicas", "2"]) == 2
    assert "pip install 'ling3[fleet]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "0"), "--replicas is 0, expected at least 1"),
        (("--ray-address", "auto"), "--ray-address is for --replicas"),
    ],
)
def test_senseless_options(options, message, capsys):
    assert cli.main(["generate", "nano", "-p", "hello", *options]) == 2
    assert message in capsys.readouterr().err


def test_senseless_numbers():
    with pytest.raises(ValueError, match="replicas is 0, expected at least 1"):
        ling3.Fleet("nano", replicas=0)
    with pytest.raises(ValueError, match="cpus is 0, expected at least 1"):
        ling3.Fleet("nano", replicas=1, cpus=0)
    with pytest.raises(TypeError, match="no engine setting is called page"):
        ling3.Fleet("nano", replicas=1, page=1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ling3.Fleet("./nowhere", replicas=1)
