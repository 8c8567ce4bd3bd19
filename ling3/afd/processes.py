"""The same workers, each in a process of its own: `jax.distributed` brings them together, and messages go by
`jax.experimental.transfer`.

A message is offered by its sender under a number that both ends count up, and pulled by its receiver, device to device.
So workers need no common step, as a collective over all of them would: a session or an FFN worker waits for the
messages it needs and for nothing else, and each holds its own programs and weights. A pull from a process that is gone
raises at once. A session that is gone is forgotten by the FFN workers; one that misses an FFN worker ends in an error.
"""

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, transfer

from ling3.afd.answers import answers
from ling3.afd.attention_worker import AttentionWorker
from ling3.afd.ffn_worker import FfnWorker
from ling3.afd.messages import GONE, LEAVE, Computed, Failed, Routed
from ling3.afd.plan import REQUESTS, AfdPlan, Device, agree, halve
from ling3.afd.stats import AfdStats, Counts
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.runtime.entry_checks import refuse_fork
from ling3.serve import Engine
from ling3.text.tokenizer import Tokenizer

# The most bytes of an address that processes tell each other.
ADDRESS_BYTES = 64


class Links:
    """This process's connections to the workers of the other group."""

    def __init__(self, device: Device, address: str):
        self._device = device
        self._server = transfer.start_transfer_server(device.client, address, [address])
        own = np.zeros(ADDRESS_BYTES, np.uint8)
        text = self._server.address().encode()
        own[: len(text)] = list(text)
        told = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, ADDRESS_BYTES)
        self._addresses = [bytes(row).rstrip(b"\0").decode() for row in told]
        self._sent = [0] * len(told)

    def send(self, to: int, message: Any) -> None:
        """Offers a message to a process."""
        number = _number(jax.process_index(), to, self._sent[to])
        self._sent[to] += 1
        self._server.await_pull(number, jax.tree.leaves(jax.device_put(message, self._device)))

    def receive(self, peer: int, like: Any, put: Callable[[Any], bool], gone: Callable[[Exception], object]) -> None:
        """Pulls messages of the shapes of `like` from a process, in a thread, until `put` of one returns False.

        `gone` is called if the process is no longer there.
        """
        connection = self._server.connect(self._addresses[peer])
        place = jax.sharding.SingleDeviceSharding(self._device)
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)

        def pull() -> None:
            number = 0
            try:
                while put(jax.block_until_ready(connection.pull(_number(peer, jax.process_index(), number), wanted))):
                    number += 1
            except Exception as error:
                gone(error)

        threading.Thread(target=pull, name=f"ling3-afd-from-{peer}", daemon=True).start()


class AttentionProcess:
    """An attention worker with a process of its own: an engine whose experts are in other processes."""

    def __init__(
        self,
        session: int,
        model: CausalLM,
        tokenizer: Tokenizer | None,
        plan: AfdPlan,
        settings: EngineSettings,
        links: Links,
        device: Device,
        execution: Execution,
    ):
        self._plan, self._counts = plan, Counts(plan)
        cards = range(plan.attention_workers, plan.attention_workers + plan.ffn_workers)
        send = [functools.partial(links.send, process) for process in cards]
        half = jax.device_put(halve(model, plan, []).attention, device)
        self.worker = AttentionWorker(session, half, plan, send, self._counts)
        self.engine = Engine(half, tokenizer, settings, execution=execution, programs=self.worker.programs)
        self._farewells = threading.Semaphore(0)
        like = plan.blank_results()
        for rank, process in enumerate(cards):
            links.receive(process, like, self._put, functools.partial(self._gone, f"FFN worker {rank}"))

    def generate(self, prompts: Iterable[Any], params: SamplingParams | None = None, **fields: Any) -> list[list[int]]:
        """The new token ids of this process's prompts; arguments, results and errors are `System.generate`'s."""
        self._counts.clear()
        names = [f"attention worker {self.worker.session}"]
        return answers(self.worker.model.config, [self.engine], names, prompts, params, **fields)

    def stats(self) -> AfdStats:
        """The counts of the last `generate`; the FFN workers' are in their processes."""
        return self._counts.stats()

    def leave(self) -> None:
        """Tells the FFN workers that this session sends no more, and waits until all know."""
        self.worker.leave()
        for _ in range(self._plan.ffn_workers):
            self._farewells.acquire()

    def __enter__(self) -> "AttentionProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _put(self, message: Computed) -> bool:
        """Takes a message; False if it is the last of its sender."""
        if int(message.epoch) == GONE:
            self._farewells.release()
            return False
        self.worker.inbox.put(message)
        return True

    def _gone(self, name: str, error: Exception) -> None:
        self.worker.inbox.put(Failed(name, error))
        self._farewells.release()


class FfnProcess:
    """An FFN worker with a process of its own."""

    def __init__(self, rank: int, model: CausalLM, plan: AfdPlan, links: Links, device: Device, execution: Execution):
        self._counts = Counts(plan)
        share = jax.device_put(halve(model, plan, [rank]).shares[0], device)
        deliver = [functools.partial(links.send, session) for session in range(plan.attention_workers)]
        self.worker = FfnWorker(rank, share, plan, deliver, self._counts, execution)
        like = plan.blank_tokens()
        for session in range(plan.attention_workers):
            links.receive(session, like, self._put, functools.partial(self._gone, like, session))

    def serve(self) -> None:
        """Runs experts until every session has left or is gone."""
        self.worker.serve()

    def stats(self) -> AfdStats:
        """The counts so far; the attention workers' are in their processes."""
        return self._counts.stats()

    def _put(self, message: Routed) -> bool:
        header = np.asarray(message.header)
        self.worker.inbox.put(message._replace(header=header))
        return int(header[0]) != LEAVE

    def _gone(self, like: Routed, session: int, error: Exception) -> None:
        """A session that is gone has left, as far as this worker is concerned."""
        header = np.asarray([LEAVE, session, GONE, 0, 0], np.int32)
        self.worker.inbox.put(like._replace(header=header))


def join(
    model: CausalLM,
    tokenizer: Tokenizer | None = None,
    *,
    attention_workers: Any,
    ffn_workers: Any,
    micro_batches: Any = 2,
    activations: Any = "exact",
    settings: EngineSettings | None = None,
    execution: Execution | None = None,
    address: str = "127.0.0.1:0",
) -> AttentionProcess | FfnProcess:
    """This process's part in a disaggregated model: called by every process, after `jax.distributed.initialize`.

    The first `attention_workers` processes are those, and the others the FFN workers: each keeps its own half of the
    model, which is to be the same everywhere, and the other arguments too. An attention worker then generates and
    `leave`s, an FFN worker `serve`s. `address` is where this process is reached by the others, with port 0 for any.
    The first process has JAX's coordinator in it: it should be the last to end, since its end ends the others.

        jax.distributed.initialize(coordinator, num_processes=4, process_id=i)
        worker = ling3.afd.join(model, attention_workers=2, ffn_workers=2)
        if isinstance(worker, ling3.afd.FfnProcess):
            worker.serve()
        else:
            with worker:
                print(worker.generate(prompts, max_tokens=64))

    Raises ValueError as `disaggregate` does, and for another number of processes.
    """
    refuse_fork()
    settings = EngineSettings(max_running_requests=REQUESTS) if settings is None else settings
    plan = agree(model, attention_workers, ffn_workers, micro_batches, settings.max_running_requests, activations)
    if jax.process_count() != attention_workers + ffn_workers:
        raise ValueError(
            f"attention_workers is {attention_workers} and ffn_workers {ffn_workers}, but jax.distributed has "
            f"{jax.process_count()} processes, expected one for each worker"
        )
    device, process = jax.local_devices()[0], jax.process_index()
    execution = Execution.default() if execution is None else execution
    links = Links(device, address)
    with jax.default_device(device):
        if process >= attention_workers:
            return FfnProcess(process - attention_workers, model, plan, links, device, execution)
        own = plan.settings(settings)
        return AttentionProcess(process, model, tokenizer, plan, own, links, device, execution)


def _number(sender: int, receiver: int, count: int) -> int:
    """The number of a message, by which it is pulled."""
    return sender << 48 | receiver << 32 | count % 2**32
