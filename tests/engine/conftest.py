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
    if warm.has_work:
        gc.collect()  # a stream that was left unread ends with the frames that hold it
    assert idle(warm)
