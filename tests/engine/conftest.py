"""One engine for all tests of a module."""

import gc

import pytest
from small_engine import engine, idle


@pytest.fixture(scope="module")
def shared():
    return engine()


@pytest.fixture(scope="module")
def warm(shared):
    shared.warmup()
    return shared


@pytest.fixture
def served(warm):
    """The engine of the module, its programs compiled; each test leaves it idle."""
    yield warm
    if not idle(warm):
        gc.collect()  # a stream that was left unread, and that a test's frames still hold, ends here
        assert idle(warm)
