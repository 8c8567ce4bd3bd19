"""Qwen's multi-token-prediction layers against transformers' `MtpModel`, which is built by hand.

transformers skips these tensors of Qwen's files; their names are vLLM's (`qwen3_next_mtp.py` and `qwen3_5_mtp.py`).
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import torch
from exhaustive_cases import exhaustively
from family_cases import tokens
from transformers.modeling_layers import MtpModel

import ling3

LOGITS = 2e-4
AROUND = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def predictor(theirs):
    """transformers' layer of gated attention on the model's embedding and head, with random weights."""
    theirs.config.num_mtp_layers, theirs.config.mtp_layer_types = 1, ["full_attention"]
    layer = MtpModel(theirs, 1).eval().requires_grad_(False)
    torch.manual_seed(1)
    for tensor in layer.layers.parameters():
        tensor.uniform_(-0.5, 0.5) if tensor.ndim == 1 else tensor.normal_(0, 1.2 * tensor.shape[-1] ** -0.5)
    return layer


def published(layer):
    """The layer's tensors under the names of Qwen's files, experts one by one."""
    tensors = {}
    for name, tensor in layer.layers[0].named_parameters():
        part, _, within = name.partition(".")
        at = f"mtp.layers.0.{within}" if part == "mtp_block" else f"mtp.{AROUND[part]}.{within}"
        array, (experts, _, of) = tensor.detach().numpy(), at.partition(".experts.")
        if of == "gate_up_proj":
            for number, own in enumerate(array):
                gate, up = np.split(own, 2)
                tensors |= {f"{experts}.experts.{number}.gate_proj.weight": gate.copy()}
                tensors |= {f"{experts}.experts.{number}.up_proj.weight": up.copy()}
        elif of == "down_proj":
            tensors |= {f"{experts}.experts.{n}.down_proj.weight": own.copy() for n, own in enumerate(array)}
        else:
            tensors[at] = array
    return tensors


@pytest.mark.parametrize("name", ["qwen3-next", *exhaustively(["qwen3.5", "qwen3.5-moe"])])
def test_logits(name, open_family, tmp_path):
    case = open_family(name)
    layer = predictor(case.theirs)
    raw = json.loads((case.directory / "config.json").read_text())
    field = "num_nextn_predict_layers" if name == "qwen3-next" else "mtp_num_hidden_layers"
    (tmp_path / "config.json").write_text(json.dumps(raw | {field: 1}))
    file = safetensors.numpy.load_file(case.directory / "model.safetensors")
    safetensors.numpy.save_file(file | published(layer), tmp_path / "model.safetensors")
    model = ling3.load(tmp_path, jnp.float32, mtp=True)
    for length in (3, 65, 130):
        ids = torch.tensor([tokens(length)])
        hidden = case.theirs.model(ids, use_cache=False).last_hidden_state
        hidden = layer.forward_layer(0, hidden[:, :-1], torch.arange(1, length)[None], None, input_ids=ids[:, 1:])
        expected = layer.shared_head(hidden)[0].numpy()
        assert 0.3 < expected.std() < 3
        found = ling3.mtp_logits(model, jnp.asarray(ids.numpy(), jnp.int32))[0]
        assert np.abs(found - expected).max() <= LOGITS, length
