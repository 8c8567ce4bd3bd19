"""The parity suite's checkpoints, opened once per session."""

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
