"""Every family against transformers' own model: fp32, CPU, random checkpoints as transformers saves them."""

import copy
import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import torch
import transformers
from exhaustive_cases import exhaustively
from family_cases import CASES, LENGTHS, distance_on_a_cache, greedy_answers, logits_of, reopened, tokens
from published_transformers import GLM_53_FLASH

import ling3
from ling3.checkpoint.names import structure
from ling3.evals.perplexity import log_likelihood
from ling3.families.glm5_next import Glm5NextConfig

LOGITS = 2e-4


# The logits of every case at the greatest length are in `test_family_closeness.py` too.
@pytest.fixture(
    scope="module",
    params=exhaustively(CASES, but=["llama 3.1", "mistral", "qwen3-moe", "qwen3-next", "glm5-next"]),
)
def case(request, open_family):
    """transformers' model and ling3's, of one checkpoint."""
    return open_family(request.param)


def test_logits(case):
    theirs, ours = case.theirs, case.ours
    ids = tokens(max(LENGTHS))
    for length in LENGTHS:
        expected = logits_of(theirs, ids[:length])
        assert 0.3 < expected.std() < 3
        found = np.asarray(ours(jnp.asarray([ids[:length]], jnp.int32))[0])
        assert np.abs(found - expected).max() <= LOGITS, length


def test_rows_of_unequal_length_on_a_cache(case):
    rows = [tokens(length, seed=length) for length in (1, 65, 130, 2)]
    assert distance_on_a_cache(case.theirs, case.ours, rows, [5] * 4) <= LOGITS


def test_greedy_continuations(case):
    prompts = [tokens(length, seed=length) for length in (3, 50, 120)]
    expected, generated, served = greedy_answers(case.theirs, case.ours, prompts)
    assert generated == expected
    assert served == expected


def test_it_is_saved_as_it_was(case, tmp_path):
    directory, ours = case.directory, case.ours
    ling3.save(ours, tmp_path / "own")
    again = ling3.load(tmp_path / "own")
    assert again.config == ours.config
    stored, own = (sum(array.nbytes for array in arrays(path).values()) for path in (directory, tmp_path / "own"))
    assert stored == own
    raw = json.loads((tmp_path / "own" / "config.json").read_text())
    theirs = reopened(tmp_path / "own")
    assert raw["architectures"] == [type(theirs).__name__]
    ids = tokens(70)
    difference = logits_of(theirs, ids) - np.asarray(ours(jnp.asarray([ids], jnp.int32))[0])
    assert np.abs(difference).max() <= LOGITS


def test_gradients(case, tmp_path):
    """Of the mean cross entropy, each tensor's within 1e-4 of its largest number: fp32 both ways through the depth."""
    ids = tokens(70)
    theirs = copy.deepcopy(case.theirs).requires_grad_(True)
    logits = theirs(torch.tensor([ids]), use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).backward()

    def loss(model):
        row = jnp.asarray([ids], jnp.int32)
        return -jnp.mean(log_likelihood(model(row)[:, :-1], row[:, 1:]))

    # Trees of gradients are trees of the models': saved, they have the published names.
    ling3.save(eqx.filter_jit(eqx.filter_grad(loss))(case.ours), tmp_path / "ours")
    for parameter in theirs.requires_grad_(False).parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, expected = (unstacked(arrays(tmp_path / name)) for name in ("ours", "theirs"))
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        if "correction_bias" not in name:  # theirs is a buffer
            assert np.abs(ours[name] - gradient).max() <= 1e-4 * np.abs(gradient).max(), name


def test_transformers_counts_as_many_parameters_in_the_published_glm():
    """Without the vision model; on a device that allocates nothing."""
    with torch.device("meta"):
        config = transformers.Glm5NextConfig.from_dict(GLM_53_FLASH)
        theirs = transformers.Glm5NextForConditionalGeneration(config).state_dict()
    count = sum(tensor.numel() for name, tensor in theirs.items() if not name.startswith("model.visual."))
    assert count == structure(Glm5NextConfig.from_dict(GLM_53_FLASH)).parameters


def arrays(directory):
    """The tensors of the text model in a directory, under published names."""
    stored = safetensors.numpy.load_file(directory / "model.safetensors")
    return {name: array for name, array in stored.items() if not name.startswith("model.visual.")}


def unstacked(named):
    """transformers 5 has the experts of a layer in one tensor; published checkpoints have them one by one."""
    found = {}
    for name, array in named.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = array
            continue
        for e, own in enumerate(array):
            parts = {"down_proj": own}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), np.split(own, 2), strict=True))
            for part, weight in parts.items():
                found[f"{name.rpartition('.')[0]}.{e}.{part}.weight"] = weight
    return found
