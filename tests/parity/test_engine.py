"""The engine against transformers' own `generate`: greedy answers to 32 prompts that come and go in one engine."""

import dataclasses
import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import reference  # noqa: E402
from cases import LOGITS  # noqa: E402

import ling3  # noqa: E402

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 127, 128, 129, 150)
"""Around pages of 4 tokens, paddings of 16 and chunks of 64; of the other prompts, lengths up to 60 are drawn."""
MOST = 24
"""The longest answer."""


@dataclasses.dataclass(frozen=True)
class Question:
    prompt: list[int]
    max_tokens: int
    answer: list[int]
    """transformers'."""


@pytest.fixture(scope="module")
def questions(open_case):
    """32 prompts whose greedy answers no rounding decides, answered by transformers one at a time.

    By the truth in float64 no token of prompt or answer has its experts within 2e-5 of others, as in `draw_well_posed`,
    and each token of the answer leads the next by more than twice what two correct programs' logits may differ by.
    """
    case = open_case("tiny-like, bound -5.0")
    weights = {name: array.astype(np.float64) for name, array in case.weights.items()}
    found, skipped = [], 0
    for seed in itertools.count():
        draw = np.random.default_rng(seed)
        length = LENGTHS[len(found)] if len(found) < len(LENGTHS) else int(draw.integers(1, 61))
        prompt = draw.integers(0, case.config.vocab_size, length).tolist()
        max_tokens = int(draw.integers(1, MOST + 1))
        answer = generate(case.oracle.model, prompt, max_tokens)
        logits, stages = reference.forward(weights, case.config, prompt + answer)
        margin = min(stage.min() for name, stage in stages.items() if name.endswith(".margin"))
        ranked = np.sort(logits[length - 1 : -1], axis=-1)
        if margin > 2e-5 and np.min(ranked[:, -1] - ranked[:, -2]) > 2 * LOGITS:
            found.append(Question(prompt, max_tokens, answer))
        else:
            skipped += 1
        if len(found) == 32:
            break
    assert skipped < 16, "most prompts are fair: a checkpoint where they are not tests something else"
    return found


def generate(model, prompt, max_tokens):
    """transformers' greedy answer to one prompt, on its own cache."""
    # Without a mask it would hide every id of the prompt that is the pad token's.
    prompt, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, use_cache=True)
    return output[0, prompt.shape[1] :].tolist()


@pytest.fixture(scope="module")
def answers(open_case, questions):
    """The engine's, which has so few pages (the longest question takes 44) that it has to preempt."""
    engine = ling3.Engine(
        open_case("tiny-like, bound -5.0").ling3,
        max_running_requests=8,
        num_pages=48,
        page_size=4,
        chunked_prefill_size=64,
        token_paddings=(16, 64),
        max_model_len=192,
        decode_rows=4,
        decode_steps=2,
    )
    params = [ling3.SamplingParams(max_tokens=question.max_tokens) for question in questions]
    outputs = engine.generate([question.prompt for question in questions], params)
    assert engine.stats().preemptions > 0
    return [list(output.token_ids) for output in outputs]


def test_the_engine_answers_as_transformers_does(questions, answers):
    assert answers == [question.answer for question in questions]
    lengths = {len(question.answer) for question in questions}
    assert len(lengths) > 10, "answers of mixed length"
    assert sum(map(len, answers)) > 200


def test_the_engine_answers_as_one_batch_does(open_case, questions, answers):
    """`ling3.generate` has one `max_tokens` for all: a shorter answer is the beginning of a longer one."""
    rows = ling3.generate(open_case("tiny-like, bound -5.0").ling3, [q.prompt for q in questions], max_tokens=MOST)
    assert answers == [row[: question.max_tokens] for row, question in zip(rows, questions, strict=True)]
