"""Every family against transformers' own model: fp32, CPU, random checkpoints as transformers saves them."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import torch
import transformers

import ling3

LENGTHS = (1, 2, 63, 257, 300)
LOGITS = 2e-4
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "head_dim": 16,
}
CASES = {
    "llama": ("Llama", {}),
    "llama tied, one head each": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn, mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe, some dense, weights as they are": (
        "Qwen3Moe",
        EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """transformers' model and ling3's, of one checkpoint; weights are large enough for logits near 1."""
    family, fields = CASES[request.param]
    directory = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | fields)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, tensor in theirs.named_parameters():
        if tensor.ndim > 1 and "embed" not in name:
            tensor.normal_(0, 1.2 * tensor.shape[-1] ** -0.5)
        elif "embed" in name:
            tensor.normal_(0, 1.0 if not config.tie_word_embeddings else 0.3)
        elif name.endswith("bias"):
            tensor.normal_(0, 0.3)
        else:
            tensor.uniform_(0.5, 1.5)
    theirs.save_pretrained(directory)
    return directory, theirs, ling3.load(directory, jnp.float32)


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(2, 97, size=length).tolist()


def logits_of(theirs, ids):
    return theirs(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def test_logits(case):
    _, theirs, ours = case
    ids = tokens(max(LENGTHS))
    for length in LENGTHS:
        expected = logits_of(theirs, ids[:length])
        assert 0.3 < expected.std() < 3
        found = np.asarray(ours(jnp.asarray([ids[:length]], jnp.int32))[0])
        assert np.abs(found - expected).max() <= LOGITS, length


def test_rows_of_unequal_length_on_a_cache(case):
    _, theirs, ours = case
    rows = [tokens(length, seed=length) for length in (1, 65, 130, 2)]
    padded = jnp.asarray([row + [0] * (130 - len(row)) for row in rows], jnp.int32)
    logits, cache = ours.step(padded, ours.init_cache(4, 160), jnp.asarray([len(row) for row in rows], jnp.int32))
    step, _ = ours.step(jnp.asarray([[5]] * 4, jnp.int32), cache)
    for b, row in enumerate(rows):
        expected = logits_of(theirs, [*row, 5])
        assert np.abs(np.asarray(logits[b, : len(row)]) - expected[:-1]).max() <= LOGITS
        assert np.abs(np.asarray(step[b, 0]) - expected[-1]).max() <= LOGITS


def test_greedy_continuations(case):
    _, theirs, ours = case
    prompts = [tokens(length, seed=length) for length in (3, 50, 120)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(24):
            ids.append(int(logits_of(theirs, ids)[-1].argmax()))
        expected.append(ids[len(prompt) :])
    assert ling3.generate(ours, prompts, max_tokens=24, ignore_eos=True) == expected
    engine = ling3.Engine(
        ours, max_running_requests=2, num_pages=24, page_size=16, chunked_prefill_size=32, token_paddings=(32,)
    )
    outputs = engine.generate(prompts, ling3.SamplingParams(max_tokens=24, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == expected


def test_it_is_saved_as_it_was(case, tmp_path):
    directory, _, ours = case
    ling3.save(ours, tmp_path / "own")
    again = ling3.load(tmp_path / "own")
    assert again.config == ours.config
    stored, own = ((path / "model.safetensors").stat().st_size for path in (directory, tmp_path / "own"))
    assert abs(stored - own) < 4096  # the headers alone
    raw = json.loads((tmp_path / "own" / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32).eval()
    assert raw["architectures"] == [type(theirs).__name__]
    ids = tokens(70)
    difference = logits_of(theirs.requires_grad_(False), ids) - np.asarray(ours(jnp.asarray([ids], jnp.int32))[0])
    assert np.abs(difference).max() <= LOGITS
