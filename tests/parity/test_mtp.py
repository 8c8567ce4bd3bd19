"""`ling3.mtp_logits` against transformers' `MtpModel`, which is built by hand: it refuses the published layout.

It has no SwiGLU clamps: those are held to `reference.py` alone, in tests/test_mtp.py.
"""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import torch
from cases import LOGITS
from oracle import Oracle, deepseek_query_path, transformers_names
from random_checkpoint import FLASH_LIKE, TINY_LIKE, draw_well_posed, write
from transformers.modeling_layers import MtpModel

import ling3

LENGTH = 130
CONFIGS = {
    "tiny-like": dataclasses.replace(TINY_LIKE, num_nextn_predict_layers=1),
    "flash-like": dataclasses.replace(FLASH_LIKE, num_nextn_predict_layers=2),
}
LAYERS = [("tiny-like", 0), ("flash-like", 0), ("flash-like", 1)]


class Drawn:
    """A random checkpoint with multi-token-prediction layers, its tokens and its truth, and ling3's model of it."""

    def __init__(self, config, directory):
        self.config = config
        self.weights, self.tokens, _, self.truth = draw_well_posed(config, LENGTH)
        write(directory, config, self.weights)
        self.model = ling3.load(directory, dtype=jnp.float32, mtp=True)

    def logits(self, length, layer):
        return np.asarray(ling3.mtp_logits(self.model, jnp.array([self.tokens[:length]]), layer=layer)[0])

    @functools.cached_property
    def oracle(self):
        return Oracle(self.config, {name: w for name, w in self.weights.items() if not self._is_mtp(name)}).model

    @functools.cached_property
    def predictor(self):
        """transformers' `MtpModel` on the main model's embedding and head, with the published tensors in it."""
        count = self.config.num_nextn_predict_layers
        self.oracle.config.num_mtp_layers = count
        self.oracle.config.mtp_layer_types = ["full_attention"] * count
        self.oracle.config.mtp_mlp_layer_types = ["sparse"] * count
        model = MtpModel(self.oracle, count)
        if self.config.q_lora_rank is not None:
            for layer in model.layers:
                layer.mtp_block.self_attn.q_proj = deepseek_query_path(self.config)
        own = {name: w for name, w in self.weights.items() if self._is_mtp(name)}
        named = {self._renamed(name): tensor for name, tensor in transformers_names(own).items()}
        missing, unexpected = model.load_state_dict(named, strict=False)
        assert not unexpected and not [name for name in missing if name.startswith("layers.")]
        return model.eval().requires_grad_(False)

    def theirs(self, length, layer):
        """The logits of `[length - 1 - layer]` positions; each layer takes the hidden states of the one before it."""
        tokens = torch.tensor([self.tokens[:length]])
        hidden = self.oracle.model(tokens, use_cache=False).last_hidden_state
        for i in range(layer + 1):
            own = tokens[:, i + 1 :]
            positions = torch.arange(i + 1, length)[None]
            hidden = self.predictor.forward_layer(i, hidden[:, :-1], positions, None, input_ids=own)
        return self.predictor.shared_head(hidden)[0].numpy()

    def _is_mtp(self, name):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return layer is not None and int(layer[1]) >= self.config.num_hidden_layers

    def _renamed(self, name):
        _, _, layer, rest = name.split(".", 3)
        within = rest if re.match("enorm|hnorm|eh_proj|final_layernorm", rest) else f"mtp_block.{rest}"
        return f"layers.{int(layer) - self.config.num_hidden_layers}.{within.replace('final_layernorm', 'post_norm')}"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return functools.cache(lambda name: Drawn(CONFIGS[name], tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("length", [3, LENGTH])
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_logits(drawn, name, layer, length):
    case = drawn(name)
    ours, theirs = case.logits(length, layer), case.theirs(length, layer)
    assert ours.shape == theirs.shape == (length - 1 - layer, case.config.vocab_size)
    assert 0.7 < theirs.std() < 1.4, "logits this small or large would make the tolerance mean something else"
    assert np.abs(ours - theirs).max() <= LOGITS
