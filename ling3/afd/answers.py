"""Generating over the engines of several attention workers: prompts are distributed, and tokens returned in order."""

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ling3.afd.messages import WorkerError
from ling3.engine.outputs import Delta
from ling3.engine.sampling_params import SamplingParams, check_prompt, of_generate
from ling3.serve import Engine


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
