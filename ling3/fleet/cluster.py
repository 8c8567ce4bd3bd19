"""Ray's cluster: joining or starting it, and the resources that it reserves for a replica."""

import logging
import math
import os
import socket
from collections.abc import Sequence
from typing import Any

from ling3.runtime.cores import cores

OBJECTS = 2**27
"""Bytes of Ray's object store on this machine; small, as answers are."""
KNOCKING = 10.0
"""Timeout in seconds for a connection to a cluster's address."""
SAME = ("JAX_", "XLA_", "LING3_")
"""Replicas inherit environment variables with these prefixes: the bits of an answer may depend on them."""
QUIETLY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would print to stdout how processes fare; the fleet logs that itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's default is 15: a replica would yield to everything else on the machine.
    "RAY_worker_niceness": "0",
}
"""Environment variables for Ray, unless they are set: it sends no usage reports and prints nothing."""
JOINING = {"RAY_gcs_server_port_wait_time_s": "1"}
"""Also for joining a cluster: one attempt, of up to 40 seconds, instead of 20."""


def library() -> Any:
    """The module `ray`. Raises ValueError if it is not installed."""
    os.environ |= {**QUIETLY, **os.environ}
    try:
        import ray  # noqa: PLC0415 -- from an extra
    except ModuleNotFoundError as error:
        raise ValueError("a fleet needs Ray, which is not installed: pip install 'ling3[fleet]'") from error
    return ray


def join_cluster(ray: Any, address: str | None, cpus: int) -> None:
    """Joins the cluster at `address`; without an address, starts one on this machine with at least `cpus` cores.

    Does nothing if this process is connected to Ray already. Raises ValueError for a malformed address, and
    ConnectionError if no cluster can be joined there.
    """
    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        own = {"num_cpus": max(cpus, cores()), "object_store_memory": OBJECTS, "include_dashboard": False}
        ray.init("local", **own, **quiet)
        return
    if address != "auto":
        _knock(address)
    os.environ |= {**JOINING, **os.environ}
    try:
        ray.init(address, **quiet)
    except ConnectionError as error:
        advice = (
            "start one here (ray start --head), or give its address as HOST:PORT"
            if address == "auto"
            else "if one runs there, Ray's messages above say why; where it asks for a token, this machine needs the "
            "same in ~/.ray/auth_token, and RAY_AUTH_MODE=token"
        )
        raise ConnectionError(f"no Ray cluster could be joined at {address}: {advice}") from error


def _knock(address: str) -> None:
    """Raises ConnectionError if nothing listens at the address: Ray would wait for a quarter of an hour."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and "/" not in host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"the address of a Ray cluster is {address!r}, expected HOST:PORT, or auto for this machine's")
    try:
        socket.create_connection((host.strip("[]"), int(port)), KNOCKING).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster could be joined at {address}: {error}; ray start --head starts one, and says its address"
        ) from error


def reserved(ray: Any, replicas: int, mesh: tuple[int, int] | None, cpus: int | None) -> dict[str, Any]:
    """Options of a replica's Ray actor: the resources that Ray reserves, and its environment."""
    devices = math.prod(mesh or (1,))
    environment = {name: value for name, value in os.environ.items() if name.startswith(SAME)}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    on_cpus = environment.get("JAX_PLATFORMS") == "cpu"
    if not on_cpus and any("GPU" in node for node in nodes):
        takes: dict[str, Any] = {"num_gpus": devices}
    elif not on_cpus and any("TPU" in node for node in nodes):
        takes = {"resources": {"TPU": devices}}
    else:
        takes = {"num_cpus": cpus or cores_each([int(node.get("CPU", 0)) for node in nodes], replicas)}
        environment["NPROC"] = str(takes["num_cpus"])  # the threads of XLA's pool
        if mesh is not None:
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
    # Replicas skip type checks, as this process has checked what it sends them.
    hook = {"worker_process_setup_hook": "ling3.leave_types_unchecked"}
    return {**takes, "runtime_env": {"env_vars": environment, **hook}}


def cores_each(nodes: Sequence[int], replicas: int) -> int:
    """The most cores that each of `replicas` can have; `nodes` has the number of cores of each node."""
    fitting = (cores for cores in range(max(nodes, default=1), 0, -1) if sum(n // cores for n in nodes) >= replicas)
    return next(fitting, 1)
