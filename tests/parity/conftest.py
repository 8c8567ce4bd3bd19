"""The parity suite's checkpoints, opened once per session, and the tables that it prints at its end."""

import functools

import pytest


@pytest.fixture(scope="session")
def open_case(tmp_path_factory):
    """The case of a given name, and the same one when asked again."""
    from cases import Case  # noqa: PLC0415 - needs torch, without which the tests are skipped

    directory = tmp_path_factory.mktemp("parity")
    return functools.cache(lambda name: Case(name, directory))


@pytest.fixture(scope="session")
def open_family(tmp_path_factory):
    """The case of another family of a given name, and the same one when asked again."""
    from family_cases import make  # noqa: PLC0415 - needs torch, without which the tests are skipped

    return functools.cache(lambda name: make(name, tmp_path_factory.mktemp("family")))


@pytest.fixture
def show(record_property):
    """Prints a table after all tests, whichever worker has made it."""
    return functools.partial(record_property, "table")


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, table in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{table}")
