"""A user's filters: what they are given, that a request has the same bits in any company, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY, open_model

import ling3
from ling3.engine.filters import checked
from ling3.engine.sampling import NOT_A_NUMBER, Adjustments, Sampling, choose
from ling3.execution import PLAIN

PROMPTS = [[5, 6, 7], list(range(3, 53)), [4], [9, 8, 7, 6, 5]]
SIZES = {"max_running_requests": 4, "num_pages": 24, "page_size": 16, "chunked_prefill_size": 32, "max_model_len": 128}
SETTINGS = {**SIZES, "token_paddings": (16, 32), "decode_rows": 4, "decode_steps": 4}


def cooling(logits, so_far):
    """Hot at first, and cooler with each new token."""
    return logits / (1.0 + 4.0 / (1.0 + jnp.sum(so_far.counts).astype(jnp.float32)))


def nothing_twice(logits, so_far):
    return jnp.where(so_far.in_prompt | (so_far.counts > 0), -jnp.inf, logits)


@functools.cache
def engine():
    return ling3.Engine(open_model(TINY), None, filters=(cooling, nothing_twice), **SETTINGS)


def params(i=0, **changes):
    return ling3.SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": i, **changes})


def sampling(own, prompt, output, *filters):
    """Of one row over 8 tokens."""
    adjustments = Adjustments.build([(own, prompt, output)], 8)
    row = (own, own.seed, len(prompt), own.check(8))
    return Sampling.build([row], 8, 4, adjustments, filters=filters)


def chosen(own, prompt, output, *filters):
    """The token that is chosen after these of eight equal logits, and its log-probability."""
    positions = jnp.asarray([len(prompt) + len(output)], jnp.int32)
    total = jnp.log(jnp.full(1, 8, jnp.float32))
    choice = choose(jnp.zeros((1, 8), jnp.float32), total, sampling(own, prompt, output, *filters), positions, PLAIN)
    return int(choice.token[0]), float(choice.logprob[0])


def test_a_filter_knows_the_tokens_so_far():
    seen = []

    def watching(logits, so_far):
        jax.debug.callback(lambda *values: seen.append([np.asarray(x).tolist() for x in values]), *so_far_of(so_far))
        return logits

    def so_far_of(so_far):
        return so_far.length, so_far.counts, so_far.in_prompt

    chosen(params(), [3, 1, 3], [2, 3, 2], watching)
    jax.effects_barrier()
    [(length, counts, in_prompt)] = seen
    assert length == 6 and counts == [0, 0, 2, 1, 0, 0, 0, 0] and np.flatnonzero(in_prompt).tolist() == [1, 3]


def test_filters_apply_in_their_order_to_what_is_chosen_and_not_to_what_is_reported():
    def only_two(logits, so_far):
        return jnp.where(jnp.arange(8) == 2, 0.0, -jnp.inf)

    def next_one(logits, so_far):
        return jnp.roll(logits, 1)

    assert chosen(params(), [3], [], only_two) == (2, pytest.approx(-np.log(8)))
    assert chosen(params(temperature=0.0), [3], [], only_two, next_one)[0] == 3
    assert chosen(params(), [3], [], next_one, only_two)[0] == 2
    assert chosen(params(stop_token_ids=[2], min_tokens=1), [3], [], only_two)[0] == NOT_A_NUMBER, "no early end"


@pytest.mark.thorough
def test_a_request_has_the_same_bits_in_any_company():
    """With penalties or none; and continued from a snapshot, it has those of the request that was not interrupted."""

    def answer(output):
        return [(each.token_ids, each.logprobs, each.finish_reason) for each in output.outputs]

    asked = [params(i, logprobs=2, **({"frequency_penalty": 0.5} if i % 2 else {})) for i in range(len(PROMPTS))]
    together = engine().generate(PROMPTS, asked)
    for prompt, own, output in zip(PROMPTS, asked, together, strict=True):
        [alone] = engine().generate([prompt], own)
        assert answer(alone) == answer(output)
        assert len({*prompt, *output.token_ids}) == len({*prompt}) + 12, "no token twice"
    begun = engine().generate(PROMPTS[0], params(0, max_tokens=5, keep=True))[0]
    rest = engine().generate(begun.outputs[0].snapshot, params(0, max_tokens=7))[0]
    assert [*begun.token_ids, *rest.token_ids] == list(together[0].token_ids)


@pytest.mark.slow
def test_generate_draws_what_the_engine_draws():
    """With penalties too, which its batch counts as the engine's does."""
    fields = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {7: 2.0}}
    rows = ling3.generate(open_model(TINY), PROMPTS, params(3), **fields, filters=[cooling, nothing_twice])
    for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        assert list(engine().generate([prompt], params(3 + i, **fields))[0].token_ids) == row


@jax.custom_batching.custom_vmap
def _centred(logits):
    return logits


@_centred.def_vmap
def _(size, batched, logits):
    return logits - logits.mean(axis=0, keepdims=True), True


def _counting():
    calls = []

    def counting(logits, so_far):
        calls.append(None)
        return logits + len(calls)

    return counting


class _Unhashable:
    __hash__ = None

    def __call__(self, logits, so_far):
        return logits


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda z, so_far: _centred(z), r"filters\[1\] \(<lambda>\) has another result for a row beside other rows"),
        (lambda z, so_far: z - z.mean(axis=1, keepdims=True), "fails with the logits .* of one row: tuple index"),
        (_counting(), r"\(counting\) has another result when it is called again"),
        (lambda z, so_far: z + np.float32(np.random.default_rng().random()), "when it is called again"),
        (lambda z, so_far: z[:5], r"gives 'float32\[5\]' for one row's logits, expected float32\[96\]"),
        (lambda z, so_far: z.astype(jnp.bfloat16), r"gives 'bfloat16\[96\]'"),
        (lambda z, so_far: None, "gives None"),
        (lambda z, so_far: z if z[0] > 0 else -z, "fails .*: Attempted boolean conversion of traced array"),
        (lambda z: z, "fails .*: <lambda>.. takes 1 positional argument but 2 were given"),
        (_Unhashable(), "fails .*: unhashable type"),
        (5, r"filters\[1\] \(int\) fails .*: Expected a callable value"),
    ],
)
def test_what_is_no_pure_function_of_one_row_is_refused(refused, message):
    with pytest.raises(ling3.ParameterError, match=message) as caught:
        checked([cooling, refused], TINY.vocab_size)
    assert caught.value.field == "filters"


def test_engine_and_generate_check_their_filters():
    for make in (
        lambda: ling3.Engine(open_model(TINY), None, filters=[_counting()], **SETTINGS),
        lambda: ling3.generate(open_model(TINY), PROMPTS, filters=[_counting()]),
    ):
        with pytest.raises(ling3.ParameterError, match=r"filters\[0\] \(counting\) has another result"):
            make()
    with pytest.raises(ling3.ParameterError, match="expected a list of functions"):
        checked(cooling, TINY.vocab_size)
