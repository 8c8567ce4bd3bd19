"""The soak of `benchmarks/soak.py`, 200 requests long, and that it would find what it looks for."""

import dataclasses
import gc
from collections import Counter

import jax
import pytest
from scripted_runner import scripted

import ling3
from benchmarks import soak
from ling3.engine.request import Request, TokenSequence

# The longest request takes 18 of the pages: 100 tokens of prompt and 40 of output, the last of which is never cached.
SETTINGS = soak.SETTINGS | {"page_size": 8, "num_pages": 26, "max_model_len": 144}


def short_soak(requests, **options):
    return soak.soak(requests, longest_prompt=100, longest_output=40, settings=SETTINGS, **options)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.optimized
def test_soak():
    """No answer depends on company, arrival, aborts or preemptions, and nothing is left of 200 requests."""
    done = Counter()
    found = short_soak(200, advance=lambda count: done.update(requests=count))
    assert found.differences == []
    assert found.leaks == []
    assert found.memory["arrays"][-1] == found.memory["arrays"][0]
    assert found.compiled == 0
    assert found.preemptions >= 20
    assert found.cached_tokens >= 5 * SETTINGS["chunked_prefill_size"], "the cache is hit, each time for whole chunks"
    assert set(found.aborted) == set(soak.STAGES) and sum(found.aborted.values()) >= 15
    assert sum(found.completions.values()) == found.compared > 200
    assert found.completions["error"] == 0
    assert (done["requests"], found.memory["requests"][-1]) == (200, 200)
    assert max(found.load["waiting"]) > 4
    assert found.figure().get_suptitle().startswith("200 requests")
    assert '"differences": []' in found.summary()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_answer_that_depends_on_company_is_found(monkeypatch):
    """Tokens that are right only in slot 0, which a sequence that is alone has."""
    take = TokenSequence.take

    def taken(self, tokens, *logprobs):
        return take(self, [token + (token > 5) for token in tokens] if self.memory.slot else tokens, *logprobs)

    monkeypatch.setattr(TokenSequence, "take", taken)
    found = short_soak(40)
    assert any("token_ids differ from place" in line for line in found.differences)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_answer_that_is_kept_is_found(monkeypatch):
    kept, output = [], Request.output
    monkeypatch.setattr(Request, "output", lambda self: kept.append(output(self)) or kept[-1])
    found = short_soak(5)
    assert any(line.endswith("objects of RequestOutput are alive, 0 at the beginning") for line in found.leaks)


@pytest.mark.slow
def test_a_page_that_is_lost_is_found(monkeypatch):
    release = ling3.engine.scheduler.Scheduler.release

    def released(self, run, spoiled=False):
        run.memory.pages.pop()
        release(self, run, spoiled)

    monkeypatch.setattr(ling3.engine.scheduler.Scheduler, "release", released)
    with pytest.raises(AssertionError, match="free_pages=25"):
        short_soak(5)


def answer(**changes):
    logprob = ling3.Logprob(5, -0.5, {})
    completion = ling3.Completion(
        index=0,
        text="ab",
        token_ids=(5, 6),
        logprobs=(logprob, dataclasses.replace(logprob, token_id=6)),
        finish_reason="stop",
        stop_reason="cd",
        error=None,
        seed=0,
        timings=ling3.Timings(None, None, None, 0.0, 0),
    )
    return ling3.RequestOutput(0, None, [1], [dataclasses.replace(completion, **changes)])


def compared(**changes):
    """What is found where a completion differs in this from its solo run, and its deltas do not from it."""
    got = answer(**changes)
    request = soak._Asked([1], ling3.SamplingParams(), {0: list(got.outputs[0].token_ids)}, {0: got.text})
    return soak.differences_of(got, answer(), request)


def test_every_difference_is_named():
    assert compared() == []
    assert compared(text="ac")[0].startswith("text is 'ac', alone 'ab'")
    assert compared(finish_reason="length")[0].startswith("finish_reason is 'length', alone 'stop'")
    other = ling3.Logprob(6, -0.5000001, {})
    assert compared(logprobs=(answer().outputs[0].logprobs[0], other))[0].startswith("logprobs differ from place 1 on")
    wrong = soak._Asked([1], ling3.SamplingParams(), {0: [5]}, {0: "ab"})
    assert soak.differences_of(answer(), answer(), wrong)[0].startswith("its deltas brought ((5,), 'ab')")


def test_an_abort_is_a_beginning():
    first = answer().outputs[0].logprobs[:1]
    begun = {"finish_reason": "abort", "stop_reason": None, "token_ids": (5,), "logprobs": first}
    for text in ("", "a", "ab", "abc", "a\N{REPLACEMENT CHARACTER}"):
        assert compared(text=text, **begun) == []
    assert compared(text="b", **begun)[0].startswith("text is 'b', which does not begin 'ab'")
    assert compared(text="a", **begun | {"token_ids": (6,)})[0].startswith("token_ids differ from place 0 on")


def counts(engine):
    """The number of Python's objects by type once the engine has forgotten its prefixes, and of JAX's arrays."""
    engine.forget_prefixes()
    engine._loop.runner.calls.clear()  # the scripted runner's record of all calls
    gc.collect()
    found = Counter(type(each).__qualname__ for each in gc.get_objects())
    return found + Counter({"jax.Array": len(jax.live_arrays())})


@pytest.mark.thorough
def test_what_is_left_does_not_grow_with_requests():
    """Of long and short prompts, with one or two answers, scored or not, and aborted in every stage."""
    engine = scripted()

    def serve(first, requests=60):
        for number in range(first, first + requests):
            params = ling3.SamplingParams(max_tokens=1 + number % 7, seed=number, n=1 + number % 2, logprobs=number % 3)
            asked = engine.submit([6 + number % 300] * (1 + number % 80), params)
            for _ in range(number % 4):
                engine.step()
            if number % 5 == 0:
                engine.abort(asked)
        while engine.has_work:
            engine.step()
        return counts(engine)

    serve(0)
    before, after = serve(60), serve(120)
    # A few objects come and go with threads and with Counter itself; a leak has one for each of 60 requests.
    assert {kind: count - before[kind] for kind, count in after.items() if count > before[kind] + 5} == {}


@pytest.mark.thorough
def test_an_object_per_request_is_found(monkeypatch):
    kept, output = [], Request.output
    monkeypatch.setattr(Request, "output", lambda self: kept.append(output(self)) or kept[-1])
    with pytest.raises(AssertionError, match="RequestOutput"):
        test_what_is_left_does_not_grow_with_requests()
