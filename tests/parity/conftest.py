"""The parity suite's checkpoints, opened once per session."""

import functools

import pytest


@pytest.fixture(scope="session")
def open_case(tmp_path_factory):
    """The case of a given name, and the same one when asked again."""
    from cases import Case  # noqa: PLC0415 - needs torch, without which the tests are skipped

    directory = tmp_path_factory.mktemp("parity")
    return functools.cache(lambda name: Case(name, directory))
