"""Requests of every kind, the sizes of an engine that serves them, and what of an answer the promise speaks of."""

import functools

import numpy as np
from tiny import TINY

import ling3

SLOTS, PAGES = 6, 48
SETTINGS = {
    "max_running_requests": SLOTS,
    "num_pages": PAGES,
    "page_size": 16,
    "chunked_prefill_size": 32,
    "token_paddings": (16, 32),
    "max_model_len": 160,
    "decode_rows": 4,
    "decode_steps": 4,
}


@functools.cache
def requests(seed=0, vocab=TINY.vocab_size):
    """Prompts and how they are sampled, every kind of sampling among them. Half of the prompts begin alike."""
    draw = np.random.default_rng(seed)
    found, common = [], draw.integers(3, vocab, size=96).tolist()
    for i in range(24):
        params = ling3.SamplingParams(
            max_tokens=int(draw.integers(1, 49)),
            temperature=[0.0, 1.0, 0.6][i % 3],
            top_k=[None, 12][i % 2],
            top_p=[1.0, 0.9, 1.0, 1.0][i % 4],
            min_p=[0.0, 0.0, 0.05][i % 3],
            repetition_penalty=[1.0, 1.2][i % 5 == 0],
            frequency_penalty=[0.0, 0.3][i % 7 == 0],
            logit_bias={7: 2.0} if i % 6 == 1 else None,
            min_tokens=0,
            ignore_eos=i % 4 != 0,
            stop_token_ids=[9, 11] if i % 5 == 2 else [],
            logprobs=[None, 0, 3][i % 3],
            seed=i,
            n=2 if i % 8 == 3 else 1,
        )
        own = draw.integers(3, vocab, size=int(draw.integers(1, 97))).tolist()
        shared = int(draw.integers(0, len(own))) * (i % 2)
        found.append((common[:shared] + own[shared:], params))
    return found


def answer(completion):
    """All of a completion that the promise speaks of; floats compare bit for bit."""
    return completion.token_ids, completion.logprobs, completion.finish_reason, completion.stop_reason


def answers(some, engine):
    """All the requests at once."""
    outputs = engine.generate([prompt for prompt, _ in some], [params for _, params in some])
    return [[answer(completion) for completion in output.outputs] for output in outputs]
