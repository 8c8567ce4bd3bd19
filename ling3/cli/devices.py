"""Options for the devices and processes over which a model is sharded."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ling3.cli.options import TextOption, WholeNumber, whole_number
from ling3.cli.terminal import announced

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ling3.mesh import Rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """How the model is sharded over devices; by default it is on one device."""

    tp: WholeNumber = None
    """Devices over which every layer's heads, channels and vocabulary are sharded; by default 1."""
    dp: WholeNumber = None
    """Groups of --tp devices, each with different requests; by default 1."""
    ep: WholeNumber = None
    """Devices over which the experts are sharded: as many as --tp (the default), --dp, or --dp times --tp. With 1, the
    channels of every expert are sharded instead."""

    def slots(self, requests: int) -> int:
        """`requests`, rounded up so that each group of devices has the same number of slots."""
        groups = self._size("dp")
        return -(-requests // groups) * groups

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The sizes of the mesh's axes ("data", "tensor"); None if no option was given."""
        return None if self == type(self)() else (self._size("dp"), self._size("tp"))

    @property
    def count(self) -> int:
        """The number of devices that the options require."""
        return self._size("dp") * self._size("tp")

    def mesh(self, devices: Sequence[Any] | None = None) -> "tuple[Mesh, Rules] | None":
        """The first of `devices` (by default JAX's) as a mesh with axes ("data", "tensor"), and its sharding rules.

        None if no option was given. Raises ValueError for invalid numbers, and if there are too few devices.
        """
        import jax

        if (sizes := self.sizes) is None:
            return None
        rules, devices = self.rules(), jax.devices() if devices is None else devices
        if self.count > len(devices):
            on_cpus = f"; XLA_FLAGS=--xla_force_host_platform_device_count={self.count} makes a CPU as many, for trials"
            raise ValueError(
                f"{self._named()} are {self.count} devices, and there are {len(devices)} "
                f"({devices[0].platform}){on_cpus if devices[0].platform == 'cpu' else ''}"
            )
        return jax.make_mesh(sizes, ("data", "tensor"), devices=devices[: self.count]), rules

    def rules(self) -> "Rules":
        """The rules that say what is sharded along which axis. Raises ValueError if no axes have --ep devices."""
        from ling3.mesh import Rules

        dp, tp = self._size("dp"), self._size("tp")
        shared = {dp * tp: ("data", "tensor"), dp: "data", 1: None, tp: "tensor"}
        ep = tp if self.ep is None else self._size("ep")
        if ep not in shared:
            fits = ", ".join(map(str, sorted(shared)))
            raise ValueError(f"--ep is {ep}, expected one of {fits}, which are axes of {self._named()}")
        return Rules(experts=shared[ep])

    def _size(self, name: str) -> int:
        size = getattr(self, name)
        if size is not None and size < 1:
            raise ValueError(f"--{name} is {size}, expected at least 1")
        return 1 if size is None else size

    def _named(self) -> str:
        return f"--dp {self._size('dp')} --tp {self._size('tp')}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines(Devices):
    """How the model is sharded over devices and processes; by default it is on one device."""

    tp: WholeNumber = None
    """Devices over which every layer's heads, channels and vocabulary are sharded; by default 1, with --nnodes all."""
    nnodes: WholeNumber = None
    """How many processes run this command together. The first one prints and writes."""
    node_rank: WholeNumber = None
    """With --nnodes: the number of this process, from 0; by default NODE_RANK."""
    dist_init_addr: TextOption = None
    """With --nnodes: HOST:PORT of the first process; by default DIST_INIT_ADDR. If neither the number nor the address
    is set, both come from Slurm, Open MPI, Kubernetes or a TPU pod."""

    def connect(self) -> bool:
        """Connects this process with the others, if there are any. Returns True if it is not the first.

        Raises ValueError for options that do not fit together.
        """
        import os

        if self.nnodes is None:
            for name in ("node_rank", "dist_init_addr"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} is for --nnodes: say how many processes there are")
            return False
        import jax

        from ling3.runtime.processes import connect

        if self.nnodes < 1:
            raise ValueError(f"--nnodes is {self.nnodes}, expected at least 1")
        rank, address = self.node_rank, self.dist_init_addr or os.environ.get("DIST_INIT_ADDR")
        if rank is None and "NODE_RANK" in os.environ:
            try:
                rank = whole_number(os.environ["NODE_RANK"])
            except ValueError as error:
                raise ValueError(f"NODE_RANK: {error}") from None
        if (rank is None) != (address is None):
            missing = "--node-rank (or NODE_RANK)" if rank is None else "--dist-init-addr (or DIST_INIT_ADDR)"
            raise ValueError(f"--nnodes is {self.nnodes}, and {missing} is missing: give both, or neither on a cluster")
        own = "waiting for" if rank is None else f"process {rank} waits at {address} for"
        with announced(f"{own} the others of {self.nnodes} processes…"):
            connect(self.nnodes if rank is not None else None, rank, address)
        if jax.process_count() != self.nnodes:
            raise ValueError(f"--nnodes is {self.nnodes}, and the cluster has started {jax.process_count()} processes")
        return jax.process_index() > 0

    def mesh(self, devices: Sequence[Any] | None = None) -> "tuple[Mesh, Rules] | None":
        """Like `Devices.mesh`; also raises ValueError if several processes would leave devices unused."""
        import jax

        if self.nnodes is not None and self.count < len(found := jax.devices()):
            raise ValueError(
                f"{self._named()} are {self.count} devices, and {self.nnodes} processes have {len(found)}: use all"
            )
        return super().mesh(devices)

    def _size(self, name: str) -> int:
        if name == "tp" and self.tp is None and self.nnodes is not None:
            import jax

            return max(1, len(jax.devices()) // self._size("dp"))
        return super()._size(name)


def fake_devices(count: int) -> None:
    """Makes JAX use the CPU as `count` devices; only works before JAX has looked for devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # it has looked: `Devices.mesh` raises if there are too few
        jax.config.update("jax_num_cpu_devices", count)
