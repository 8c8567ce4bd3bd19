"""Work of an engine when a sequence of a request ends, before its last delta is handed out: snapshots and captures.

The loop calls the functions of `Request.at_end`, and knows no more of them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from ling3.engine.outputs import Delta
from ling3.engine.request import NOT_FINITE, Request, TokenSequence
from ling3.engine.requests import Requests
from ling3.engine.sampling_params import MAX_COMPLETIONS, SamplingParams
from ling3.text.detokenizer import StopStrings


def keep_snapshot(loop: Requests, sequence: TokenSequence, delta: Delta) -> Delta:
    """The last delta with a snapshot of the sequence; in `error` if it is not finite, or there is no memory for it."""
    if delta.finish_reason not in ("stop", "length"):
        return delta
    loop.scheduler.group_of(sequence).free_behind(sequence)
    try:
        snapshot = loop.runner.keep(sequence)
    except Exception as error:
        return _failed(sequence, delta, f"what it remembers could not be copied: {error!r}")
    if not all(map(_is_finite, jax.tree.leaves((snapshot.states, snapshot.pages)))):
        return _failed(sequence, delta, NOT_FINITE)
    sequence.amend(snapshot=snapshot)
    return dataclasses.replace(delta, output=sequence.request.output())


def capture_answer(loop: Requests, sequence: TokenSequence, delta: Delta) -> Delta | None:
    """Has prompt and answer computed again by a second request, which captures; that one hands out the last delta.

    It has the sequence's place in the queue. What ends it otherwise ends the answer too.
    """
    if delta.finish_reason not in ("stop", "length"):
        return delta
    request = sequence.request
    number = -1 - request.request_id * MAX_COMPLETIONS - sequence.index  # no request of a caller's has it
    params = SamplingParams(max_tokens=0, capture=sequence.params.capture)
    follower = Request(number, None, [*sequence.prompt, *sequence.token_ids], params)
    follower.interventions, follower.want = request.interventions, request.want
    watched = TokenSequence(follower, 0, sequence.order, sequence.seed, (), None, StopStrings(()))
    watched.watch()
    follower.sequences.append(watched)

    def hand_over(receiver: Callable[[], Callable[[Delta], None]], last: Delta) -> None:
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
        reason = sequence.completion.finish_reason
        receiver()(dataclasses.replace(delta, finish_reason=reason, output=request.output()))

    follower.deliver = functools.partial(hand_over, lambda: request.deliver)
    follower.report = functools.partial(hand_over, lambda: request.report)
    request.followers.append(follower)
    loop.queue(follower)
    return None


def _failed(sequence: TokenSequence, delta: Delta, error: str) -> Delta:
    """The last delta in `error`, with the text and the tokens of the one that was to be it."""
    sequence.fail(error)
    return dataclasses.replace(delta, finish_reason="error", output=sequence.request.output())


def _is_finite(x: Shaped[np.ndarray, "..."]) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.floating) or bool(np.isfinite(x).all())
