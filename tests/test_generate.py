"""Generation of one batch: the greedy path, stops, seeds, bad input, memory in place, and no retrace."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import EXHAUSTIVE, exhaustively
from tiny import ALIGNED, TINY, open_model

import ling3
from ling3.cache import CacheSpec
from ling3.engine.forward import Batch, decode, extend
from ling3.engine.pool import Pool, Rows
from ling3.engine.sampling import Sampling
from ling3.engine.sampling_params import SamplingParams
from ling3.execution import Execution
from ling3.generate import _chunk

PROMPTS = [[5, 6, 7], list(range(3, 53)), [4]]


@pytest.fixture(scope="module")
def model():
    return open_model(TINY)


def likeliest(model, prompts, rows):
    """The argmax of the whole forward's logits at the place of each new token; what pads to one shape is after all."""
    width = max(len(prompt) + len(row) for prompt, row in zip(prompts, rows, strict=True))
    tokens = np.zeros((len(prompts), width), np.int32)
    for line, prompt, row in zip(tokens, prompts, rows, strict=True):
        line[: len(prompt) + len(row)] = [*prompt, *row]
    best = np.asarray(model(tokens)).argmax(axis=-1)
    return [line[len(prompt) - 1 :][: len(row)].tolist() for line, prompt, row in zip(best, prompts, rows, strict=True)]


@pytest.mark.parametrize(
    "config", exhaustively([TINY, ALIGNED], but=[ALIGNED]), ids=lambda config: f"vocabulary of {config.vocab_size}"
)
def test_greedy_is_the_argmax_of_the_whole_forward(config):
    model = open_model(config)
    rows = ling3.generate(model, PROMPTS, max_tokens=24, temperature=0.0, ignore_eos=True)
    assert [len(row) for row in rows] == [24, 24, 24]
    assert rows == likeliest(model, PROMPTS, rows)


@pytest.mark.slow
def test_prompts_longer_than_a_chunk_are_prefilled_in_parts(model):
    prompt = [int(t) for t in np.random.default_rng(0).integers(3, 96, size=700)]
    prompts = [prompt, prompt[:600]]
    rows = ling3.generate(model, prompts, max_tokens=3, ignore_eos=True)
    assert rows == likeliest(model, prompts, rows)


@pytest.mark.parametrize(
    ("longest", "batch", "widths"),
    [
        (1, 1, [16]),
        (100, 1, [128]),
        (600, 1, [512, 128]),
        (2048, 1, [2048]),
        (5000, 1, [2048, 2048, 512, 512]),
        (300, 8, [256, 64]),
        (40, 100, [16, 16, 16]),
    ],
)
def test_a_call_has_at_most_so_many_tokens_and_little_padding(longest, batch, widths):
    found, left = [], longest
    while left > 0:
        found.append(_chunk(left, batch))
        left -= found[-1]
    assert found == widths


def test_a_stop_token_is_the_last_of_its_row(model):
    free = ling3.generate(model, PROMPTS, max_tokens=24, ignore_eos=True)
    stop = free[1][9]
    stopped = ling3.generate(model, PROMPTS, max_tokens=24, stop_token_ids=[stop], ignore_eos=True)
    for row, full in zip(stopped, free, strict=True):
        assert row == (full[: full.index(stop) + 1] if stop in full else full)
    ending = type(model)(model.model, model.lm_head, dataclasses.replace(TINY, eos_token_id=(stop,)))
    assert ling3.generate(ending, PROMPTS, max_tokens=24) == stopped
    assert ling3.generate(ending, PROMPTS, max_tokens=24, ignore_eos=True) == free


def test_ids_up_to_the_last_are_drawn_and_read():
    """Where the vocabulary is a multiple of 128, too."""
    model, last = open_model(ALIGNED), ALIGNED.vocab_size - 1
    even = eqx.tree_at(lambda m: m.model.norm.weight, model, replace_fn=jnp.zeros_like)  # all logits are 0
    rows = ling3.generate(even, PROMPTS, max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    assert {token // 32 for row in rows for token in row} == {0, 1, 2, 3}
    prompts = [[last, 6, 7], *PROMPTS[1:]]
    rows = ling3.generate(model, prompts, max_tokens=24, ignore_eos=True)
    assert rows == likeliest(model, prompts, rows)


def test_one_token_and_no_prompts(model):
    assert [len(row) for row in ling3.generate(model, PROMPTS, max_tokens=1)] == [1, 1, 1]
    assert ling3.generate(model, [], max_tokens=5) == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "alone", [(0, 2), pytest.param((1,), marks=[*EXHAUSTIVE, pytest.mark.optimized])], ids=["short", "long"]
)
def test_draws_depend_on_the_seed_and_not_on_the_company(model, alone):
    sampled = ling3.generate(model, PROMPTS, max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    assert sampled == ling3.generate(model, PROMPTS, max_tokens=20, temperature=1.0, seed=7, ignore_eos=True)
    assert sampled != ling3.generate(model, PROMPTS, max_tokens=20, temperature=1.0, seed=70, ignore_eos=True)
    for i in alone:
        found = ling3.generate(model, [PROMPTS[i]], max_tokens=20, temperature=1.0, seed=7 + i, ignore_eos=True)
        assert found == [sampled[i]]


def test_params_and_fields_by_name_are_the_same(model):
    params = SamplingParams(max_tokens=9, temperature=0.7, seed=3, ignore_eos=True)
    expected = ling3.generate(model, PROMPTS, max_tokens=9, temperature=0.7, seed=3, ignore_eos=True)
    assert ling3.generate(model, PROMPTS, params) == expected
    assert ling3.generate(model, PROMPTS, dataclasses.replace(params, seed=9), seed=3) == expected
    with pytest.raises(TypeError, match="temprature"):
        ling3.generate(model, PROMPTS, temprature=1.0)


def test_nothing_is_traced_again(model):
    """Other prompts of the same widths, other samplings, and any number of stops run what is compiled."""

    def programs():
        return [function._cache_size() for function in (extend, decode)]

    ling3.generate(model, PROMPTS, max_tokens=40, ignore_eos=True)
    compiled = programs()
    for prompts, stops in ((PROMPTS, []), ([[9] * 40, [8], [7, 7]], [90]), (PROMPTS, [91, 92, 93])):
        ling3.generate(model, prompts, max_tokens=35, seed=5, temperature=0.5, stop_token_ids=stops)
    assert programs() == compiled


def test_ids_may_be_numpys(model):
    expected = ling3.generate(model, PROMPTS, max_tokens=3)
    prompts = (np.asarray(prompt, np.int64) for prompt in PROMPTS)
    assert ling3.generate(model, prompts, max_tokens=np.int32(3), stop_token_ids=np.asarray([2])) == expected


@pytest.mark.slow
def test_logits_that_are_nan_name_their_prompt(model):
    poisoned = eqx.tree_at(lambda m: m.model.word_embeddings.weight, model, replace_fn=lambda w: w.at[50].set(jnp.nan))
    assert ling3.generate(poisoned, [[4]], max_tokens=1) == ling3.generate(model, [[4]], max_tokens=1)
    with pytest.raises(FloatingPointError, match="the logits of prompt 1 are NaN"):
        ling3.generate(poisoned, [[4], [5, 50, 6]], max_tokens=4)


def pool_of(model, slots, pages):
    rows = [(SamplingParams(), 0, 4, ())] * slots
    spec = CacheSpec(slots, pages, 16, jnp.float32)
    return Pool.empty(model, Sampling.build(rows, model.config.vocab_size, 8), spec)


def compiled(program, model, rows, width, pool):
    """The memory that a program takes for rows of so many tokens."""
    count = rows.table.shape[0]
    batch = Batch(rows, jnp.zeros((count, width), jnp.int32), jnp.ones(count, jnp.int32))
    return program.lower(model, batch, pool, Execution.default()).compile().memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("slots", [[0, 2], *exhaustively([None])], ids=["some slots", "every slot"])
def test_the_memory_is_updated_in_place(model, slots):
    """Every byte of the pool, caches and all, is an output that lies in its input's buffer."""
    pool = pool_of(model, 3, 8)
    count = 3 if slots is None else len(slots)
    rows = Rows(
        None if slots is None else jnp.asarray(slots, jnp.int32),
        jnp.arange(2 * count, dtype=jnp.int32).reshape(count, 2),
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    for program, width in ((decode, 0), (extend, 16)):
        assert compiled(program, model, rows, width, pool).alias_size_in_bytes == size


@pytest.mark.slow
def test_narrow_weights_are_widened_nowhere():
    """Of none of the large matrices is there a float32 copy, in a loop or before it: one would be 1 MB."""
    config = dataclasses.replace(TINY, vocab_size=8192)
    model = ling3.init(config, key=jax.random.key(0), dtype=jnp.bfloat16)
    pool, rows = pool_of(model, 2, 4), Rows(None, jnp.arange(4, dtype=jnp.int32).reshape(2, 2))
    memory = compiled(decode, model, rows, 0, pool)
    assert memory.temp_size_in_bytes < 4 * model.lm_head.weight.size


@pytest.mark.slow
def test_a_prefill_s_temporaries_are_one_layer_s():
    """Nothing is written for a later one while an earlier one is at work: no zeros for its experts' results."""

    def temporaries(layers):
        model = ling3.init(dataclasses.replace(TINY, num_hidden_layers=layers), key=jax.random.key(0))
        pool, rows = pool_of(model, 1, 32), Rows(None, jnp.arange(32, dtype=jnp.int32)[None])
        return compiled(extend, model, rows, 512, pool).temp_size_in_bytes

    results = 512 * TINY.num_experts_per_tok * TINY.hidden_size * 4
    assert temporaries(6) - temporaries(3) < 3 * results / 2


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 96]], {}, r"prompt 0, token 1 is 96, expected an id in \[0, 96\)"),
        ([[-1]], {}, "prompt 0, token 0 is -1"),
        ([[True]], {}, "prompt 0, token 0 is True"),
        ([[1.0]], {}, "prompt 0, token 0 is 1.0"),
        (["text"], {}, "expected a list of token ids"),
        ([[1]], {"max_tokens": 0}, "max_tokens is 0"),
        ([[1]], {"max_tokens": True}, "max_tokens is True"),
        ([[1]], {"stop_token_ids": [2, 1.5]}, r"stop_token_ids is \(2, 1.5\), expected whole numbers"),
        ([[1]], {"stop_token_ids": [96]}, r"stop_token_ids has 96, expected ids in \[0, 96\)"),
        ([[1] * 2040], {"max_tokens": 9}, "2049 together"),
        ([[1]], {"temperature": float("nan")}, "temperature is nan"),
        ([[1]], {"temperature": -1.0}, "temperature is -1"),
        ([[1]], {"top_p": 0.0, "min_p": 2.0}, "top_p is 0.0.*min_p is 2.0"),
        ([[1]], {"top_k": 0}, "top_k is 0"),
        ([[1]], {"seed": -1}, "seed is -1"),
        ([[1]], {"n": 2}, "n is 2, which ling3.generate cannot do: use an Engine"),
        ([[1]], {"params": SamplingParams(stop=["x"])}, r"stop is \('x',\), which ling3.generate cannot do"),
    ],
)
def test_bad_input_is_refused_before_any_work(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        ling3.generate(model, prompts, **options)
