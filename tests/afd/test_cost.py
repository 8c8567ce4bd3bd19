"""The cost model against bytes counted by hand, against Monte Carlo, and against its own laws."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import DEEPSEEK_V4_FLASH, FLASH
from published_transformers import GLM_53_FLASH, QWEN3_30B_A3B

import ling3
from ling3.afd import cost
from ling3.afd.cost import H200, DecodeStep, Deployment, Hardware, ModelCost, Stage
from ling3.checkpoint.names import structure
from ling3.families.deepseek_v4_config import DeepseekV4Config
from ling3.families.glm5_next import Glm5NextConfig
from ling3.families.quantization import in_floats
from ling3.families.qwen3_moe import Qwen3MoeConfig

LING, V4 = ling3.Ling3Config.from_dict(FLASH), DeepseekV4Config.from_dict(DEEPSEEK_V4_FLASH)
FASTER = dataclasses.replace(H200, link_bandwidth=math.inf, link_latency=0.0)
TIMES = st.floats(0.01, 10.0)
SMALL = ling3.Ling3Config(num_hidden_layers=4, num_experts=32, vocab_size=1024)


def first_layers(config, layers):
    names = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list", "layer_types")
    lists = {name: getattr(config, name, None) for name in names}
    cut = {name: values[:layers] for name, values in lists.items() if values is not None}
    return dataclasses.replace(config, num_hidden_layers=layers, **cut)


@pytest.fixture(scope="module")
def ling():
    """Ling-3.0-flash up to its first MLA layer: two dense layers, then four with experts."""
    return ModelCost.of(first_layers(LING, 6))


@pytest.fixture(scope="module")
def v4():
    """DeepSeek-V4-Flash's first four layers, one of each kind and two of SWA, as published."""
    return ModelCost.of(first_layers(V4, 4), weight_bytes=1.0, expert_bytes=17 / 32, packed=True)


KDA_WEIGHTS = (
    2 * (6 * 4096 * 2560 + 32 * 2560)  # q, k, v, f, g, o and b
    + 4 * (3 * 4096 * 4 + 32 + 4096 + 128)  # convolutions, A_log, dt_bias and the norm of the output
)
MLA_WEIGHTS = 2 * (32 * 192 * 2560 + 576 * 2560 + 32 * 256 * 512 + 32 * 2560 + 2560 * 32 * 128) + 4 * 512
AROUND = 4 * 2 * 2560 + 4 * (512 * 2560 + 512) + 2 * 3 * 768 * 2560  # norms, router and its bias, shared expert


def test_ling_flash_by_hand(ling):
    first, second, third, mla = ling.blocks
    assert second == third
    assert second.weights == KDA_WEIGHTS + AROUND
    assert second.moved == 2 * (4 * 32 * 128 * 128 + 2 * 3 * 3 * 4096) and second.reads == ()
    assert mla.weights == MLA_WEIGHTS + AROUND and mla.moved == 0
    (read,) = mla.reads
    assert (read.bytes, read.flops, read.most) == (2 * 576, 2 * 32 * (576 + 512), math.inf)
    dense, head = 3 * KDA_WEIGHTS + AROUND + 2 * (2 * 3 * 6144 * 2560 + 4 * 2 * 2560), 2 * 157_184 * 2560
    assert first.weights == dense + head and first.moved == 3 * second.moved
    assert ling.expert_bytes == 2 * 3 * 768 * 2560 and ling.expert_flops == ling.expert_bytes
    assert (ling.experts, ling.top_k, ling.hidden) == (512, 8, 2560)
    assert ling.sequence(0) == 5 * second.moved / 2 and ling.sequence(1000) == ling.sequence(0) + 1000 * 1152
    # 2 flop for each number in a matrix, and 7 for each of the recurrent state
    assert second.flops == pytest.approx(
        KDA_WEIGHTS + 2 * 3 * 768 * 2560 + 2 * 512 * 2560 + 7 * 32 * 128 * 128, rel=4e-3
    )


def test_v4_flash_by_hand(v4):
    first, second, csa, hca = v4.blocks
    assert v4.expert_bytes == 3 * 2048 * 4096 * 17 / 32 and (v4.experts, v4.top_k) == (256, 6)
    window = csa.reads[0]
    assert window == hca.reads[0] == first.reads[0] == second.reads[0]
    assert (window.bytes, window.flops, window.most) == (2 * 512, 4 * 64 * 512, 128)
    keys, entries = csa.reads[1:]
    assert (keys.bytes, keys.most) == (132 / 4, math.inf)
    assert (entries.bytes, entries.most) == (584 / 4, 512 * 4)
    assert (keys.flops, entries.flops) == (2 * 64 * 128 / 4, 4 * 64 * 512 / 4)
    assert (hca.reads[1].bytes, hca.reads[1].most) == (584 / 128, math.inf)
    # A row of the tail written each step, the tail read with each entry: for entries and for the indexer's keys.
    assert csa.moved == 8 * 2048 * (1 + 7 / 4) / 2 + 8 * 512 * (1 + 7 / 4) / 2
    assert first.moved == 0 and second.weights < csa.weights
    assert v4.sequence(0) == 4 * 127 * 512 * 2 + 57_344 + 14_336 + 520_192


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "per_token", "parameters"),
    [(LING, 7 * 2 * 576, 124.4e9), (V4, 21 * (584 + 132) / 4 + 20 * 584 / 128, 284.3e9)],
    ids=["ling", "v4"],
)
def test_the_published_models_whole(config, per_token, parameters):
    model, arrays = ModelCost.of(config, packed=config is V4), structure(in_floats(config))
    floating = [leaf for leaf in jax.tree.leaves(arrays) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert sum(leaf.size for leaf in floating) == pytest.approx(parameters, rel=1e-3)
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in floating)
    assert model.weights + len(model.blocks) * model.experts * model.expert_bytes == held
    assert sum(size for size, _ in model.held_per_token) == per_token
    # All weights are read in a step, but for the embeddings and what is after the last layer.
    read, embeddings = sum(block.weights for block in model.blocks), 2 * config.vocab_size * config.hidden_size
    assert read == pytest.approx(model.weights - embeddings, rel=1e-4)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="config: Ling3Config has no layer with routed experts"):
        ModelCost.of(dataclasses.replace(SMALL, num_hidden_layers=1))


def test_grouped_queries_by_hand():
    """Qwen3-30B-A3B: 32 heads over 4 of keys and values, each of 128 channels, in every layer."""
    config = Qwen3MoeConfig.from_dict(QWEN3_30B_A3B | {"num_hidden_layers": 2})
    model = ModelCost.of(config)
    assert [block.reads for block in model.blocks] == [(cost.Reads(2 * 2 * 4 * 128, 4 * 32 * 128),)] * 2
    assert (model.experts, model.top_k, model.expert_bytes) == (128, 8, 2 * 3 * 768 * 2048)
    assert model.sequence(100) == 100 * 2 * 2048 and all(block.moved == 0 for block in model.blocks)


def test_indexed_latents_by_hand():
    """GLM-5.3-Flash's first layers up to one with an indexer: keys of 4 tokens each, and 2,048 latents at most."""
    config = Glm5NextConfig.from_dict(GLM_53_FLASH)
    linear = dataclasses.replace(config.linear_attn_config, kda_layers=(0, 1, 2), full_attn_layers=(3,))
    parts = {"num_hidden_layers": 4, "mlp_layer_types": config.mlp_layer_types[:4], "linear_attn_config": linear}
    (block,) = ModelCost.of(dataclasses.replace(config, **parts)).blocks
    keys, latents = block.reads
    assert (keys.bytes, keys.flops, keys.most) == (2 * 128 / 4, 2 * 32 * 128 / 4, math.inf)
    assert (latents.bytes, latents.flops, latents.most) == (2 * 512, 2 * 64 * 1024, 2048)


def test_the_expected_number_of_distinct_experts():
    assert cost.distinct(64, 4, 0) == 0
    assert cost.distinct(64, 4, 1) == pytest.approx(4)
    assert cost.distinct(64, 4, 1e6) == 64
    assert cost.distinct(8, 8, 1) == 8
    draws = np.random.default_rng(0)
    for tokens in (2, 8, 25):
        order = np.argsort(draws.random((2000, tokens, 64)), axis=-1)
        found = np.mean(np.any(order < 4, axis=1).sum(axis=1))  # each token has chosen the experts of the places 0 to 3
        assert cost.distinct(64, 4, tokens) == pytest.approx(found, rel=0.01)  # five standard errors and more


@settings(max_examples=40)
@given(TIMES, TIMES, TIMES, TIMES, st.floats(0, 10), st.integers(1, 8), st.booleans())
def test_laws_of_the_period(attention, experts, out, back, latency, micro_batches, divided):
    stage = Stage(attention, (experts / 2, experts), out, back, latency)
    one, some, more = (stage.period(m, divided) for m in (1, micro_batches, micro_batches + 1))
    assert one == pytest.approx(attention + experts + out + back + 2 * latency)
    assert some >= one and more / (micro_batches + 1) <= some / micro_batches * (1 + 1e-12)
    assert stage.period(micro_batches) <= stage.period(micro_batches, divided=False)
    busiest = max(attention, experts, out, back) if divided else max(attention + experts, out + back)
    assert stage.period(10_000, divided) == pytest.approx(10_000 * busiest)


def test_a_step_is_the_sum_of_its_blocks(ling):
    deployment = Deployment(3, 2, H200, H200)
    for micro_batches in (1, 3):
        work = DecodeStep(4096, 16, micro_batches, 2)
        stages = cost.stages(ling, work, deployment)
        assert len(stages) == 4 and all(len(stage.experts) == 3 for stage in stages)
        total = sum(stage.period(micro_batches) for stage in stages)
        assert cost.step_time(ling, work, deployment) == pytest.approx(total)
    assert cost.step_time(ling, DecodeStep(4096, 16, 1), deployment) == pytest.approx(
        sum(
            s.attention + s.experts[-1] + s.out + s.back + 2 * 5e-6
            for s in cost.stages(ling, DecodeStep(4096, 16, 1), deployment)
        )
    )
    free = cost.stages(ling, work, Deployment(3, 2, FASTER, FASTER))
    assert all(stage.out == stage.back == stage.latency == 0 for stage in free)


def test_the_times_of_a_stage_by_hand(ling):
    work, deployment = DecodeStep(1000, 20, 2, 2), Deployment(4, 2, H200, H200)
    *_, kda, mla = cost.stages(ling, work, deployment)
    assert mla.attention == (MLA_WEIGHTS + AROUND + 20 * 1000 * 1152) / 4.8e12
    touched = 256 * (1 - (1 - 8 / 512) ** 80)
    assert kda.experts[-1] == mla.experts[-1] == pytest.approx(touched * 11_796_480 / 4.8e12)
    # The card's link has the rows of four sessions, half of them: 20·8 slots of 2,564 bytes in 3,072, and 5,120 back.
    assert mla.out == pytest.approx(2 * 20 * 8 * 3072 / 450e9) and mla.back == pytest.approx(2 * 20 * 8 * 5120 / 450e9)
    once = cost.stages(ling, dataclasses.replace(work, once_per_card=True), deployment)[-1]
    assert once.back == pytest.approx(2 * 20 * 2 * (1 - 0.5**8) * 5120 / 450e9)
    crowd = cost.stages(ling, DecodeStep(1000, 100_000, 1), deployment)[-1]
    assert crowd.experts[-1] == pytest.approx(400_000 * 8 / 2 * ling.expert_flops / 989e12)
    alone = cost.stages(ling, DecodeStep(1000, 20, 1), Deployment.undivided(1, H200))[-1]
    assert alone.out == alone.back == 0 and len(alone.experts) == 1


def test_several_batches_at_once(ling):
    deployment, batches = Deployment(3, 2, H200, H200), np.array([1, 7, 500])
    together = cost.step_time(ling, DecodeStep(4096, batches, 2), deployment)
    assert together.tolist() == [cost.step_time(ling, DecodeStep(4096, int(b), 2), deployment) for b in batches]
    per_sequence = cost.step_time(ling, DecodeStep(4096, np.arange(1, 3000), 2), deployment) / np.arange(1, 3000)
    assert np.all(np.diff(per_sequence) <= 1e-18)


def test_the_fullest_batch_is_the_largest_that_fits(ling):
    deployment, work = Deployment(3, 2, H200, H200), DecodeStep(8192, 1, 2)
    plan = cost.fullest(ling, work, deployment)
    most = int((H200.memory - ling.weights) / ling.sequence(8192)) // 2
    assert plan.work.batch == most and plan.throughput == pytest.approx(3 * 2 * most / plan.step_time / 5)
    limited = cost.fullest(ling, work, deployment, plan.step_time / 2)
    batch = limited.work.batch
    assert limited.step_time <= plan.step_time / 2
    assert cost.step_time(ling, DecodeStep(8192, batch + 1, 2), deployment) > plan.step_time / 2
    assert limited.throughput < plan.throughput and cost.fullest(ling, work, deployment, 1e-9) is None
    tight = dataclasses.replace(H200, memory=ling.weights)
    assert cost.fullest(ling, work, Deployment(3, 2, tight, H200)) is None
    assert cost.fullest(ling, work, Deployment(3, 2, H200, tight)) is None  # half of the experts have no room
    chosen = cost.best(ling, work, [Deployment(4, 1, H200, H200), deployment])
    others = [
        cost.fullest(ling, DecodeStep(8192, 1, m), Deployment(5 - w, w, H200, H200))
        for w in (1, 2)
        for m in range(1, 5)
    ]
    assert chosen.throughput == max(plan.throughput for plan in others)
    assert cost.best(ling, work, [Deployment(3, 2, tight, H200)]) is None


def test_where_the_room_for_caches_is(ling):
    """All attention workers together have more than the peer just where the experts fill the cards that hold them."""
    experts = len(ling.blocks) * ling.experts * ling.expert_bytes
    for memory in (ling.weights + experts / 4, 10 * experts):
        hardware = dataclasses.replace(H200, memory=memory)
        divided, peer = Deployment(12, 4, hardware, hardware), Deployment.undivided(16, hardware)
        more = 12 * divided.room(ling) - 16 * peer.room(ling)
        assert more == pytest.approx(experts - 4 * (memory - ling.weights), rel=1e-6, abs=1e3)
        assert (divided.price, peer.price, divided.devices, peer.devices) == (16, 16, 16, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dataclasses.replace(H200, memory_bandwidth=-1.0), "memory_bandwidth is -1.0, expected"),
        (lambda: Hardware(1.0, 1.0, math.nan, 1.0), "flops is nan"),
        (lambda: dataclasses.replace(H200, link_latency=-1e-6), "link_latency is -1e-06, expected at least 0"),
        (lambda: DecodeStep(10, 1, 0), "micro_batches is 0, expected at least 1"),
        (lambda: DecodeStep(10, np.array([3, 0]), 1), "batch is"),
        (lambda: DecodeStep(-1, 1, 1), "context is -1"),
        (lambda: Deployment(0, 1, H200, H200), "attention_workers is 0"),
        (lambda: Deployment(1, 0, H200, H200), "ffn_workers is 0"),
        (lambda: Deployment(2, 1, H200, H200, divided=False), "ffn_workers is 1, expected the attention"),
        (lambda: Stage(1.0, (1.0,), 0.0, 0.0, 0.0).period(0), "micro_batches is 0"),
        (lambda: ModelCost.of(SMALL, expert_bytes=0.0), "expert_bytes is 0.0, expected a number above 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_work_is_named(ling):
    deployment = Deployment(1, 1, H200, H200)
    with pytest.raises(ValueError, match="token_dtype"):
        cost.step_time(ling, DecodeStep(10, 1, 1, token_dtype=3), deployment)
    with pytest.raises(ValueError, match="limit is 0"):
        cost.fullest(ling, DecodeStep(10, 1, 1), deployment, limit=0.0)
