"""The options that say over how many devices a model lies."""

import pytest

from ling3.cli.devices import Devices
from ling3.mesh import Rules


def test_the_first_devices_are_the_mesh():
    found = Devices(tp=2, dp=3).mesh()
    assert found is not None
    mesh, rules = found
    assert dict(mesh.shape) == {"data": 3, "tensor": 2} and [d.id for d in mesh.devices.flat] == [*range(6)]
    assert rules == Rules() and Devices().mesh() is None


@pytest.mark.parametrize(
    ("dp", "tp", "ep", "experts"),
    [
        (2, 4, None, "tensor"),
        (2, 4, 4, "tensor"),
        (2, 4, 8, ("data", "tensor")),
        (2, 4, 2, "data"),
        (2, 4, 1, None),
        (None, 4, 4, "tensor"),
        (None, 4, 1, None),
        (4, None, 4, "data"),
    ],
)
def test_experts_lie_along_axes_of_as_many_devices(dp, tp, ep, experts):
    assert Devices(dp=dp, tp=tp, ep=ep).rules() == Rules(experts=experts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp": 2, "tp": 4, "ep": 3}, r"^--ep is 3, expected one of 1, 2, 4, 8, which are axes of --dp 2 --tp 4$"),
        ({"tp": 0}, r"^--tp is 0, expected at least 1$"),
        ({"tp": 2, "ep": -1}, r"^--ep is -1, expected at least 1$"),
        ({"dp": 2, "tp": 8}, r"^--dp 2 --tp 8 are 16 devices, and there are 8 \(cpu\); XLA_FLAGS=.*_count=16 makes "),
    ],
)
def test_what_cannot_be_a_mesh_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Devices(**options).mesh()
