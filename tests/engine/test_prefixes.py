"""Prefixes of earlier prompts are found again, and no bit of an answer shows it."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from tiny import TINY, open_model

import ling3
from ling3.engine.scheduler import Scheduler
from ling3.engine.settings import EngineSettings
from ling3.engine.shapes import Grid, settle
from ling3.execution import PLAIN
from ling3.families.mistral import MistralConfig
from ling3.families.qwen2 import Qwen2Config

pytestmark = pytest.mark.thorough

TINY_LONG = dataclasses.replace(TINY, max_position_embeddings=2048)
PAGE, STEP, PAGES, LENGTH = 8, 16, 40, 192
# Two steps, the first of which a sequence needs in part.
WINDOW = 24
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "hidden_act": "silu",
}
SETTINGS = {
    "max_running_requests": 4,
    "decode_rows": 4,
    "num_pages": PAGES,
    "page_size": PAGE,
    "chunked_prefill_size": STEP,
    "token_paddings": (STEP,),
    "max_model_len": LENGTH,
    "decode_steps": 4,
}
KINDS = {
    "hybrid": lambda: open_model(TINY_LONG),
    "full attention": lambda: small(Qwen2Config, {}),
    "window": lambda: small(MistralConfig, {"sliding_window": WINDOW}),
}
every_kind = pytest.mark.parametrize("kind", exhaustively(KINDS, but=["hybrid", "window"]))


def small(config, changes):
    return ling3.init(config.from_dict(SIZES | changes), key=jax.random.key(0), dtype=jnp.float32)


@functools.cache
def engine(kind, cached=True):
    return ling3.Engine(KINDS[kind](), None, **SETTINGS, prefix_cache=cached)


def fresh(kind, pages=PAGES, snapshots=100):
    """The engine with an empty pool of so many pages, and room for so many snapshots."""
    served = engine(kind)
    shapes = served._loop.runner.shapes
    grid = Grid(STEP, shapes.grid.snapshot, snapshots * shapes.grid.snapshot)
    served._loop.scheduler = Scheduler(dataclasses.replace(shapes, pages=pages, grid=grid))
    return served


def answer(output):
    """What the promise speaks of; floats compare bit for bit."""
    return [(one.token_ids, one.logprobs, one.finish_reason) for one in output.outputs]


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, 64, size=count).tolist()


def params(tokens=3, **changes):
    return ling3.SamplingParams(**{"max_tokens": tokens, "logprobs": 0, "ignore_eos": True, **changes})


def ask(served, prompt, own=None):
    """The answer to a prompt, after which the books balance."""
    (output,) = served.generate([prompt], params() if own is None else own)
    served._loop.scheduler.check()
    stats = served.stats()
    assert (stats.free_slots, stats.free_pages) == (stats.slots, stats.pages)
    return output


def found(served, prompt):
    return ask(served, prompt).cached_tokens


@functools.cache
def cold(kind, prompt, own):
    return answer(ask(engine(kind, cached=False), list(prompt), own))


def same(kind, output, own):
    return answer(output) == cold(kind, tuple(output.prompt_token_ids), own)


@every_kind
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_a_prompt_is_found_again_by_whole_steps(kind, length):
    """All its steps but the one with its last token, which gives the first new one. Sampling is its own."""
    served, prompt, known = fresh(kind), ids(length), (length - 1) // STEP * STEP
    before = served.stats()
    for own, cached in ((params(), 0), (params(temperature=1.0, seed=3), known), (params(5), known)):
        output = ask(served, prompt, own)
        assert same(kind, output, own)
        assert output.cached_tokens == cached
    after = served.stats()
    assert after.cached_tokens - before.cached_tokens == 2 * known
    assert after.prompt_tokens - before.prompt_tokens == 3 * length - 2 * known


@pytest.mark.parametrize("kind", exhaustively(["hybrid", "full attention"], but=["hybrid"]))
def test_prompts_at_once_share_what_the_first_computes(kind):
    served, prompt = fresh(kind), ids(70)
    before = served.stats()
    prompts = [prompt + ids(5 + i, seed=i) for i in range(4)]
    outputs = served.generate(prompts, params())
    assert all(same(kind, output, params()) for output in outputs)
    assert [output.cached_tokens for output in outputs] == [0, 64, 64, 64]
    assert served.stats().prompt_tokens - before.prompt_tokens == sum(map(len, prompts)) - 3 * 64
    # Four steps, and nothing of what follows them.
    assert served.stats().cached_pages == 64 // PAGE


@every_kind
def test_an_answer_is_known_once_it_was_part_of_a_prompt(kind):
    """A chat: what was decoded has other last bits than what was prefilled, and is computed with the next prompt."""
    served, prompt, own = fresh(kind), ids(40), params(30)
    known = 0
    for turn in range(4):
        output = ask(served, prompt, own)
        assert same(kind, output, own)
        assert output.cached_tokens == known
        known = len(prompt) // STEP * STEP
        prompt = [*prompt, *output.token_ids, *ids(9, seed=turn)]


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_where_prompts_part_the_second_leaves_what_the_third_finds(kind):
    """With room for the ends of prompts alone. Engines that take snapshots of a request's own suffix never hit here."""
    served, common = fresh(kind, snapshots=2), ids(50)
    lengths = [found(served, common + ids(60, seed=seed)) for seed in (1, 2, 3, 4)]
    assert lengths == ([0, 32, 48, 48] if kind == "hybrid" else [0, 48, 48, 48])


def test_snapshots_keep_to_their_budget():
    """One that came last but one and was not used again goes first, and its prefix with it."""
    served = fresh("hybrid", snapshots=2)
    size = served._loop.runner.shapes.grid.snapshot
    prompts = [ids(20, seed=seed) for seed in range(3)]
    for prompt in prompts:
        ask(served, prompt)
        assert served.stats().snapshot_bytes <= 2 * size
    assert [found(served, prompt) for prompt in (prompts[0], prompts[2], prompts[1], prompts[2])] == [16, 16, 0, 16]


@every_kind
def test_pages_that_requests_need_are_taken_from_known_prefixes(kind):
    """Twelve prompts through pages for three: nothing is preempted or refused for what nobody uses."""
    served = fresh(kind, pages=3 * 13)
    before = served.stats().preemptions
    for seed in itertools.chain(range(12), range(12)):
        output = ask(served, ids(100, seed=seed))
        assert same(kind, output, params())
    assert served.stats().preemptions == before
    assert 0 < served.stats().cached_pages <= 3 * 13


@every_kind
@pytest.mark.parametrize("snapshots", [1, 100])
def test_preemption_and_aborts_amid_known_prefixes_change_nothing(kind, snapshots):
    """One sequence is swapped out before every third turn, and some are aborted; others share what they had."""
    served, draw = fresh(kind, pages=30, snapshots=snapshots), np.random.default_rng(5)
    loop, common = served._loop, ids(120)
    asked, ends, before = {}, {}, served.stats()
    for turn in itertools.count():
        if turn < 40:
            prompt = common[: int(draw.integers(1, 120))] + ids(int(draw.integers(1, 20)), seed=turn)
            own = params(int(draw.integers(1, 12)), temperature=turn % 2, seed=turn)
            asked[served.submit(prompt, own)] = own
        if turn % 3 == 2:
            calls, loop.in_flight = loop.in_flight, []
            for call in calls:
                loop._read(call)
            if running := loop.scheduler.running:
                loop._preempt(running[turn % len(running)])
        if turn % 7 == 6:
            served.abort(int(draw.choice(list(asked))))
        for delta in served.step():
            if delta.output is not None:
                ends[delta.request_id] = delta.output
        loop.scheduler.check()
        if not served.has_work:
            break
    whole = {which: output for which, output in ends.items() if output.finish_reason != "abort"}
    assert ends.keys() == asked.keys() and 20 < len(whole) < 40
    assert all(same(kind, output, asked[which]) for which, output in whole.items())
    assert served.stats().cached_tokens - before.cached_tokens > 200
    assert served.stats().preemptions - before.preemptions > 5


@pytest.mark.parametrize("spare", [0, 1, 4])
def test_a_window_needs_no_more_pages_with_a_known_prefix(spare):
    """In the fewest pages with which it runs at all, where there is no room to copy a prefix's pages to its own."""
    most = engine("window")._loop.runner.shapes.most_pages
    served, prompt, own = fresh("window", pages=most + spare), ids(150), params(40)
    before = served.stats().preemptions
    for _ in range(3):
        assert same("window", ask(served, prompt, own), own)
    assert served.stats().preemptions == before


@every_kind
def test_what_is_forgotten_is_computed_again(kind):
    served, prompt = fresh(kind), ids(70)
    assert [found(served, prompt), found(served, prompt)] == [0, 64]
    served.forget_prefixes()
    stats = served.stats()
    assert (stats.cached_pages, stats.snapshot_bytes) == (0, 0)
    assert found(served, prompt) == 0


def test_prefixes_in_use_are_not_forgotten():
    served, prompt, own = fresh("full attention"), ids(70), params(30)
    ask(served, prompt)
    running = served.submit(prompt, own)
    deltas = served.step() + served.step()
    served.forget_prefixes()
    served._loop.scheduler.check()
    assert served.stats().cached_pages == 64 // PAGE
    while served.has_work:
        deltas += served.step()
    (output,) = [delta.output for delta in deltas if delta.output is not None]
    assert output.request_id == running
    assert same("full attention", output, own)


def test_without_the_cache_nothing_is_kept():
    served = engine("hybrid", cached=False)
    assert [found(served, ids(70)) for _ in range(2)] == [0, 0]
    assert served._loop.runner.shapes.grid is None and served.stats().cached_pages == 0


def test_a_prompt_that_failed_leaves_nothing():
    """A callback that raises ends its request amid its answer; what others use of its prefix stays."""
    served, common = fresh("hybrid"), ids(40)
    ask(served, common + ids(40, seed=2))

    def fail(delta):
        raise OSError("disk full")

    served.submit(common + ids(40, seed=1), params(), on_delta=fail)
    while served.has_work:
        served.step()
    served._loop.scheduler.check()
    assert [found(served, common + ids(40, seed=seed)) for seed in (1, 2)] == [32, 64]


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, 512),
        ({"page_size": 48, "chunked_prefill_size": 32}, 96),
        ({"prefix_cache": False}, None),
        ({"max_model_len": 511}, None),
        ({"snapshot_fraction": 0.0}, None),
    ],
)
def test_a_prefix_is_a_whole_number_of_chunks_and_pages(changes, step):
    changes = {"max_model_len": 1024, **changes}
    _, shapes = settle(EngineSettings(**changes), open_model(TINY_LONG), PLAIN)
    assert (shapes.grid and shapes.grid.step) == step
    if "snapshot_fraction" in changes:  # which attention alone needs none of
        full = KINDS["full attention"]()
        assert settle(EngineSettings(**changes), full, PLAIN)[1].grid == Grid(512, 0, 0)


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan"), "0.1", True])
def test_a_senseless_share_for_snapshots_is_refused(fraction):
    with pytest.raises(ValueError, match=r"snapshot_fraction is .*, expected a number in"):
        EngineSettings(snapshot_fraction=fraction)
