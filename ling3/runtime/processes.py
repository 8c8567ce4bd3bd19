"""Several processes that run one program: connecting them, and messages from the first one to the others.

`jax.distributed` connects them. Its coordinator, in the first process, monitors them: if one is gone, it ends the
others with an error that names it.
"""

import contextlib
import itertools
import socket
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

HEARTBEAT = 20
"""Seconds without a heartbeat after which a process is considered dead."""
PATIENCE = 45
"""Seconds that an ending process waits for the others; gloo gives up after 30."""
LISTEN = 5_000
"""Milliseconds that one attempt to read a message waits."""
KEPT = 64
"""The number of last messages that are kept for processes that have not read them yet."""

FAILED = "ling3/failed"
"""The key under which processes that end in an error report it."""

_wires = itertools.count()


def connect(nodes: int | None = None, rank: int | None = None, address: str | None = None) -> None:
    """Makes this process number `rank` of `nodes`; the first one's coordinator is at `address`.

    `jax.distributed` finds arguments that are None from Slurm, Open MPI, Kubernetes or a TPU pod. Call this before any
    other use of JAX. On CPUs the processes exchange arrays by gloo. Raises ValueError for arguments that do not fit
    together, and RuntimeError if the other processes do not connect.
    """
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes is {nodes}, expected a whole number >= 1")
    if rank is not None and not 0 <= rank < (nodes or rank + 1):
        raise ValueError(f"rank is {rank}, expected a whole number in [0, {nodes})")
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise ValueError(f"address is {address!r}, expected HOST:PORT of the first process")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            address, nodes, rank, heartbeat_timeout_seconds=HEARTBEAT, shutdown_timeout_seconds=PATIENCE
        )
    except ValueError as error:
        if address is not None and rank is not None:
            raise
        raise ValueError(
            f"JAX finds no Slurm, Open MPI, Kubernetes or TPU pod that would tell of the other processes ({error}): "
            "give rank and address (--node-rank and --dist-init-addr, or NODE_RANK and DIST_INIT_ADDR)"
        ) from error


def say_failed(error: str) -> None:
    """Reports the error in which this process ends, for `failed` in the others."""
    state = distributed.global_state
    if (client := state.client) is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator may be gone
            client.key_value_set(
                f"{FAILED}/{state.process_id}", f"process {state.process_id}, on {socket.gethostname()}: {error}"
            )


def failed() -> list[str]:
    """The errors in which other processes have ended, as far as they could report them."""
    state = distributed.global_state
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        said = [] if state.client is None else state.client.key_value_dir_get(FAILED)
        return [text for key, text in said if not key.endswith(f"/{state.process_id}")]
    return []


def least(number: int) -> int:
    """The smallest of all processes' numbers; every process calls this."""
    if jax.process_count() == 1:
        return number
    own = np.asarray([number], np.int64).view(np.uint8)  # as bytes, since JAX has no int64 without 64-bit mode
    return int(np.asarray(multihost_utils.process_allgather(own)).view(np.int64).min())


class Wire:
    """Ordered messages from the first process to all others, which do not wait for devices that are busy.

    All processes must create the same number of wires, in the same order.
    """

    def __init__(self):
        self._client: Any = distributed.global_state.client
        if self._client is None:
            raise RuntimeError("the processes are not connected: call ling3.runtime.processes.connect first")
        self._name, self._count = f"ling3/{next(_wires)}", 0

    def tell(self, message: str) -> None:
        """Sends a message to all other processes."""
        self._client.key_value_set(self._key(self._count), message)
        if self._count >= KEPT:
            self._client.key_value_delete(self._key(self._count - KEPT))
        self._count += 1

    def hear(self) -> str:
        """Waits for the next message. Raises RuntimeError if a process has ended in an error instead."""
        while True:
            try:
                message = self._client.blocking_key_value_get(self._key(self._count), LISTEN)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if errors := failed():
                    raise RuntimeError("; ".join(errors)) from None
            else:
                self._count += 1
                return message

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"
