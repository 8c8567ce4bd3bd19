"""Snapshots: a request is gone on from without computing it again, and no bit shows it."""

import asyncio
import copy
import dataclasses
import functools
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deepseek_v4_checkpoint import WIDE
from exhaustive_cases import exhaustively
from small_engine import CONFIG, SETTINGS, answer, crowd, engine, idle, model, reciter, tokenizer
from tiny import open_model

import ling3
from ling3.engine.origins import checksum
from ling3.families.deepseek_v4_config import DeepseekV4Config
from ling3.families.mistral import MistralConfig
from ling3.families.qwen2 import Qwen2Config

pytestmark = pytest.mark.thorough

CHUNK = SETTINGS["chunked_prefill_size"]
KEEP = ling3.SamplingParams(max_tokens=0, keep=True)
# Every kind of sampling whose next token depends on those before it.
SAMPLED = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "repetition": {"repetition_penalty": 1.3, "logit_bias": {9: 2.0}, "temperature": 0.5, "seed": 1},
}
SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "hidden_act": "silu",
}
V4 = WIDE | {"max_position_embeddings": 256, "vocab_size": 400}


def initialized(config, sizes):
    return ling3.init(config.from_dict(sizes), key=jax.random.key(0), dtype=jnp.float32)


FAMILIES = {
    "hybrid": (model, {}),
    "narrow": (lambda: open_model(CONFIG, dtype=jnp.bfloat16), {"cache_dtype": "bfloat16"}),
    "full attention": (lambda: initialized(Qwen2Config, SIZES), {}),
    "window": (lambda: initialized(MistralConfig, SIZES | {"sliding_window": 24}), {}),
    "packed": (lambda: initialized(DeepseekV4Config, V4), {"cache_dtype": "packed"}),
}


@functools.cache
def family(name, cached):
    build, changes = FAMILIES[name]
    return ling3.Engine(build(), None, **SETTINGS | changes, prefix_cache=cached)


@functools.cache
def lonely():
    """Where a new request is alone, and finds no known prefix."""
    return engine(prefix_cache=False)


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(6, 300, size=count).tolist()


def params(tokens=12, **changes):
    return ling3.SamplingParams(**{"max_tokens": tokens, "logprobs": 2, "ignore_eos": True, **changes})


def ask(served, prompt, own):
    (output,) = served.generate(prompt if isinstance(prompt, ling3.Snapshot) else [prompt], own)
    return output


def computed(served, prompt, own):
    """The answer, and how many tokens of the prompt were computed for it and how many not."""
    before = served.stats()
    output, after = ask(served, prompt, own), served.stats()
    return output, after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens


def bits(*outputs):
    """Tokens and log-probabilities of pieces of an answer, as those of one."""
    return [token for one in outputs for token in one.token_ids], [x for one in outputs for x in one.logprobs]


# Right after a prompt


@pytest.mark.parametrize("length", exhaustively([1, 15, 16, 31, 32, 33, 64, 100], but=[1, 16, 33, 100]))
def test_right_after_a_prompt_is_a_new_request(served, length):
    """Any number of continuations, each as if the prompt were its own; only its last token is computed again."""
    prompt = ids(length)
    context = ask(served, prompt, KEEP).snapshot
    assert context.token_ids == tuple(prompt) and (context.answered, context.held) == (0, length - 1)
    for sampled in SAMPLED.values():
        output, own, cached = computed(served, context, params(**sampled))
        assert (own, cached, output.cached_tokens, len(output.prompt_token_ids)) == (1, length - 1, length - 1, length)
        fresh = ask(lonely(), prompt, params(**sampled))
        assert [answer(one) for one in output.outputs] == [answer(one) for one in fresh.outputs]


def test_keeping_is_an_answer_of_no_tokens(served):
    output, own, _ = computed(served, ids(70, 1), KEEP)
    assert (output.text, list(output.token_ids), output.finish_reason, own) == ("", [], "length", 69)
    known, own, cached = computed(served, ids(70, 1), KEEP)  # by the prefix cache
    assert (own, cached) == (69 - 64, 64)
    assert bits(*served.generate([known.snapshot], params())) == bits(ask(lonely(), ids(70, 1), params()))


def test_several_continuations_at_once_beside_others(served):
    """Of one snapshot, by `n`, by a list with other prompts, and as streams."""
    context, other = ask(served, ids(50), KEEP).snapshot, ids(40, 2)
    drawn = [params(temperature=1.0, seed=seed) for seed in range(8)]
    mixed = served.generate([context if i % 2 else ids(50) for i in range(6)] + [other, [3]], drawn)
    fresh = [ask(lonely(), prompt, own) for prompt, own in zip([ids(50)] * 6 + [other, [3]], drawn, strict=True)]
    assert [bits(one) for one in mixed] == [bits(one) for one in fresh]
    assert len({tuple(one.token_ids) for one in mixed[:6]}) == 6
    four = ask(served, context, dataclasses.replace(drawn[0], n=4))
    assert [bits(one) for one in four.outputs] == [bits(one) for one in fresh[:4]]

    async def streamed():
        return [token async for delta in served.astream(context, drawn[1]) for token in delta.token_ids]

    assert [token for delta in served.stream(context, drawn[1]) for token in delta.token_ids] == list(
        fresh[1].token_ids
    )
    assert asyncio.run(streamed()) == list(fresh[1].token_ids)
    ends = {i: delta.output for i, delta in served.stream_all([context, context], drawn[:2]) if delta.output}
    assert [bits(ends[i]) for i in range(2)] == [bits(one) for one in fresh[:2]]
    number, found = served.submit(context, drawn[2]), {}
    while served.has_work:
        found |= {delta.request_id: delta.output for delta in served.step() if delta.output is not None}
    assert bits(found[number]) == bits(fresh[2])


# Interrupted answers


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("length", exhaustively([1, 32, 45], but=[1, 45]))
def test_an_interrupted_answer_is_the_whole_one(served, kind, length):
    """Cut after any number of tokens, or after each."""
    whole = bits(ask(lonely(), ids(length), params(14, **SAMPLED[kind])))
    for cut in (1, 2, 5, 13):
        first = ask(served, ids(length), params(cut, keep=True, **SAMPLED[kind]))
        assert first.snapshot.token_ids == (*ids(length), *first.token_ids)
        assert (first.snapshot.answered, first.snapshot.held) == (cut, length + cut - 1)
        second, own, cached = computed(served, first.snapshot, params(14 - cut, **SAMPLED[kind]))
        assert bits(first, second) == whole
        assert (own, cached) == (1, length + cut - 1)
    pieces = [ask(served, ids(length), params(1, keep=True, **SAMPLED[kind]))]
    while len(pieces) < 14:
        pieces.append(ask(served, pieces[-1].snapshot, params(1, keep=True, **SAMPLED[kind])))
        assert pieces[-1].snapshot.answered == len(pieces)
    assert bits(*pieces) == whole


def test_keeping_changes_no_bit(served):
    """Nor does what keeping with stop strings does: a token per call, in calls of its own."""
    for sampled in SAMPLED.values():
        own = params(20, temperature=1.0, seed=2, stop=["never", "said"]) if not sampled else params(20, **sampled)
        several = served.generate([ids(20), ids(60)], dataclasses.replace(own, keep=True))
        assert [answer(one.outputs[0])[:2] for one in several] == [
            answer(ask(lonely(), prompt, own).outputs[0])[:2] for prompt in (ids(20), ids(60))
        ]


def test_an_answer_that_ends_can_be_continued():
    """At an end id, as the device sees it; at a stop string, as the host does: the device is not past it."""
    said = list(range(70, 90))
    assert tokenizer().decode(said) == "abcdefghijklmnopqrst"
    served = engine(reciter([7, *said, 4, *range(150, 170)]))
    ended = ask(served, [7], ling3.SamplingParams(max_tokens=40, keep=True))
    assert (ended.finish_reason, list(ended.token_ids)) == ("stop", [*said, 4])
    assert list(ask(served, ended.snapshot, params(8)).token_ids) == list(range(150, 158))
    stopped = ask(served, [7], ling3.SamplingParams(max_tokens=40, keep=True, stop="fg"))
    assert (stopped.finish_reason, stopped.text, list(stopped.token_ids)) == ("stop", "abcde", said[:7])
    assert stopped.snapshot.token_ids == (7, *said[:7])
    whole = ask(served, [7], params(20))
    rest = ask(served, stopped.snapshot, params(13))
    assert [*stopped.token_ids, *rest.token_ids] == list(whole.token_ids)
    assert rest.logprobs[-1] == whole.logprobs[-1]
    assert idle(served)


# Tokens appended


def test_after_whole_chunks_appended_tokens_are_a_new_requests(served):
    for length in (CHUNK + 1, 3 * CHUNK + 1):
        context = ask(served, ids(length), KEEP).snapshot
        for more in (1, 20, CHUNK, 50):
            output, own, cached = computed(served, context.then(ids(more, 5)), params())
            assert (own, cached, output.cached_tokens) == (more + 1, length - 1, length - 1)
            assert output.prompt_token_ids == ids(length) + ids(more, 5)
            assert bits(output) == bits(ask(lonely(), ids(length) + ids(more, 5), params()))


def steps(served):
    """A conversation: a prompt, an answer, and two ways to go on, each twice."""
    first = ask(served, ids(45), params(9, keep=True, temperature=1.0, seed=1))
    turns = [ask(served, first.snapshot.then(ids(n, n)), params(7, keep=True)) for n in (1, 40, 1, 40)]
    last = [ask(served, turn.snapshot.then([8]), params(5, presence_penalty=0.2)) for turn in turns]
    return [bits(first), *map(bits, turns), *map(bits, last)]


def test_elsewhere_they_are_those_of_the_same_steps(served):
    """In any company, with and without known prefixes. From a new request's they differ by rounding alone."""
    alone = steps(lonely())
    assert alone[1] == alone[3] and alone[6] == alone[8]
    with_others = served.generate([ids(30, 8)] * 2, params(3))
    assert steps(served) == alone
    deltas = served.stream(ids(90, 4), params(100))
    next(deltas)
    assert steps(served) == alone
    del deltas, with_others
    first = ask(served, ids(45), params(9, keep=True, temperature=1.0, seed=1))
    output, own, cached = computed(served, first.snapshot.then(ids(40, 40)), params(1, prompt_logprobs=None))
    assert (own, cached) == (41, 45 + 8)
    fresh = ask(lonely(), output.prompt_token_ids, params(1))
    # Logits of standard deviation near 1 in float32, through three layers: 1e-5 at most.
    assert abs(output.logprobs[0].logprob - fresh.logprobs[0].logprob) < 1e-4


def test_no_known_prefix_comes_of_them(served):
    """Later prompts with the same tokens are computed as ever."""
    served.forget_prefixes()
    first = ask(served, ids(45, 9), params(9, keep=True))
    whole = [*first.snapshot.token_ids, *ids(90, 3)]
    ask(served, first.snapshot.then(ids(90, 3)), params(2))
    again, _, cached = computed(served, whole, params())
    assert cached == CHUNK  # of the first prompt, which is a known prefix
    assert bits(again) == bits(ask(lonely(), whole, params()))


def test_texts_and_chats_are_appended(served):
    first = ask(served, "Sam has", params(4, keep=True))
    more = tokenizer().encode(" 3 pens")
    assert ask(served, first.snapshot.then(" 3 pens"), params()).prompt_token_ids == [*first.snapshot.token_ids, *more]
    assert bits(ask(served, first.snapshot.then(""), params())) == bits(ask(served, first.snapshot, params()))
    chat = [{"role": "user", "content": "Hi"}]
    context = ask(served, chat, KEEP).snapshot
    longer = [*chat, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
    output, own, cached = computed(served, context.then(longer), params())
    assert output.prompt_token_ids == tokenizer().apply_chat_template(longer)
    assert (own, cached) == (len(output.prompt_token_ids) - context.held, context.held)
    where, said = context.token_ids, tuple(tokenizer().encode("Hi"))
    place = next(i for i in range(len(where)) if where[i : i + 2] == said)
    for wrong, at in (([{"role": "user", "content": "Ho"}, *longer[1:]], place + 1), (chat, len(context.token_ids))):
        with pytest.raises(ValueError, match=f"^prompt: the chat's .* they part at token {at};"):
            served.submit(context.then(wrong), params())


# Company, memory, other kinds of memory


@pytest.mark.slow
def test_resumed_in_a_crowd_and_preempted():
    """Twelve continuations of three snapshots, each of which grows to most of the pages there are."""
    crowded = engine()
    contexts = [ask(crowded, ids(n), KEEP).snapshot for n in (40, 65, 90)]
    mid = [ask(crowded, ids(n), params(5, keep=True)).snapshot for n in (40, 65, 90)]
    crowd(crowded, pages=14)
    drawn = [params(100, temperature=1.0, seed=i, frequency_penalty=0.1) for i in range(12)]
    prompts = [[*contexts, *mid, *(one.then([9, 8, 7]) for one in contexts), *mid][i] for i in range(12)]
    before = crowded.stats().preemptions
    together = [bits(one) for one in crowded.generate(prompts, drawn)]
    assert crowded.stats().preemptions - before > 10
    crowd(crowded)
    assert together == [bits(ask(crowded, one, own)) for one, own in zip(prompts, drawn, strict=True)]
    crowded._loop.scheduler.check()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", exhaustively(FAMILIES, but=["hybrid"]))
def test_every_kind_of_memory_is_kept(name, cached):
    served, fresh = family(name, cached), family(name, False)
    for length in (3, 40, 65, 150):
        own = params(20, temperature=1.0, seed=length)
        whole = bits(ask(fresh, ids(length), own))
        context = ask(served, ids(length), KEEP).snapshot
        first = ask(served, context, dataclasses.replace(own, max_tokens=9, keep=True))
        assert bits(first, ask(served, first.snapshot, dataclasses.replace(own, max_tokens=11))) == whole
        more = ask(served, context.then(ids(33, 2)), own)
        if length == 65:
            assert bits(more) == bits(ask(fresh, ids(65) + ids(33, 2), own))
    served._loop.scheduler.check()
    stats = served.stats()
    assert (stats.free_slots, stats.free_pages) == (stats.slots, stats.pages)


def test_a_snapshot_is_on_the_host_alone_and_goes_with_its_last_reference(served):
    context = ask(served, ids(50), KEEP).snapshot
    assert idle(served)
    arrays = jax.tree.leaves((context.states, context.pages))
    assert all(isinstance(x, np.ndarray) for x in arrays) and context.nbytes == sum(x.nbytes for x in arrays)
    pages = [x for some in context.pages for x in some]
    assert {x.shape[:2] for x in pages} == {(-(-50 // SETTINGS["page_size"]), SETTINGS["page_size"])}
    assert repr(context).startswith("<Snapshot: 50 tokens, ")
    longer = ask(served, ids(82), KEEP).snapshot  # two pages more, and nothing else
    assert longer.nbytes - context.nbytes == 2 * sum(x.nbytes for x in pages) // 4
    ask(served, context, params())
    gone = weakref.ref(context)
    del context, arrays, pages
    gc.collect()
    assert gone() is None


def test_another_engine_of_the_same_weights_goes_on_from_it(served):
    """Which takes no more than the settings that an answer's bits depend on."""
    context = ask(served, ids(50), KEEP).snapshot
    copied = jax.tree.map(jnp.array, model())
    assert checksum(copied) == checksum(model())
    other = engine(copied, mem_fraction=0.5, prefix_cache=False, max_queue=7)
    assert bits(ask(other, context, params())) == bits(ask(lonely(), ids(50), params()))


def test_aborted_and_broken_requests_leave_none(served):
    number = served.submit(ids(50), params(100, keep=True))
    for _ in range(4):
        served.step()
    assert served.abort(number)
    (last,) = [delta.output for delta in served.step() if delta.output is not None]
    assert (last.finish_reason, last.snapshot) == ("abort", None)
    for part, own in (("embeddings", KEEP), ("head", params(keep=True))):
        where = {"embeddings": lambda m: m.model.word_embeddings.weight, "head": lambda m: m.lm_head.weight}[part]
        broken = engine(eqx.tree_at(where, model(), replace_fn=lambda x: x * jnp.nan))
        output = ask(broken, ids(50), own)
        assert output.finish_reason == "error" and "logits were NaN" in output.error and output.snapshot is None
        assert idle(broken)


def test_one_that_cannot_be_copied_ends_its_request_in_error(served, monkeypatch):
    whole = ask(lonely(), ids(50), params(4))

    def fails(sequence):
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(served._loop.runner, "keep", fails)
        seen = list(served.stream(ids(50), params(4, keep=True)))
        broken, other = served.generate([ids(50), [7]], [KEEP, params(4)])
    output = seen[-1].output
    assert (seen[-1].finish_reason, output.finish_reason, output.snapshot) == ("error", "error", None)
    assert output.error == "what it remembers could not be copied: MemoryError('none left')" == broken.error
    assert bits(*seen) == bits(output) == bits(whole) and output.text == "".join(delta.text for delta in seen)
    assert other.finish_reason == "length" and ask(served, ids(50), params(4, keep=True)).snapshot.held == 53


def test_warmup_compiles_what_they_take():
    served = engine(decode_rows=3)
    served.warmup()
    programs = served._loop.runner.programs
    context = ask(served, ids(50), KEEP).snapshot
    ask(served, context, params(keep=True, stop="never"))
    assert served._loop.runner.programs == programs


# Grammars


def test_grammars_begin_anew_after_a_snapshot(served):
    """With tokens appended and without, as in a new request."""
    own = params(30, structured=ling3.Regex("(ab|cd){2,4}[0-9]{3}"), temperature=1.0, seed=4, ignore_eos=False)
    context = ask(served, ids(65), KEEP).snapshot
    output, computed_here, _ = computed(served, context.then(ids(66)[65:]), dataclasses.replace(own, keep=True))
    assert computed_here == 2 and answer(output.outputs[0]) == answer(ask(lonely(), ids(66), own).outputs[0])
    again = ask(served, output.snapshot, own)
    assert output.finish_reason == again.finish_reason == "stop" and again.prompt_token_ids[:65] == ids(65)
    assert {len(one.text) in range(7, 12) for one in (output, again)} == {True}
    stopped = ask(served, ids(64), dataclasses.replace(own, keep=True, stop="bc"))
    assert stopped.snapshot.token_ids == (*ids(64), *stopped.token_ids)
    assert answer(ask(served, context, own).outputs[0]) == answer(ask(lonely(), ids(65), own).outputs[0])


# Refusals


def touched():
    """The model with the last bit of one number of one matrix changed."""
    weight = np.array(model().model.layers[1].mlp.gate.weight)
    weight.view(np.uint32)[2, 3] ^= 1
    return eqx.tree_at(lambda m: m.model.layers[1].mlp.gate.weight, model(), jnp.asarray(weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 8}, "prompt is a snapshot of an engine whose page_size is 16 and not 8: it holds for the same"),
        ({"decode_rows": 2}, "prompt is a snapshot of an engine whose decode_rows is 4 and not 2"),
        (
            {"cache_dtype": "bfloat16"},
            "prompt is a snapshot of an engine whose cache_dtype is 'auto' and not 'bfloat16'",
        ),
        ({"execution": ling3.Execution(chunk_size=32)}, "prompt is a snapshot of another execution: it holds for"),
        ({"served": lambda: open_model(CONFIG, seed=1)}, "prompt is a snapshot of another model: it holds for"),
        ({"served": touched}, "prompt is a snapshot of another model: it holds for"),
    ],
)
def test_other_models_and_settings_refuse_it(served, change, message):
    context = ask(served, ids(20), KEEP).snapshot
    change = {name: value() if name == "served" else value for name, value in change.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        engine(**change).submit(context.then([7]), params())


def edited(given, /, **fields):
    """A copy with other values in its fields, which nothing has checked, as out of a file."""
    copied = copy.copy(given)
    for name, value in fields.items():
        object.__setattr__(copied, name, value)
    return copied


def changed_array(tree, change):
    """A tree of arrays whose first one is changed."""
    leaves, form = jax.tree.flatten(tree)
    return jax.tree.unflatten(form, [change(leaves[0]), *leaves[1:]])


TAMPERED = {
    "fewer tokens": (lambda x: {"token_ids": x.token_ids[:-1]}, "held is 49, expected 48 with 49 tokens"),
    "more tokens": (lambda x: {"token_ids": (*x.token_ids, 7)}, "held is 49, expected 50 with 51 tokens"),
    "no tokens": (lambda x: {"token_ids": ()}, r"token_ids are \(\), expected a tuple"),
    "a list": (lambda x: {"token_ids": list(x.token_ids)}, "token_ids are"),
    "all answered": (lambda x: {"answered": 50}, r"answered is 50, expected a whole number in \[0, 50\)"),
    "an answer of a part": (lambda x: {"answered": 1.0}, "answered is 1.0"),
    "held": (lambda x: {"held": 51}, "held is 51, expected 49"),
    "a page": (lambda x: {"first_page": 1}, "first_page is 1, expected 0"),
    "no states": (lambda x: {"states": x.states[:-1]}, "states has other parts"),
    "a state's shape": (lambda x: {"states": changed_array(x.states, lambda a: a[..., :-1])}, "states has an array of"),
    "a state's dtype": (
        lambda x: {"states": changed_array(x.states, lambda a: a.astype(np.float64))},
        "states has an array of float64",
    ),
    "no array": (lambda x: {"states": changed_array(x.states, lambda a: 1.5)}, "states has 1.5, expected an array of"),
    "no pages": (lambda x: {"pages": ()}, "pages has other parts"),
    "fewer pages": (lambda x: {"pages": changed_array(x.pages, lambda a: a[:-1])}, "pages has an array of"),
    "a page's dtype": (
        lambda x: {"pages": changed_array(x.pages, lambda a: a.astype(np.int8))},
        "pages has an array of int8",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_one_that_was_damaged_or_edited_is_refused_when_it_is_given(served, name):
    """Nothing of it reaches the loop, which would be at work on it for ever."""
    change, message = TAMPERED[name]
    context = ask(served, ids(50), KEEP).snapshot
    bad = edited(context, **change(context))
    for prompt in (bad, bad.then([7])):
        with pytest.raises(ValueError, match=f"^prompt is a snapshot that was damaged or edited: {message}"):
            served.submit(prompt, params())
    assert not served.has_work and bits(ask(served, context, params())) == bits(ask(lonely(), ids(50), params()))


def test_one_of_no_engine_is_refused(served):
    context = ask(served, ids(50), KEEP).snapshot
    for origin in ({}, {**context.origin, "page_size": None}):
        with pytest.raises(ValueError, match="prompt is a snapshot of an"):
            served.submit(edited(context, origin=origin), params())
    with pytest.raises(ValueError, match="prompt is a snapshot whose origin is None"):
        served.submit(edited(context, origin=None), params())
    with pytest.raises(ValueError, match=r"the prompt continues \[1, 2\], expected a ling3.Snapshot"):
        served.submit(edited(context.then([3]), snapshot=[1, 2]), params())
    outside = edited(context, token_ids=(*context.token_ids[:-1], 400))
    with pytest.raises(ValueError, match="prompt, token 49 is 400, expected an id in"):
        served.submit(outside, params())


@pytest.mark.parametrize(
    ("more", "own", "message"),
    [
        ((), params(prompt_logprobs=0), "prompt_logprobs: prompt goes on from a snapshot"),
        ((), params(capture=ling3.Capture(gates=True)), "prompt goes on from a snapshot, .* capture and interventions"),
        ((), KEEP, "max_tokens is 0 and prompt is a snapshot with nothing appended"),
        ([3, 400], params(), r"prompt, token 1 is 400, expected an id in \[0, 400\)"),
        ([2.5], params(), "prompt, token 0 is 2.5, expected a whole number"),
        (5, params(), "prompt is 5, expected a list of token ids"),
        (ids(240), params(), "prompt has 260 tokens and max_tokens is 12: 272 together, but there is room for 256"),
    ],
)
def test_what_cannot_be_appended_is_refused(served, more, own, message):
    context = ask(served, ids(20), KEEP).snapshot
    for truncate in (None, "prompt"):
        with pytest.raises(ValueError, match=f"^{message}"):
            served.submit(context.then(more), own, truncate=truncate)
    assert served.check(context, params()) is None and served.check(context.then([8]), params()) is None
    assert ask(served, context.then([8]), KEEP).snapshot.held == 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep": 1}, "keep is 1, expected True or False"),
        ({"keep": False, "max_tokens": 0}, "max_tokens is 0, expected a whole number >= 1"),
        ({"keep": True, "max_tokens": 0, "n": 2}, "n is 2, which needs max_tokens >= 1"),
        ({"keep": True, "max_tokens": 0, "prompt_logprobs": 1}, "keep is True and prompt_logprobs is 1, which needs"),
        ({"keep": True, "capture": ling3.Capture(gates=True)}, "keep is True, expected False with capture"),
    ],
)
def test_senseless_values_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^sampling parameters: {message}"):
        ling3.SamplingParams(**values)


def test_an_engine_that_keeps_none_refuses_it(served):
    other = engine()
    other._intake.snapshots = None  # as a mesh and other programs make it
    for prompt, own in ((ids(3), KEEP), (ask(served, ids(3), KEEP).snapshot, params())):
        with pytest.raises(
            ValueError, match="an engine on a mesh or of attention and experts apart keeps no snapshots"
        ):
            other.submit(prompt, own)
