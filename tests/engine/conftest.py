"""One engine for all tests of a module."""

import gc

import pytest
from small_engine import SHORT, answer, engine, idle


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


@pytest.fixture
def busy(shared):
    """The engine of this module; each test leaves it idle."""
    yield shared
    shared.step()
    assert idle(shared)


@pytest.fixture(scope="module")
def alone(shared):
    """The answers of requests that ran alone."""

    def run(prompt, params=SHORT):
        (output,) = shared.generate([prompt], params)
        return [answer(completion) for completion in output.outputs]

    return run
