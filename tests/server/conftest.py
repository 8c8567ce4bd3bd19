"""A server of nano on a port of this machine."""

import contextlib
import threading
import time

import pytest
import uvicorn

import ling3
from ling3.server.app import build
from ling3.server.running import Service


@pytest.fixture(scope="session")
def serving():
    """A context in which an app is served: its address."""

    @contextlib.contextmanager
    def serve(app):
        config = uvicorn.Config(app, port=0, log_level="warning", ws="none")
        socket, server = config.bind_socket(), uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            socket.close()

    return serve


@pytest.fixture(scope="session")
def nano():
    """An engine of four slots."""
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512)


@pytest.fixture(scope="session")
def nano_app():
    """An app over an engine, with as many waiting requests."""

    def app(engine, max_queue=1024, keys=()):
        return build(Service(engine, engine.tokenizer, "nano", max_queue), keys)

    return app
