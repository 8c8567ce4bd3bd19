"""Which cluster is joined or started, and what a replica gets of it; Ray itself is a stand-in here."""

import socket
from types import SimpleNamespace

import pytest

from ling3.fleet import cluster
from ling3.runtime.cores import cores

JOINING = list(cluster.JOINING)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in JOINING:
        monkeypatch.setenv(name, "1")  # so that what is set is undone
        monkeypatch.delenv(name)


@pytest.fixture
def listening():
    """A port where something listens, which is no cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def ray(*, nodes=(), fails=False, initialized=False):
    """Ray as far as it is asked: what it is told to start is in `calls`."""
    calls = []

    def init(address, **options):
        calls.append((address, options))
        if fails:
            raise ConnectionError("Ray's own words")

    alive = [{"Alive": True, "Resources": resources} for resources in nodes]
    return SimpleNamespace(
        init=init, calls=calls, is_initialized=lambda: initialized, nodes=lambda: [*alive, {"Alive": False}]
    )


def test_without_an_address_ray_is_started_here_with_a_core_for_each_replica():
    started = ray()
    cluster.join_cluster(started, None, 1000)
    cluster.join_cluster(started, None, 1)
    assert [(address, options["num_cpus"]) for address, options in started.calls] == [
        ("local", 1000),
        ("local", cores()),
    ]


def test_a_process_stays_with_its_cluster():
    joined = ray(initialized=True)
    cluster.join_cluster(joined, "nowhere:1", 1)
    assert not joined.calls


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:port", "host:65536", "ray://host:10001", ""])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=f"the address of a Ray cluster is '{address}', expected HOST:PORT, or auto"):
        cluster.join_cluster(ray(), address, 1)


def test_where_nothing_listens_there_is_no_cluster_and_ray_is_not_asked(listening):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    asked = ray()
    with pytest.raises(ConnectionError, match=rf"no Ray cluster could be joined at 127\.0\.0\.1:{port}: .*refused"):
        cluster.join_cluster(asked, f"127.0.0.1:{port}", 1)
    assert not asked.calls
    cluster.join_cluster(asked, f"127.0.0.1:{listening}", 1)
    assert [address for address, _ in asked.calls] == [f"127.0.0.1:{listening}"]


def test_what_ray_cannot_join_is_told_with_what_to_do(listening):
    with pytest.raises(ConnectionError, match=f"joined at 127.0.0.1:{listening}: .*RAY_AUTH_MODE=token"):
        cluster.join_cluster(ray(fails=True), f"127.0.0.1:{listening}", 1)
    with pytest.raises(ConnectionError, match=r"joined at auto: start one here \(ray start --head\)"):
        cluster.join_cluster(ray(fails=True), "auto", 1)


@pytest.mark.parametrize(
    ("nodes", "mesh", "platforms", "expected"),
    [
        ([{"CPU": 8.0}], None, "", {"num_cpus": 4}),
        ([{"CPU": 8.0, "GPU": 4.0}], None, "", {"num_gpus": 1}),
        ([{"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}], (1, 2), "", {"num_gpus": 2}),
        ([{"CPU": 8.0, "TPU": 4.0}], (2, 2), "", {"resources": {"TPU": 4}}),
        ([{"CPU": 8.0, "GPU": 4.0}], None, "cpu", {"num_cpus": 4}),
    ],
)
def test_what_is_reserved_for_a_replica(monkeypatch, nodes, mesh, platforms, expected):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("XLA_FLAGS", "--xla_given=1")
    found = cluster.reserved(ray(nodes=nodes), 2, mesh, None)
    environment = found.pop("runtime_env")["env_vars"]
    assert found == expected
    assert environment["JAX_PLATFORMS"] == platforms and environment["XLA_FLAGS"] == "--xla_given=1"
    assert environment.get("NPROC") == ("4" if "num_cpus" in expected else None), "the threads of XLA's pool"


def test_a_replica_on_cpus_has_as_many_fake_devices_as_its_mesh(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_given=1")
    flags = cluster.reserved(ray(nodes=[{"CPU": 2.0}]), 1, (2, 3), 1)["runtime_env"]["env_vars"]["XLA_FLAGS"]
    assert flags == "--xla_given=1 --xla_force_host_platform_device_count=6"


def test_all_replicas_run_at_once_on_as_many_cores_as_there_are():
    cases = [([2], 2), ([2], 1), ([8, 8], 3), ([6, 2], 2), ([2], 4), ([], 1)]
    assert [cluster.cores_each(*case) for case in cases] == [1, 2, 4, 3, 1, 1]
