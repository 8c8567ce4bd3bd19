"""Many requests at once, each with its deltas as they come."""

import itertools
import time

import pytest
from scripted_runner import after, scripted
from small_engine import answer, idle

from ling3 import SamplingParams

PROMPTS = [[3], [7, 8, 9] * 9, "12 + 3", [{"role": "user", "content": "a"}], [11] * 40, [6, 6]]
PARAMS = [SamplingParams(max_tokens=m, ignore_eos=True, seed=m, temperature=1.0) for m in (5, 1, 30, 12, 9, 17)]


@pytest.fixture(scope="module")
def busy():
    return scripted()


def outputs(deltas):
    """Each prompt's output and the token ids of its deltas; nothing comes after a request's last delta."""
    found, tokens = {}, {}
    for index, delta in deltas:
        assert index not in found
        tokens.setdefault(index, []).extend(delta.token_ids)
        if delta.output is not None:
            found[index] = delta.output
    assert all(tokens[index] == list(output.token_ids) for index, output in found.items())
    return [found[index] for index in range(len(found))]


@pytest.mark.parametrize("arrivals", [None, [0.0, 0.0, 0.01, 0.05, 0.3, 0.3]])
def test_every_prompt_has_its_answer(busy, arrivals):
    alone = [busy.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    found = outputs(busy.stream_all(PROMPTS, PARAMS, arrivals=arrivals))
    assert [answer(output.outputs[0]) for output in found] == [answer(output.outputs[0]) for output in alone]
    assert idle(busy)


def test_the_queue_may_be_shorter_than_the_list(busy):
    short = scripted(max_queue=1)
    found = outputs(short.stream_all(PROMPTS, PARAMS))
    assert [output.token_ids for output in found] == [o.token_ids for o in outputs(busy.stream_all(PROMPTS, PARAMS))]
    assert idle(short)


def test_several_completions_are_one_request(busy):
    (output,) = outputs(delta for delta in busy.stream_all([[3]], SamplingParams(max_tokens=3, n=1)))
    several = list(busy.stream_all([[3], [4]], SamplingParams(max_tokens=3, n=2, ignore_eos=True)))
    assert [sum(index == i and delta.output is not None for index, delta in several) for i in (0, 1)] == [1, 1]
    assert output.finish_reason in ("length", "stop") and idle(busy)


def test_all_prompts_are_checked_when_it_is_called(busy):
    before = busy.stats()
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        busy.stream_all([[3], []])
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        busy.stream_all([[3]], PARAMS[:2])
    with pytest.raises(ValueError, match="arrivals"):
        busy.stream_all([[3], [4]], arrivals=[0.0])
    busy.stream_all(PROMPTS, PARAMS)  # never begun
    assert busy.stats() == before and list(busy.stream_all([])) == []


def test_answers_take_what_room_there_is(busy):
    cut, whole = outputs(
        busy.stream_all([[3] * 250, [3]], SamplingParams(max_tokens=9, ignore_eos=True), truncate="output")
    )
    assert (len(cut.token_ids), len(whole.token_ids)) == (6, 9)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_leaving_aborts_what_is_unfinished(busy, taken):
    deltas = busy.stream_all(PROMPTS, PARAMS, arrivals=[0.0, 0.0, 0.0, 0.0, 100.0, 100.0])
    assert len(list(itertools.islice(deltas, taken))) == taken
    deltas.close()
    assert idle(busy)


def test_requests_come_when_they_are_due_and_waiting_takes_no_time_of_the_processor():
    """From a request's arrival, and not from the end of the one before."""
    said = scripted(after([7, 8, 9, 5]))
    begin, used, seen = time.perf_counter(), time.process_time(), {}
    for index, delta in said.stream_all([[7], [7]], arrivals=[0.0, 0.8]):
        seen.setdefault(index, time.perf_counter() - begin)
        assert delta.output is None or tuple(delta.output.token_ids) == (8, 9, 5)
    assert seen[0] < 0.8 <= seen[1]
    assert time.process_time() - used < 0.6
