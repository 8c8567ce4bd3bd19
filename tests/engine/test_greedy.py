"""The engine's greedy answers are those of `ling3.generate`, whose shapes, and so whose roundings, are its own."""

import numpy as np
import pytest
from tiny import TINY, open_model

import ling3

# Around pages of 16 tokens and chunks of 32; the longest takes 19 pages and 9 chunks.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 288)
MOST = 24


@pytest.fixture(scope="module")
def questions():
    """Prompts, and how long their answers may be: 24 tokens for the longest."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, TINY.vocab_size, length).tolist() for length in LENGTHS]
    return prompts, [*draw.integers(1, MOST + 1, len(prompts) - 1).tolist(), MOST]


@pytest.fixture(scope="module")
def answers(questions):
    engine = ling3.Engine(
        open_model(TINY),
        max_running_requests=4,
        num_pages=22,
        page_size=16,
        chunked_prefill_size=32,
        token_paddings=(16, 32),
        max_model_len=320,
        decode_rows=4,
        decode_steps=4,
    )
    prompts, most = questions
    params = [ling3.SamplingParams(max_tokens=count, logprobs=2) for count in most]
    outputs = engine.generate(prompts, params)
    return [output.outputs[0] for output in outputs]


@pytest.mark.slow
def test_one_batch_answers_alike(questions, answers):
    """`generate` has one `max_tokens` for all: a shorter answer is the beginning of a longer one."""
    prompts, most = questions
    rows = ling3.generate(open_model(TINY), prompts, max_tokens=MOST)
    assert [list(answer.token_ids) for answer in answers] == [
        row[:count] for row, count in zip(rows, most, strict=True)
    ]
    assert len({len(answer.token_ids) for answer in answers}) > 6


@pytest.mark.thorough
def test_no_answer_hung_on_rounding(answers):
    """Each token led the next by far more than the 1e-5 that float32's rounding makes of such logits."""
    for answer in answers:
        for first, second in (tuple(logprob.top.values()) for logprob in answer.logprobs):
            assert first - second > 1e-3
