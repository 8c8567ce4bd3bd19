"""A server of nano on a port of this machine."""

import http_server
import pytest

import ling3
from ling3.server.app import build
from ling3.server.service import Service


@pytest.fixture(scope="session")
def serving():
    """A context in which an app is served: its address."""
    return http_server.listening


@pytest.fixture(scope="session")
def nano():
    """An engine of four slots."""
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512)


@pytest.fixture(scope="session")
def nano_app():
    """An app over an engine."""

    def app(engine, keys=()):
        return build(Service(engine, engine.tokenizer, "nano"), keys)

    return app
