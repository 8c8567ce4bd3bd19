import time

import pytest

from ling3.runtime import progress


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")


def work(steps: int, seconds: float = 0.0) -> None:
    with progress.progress("loading x", 10 * steps) as advance:
        time.sleep(seconds)
        for _ in range(steps):
            advance(10)


def test_long_work_is_shown_on_stderr_alone(terminal, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    work(3, seconds=0.5)
    written = capsys.readouterr()
    assert "loading x" in written.err and written.out == ""


def test_a_bar_is_shown_before_the_first_part_is_done(terminal, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.progress("loading x", 10) as advance:
        time.sleep(0.5)
        assert "loading x" in capsys.readouterr().err
        advance(5, "loading y")
        time.sleep(0.5)
        assert "loading y" in capsys.readouterr().err


def test_short_work_is_not_shown(terminal, capsys):
    work(3)
    written = capsys.readouterr()
    assert "loading" not in written.err + written.out


def test_nothing_is_drawn_into_a_file(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    work(3, seconds=0.5)
    assert capsys.readouterr().err == ""
