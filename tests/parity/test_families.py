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
from family_cases import CASES, LENGTHS, distance_on_a_cache, greedy_answers, logits_of, tokens

import ling3
from ling3.evals.perplexity import log_likelihood

LOGITS = 2e-4


# The logits of every case are in `test_family_closeness.py` too.
@pytest.fixture(
    scope="module", params=exhaustively(CASES, but=["llama 3.1", "mistral", "qwen2", "qwen3-moe", "qwen3-next"])
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
    stored, own = ((path / "model.safetensors").stat().st_size for path in (directory, tmp_path / "own"))
    assert abs(stored - own) < 4096  # the headers alone
    raw = json.loads((tmp_path / "own" / "config.json").read_text())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "own", dtype=torch.float32).eval()
    assert raw["architectures"] == [type(theirs).__name__]
    ids = tokens(70)
    difference = logits_of(theirs.requires_grad_(False), ids) - np.asarray(ours(jnp.asarray([ids], jnp.int32))[0])
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

    # A tree of gradients is a tree of the model's: saved, it has the published names.
    ling3.save(eqx.filter_jit(eqx.filter_grad(loss))(case.ours), tmp_path / "gradients")
    saved = safetensors.numpy.load_file(tmp_path / "gradients" / "model.safetensors")
    ours = {
        name.replace("language_model.", ""): gradient
        for name, gradient in saved.items()
        if "correction_bias" not in name  # theirs is a buffer
    }
    expected = unstacked({name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()})
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert np.abs(ours[name] - gradient).max() <= 1e-4 * np.abs(gradient).max(), name


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
