"""Options for one engine or a fleet of engines."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console

from ling3.cli import interruption
from ling3.cli.devices import Devices, Machines
from ling3.cli.loading import Loading, ModelSource
from ling3.cli.options import TextOption, WholeNumber

if TYPE_CHECKING:
    from ling3.engine.settings import EngineSettings
    from ling3.fleet import Fleet
    from ling3.serve import Server
    from ling3.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving(Loading):
    """Options for weights, the number of engines, and how errors are shown."""

    replicas: WholeNumber = None
    """Share the prompts among this many engines, each in a separate process (extra: fleet), with the same answers."""
    ray_address: TextOption = None
    """With --replicas: the Ray cluster to run them on, as HOST:PORT, or auto for this machine's; by default they run
    here."""

    def check(self, devices: Machines) -> None:
        """Raises ValueError for options that do not fit together, before any work."""
        if self.replicas is not None and devices.nnodes is not None:
            raise ValueError("--nnodes is for one model over several machines, and --replicas for many: give one")
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"--replicas is {self.replicas}, expected at least 1")
        if self.ray_address is not None and self.replicas is None:
            raise ValueError("--ray-address is for --replicas")

    @contextlib.contextmanager
    def serve(
        self, source: ModelSource, tokenizer: "Tokenizer | None", settings: "EngineSettings", console: Console
    ) -> "Iterator[Served]":
        """Loads the model, prints a line about it, and yields an engine or a fleet."""
        from ling3.evals.predictions import fingerprint
        from ling3.serve import Engine

        if self.replicas is not None:
            with self._fleet(self.replicas, source, settings) as fleet:
                source.say(fleet.parameters, fleet.dtype, f"{self.replicas} × {fleet.platform}", console)
                yield Served(fleet, lambda: fleet.fingerprint)
            return
        model = source.load(tokenizer)
        source.introduce(model, console)
        yield Served(Engine(model, tokenizer, settings), lambda: fingerprint(model))

    def _fleet(self, replicas: int, source: ModelSource, settings: "EngineSettings") -> "Fleet":
        """A fleet of replicas, each on the devices that `source` describes."""
        from ling3.cli import descendants
        from ling3.fleet import Fleet

        # On Ctrl-C: Ray's agents would outlive this process by more than a minute.
        interruption.do_last(descendants.kill)
        devices = source.devices or Devices()
        mesh, rules = (None, None) if devices.sizes is None else (devices.sizes, devices.rules())
        where = {"mesh": mesh, "rules": rules, "address": self.ray_address}
        return Fleet(dataclasses.replace(source, devices=None), replicas, settings=settings, **where)


@dataclasses.dataclass(frozen=True)
class Served:
    """An engine or a fleet that answers prompts, and the identity of its model."""

    server: "Server"
    fingerprint: Callable[[], str]
