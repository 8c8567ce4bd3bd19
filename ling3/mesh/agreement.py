"""Agreement between the processes of a mesh: an error in one of them is raised in all, so that none waits for it."""

import socket
from types import TracebackType

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ling3.mesh.sharding import processes

BYTES = 4096
"""The longest message of a process to the others; longer errors are truncated."""
_WELL, _FAILED = "=", "!"


class Together:
    """Context manager for a block that every process of a mesh runs in step; a no-op for one process or no mesh.

    If an `Exception` leaves the block in one process, it gets a note there that names process and host, and the others
    raise an `error` that names them too, in their next `check` or at the end of the block. A killed process cannot send
    a message; `jax.distributed` then ends the others.
    """

    def __init__(self, mesh: Mesh | None, error: type[Exception]):
        self._mesh = None if mesh is None or len(processes(mesh)) == 1 else mesh
        self._error = error
        self._over = False

    def check(self, same: str = "") -> None:
        """Raises `error` if another process failed or passed another `same`; all processes call it together."""
        if self._mesh is None:
            return
        self._over = True  # remains True if the exchange fails because others have ended
        told = _told(self._mesh, _WELL + same)
        failed = [f"process {i}, {text[1:]}" for i, text in told.items() if text.startswith(_FAILED)]
        if failed:
            raise self._error("\n".join(failed))
        others = [i for i, text in told.items() if text != _WELL + same]
        if others:
            names = f"process {jax.process_index()} and {', '.join(map(str, others))}"
            raise self._error(f"{names} have found different checkpoints; give all the same")
        self._over = False

    def __enter__(self) -> "Together":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mesh is None or self._over:
            return
        if error is None:
            self.check()
        elif isinstance(error, Exception):
            error.add_note(f"in process {jax.process_index()}, on {socket.gethostname()}")
            _told(self._mesh, f"{_FAILED}on {socket.gethostname()}: {error}")


def _told(mesh: Mesh, text: str) -> dict[int, str]:
    """Sends this process's message to all others of the mesh; returns every process's message by process index."""
    own = np.zeros(BYTES, np.uint8)
    encoded = np.frombuffer(text.encode(errors="replace")[:BYTES], np.uint8)
    own[: encoded.size] = encoded
    devices = mesh.devices.reshape(-1)
    line = Mesh(devices, ("all",), axis_types=(AxisType.Auto,))
    sent = jax.make_array_from_callback(
        (devices.size, BYTES), NamedSharding(line, PartitionSpec("all")), lambda index: own[None]
    )
    every = jax.jit(_as_it_is, out_shardings=NamedSharding(line, PartitionSpec()))(sent).addressable_data(0)
    words = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in np.asarray(every)]
    return dict(zip((device.process_index for device in devices), words, strict=True))


def _as_it_is(x: jax.Array) -> jax.Array:
    return x
