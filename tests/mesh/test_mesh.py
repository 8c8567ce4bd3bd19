"""A model over fake devices: what each has, what it computes, and what the engine on it answers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from meshes import FAMILIES, TOKENS, mesh, model, placed, tolerance

import ling3
from ling3.evals.predictions import fingerprint
from ling3.leaves import array_leaves
from ling3.mesh import MeshError, Rules, plan
from ling3.mesh.rules import share_of

SETTINGS = {
    "max_running_requests": 4,
    "num_pages": 16,
    "page_size": 16,
    "chunked_prefill_size": 32,
    "token_paddings": (16, 32),
    "max_model_len": 160,
    "decode_rows": 2,
    "decode_steps": 4,
}


def forward(model):
    """Logits of whole sequences, after a prefill, and after a decode step."""
    tokens = jnp.asarray(TOKENS, jnp.int32)
    cache = model.init_cache(2, 64)
    prefilled, cache = model.step(tokens[:, :39], cache, last=True)
    decoded, _ = model.step(tokens[:, 39:], cache)
    return [np.asarray(logits) for logits in (model(tokens), prefilled, decoded)]


@functools.cache
def expected(name):
    return forward(model(name))


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "data", "rules"),
    [
        ("tiny", 2, 1, Rules()),
        ("nano", 4, 1, Rules()),
        *((name, 4, 1, Rules(sums=True)) for name in ("tiny", "flash", "nano", "grouped")),
        ("tiny", 2, 2, Rules(experts=("data", "tensor"))),
        ("tiny", 4, 2, Rules(experts=None)),
        ("tiny", 4, 2, Rules(experts=None, sums=True)),
    ],
)
def test_logits_are_those_of_one_device(name, tensor, data, rules):
    """Also of a cache; `test_every_mesh.py` has more meshes."""
    for found, own in zip(forward(placed(name, tensor, data, rules)), expected(name), strict=True):
        assert np.abs(found - own).max() <= tolerance(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_whose_channels_follow_each_other_are_cut_one_kind_after_the_other(name):
    """Its states too: the memory of a sequence is shared by the devices."""
    one, cut = model(name), placed(name, 8)
    for found, own in zip(forward(cut), expected(name), strict=True):
        assert np.abs(found - own).max() <= tolerance(name)
    packed = [share for share in cut.placement.shares if share.packed == (64, 64, 128)]
    assert {share.width for share in packed} == {32} and cut.shapes == one.shapes
    state = cut.init_cache(2, 64).layers[0].recurrent
    assert state.shape == one.init_cache(2, 64).layers[0].recurrent.shape
    assert {shard.data.shape[1] for shard in state.addressable_shards} == {2}


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["tiny", "flash", "nano", "grouped", *FAMILIES])
def test_bits_do_not_depend_on_the_number_of_devices_where_asked(name):
    """A mesh of one device beside larger ones; without a mesh XLA may fuse otherwise."""
    one, *others = (forward(placed(name, tensor, 1, Rules(same_bits=True))) for tensor in (1, 2, 4, 8))
    for other in others:
        for found, own in zip(other, one, strict=True):
            assert np.array_equal(found, own)
    for own, plain in zip(one, expected(name), strict=True):
        assert np.abs(own - plain).max() <= tolerance(name)


DRAWN = np.random.default_rng(0)
PROMPTS = [DRAWN.integers(3, 96, size=n).tolist() for n in (5, 40, 17, 33, 60, 2)]
PARAMS = [
    ling3.SamplingParams(max_tokens=12, temperature=[0, 0.9][i % 2], seed=i, logprobs=2, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("tensor", "data", "rules", "num_pages"),
    [
        pytest.param(2, 2, Rules(experts=("data", "tensor")), 16, marks=SLOW),
        (4, 1, Rules(), 9),  # few enough for preemption
        pytest.param(1, 4, Rules(), 20, marks=SLOW),  # on each device five, which the longest request needs
    ],
)
def test_an_engine_answers_as_on_one_device_and_alike_in_any_company(tensor, data, rules, num_pages):
    settings = SETTINGS | {"decode_rows": SETTINGS["max_running_requests"] // data, "num_pages": num_pages}
    own = [each.outputs[0] for each in ling3.Engine(model("tiny"), **settings).generate(PROMPTS, PARAMS)]
    engine = ling3.Engine(placed("tiny", tensor, data, rules), **settings)
    found = [each.outputs[0] for each in engine.generate(PROMPTS, PARAMS)]
    for one, other in zip(own, found, strict=True):
        assert one.token_ids == other.token_ids
        logprobs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(own.logprob - cut.logprob) for own, cut in logprobs) <= tolerance("tiny")
    engine.forget_prefixes()
    for prompt, params, together in zip(PROMPTS, PARAMS, found, strict=True):
        [alone] = engine.generate([prompt], params)
        assert (alone.outputs[0].token_ids, alone.outputs[0].logprobs) == (together.token_ids, together.logprobs)
    assert max(each.timings.preemptions for each in found) > 0 or data > 1
    with pytest.raises(ValueError, match=r"keep is True, and an engine on a mesh .* keeps no snapshots"):
        engine.submit(PROMPTS[0], ling3.SamplingParams(keep=True))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("tensor", "data", "rules", "num_pages"),
    [(4, 1, Rules(), 9), (2, 2, Rules(experts=("data", "tensor")), 20)],
    ids=["tensor", "tensor and data"],
)
def test_answers_keep_their_bits_however_requests_arrive(tensor, data, rules, num_pages):
    """Requests arrive at drawn turns, a few are aborted, and pages run out where all are on one group of devices."""
    settings = SETTINGS | {"decode_rows": SETTINGS["max_running_requests"] // data, "num_pages": num_pages}
    engine = ling3.Engine(placed("tiny", tensor, data, rules), **settings)
    alone = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.forget_prefixes()
        alone.append(engine.generate([prompt], params)[0].outputs[0])
    found, preempted = 0, 0
    for seed in range(12):
        draw, asked, aborted = np.random.default_rng(seed), {}, set()
        engine.forget_prefixes()
        left = draw.integers(len(PROMPTS), size=10).tolist()
        while left or engine.has_work:
            while left and (not engine.has_work or draw.random() < 0.4):
                which = left.pop()
                asked[engine.submit(PROMPTS[which], PARAMS[which])] = which
            if asked and draw.random() < 0.05:
                number = int(draw.choice(list(asked)))
                aborted |= {number} if engine.abort(number) else set()
            for delta in engine.step():
                if delta.output is not None and delta.request_id not in aborted:
                    own, expected = delta.output.outputs[0], alone[asked[delta.request_id]]
                    assert (own.token_ids, own.logprobs) == (expected.token_ids, expected.logprobs)
                    found, preempted = found + 1, preempted + delta.output.timings.preemptions
    assert found > 60 and (preempted > 0 or data > 1)


def _packed_over_sixteen():
    [leaf] = [leaf for leaf in array_leaves(model("delta")) if leaf.path == "model.layers.0.attention.conv1d.weight"]
    share_of(leaf, {"tensor": 16}, Rules())


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(MeshError, match=r"heads are 8, which 3 devices cannot share evenly; 1, 2, 4, 8 can"):
        plan(model("tiny"), mesh(3))
    with pytest.raises(MeshError, match="16 devices cannot share 8 groups of heads, of which no two can have the same"):
        _packed_over_sixteen()
    with pytest.raises(ValueError, match="sums or same_bits"):
        Rules(sums=True, same_bits=True)


@pytest.mark.slow
def test_a_cut_model_is_identified_as_on_one_device():
    assert fingerprint(placed("tiny", 2)) == fingerprint(model("tiny"))


def test_a_cut_model_counts_its_own_numbers():
    one, cut = model("tiny"), placed("tiny", 2)
    assert cut.parameters == one.parameters == sum(leaf.value.size for leaf in array_leaves(one))
    assert cut.shapes == one.shapes != tuple(leaf.value.shape for leaf in array_leaves(cut))
