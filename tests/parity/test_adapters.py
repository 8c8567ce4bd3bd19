"""LoRA adapters against PEFT on transformers: fp32, CPU, random A and B, files read in both directions."""

import copy
import types

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("peft", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import deepseek_v4_cases
import peft
import torch
from cases import Case
from exhaustive_cases import exhaustively
from family_cases import logits_of, make
from test_kimi_linear import BASE, open_kimi

import ling3
from ling3.adapters.adapter import adaptable

# PEFT 0.21 asks for an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LOGITS = 1e-4
"""The largest difference allowed between logits whose standard deviation is near 1: half of what the base models may
differ by over longer sequences."""

NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR = {
    "target_modules": [*NAMES, "b_proj", "g_proj", "f_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
    "rank_pattern": {"kv_b_proj": 5, r"layers\.0\.self_attn\.q_proj": 2, "mlp.up_proj": 6},
    "alpha_pattern": {"kv_b_proj": 9, "g_proj": 2.5, r"mlp.*down_proj": 7},
}
SETTINGS = {
    "ling3": LINEAR | {"use_rslora": True},
    "kimi": LINEAR
    | {
        "target_modules": [*NAMES, "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "kv_b_proj"],
        "alpha_pattern": {"kv_b_proj": 9, "f_b_proj": 2.5},
    },
    "deepseek-v4": {
        "target_modules": ["q_a_proj", "q_b_proj", "kv_proj", "o_b_proj", "weights_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"indexer.gate_proj": 2},
    },
    "llama": {
        "target_modules": [*NAMES, "lm_head"],
        "exclude_modules": ["v_proj", "layers.1.self_attn.k_proj"],
        "rank_pattern": {"o_proj": 2},
        "alpha_pattern": {r"layers\.[12]\.mlp\.down_proj": 11, "q_proj": 1},
    },
    "mistral": {"target_modules": r"model\.layers\.\d+\.self_attn\.[qkvo]_proj", "use_rslora": True},
    "qwen2": {
        "target_modules": NAMES,
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
        "rank_pattern": {r"mlp\.gate_proj": 3},
    },
    "qwen3": {"target_modules": NAMES, "use_rslora": True, "alpha_pattern": {"o_proj": 3}},
    "deepseek-v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "qwen3-next": {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]},
    "qwen3.5": {
        "target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "down_proj"],
        "alpha_pattern": {"in_proj_z": 3},
    },
}
"""By family; those of the hybrids leave out `gate_proj` and the like, which PEFT takes for experts of all layers."""
HYBRIDS = {"deepseek-v3", "deepseek-v4", "qwen3-next", "qwen3.5"}


@pytest.fixture(scope="module", params=exhaustively(SETTINGS, but=SETTINGS.keys() - HYBRIDS))
def case(request, tmp_path_factory):
    """Both models of one checkpoint, PEFT's model with a random adapter, and the directory in which PEFT saved that."""
    name, directory = request.param, tmp_path_factory.mktemp("adapter")
    if name == "ling3":
        base = Case("flash-like, bound -5.0", directory)
        own = types.SimpleNamespace(theirs=base.oracle.model, ours=base.ling3, tokens=base.tokens)
    elif name == "kimi":
        own = open_kimi(BASE, directory / "base")
    elif name == "deepseek-v4":
        own = deepseek_v4_cases.make(directory / "base")
    else:
        own = make(name, directory / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **SETTINGS[name])
    adapted = peft.get_peft_model(copy.deepcopy(own.theirs), config)
    for parameter, tensor in adapted.named_parameters():
        if "lora_" in parameter:
            tensor.data.normal_(0, 0.7 * tensor.shape[-1] ** -0.5)
    adapted.eval().requires_grad_(False).save_pretrained(directory / "peft", save_embedding_layers=False)
    ids = np.random.default_rng(3).integers(2, 64, size=80).tolist()
    return types.SimpleNamespace(
        base=own.theirs, ours=own.ours, adapted=adapted, expected=logits_of(adapted, ids), ids=ids, directory=directory
    )


def ours_of(model, ids):
    return np.asarray(model(jnp.asarray([ids], jnp.int32))[0])


def test_a_file_of_peft_has_its_logits(case):
    adapter = ling3.load_adapter(case.ours, case.directory / "peft")
    assert 0.3 < case.expected.std() < 4
    assert np.abs(case.expected - logits_of(case.base, case.ids)).max() > 0.1, "the adapter should change the logits"
    model = ling3.with_adapter(case.ours, adapter)
    assert np.abs(ours_of(model, case.ids) - case.expected).max() <= LOGITS
    merged = ling3.merge_adapter(case.ours, adapter)
    assert np.abs(ours_of(merged, case.ids) - case.expected).max() <= LOGITS
    # Prefill and a decode step on a cache, where MLA reads its matrices in the absorbed form.
    rows = jnp.asarray([case.ids[:-1]], jnp.int32)
    _, cache = model.step(rows, model.init_cache(1, 96))
    step, _ = model.step(jnp.asarray([case.ids[-1:]], jnp.int32), cache)
    assert np.abs(np.asarray(step[0, 0]) - case.expected[-1]).max() <= LOGITS


def test_peft_reads_what_ling3_writes(case):
    adapter = ling3.load_adapter(case.ours, case.directory / "peft")
    ling3.save_adapter(adapter, case.directory / "ling3", overwrite=True)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(case.base), case.directory / "ling3").eval()
    # The same numbers in the same modules: the same sums.
    assert np.abs(logits_of(again, case.ids) - case.expected).max() <= 1e-6


def test_transformers_has_a_module_of_each_name(case):
    linear = {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name, module in case.adapted.named_modules()
        if type(module) is torch.nn.Linear and "lora_" not in name
    }
    tied = {"lm_head"} if case.ours.lm_head is None else set()
    assert {own.module for own in adaptable(case.ours)} == linear - tied
