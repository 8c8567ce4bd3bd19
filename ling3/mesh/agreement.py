"""Agreement between the processes of a mesh: an error in one of them ends all, and leaves none waiting."""

import socket
from types import TracebackType

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ling3.mesh.sharding import processes

BYTES = 4096
"""The most that a process tells the others at a time; longer errors are cut."""
_WELL, _FAILED = "=", "!"


class Together:
    """A `with` statement around what every process of a mesh does in step; a mesh of one process, or None, needs none.

    If an exception leaves it in one process, it leaves it in all: there with its own type and a note that names the
    process, elsewhere as an `error` whose message names process and host. They hear of it at the next `check`, or at
    the end. A process that is killed says nothing: `jax.distributed` ends the others.
    """

    def __init__(self, mesh: Mesh | None, error: type[Exception]):
        self._mesh = None if mesh is None or len(processes(mesh)) == 1 else mesh
        self._error = error
        self._over = False

    def check(self, same: str = "") -> None:
        """Raises if another process has failed, or has something else for `same`. All call this at the same point."""
        if self._mesh is None:
            return
        self._over = True  # also if the others cannot be asked, as they have ended
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
    """The messages of all processes of a mesh, by process index."""
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
