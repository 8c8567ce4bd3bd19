"""The scripted runner: it says what its rule says, in any company, and notices memory that is not its own."""

import dataclasses

import pytest
from scripted_runner import after, by_hash, scripted
from small_engine import LONG, PROMPTS, answer, balanced, idle

import ling3


def test_tokens_follow_the_rule():
    (output,) = scripted(after([7, 8, 9, 10])).generate([[7]], ling3.SamplingParams(max_tokens=5, ignore_eos=True))
    assert output.token_ids == (8, 9, 10, 6, 6)


def test_answers_are_the_same_in_any_company_and_after_preemption():
    served = scripted()
    prompts = [*PROMPTS, *([i] * 50 for i in range(40, 44))]
    alone = [answer(scripted().generate([prompt], LONG)[0].outputs[0]) for prompt in prompts]
    assert [answer(output.outputs[0]) for output in served.generate(prompts, LONG)] == alone
    assert served.stats().preemptions > 0 and idle(served)


@pytest.mark.parametrize(("slots", "pages"), [(8, 48), (3, 48), (8, 12)])
def test_a_prompt_of_several_answers_is_prefilled_once(slots, pages):
    """Also where some of them wait for a slot, or are preempted, in company."""
    served = scripted(max_running_requests=slots, num_pages=pages)
    params = dataclasses.replace(LONG, n=6, temperature=1.0, seed=5)
    others = [served.submit(prompt, LONG, on_delta=lambda delta: None) for prompt in PROMPTS[:2]]
    (output,) = served.generate([PROMPTS[0]], params)
    for index, completion in enumerate(output.outputs):
        (alone,) = scripted().generate([PROMPTS[0]], dataclasses.replace(params, n=1, seed=5 + index))
        assert answer(completion) == answer(alone.outputs[0])
        assert completion.cached_tokens in ((0,) if index == 0 else (0, len(PROMPTS[0]) - 1))
    if pages == 48:
        assert [each.cached_tokens for each in output.outputs] == [0] + [len(PROMPTS[0]) - 1] * 5
    for request in others:
        served.abort(request)
    served.step()
    assert balanced(served.stats()) and served.stats().free_pages == pages
    served._loop.scheduler.check()


@pytest.mark.parametrize("where", ["pages", "slots"])
def test_memory_that_was_changed_is_noticed(where):
    served = scripted(by_hash)
    served.submit(list(range(20, 65)), LONG)
    served.step()
    served.step()
    (sequence,), runner = served._loop.scheduler.running, served._loop.runner
    if where == "pages":
        runner.pages[sequence.memory.pages[1], 3] += 1
    else:
        runner.slots[sequence.memory.slot].state.update(b"0")
    with pytest.raises(AssertionError, match="the pages of a sequence hold the tokens that its slot has seen"):
        served.step()
