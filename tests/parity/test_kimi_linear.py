"""Kimi-Linear against transformers' `KimiLinearForCausalLM` in fp32 on the CPU, both reading the published layout."""

import dataclasses
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import kimi_reference
import safetensors.numpy
import torch
import transformers
from exhaustive_cases import exhaustively
from family_cases import LENGTHS, distance_on_a_cache, greedy_answers, logits_of
from published_configs import KIMI_LINEAR

import ling3
from ling3.families.kimi_linear import KimiLinearConfig, LinearAttention
from ling3.leaves import array_leaves

LOGITS = 2e-4
BASE = dataclasses.replace(
    KimiLinearConfig.from_dict(KIMI_LINEAR),
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    linear_attn_config=LinearAttention((1, 2, 4), (3,), 3, 16, 4),
    num_attention_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    model_max_length=512,
    num_experts=8,
    num_experts_per_token=3,
    num_expert_group=4,
    topk_group=2,
    moe_intermediate_size=24,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)
CONFIGS = {
    "in groups": BASE,
    "two dense layers and shared experts, weights as they are": dataclasses.replace(
        BASE,
        num_hidden_layers=3,
        linear_attn_config=LinearAttention((2,), (1, 3), 3, 16, 4),
        num_expert_group=1,
        topk_group=1,
        moe_renormalize=False,
        routed_scaling_factor=0.7,
        num_shared_experts=2,
        first_k_dense_replace=2,
        rms_norm_eps=1e-3,
    ),
    "real head sizes": dataclasses.replace(
        BASE,
        num_hidden_layers=2,
        linear_attn_config=LinearAttention((1,), (2,), 2, 128, 4),
        num_attention_heads=2,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}


def open_kimi(config, directory, seed=1):
    """A checkpoint in the published layout, tokens, their logits in float64, and both models."""
    weights, tokens, truth = kimi_reference.draw_well_posed(config, max(LENGTHS), first=seed)
    kimi_reference.write(directory, config, weights)
    theirs, told = transformers.KimiLinearForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    theirs.eval().requires_grad_(False)
    ours = ling3.load(directory, jnp.float32)
    return types.SimpleNamespace(directory=directory, tokens=tokens, truth=truth, theirs=theirs, ours=ours)


@pytest.fixture(scope="module", params=exhaustively(CONFIGS, but=["in groups"]))
def case(request, tmp_path_factory):
    return open_kimi(CONFIGS[request.param], tmp_path_factory.mktemp("checkpoint"))


def ours_of(ours, ids):
    return np.asarray(ours(jnp.asarray([ids], jnp.int32))[0])


def test_logits(case):
    for length in LENGTHS:
        expected = logits_of(case.theirs, case.tokens[:length])
        assert 0.3 < case.truth[:length].std() < 3
        assert np.abs(ours_of(case.ours, case.tokens[:length]) - expected).max() <= LOGITS, length


def test_ling3_is_as_close_to_the_truth_as_transformers(tmp_path, show):
    """In the median over all logits, and at worst: the mean of the largest distances in eight checkpoints.

    A single largest distance is luck: it hangs on one token whose rounding either program may hit at some length.
    """
    found = {"transformers": [], "ling3": []}
    for seed in range(1, 9):
        case = open_kimi(BASE, tmp_path / str(seed), seed)
        for length in (63, 300):
            ids, truth = case.tokens[:length], case.truth[:length]
            found["transformers"].append(np.abs(logits_of(case.theirs, ids) - truth).ravel())
            found["ling3"].append(np.abs(ours_of(case.ours, ids) - truth).ravel())
    median = {name: np.median(np.concatenate(each)) for name, each in found.items()}
    worst = {name: np.mean([distances.max() for distances in each]) for name, each in found.items()}
    said = ", ".join(f"{name} {worst[name]:.1e} ({median[name]:.1e})" for name in found)
    show(f"Kimi-Linear: fp32 logits - truth, mean of the largest (median): {said}")
    assert worst["transformers"] <= LOGITS, "two readings of the model, which share no code"
    assert median["ling3"] <= median["transformers"]
    assert worst["ling3"] <= worst["transformers"]


def test_rows_of_unequal_length_on_a_cache(case):
    lengths = (1, 65, 130, 2)
    rows, following = [case.tokens[:length] for length in lengths], [case.tokens[length] for length in lengths]
    assert distance_on_a_cache(case.theirs, case.ours, rows, following) <= LOGITS


def test_greedy_continuations(case):
    expected, generated, served = greedy_answers(
        case.theirs, case.ours, [case.tokens[:length] for length in (3, 50, 120)]
    )
    assert generated == expected
    assert served == expected


def renamed(directory, dense):
    """transformers' `model.safetensors` in the published layout: it puts the dense layers under `block_sparse_moe`."""
    stored = safetensors.numpy.load_file(directory / "model.safetensors")
    for name in [name for name in stored if any(f"layers.{i}.block_sparse_moe." in name for i in range(dense))]:
        stored[name.replace(".block_sparse_moe.", ".mlp.")] = stored.pop(name)
    safetensors.numpy.save_file(stored, directory / "model.safetensors")


def test_what_transformers_saves_is_the_published_layout_but_for_dense_layers(case, tmp_path):
    """Its own spelling of the config is read, too."""
    case.theirs.save_pretrained(tmp_path)
    with pytest.raises(ling3.CheckpointError, match=r"model\.layers\.0\.block_sparse_moe\.gate_proj\.weight"):
        ling3.load(tmp_path)
    renamed(tmp_path, case.ours.config.first_k_dense_replace)
    again = ling3.load(tmp_path)
    assert again.config == case.ours.config
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(case.ours), strict=True):
        assert jnp.array_equal(one, other)


def test_gradients(tmp_path):
    """Of the mean loss of 80 tokens, each array's within 1e-4 of its largest; transformers' come in as a checkpoint."""
    case = open_kimi(BASE, tmp_path / "given")
    ids = case.tokens[:81]
    theirs = case.theirs.requires_grad_(True)
    theirs.set_experts_implementation("eager")
    logits = theirs(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).backward()
    for parameter in theirs.requires_grad_(False).parameters():
        parameter.copy_(parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    renamed(tmp_path / "gradients", BASE.first_k_dense_replace)
    expected = ling3.load(tmp_path / "gradients")

    @eqx.filter_jit
    @eqx.filter_grad
    def gradients(model):
        own = jax.nn.log_softmax(model(jnp.asarray([ids[:-1]], jnp.int32))[0])
        return -jnp.mean(jnp.take_along_axis(own, jnp.asarray(ids[1:], jnp.int32)[:, None], axis=1))

    found = gradients(case.ours)
    for one, other in zip(array_leaves(found), array_leaves(expected), strict=True):
        if one.field != "expert_bias":  # chooses, and has no gradient: transformers keeps it beside its parameters
            assert jnp.abs(one.value - other.value).max() <= 1e-4 * jnp.abs(other.value).max(), one.path


def test_it_is_saved_as_it_was(case, tmp_path):
    ling3.save(case.ours, tmp_path / "own")
    own, given = (safetensors.numpy.load_file(at / "model.safetensors") for at in (tmp_path / "own", case.directory))
    assert own.keys() == given.keys()
    assert all(own[name].shape == given[name].shape and np.array_equal(own[name], given[name]) for name in own)


def test_transformers_counts_as_many_parameters_in_the_published_model():
    config = transformers.KimiLinearConfig.from_dict(
        {name: value for name, value in KIMI_LINEAR.items() if name not in ("auto_map", "rope_scaling")}
    )
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(config)
    assert sum(tensor.numel() for tensor in theirs.state_dict().values()) == 49_122_681_728
