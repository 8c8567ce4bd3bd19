"""Disaggregation within one process: attention and experts on different devices, and a thread for each worker.

Prompts are distributed over the engines of the attention workers, and their tokens returned in order.
"""

import dataclasses
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ling3.afd.attention_worker import AttentionWorker
from ling3.afd.ffn_worker import FfnWorker
from ling3.afd.messages import Failed, WorkerError
from ling3.afd.plan import REQUESTS, AfdPlan, Device, ExpertShard, agree, halve
from ling3.afd.stats import AfdStats, Counts
from ling3.engine.outputs import Delta
from ling3.engine.sampling_params import SamplingParams, check_prompt, of_generate
from ling3.engine.settings import EngineSettings
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.runtime.entry_checks import refuse_fork
from ling3.serve import Engine
from ling3.text.tokenizer import Tokenizer


class System:
    """The attention workers and FFN workers of one model, made by `disaggregate`.

    Each attention worker has an engine in `engines`, without the optional parts of a batch (grammars, interventions);
    `generate` distributes prompts over them. Use it in a `with` block, or call `close`.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None,
        plan: AfdPlan,
        settings: EngineSettings,
        execution: Execution,
        devices: Sequence[Device],
    ):
        self.plan, self._counts = plan, Counts(plan)
        attention_devices, ffn_devices = devices_of(plan, devices)
        halves = halve(model, plan, range(plan.ffn_workers))
        cards: list[FfnWorker] = []
        sessions: list[AttentionWorker] = []
        deliver: list[Callable[[Any], object]] = []
        for rank, (device, share) in enumerate(zip(ffn_devices, halves.shares, strict=True)):
            own = jax.device_put(share, device)
            with jax.default_device(device):
                cards.append(FfnWorker(rank, own, plan, deliver, self._counts, execution))
        send = [functools.partial(_carry, card, to) for card, to in zip(cards, ffn_devices, strict=True)]
        for session, device in enumerate(attention_devices):
            own = jax.device_put(halves.attention, device)
            with jax.default_device(device):
                sessions.append(AttentionWorker(session, own, plan, send, self._counts))
            deliver.append(functools.partial(_carry, sessions[-1], device))
        self.attention_workers: tuple[CausalLM, ...] = tuple(worker.model for worker in sessions)
        """The weights of each attention worker: the model without its routed experts."""
        self.ffn_workers: tuple[ExpertShard, ...] = tuple(card.share for card in cards)
        """The weights of each FFN worker: its share of every sparse layer's experts."""
        inboxes, replies = ([worker.inbox for worker in group] for group in (cards, sessions))
        failed = functools.partial(_tell, [*inboxes, *replies])
        threads = [
            threading.Thread(target=_serve, args=(card, device, failed), name=f"ling3-ffn-{card.rank}", daemon=True)
            for card, device in zip(cards, ffn_devices, strict=True)
        ]
        self._close = weakref.finalize(self, _stop, inboxes, replies, threads)
        for thread in threads:
            thread.start()
        self.engines: tuple[Engine, ...] = ()
        for worker, device in zip(sessions, attention_devices, strict=True):
            with jax.default_device(device):
                self.engines += (worker.engine(tokenizer, settings, execution),)

    def generate(self, prompts: Iterable[Any], params: SamplingParams | None = None, **fields: Any) -> list[list[int]]:
        """The new token ids of each prompt, as `ling3.generate` returns them; prompt i runs in session i mod A.

        Raises ParameterError as that function does, before any work; WorkerError, naming the worker, if one fails,
        after the requests of the other sessions are complete.
        """
        self._counts.clear()
        engines = {f"attention worker {session}": engine for session, engine in enumerate(self.engines)}
        return answers(engines, prompts, params, **fields)

    def stats(self) -> AfdStats:
        """The counts of the last `generate`."""
        return self._counts.stats()

    def close(self) -> None:
        """Stops the FFN workers; unfinished and later requests end in an error. May be called more than once."""
        self._close()

    def __enter__(self) -> "System":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def disaggregate(
    model: CausalLM,
    tokenizer: Tokenizer | None = None,
    *,
    attention_workers: Any = 1,
    ffn_workers: Any = 1,
    micro_batches: Any = 2,
    activations: Any = "exact",
    settings: EngineSettings | None = None,
    execution: Execution | None = None,
    devices: Sequence[Device] | None = None,
) -> System:
    """Puts a model's attention on some devices and its routed experts on others (MegaScale-Infer, arXiv 2504.02263).

    Every attention worker has the model without its routed experts, an engine and the caches of its requests; every FFN
    worker has its share of each layer's experts. A session has up to `micro_batches` in flight: while the experts of
    one run, it runs attention on another. `activations` is "exact", or "int8", which sends tokens to the experts in 8
    bits with one scale per token and changes answers. Workers are distributed over `devices` (by default all of JAX's):
    one each if there are enough; otherwise workers of the same group share devices, and with a single device all do.

    Raises ValueError for a model without routed experts, and for counts that do not fit it.
    """
    refuse_fork()
    settings = EngineSettings(max_running_requests=REQUESTS) if settings is None else settings
    plan = agree(model, attention_workers, ffn_workers, micro_batches, settings.max_running_requests, activations)
    execution = Execution.default() if execution is None else execution
    return System(model, tokenizer, plan, settings, execution, devices or jax.devices())


def devices_of(plan: AfdPlan, devices: Sequence[Device]) -> tuple[list[Device], list[Device]]:
    """The device of each attention worker and of each FFN worker."""
    attention, ffn = plan.attention_workers, plan.ffn_workers
    if len(devices) >= attention + ffn:
        return list(devices[:attention]), list(devices[attention : attention + ffn])
    if len(devices) == 1:
        return [devices[0]] * attention, [devices[0]] * ffn
    cut = min(max(1, len(devices) * attention // (attention + ffn)), len(devices) - 1)
    ours, theirs = devices[:cut], devices[cut:]
    return [ours[i % len(ours)] for i in range(attention)], [theirs[i % len(theirs)] for i in range(ffn)]


def _carry(worker: AttentionWorker | FfnWorker, to: Device, message: Any) -> None:
    """Puts a message into the inbox of a worker whose device is `to`; headers stay on the host."""
    worker.inbox.put(jax.tree.map(lambda x: jax.device_put(x, to) if isinstance(x, jax.Array) else x, message))


def _serve(card: FfnWorker, device: Device, failed: Callable[[Failed], object]) -> None:
    """The function that an FFN worker's thread runs."""
    try:
        with jax.default_device(device):
            card.serve()
    except WorkerError:  # another worker failed, and has reported it to all
        pass
    except Exception as error:
        failed(Failed(f"FFN worker {card.rank}", error))


def _tell(inboxes: Iterable["queue.SimpleQueue[Any]"], message: Any) -> None:
    """Puts a message into several inboxes."""
    for inbox in inboxes:
        inbox.put(message)


def _stop(
    cards: Sequence["queue.SimpleQueue[Any]"],
    sessions: Sequence["queue.SimpleQueue[Any]"],
    threads: Sequence[threading.Thread],
) -> None:
    """Ends the FFN workers' threads after their current batches, then sends every session a `Failed`."""
    _tell(cards, None)
    for thread in threads:
        thread.join()
    _tell(sessions, Failed("the system", RuntimeError("it was closed")))


def answers(
    engines: Mapping[str, Engine],
    prompts: Iterable[Any],
    params: SamplingParams | None = None,
    **fields: Any,
) -> list[list[int]]:
    """The new token ids of each prompt, by `ling3.generate`'s parameters; prompt i runs on engine i mod count.

    Raises ParameterError before any work; WorkerError, naming the worker, if one fails; and FloatingPointError if a
    request ends in an error, as when its logits are not finite. Other engines' requests are completed first.
    """
    count, each = len(engines), list(engines.values())
    common = of_generate(params, fields)
    vocab = each[0].intake.vocab
    common.check(vocab, each[0].intake.ends)
    ids, wanted = [], []
    for i, prompt in enumerate(prompts):
        ids.append(check_prompt(prompt, vocab, f"prompt {i}"))
        wanted.append(dataclasses.replace(common, seed=(common.seed or 0) + i))
        each[i % count].check(ids[i], wanted[i], name=f"prompt {i}")
    stopping = threading.Event()
    with ThreadPoolExecutor(count, thread_name_prefix="ling3-afd") as callers:
        runs = [callers.submit(_run, each[i], ids[i::count], wanted[i::count], stopping) for i in range(count)]
        try:
            errors = [run.exception() for run in runs]
        except BaseException:
            stopping.set()
            raise
    for name, error in zip(engines, errors, strict=True):
        if isinstance(error, WorkerError | FloatingPointError):
            raise error
        if error is not None:
            raise WorkerError(f"{name} failed: {error!r}") from error
    results: list[list[int]] = [[] for _ in ids]
    for i, run in enumerate(runs):
        results[i::count] = run.result()
    return results


def _run(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], stopping: threading.Event
) -> list[list[int]]:
    """The new tokens of one engine's prompts; ends with InterruptedError once `stopping` is set."""

    def heed(delta: Delta) -> None:
        if stopping.is_set():
            raise InterruptedError("generate was interrupted")

    outputs = engine.generate(prompts, params, on_delta=heed) if prompts else []
    for output in outputs:
        if output.finish_reason == "error" and not stopping.is_set():
            raise FloatingPointError(output.error)
    return [list(output.token_ids) for output in outputs]
