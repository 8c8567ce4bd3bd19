"""The commands without --replicas."""

import importlib.util
import sys

import pytest

from ling3 import cli
from ling3.evals.prompts import Question, write
from ling3.evals.run import Score


class Watch:
    """Finds no module, but notes which of Ray's are looked for."""

    def __init__(self):
        self.seen = []

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            self.seen.append(name)


@pytest.mark.thorough
def test_nothing_of_ray_is_imported_without_replicas(directory, scripted, tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [watch := Watch(), *sys.meta_path])
    scripted("12")
    monkeypatch.setattr("ling3.evals.run.evaluate", lambda *arguments, **others: Score(1, 1))
    write(prompts := tmp_path / "prompts.json", [Question("1 + 1?", "2")])
    assert cli.main(["eval", "gsm8k", str(directory), "--prompts", str(prompts), "--out", str(tmp_path / "out")]) == 0
    assert cli.main(["generate", str(directory), "-p", "6 + 6?", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(Score(1, 1)), "12"]
    assert not watch.seen
    importlib.util.find_spec("ray")
    assert watch.seen == ["ray"], "it would have been seen"
