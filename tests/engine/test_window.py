"""Pages behind a sliding window are freed, and no bit of an answer shows it."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively

import ling3
from ling3.cache import map_pages
from ling3.engine.memory import Footprint
from ling3.engine.scheduler import Scheduler
from ling3.engine.settings import EngineSettings
from ling3.engine.shapes import settle
from ling3.execution import PLAIN
from ling3.families.mistral import MistralConfig
from ling3.families.qwen2 import Qwen2Config

pytestmark = pytest.mark.thorough

WINDOW, CHUNK, LENGTH = 24, 16, 320
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
    "hidden_act": "silu",
}
SETTINGS = {
    "chunked_prefill_size": CHUNK,
    "token_paddings": (CHUNK,),
    "max_model_len": LENGTH,
    "decode_steps": 4,
}
# A decode call with a row for every slot, and one of more rows than share an iteration of attention.
ROWS = {8: {"max_running_requests": 4, "decode_rows": 4}, 32: {"max_running_requests": 10, "decode_rows": 9}}
# Tokens of a call and of the window before them: 39. In pages of 8 they are in up to 6, in pages of 32 in up to 3.
MOST = {8: 6, 32: 3}
both_sizes = pytest.mark.parametrize("page_size", exhaustively([8, 32], but=[8]))


@functools.cache
def model():
    return ling3.init(MistralConfig.from_dict(SIZES), key=jax.random.key(0), dtype=jnp.float32)


def new_engine(page_size, pages, **changes):
    changes = {"prefix_cache": False, **changes}
    return ling3.Engine(model(), None, **SETTINGS, **ROWS[page_size], page_size=page_size, num_pages=pages, **changes)


@functools.cache
def engine(page_size):
    """One for all tests, with pages for a sequence that keeps all of its own."""
    return new_engine(page_size, LENGTH // page_size)


def served_by(page_size, pages):
    """The engine with an empty pool of so many pages."""
    served = engine(page_size)
    served._loop.scheduler = Scheduler(dataclasses.replace(served._loop.runner.shapes, pages=pages))
    return served


@functools.cache
def requests():
    """Long prompts and short ones, long answers and short ones; some that end early, several sampled."""
    draw = np.random.default_rng(0)
    found = []
    for i, (prompt, tokens) in enumerate([(200, 100), (1, 90), (60, 1), (24, 40), (130, 25), (7, 33), (90, 60)]):
        params = ling3.SamplingParams(
            max_tokens=tokens,
            temperature=[0.0, 1.0][i % 2],
            seed=i,
            logprobs=0,
            stop_token_ids=list(range(3, 9)) if i == 6 else [],
            n=2 if i == 5 else 1,
        )
        found.append((draw.integers(3, 96, size=prompt).tolist(), params))
    return found


def answer(output):
    """What the promise speaks of; floats compare bit for bit."""
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]


def answers(some, served):
    """Tokens and log-probabilities of requests that run together."""
    outputs = served.generate([prompt for prompt, _ in some], [params for _, params in some])
    return [answer(output) for output in outputs]


@functools.cache
def expected(page_size):
    """Each request alone, keeping all its pages."""
    lonely = new_engine(page_size, LENGTH // page_size)
    unwindowed = {"slots": 1, "window": None, "most_pages": LENGTH // page_size}
    lonely._loop.scheduler = Scheduler(dataclasses.replace(lonely._loop.runner.shapes, **unwindowed))
    return [answers([request], lonely)[0] for request in requests()]


def whole(served):
    """True if every slot and page is free."""
    stats = served.stats()
    served._loop.scheduler.check()
    return (stats.free_slots, stats.free_pages) == (stats.slots, stats.pages)


@both_sizes
def test_the_engine_knows_the_window(page_size):
    scheduler = new_engine(page_size, 4)._loop.scheduler
    shapes = scheduler.groups[0].shapes
    assert (shapes.window, shapes.most_pages) == (WINDOW, MOST[page_size])


@both_sizes
def test_a_long_sequence_fits_into_few_pages(page_size):
    """300 tokens in the pages of 39, with the bits of a sequence that keeps all its pages."""
    served = served_by(page_size, MOST[page_size])
    prompt, params = requests()[0]
    assert len(prompt) + params.max_tokens > 5 * page_size * MOST[page_size] / 4
    request, held = served.submit(prompt, params), set()
    outputs = []
    while served.has_work:
        outputs += [delta.output for delta in served.step() if delta.output is not None]
        held |= {len(sequence.memory.pages) for sequence in served._loop.scheduler.running}
        served._loop.scheduler.check()
    assert [output.request_id for output in outputs] == [request]
    assert max(held) <= MOST[page_size]
    assert answer(outputs[0]) == expected(page_size)[0]
    assert outputs[0].outputs[0].timings.preemptions == 0
    assert whole(served)


@both_sizes
def test_the_answers_are_the_models(page_size):
    """Log-probabilities of the engine are those of the model over the whole sequence, without a cache."""
    (prompt, _), (tokens, logprobs, _) = requests()[0], expected(page_size)[0][0]
    logits = model()(jnp.asarray([[*prompt, *tokens]], jnp.int32))[0, len(prompt) - 1 : -1]
    of_tokens = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens, jnp.int32)[:, None], axis=1)[:, 0]
    # Logits of standard deviation near 1 in float32, through two layers.
    np.testing.assert_allclose([one.logprob for one in logprobs], of_tokens, atol=1e-4)


@both_sizes
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_any_company_and_preemption_change_nothing(page_size, spare):
    """In the fewest pages with which an engine works at all, and in a few more; some are preempted in their prompts."""
    served = served_by(page_size, MOST[page_size] + spare)
    before = served.stats().preemptions
    assert answers(requests(), served) == expected(page_size)
    assert served.stats().preemptions > before or spare == 5
    assert whole(served)


@both_sizes
def test_preemption_at_any_turn_changes_nothing(page_size):
    """One sequence is swapped out before every third turn, some in their prompts, and some with freed pages."""
    served, found, freed = served_by(page_size, LENGTH // page_size), {}, set()
    loop = served._loop
    asked = [served.submit(*request) for request in requests()]
    for turn in itertools.takewhile(lambda _: served.has_work, itertools.count()):
        if turn % 3 == 2:
            calls, loop.in_flight = loop.in_flight, []
            for call in calls:
                loop._read(call)
            if running := loop.scheduler.running:
                some = running[turn % len(running)]
                loop._preempt(some)
                freed.add((some.decoding, some.memory.first_page > 0))
        for delta in served.step():
            if delta.output is not None:
                found[delta.request_id] = delta.output
    assert [answer(found[which]) for which in asked] == expected(page_size)
    assert freed == {(decoding, behind) for decoding in (False, True) for behind in (False, True)}
    assert whole(served)


@both_sizes
def test_nan_in_freed_pages_changes_nothing(page_size):
    """NaN in every free page before every turn: those behind a window are free, or another sequence's."""
    served = served_by(page_size, MOST[page_size] + 2)
    asked = {served.submit(*request): which for which, request in enumerate(requests())}
    runner = served._loop.runner
    while served.has_work:
        free = [*served._loop.scheduler.groups[0].free_pages, *range(MOST[page_size] + 2, LENGTH // page_size)]

        def poisoned(x, free=free):
            x = np.array(x)
            x[free] = np.nan
            return jnp.asarray(x)

        runner.pool = eqx.tree_at(lambda p: p.layers, runner.pool, map_pages(poisoned, runner.pool.layers))
        for delta in served.step():
            if delta.output is not None:
                which = asked.pop(delta.request_id)
                assert answer(delta.output) == expected(page_size)[which]
    assert not asked


def test_a_layer_without_a_window_keeps_all_pages():
    def window(**changes):
        shapes = eqx.filter_eval_shape(
            lambda: ling3.init(Qwen2Config.from_dict({**SIZES, **changes}), key=jax.random.key(0), dtype=jnp.float32)
        )
        return Footprint.of(shapes, EngineSettings(page_size=8)).window

    assert window(use_sliding_window=True, max_window_layers=0) == WINDOW
    assert window(use_sliding_window=True, max_window_layers=1) is None
    assert window(use_sliding_window=False) is None


@pytest.mark.parametrize("page_size", [1, 3, 8, 64])
@pytest.mark.parametrize("window", [1, 2, 8, 30])
@pytest.mark.parametrize(("chunk", "steps"), [(1, 1), (1, 6), (16, 8)])
@pytest.mark.parametrize("kept", [1, 2])
def test_most_pages_are_those_of_the_widest_call(page_size, window, chunk, steps, kept):
    """Pages that are freed one by one, or two together."""
    settings = EngineSettings(
        page_size=page_size, chunked_prefill_size=chunk, decode_steps=steps, token_paddings=(chunk,)
    )
    tokens, step = max(chunk, steps), kept * page_size
    firsts = [(start, max(start - window + 1, 0) // step * kept) for start in range(4 * 64)]
    touched = [(start + tokens - 1) // page_size - first + 1 for start, first in firsts]
    assert settings.most_pages(10_000, window, step) == max(touched)
    assert settings.most_pages(2, window, step) == min(-(-2 // page_size), max(touched))
    assert settings.most_pages(10_000, None, step) == -(-10_000 // page_size)
    assert kept == 2 or settings.most_pages(10_000, window) == max(touched)


def test_an_engine_takes_no_more_pages_than_windows_need():
    for cached, most in ((False, MOST[8]), (True, MOST[8] + 1)):  # the cache keeps steps of 16 tokens, two pages
        asked = EngineSettings(**SETTINGS, max_running_requests=7, page_size=8, prefix_cache=cached)
        settings, shapes = settle(asked, model(), PLAIN)
        assert settings.num_pages == shapes.pages == 7 * most


def test_a_request_is_refused_only_if_its_window_does_not_fit():
    """300 tokens are 38 pages of 8, of which 6 are held at once."""
    prompt, params = requests()[0]
    for pages in (MOST[8], MOST[8] - 1):
        served = new_engine(8, pages)
        if pages == MOST[8]:
            served.abort(served.submit(prompt, params))
        else:
            with pytest.raises(ValueError, match="takes 6 pages of 8 tokens, and the engine has 5"):
                served.submit(prompt, params)
