"""Where a docstring says that a name counts as in another program, the two functions agree on many names."""

import itertools

import pytest
from compressed_tensors.utils.match import match_name
from transformers import BailingHybridConfig
from transformers.quantizers.quantizers_utils import should_convert_module

from ling3.families.ling3_config import Ling3Config
from ling3.families.quantization import _names, _names_for_fp8

MODULES = (
    "lm_head",
    "model.layers.1",
    "model.layers.11.attention.dense",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.experts.1.up_proj",
    "model.layers.12.mlp.experts.10.up_proj",
)
PATTERNS = (
    "lm_head", "head", "model.layers.1", "model.layers.1.", "layers.1", r"model\.layers\.1", "model.layers.*",
    "mlp.gate", "gate", ".*gate", ".*gate$", "up_proj", r".*experts\.1", "model.layers.1|lm_head", "",
)  # fmt: skip
PAIRS = [*itertools.product(PATTERNS, MODULES)]


@pytest.mark.parametrize(("pattern", "module"), PAIRS)
def test_modules_that_are_not_converted_to_fp8(pattern, module):
    assert _names_for_fp8(pattern, module) == (not should_convert_module(module, [pattern]))


@pytest.mark.parametrize(("pattern", "module"), PAIRS)
def test_targets_of_compressed_tensors(pattern, module):
    for target in (pattern, f"re:{pattern}"):
        assert _names(target, module, "Linear") == match_name(module, target)


@pytest.mark.parametrize("layers", [1, 3, 4, 6, 9])
def test_layers_after_the_last_full_group_are_kda(layers):
    theirs = BailingHybridConfig(num_hidden_layers=layers, layer_group_size=4).layer_types
    ours = Ling3Config(num_hidden_layers=layers, layer_group_size=4)
    kinds = {"full_attention": "mla", "linear_attention": "kda"}
    assert [ours.attention_kind(layer) for layer in range(layers)] == [kinds[kind] for kind in theirs]
