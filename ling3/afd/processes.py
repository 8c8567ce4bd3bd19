"""Disaggregation with one process per worker: `jax.distributed` connects the processes, and
`jax.experimental.transfer` carries their messages.

A sender offers each message under a number that both ends count up, and the receiver pulls it, device to device. So
workers need no common step, as a collective over all of them would: a session or an FFN worker waits only for the
messages that it needs, and each has its own programs and weights. A pull from a process that is gone raises at once:
FFN workers then count that session as having left; a session whose FFN worker is gone ends in an error.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils, transfer

from ling3.afd.attention_worker import AttentionWorker
from ling3.afd.ffn_worker import FfnWorker
from ling3.afd.messages import GONE, Failed
from ling3.afd.plan import REQUESTS, Device, agree, halve
from ling3.afd.stats import AfdStats, Counts
from ling3.afd.system import answers
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.runtime.entry_checks import refuse_fork
from ling3.serve import Engine
from ling3.text.tokenizer import Tokenizer

# The longest address of a process, in bytes.
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
        """Offers a message to a process, which pulls it."""
        number = _number(jax.process_index(), to, self._sent[to])
        self._sent[to] += 1
        self._server.await_pull(number, jax.tree.leaves(jax.device_put(message, self._device)))

    def receive(
        self, peer: int, like: Any, put: Callable[[Any], object], gone: Callable[[Exception], Any]
    ) -> threading.Thread:
        """Pulls messages with the shapes of `like` from a process, in a thread that ends after the sender's last one.

        Calls `put` with each message, or with `gone(error)` if the process is no longer there.
        """
        connection = self._server.connect(self._addresses[peer])
        place = jax.sharding.SingleDeviceSharding(self._device)
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)

        def pull() -> None:
            try:
                for number in itertools.count():
                    message = connection.pull(_number(peer, jax.process_index(), number), wanted)
                    put(jax.block_until_ready(message))
                    if int(message.epoch) == GONE:
                        return
            except Exception as error:
                put(gone(error))

        thread = threading.Thread(target=pull, name=f"ling3-afd-from-{peer}", daemon=True)
        thread.start()
        return thread


class AttentionProcess:
    """The attention worker of this process: an engine whose routed experts are in other processes."""

    def __init__(self, worker: AttentionWorker, engine: Engine, links: Links):
        self.worker, self.engine = worker, engine
        plan = worker.plan
        self._receiving = [
            links.receive(
                plan.attention_workers + rank,
                plan.last_computed(),
                worker.inbox.put,
                functools.partial(Failed, f"FFN worker {rank}"),
            )
            for rank in range(plan.ffn_workers)
        ]

    def generate(self, prompts: Iterable[Any], params: SamplingParams | None = None, **fields: Any) -> list[list[int]]:
        """The new token ids of this process's prompts; arguments, results and errors are those of `System.generate`."""
        self.worker.counts.clear()
        return answers({f"attention worker {self.worker.session}": self.engine}, prompts, params, **fields)

    def stats(self) -> AfdStats:
        """The counts of the last `generate`; the FFN workers' processes have theirs."""
        return self.worker.counts.stats()

    def leave(self) -> None:
        """Tells the FFN workers that this session sends no more, and waits until all have confirmed."""
        self.worker.leave()
        for thread in self._receiving:
            thread.join()

    def __enter__(self) -> "AttentionProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class FfnProcess:
    """The FFN worker of this process."""

    def __init__(self, worker: FfnWorker, links: Links):
        self.worker = worker
        for session in range(worker.plan.attention_workers):
            last = worker.plan.last_routed(session)  # a session whose process is gone has left
            links.receive(session, last, worker.inbox.put, lambda error, last=last: last)

    def serve(self) -> None:
        """Runs experts until every session has left or is gone."""
        self.worker.serve()

    def stats(self) -> AfdStats:
        """The counts so far; the attention workers' processes have theirs."""
        return self.worker.counts.stats()


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
    """This process's worker of a disaggregated model; every process calls it, after `jax.distributed.initialize`.

    The first `attention_workers` processes are attention workers, the others FFN workers; each keeps its half of the
    model. The model and all arguments but `address` must be the same in all processes. An attention worker then calls
    `generate` and `leave`, an FFN worker `serve`. Others reach this process at `address`; port 0 takes any free one.
    The first process runs JAX's coordinator: it should be the last to end, since its end ends the others.

        jax.distributed.initialize(coordinator, num_processes=4, process_id=i)
        worker = ling3.afd.join(model, attention_workers=2, ffn_workers=2)
        if isinstance(worker, ling3.afd.FfnProcess):
            worker.serve()
        else:
            with worker:
                print(worker.generate(prompts, max_tokens=64))

    Raises ValueError as `disaggregate` does, and unless there are as many processes as workers.
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
    sessions = range(attention_workers)
    with jax.default_device(device):
        if process not in sessions:
            rank = process - attention_workers
            deliver = [functools.partial(links.send, session) for session in sessions]
            share = jax.device_put(halve(model, plan, [rank]).shares[0], device)
            return FfnProcess(FfnWorker(rank, share, plan, deliver, Counts(plan), execution), links)
        send = [functools.partial(links.send, attention_workers + rank) for rank in range(ffn_workers)]
        half = jax.device_put(halve(model, plan, []).attention, device)
        worker = AttentionWorker(process, half, plan, send, Counts(plan))
        return AttentionProcess(worker, worker.engine(tokenizer, settings, execution), links)


def _number(sender: int, receiver: int, count: int) -> int:
    """The number under which a message is offered and pulled."""
    return sender << 48 | receiver << 32 | count % 2**32
