"""Hooks that run when a sequence ends, before its last delta is handed out: snapshots and captures.

The loop calls the functions in `Request.at_end`, and knows nothing else about them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from ling3.engine.outputs import Delta
from ling3.engine.request import NOT_FINITE, Request, TokenSequence
from ling3.engine.requests import Requests
from ling3.engine.sampling_params import MAX_COMPLETIONS, SamplingParams
from ling3.text.detokenizer import StopStrings


def keep_snapshot(loop: Requests, sequence: TokenSequence, delta: Delta) -> bool:
    """Adds a snapshot to the completion; ends it in `error` if the copy fails or has numbers that are not finite."""
    if not _ended_by_itself(sequence):
        return False
    loop.scheduler.group_of(sequence).free_behind(sequence)
    try:
        snapshot = loop.runner.keep(sequence)
    except Exception as error:
        sequence.fail(f"what it remembers could not be copied: {error!r}")
        return False
    if all(map(_is_finite, jax.tree.leaves((snapshot.states, snapshot.pages)))):
        sequence.amend(snapshot=snapshot)
    else:
        sequence.fail(NOT_FINITE)
    return False


def capture_answer(loop: Requests, sequence: TokenSequence, delta: Delta) -> bool:
    """Queues a second request, which prefills prompt and answer again and captures, then hands out the last delta.

    It has the sequence's place in the queue. If it fails or is aborted, so is the answer.
    """
    if not _ended_by_itself(sequence):
        return False
    request = sequence.request
    number = -1 - request.request_id * MAX_COMPLETIONS - sequence.index  # negative, unlike the ids of callers' requests
    params = SamplingParams(max_tokens=0, capture=sequence.params.capture)
    follower = Request(number, None, [*sequence.prompt, *sequence.token_ids], params)
    follower.interventions, follower.want = request.interventions, request.want
    follower.adapter = request.adapter
    watched = TokenSequence(follower, 0, sequence.order, sequence.seed, (), None, StopStrings(()))
    watched.watch()
    follower.sequences.append(watched)

    def hand_over(last: Delta) -> None:
        found = watched.completion
        if last.finish_reason is None or found is None:
            return
        assert sequence.completion is not None, "captured at its end"
        request.fault = request.fault or follower.fault
        now = sequence.times.until_now(len(sequence.token_ids))
        waited = {"total": now.total, "preemptions": now.preemptions + watched.times.preemptions}
        sequence.amend(captured=found.captured, timings=dataclasses.replace(sequence.completion.timings, **waited))
        if found.finish_reason != "length":
            sequence.amend(finish_reason=found.finish_reason, stop_reason=None, error=found.error)
        loop.forget(request)
        loop.hand_out(sequence, sequence.last(delta))

    follower.deliver = hand_over
    request.followers.append(follower)
    loop.queue(follower)
    return True


def _ended_by_itself(sequence: TokenSequence) -> bool:
    return sequence.completion is not None and sequence.completion.finish_reason in ("stop", "length")


def _is_finite(x: Shaped[np.ndarray, "..."]) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.floating) or bool(np.isfinite(x).all())
