"""The scripted runner: it says what its rule says, in any company, and notices memory that is not its own."""

import pytest
from scripted_runner import after, by_hash, scripted
from small_engine import LONG, PROMPTS, answer, idle

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
