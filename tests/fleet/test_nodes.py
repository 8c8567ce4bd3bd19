"""A cluster of several nodes, all on this machine: one joins, one falls silent."""

import contextlib
import importlib.util
import os
import signal
import time

import pytest

# What needs Ray is imported once it is known to be there, and Ray by the fleet, which keeps it quiet.

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed (the extra fleet)", allow_module_level=True)

import fleet_models
from fleet_models import ONE_CORE, SETTINGS

import ling3
from ling3.fleet import cluster

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGSTOP is POSIX's")

PARAMS = ling3.SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture
def head(monkeypatch):
    """A cluster without a core."""
    for name, value in fleet_models.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    ray = cluster.library()
    nodes = importlib.import_module("ray.cluster_utils")
    head = nodes.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield head
    ray.shutdown()
    head.shutdown()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray starts nodes after JAX was used here
def test_a_node_joins_and_another_falls_silent(head, tmp_path):
    """The first one's replica is stopped before its node is killed, so that what it holds can only go to the other."""
    first = head.add_node(num_cpus=1)
    directory = fleet_models.write(tmp_path / "model")
    with ling3.Fleet(directory, 2, address=head.address, **ONE_CORE) as fleet:
        assert "1 of 2 replicas" in repr(fleet)
        [old] = fleet.processes()  # the other waits for room
        head.add_node(num_cpus=1)
        until = time.monotonic() + 120
        while "2 of 2 replicas" not in repr(fleet) and time.monotonic() < until:
            fleet.generate([[7]], PARAMS)
        assert len(fleet.processes()) == 2
        outputs = {}
        try:
            for i, delta in fleet.stream_all([[7 + i, 8, 9] for i in range(40)], PARAMS):
                assert i not in outputs
                outputs[i] = delta.output
                if len(outputs) == 10:
                    os.kill(old.pid, signal.SIGSTOP)
                    head.remove_node(first, allow_graceful=False)
        finally:
            with contextlib.suppress(ProcessLookupError):  # Ray may have killed it too
                os.kill(old.pid, signal.SIGKILL)
        [left] = fleet.processes()
        assert left != old
    engine = ling3.Engine.from_pretrained(directory, **SETTINGS)
    alone = engine.generate([[7 + i, 8, 9] for i in range(40)], PARAMS)
    assert [outputs[i].token_ids for i in range(40)] == [output.token_ids for output in alone]
