import pytest

from ling3.runtime import progress


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")


def work(steps: int) -> None:
    with progress.progress("loading x", 10 * steps) as advance:
        for _ in range(steps):
            advance(10)


def test_long_work_is_shown_on_stderr_alone(terminal, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    work(3)
    written = capsys.readouterr()
    assert "loading x" in written.err and written.out == ""


def test_short_work_is_not_shown(terminal, capsys):
    work(3)
    written = capsys.readouterr()
    assert "loading" not in written.err + written.out


def test_nothing_is_drawn_into_a_file(monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    work(3)
    assert capsys.readouterr().err == ""
