"""What annotations state of weights is what the models of all families have."""

import typing

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from exhaustive_cases import thoroughly
from published_configs import DEEPSEEK_V4_FLASH
from published_transformers import QWEN3_30B_A3B, QWEN3_NEXT_80B_A3B
from tiny import FLASH, TINY

from ling3.checkpoint.names import structure
from ling3.families.deepseek_v4_config import DeepseekV4Config
from ling3.families.qwen3_moe import Qwen3MoeConfig
from ling3.families.qwen3_next import Qwen3NextConfig
from ling3.layers.draw import Draw, axes
from ling3.layers.linear import Linear, LowRank, Matrix
from ling3.leaves import array_leaves

WORDS = {"heads": 4, "nope": 16, "rope": 8, "groups": 2, "hidden": 32, "rank": 3}


class Layer(eqx.Module):
    sums: typing.Annotated[Matrix, "heads·(nope+rope) hidden"]
    quotient: typing.Annotated[Matrix | None, "groups rank heads·nope/groups"]
    first: typing.Annotated[jax.Array, "nope+rope"]
    silent: jax.Array


def draw(seed=0):
    return Draw(Layer, WORDS, iter(jax.random.split(jax.random.key(seed), 2)), jnp.float32, 0.5)


def test_sizes_and_axes():
    assert draw().shape("sums") == (96, 32) and axes(Layer, "sums") == ("heads", "hidden")
    assert draw().shape("quotient") == (2, 3, 32) and axes(Layer, "quotient") == ("groups", "rank", "heads")
    assert axes(Layer, "first") == ("nope",) and axes(Layer, "silent") == ()
    with pytest.raises(KeyError, match="nope"):
        Draw(Layer, {"heads": 4}, iter([]), jnp.float32, 0.5).shape("sums")


def test_a_matrix_is_the_one_of_the_next_key():
    first, second = jax.random.split(jax.random.key(0), 2)
    options = {"dtype": jnp.float32, "std": 0.5}
    own = draw()
    assert eqx.tree_equal(own("sums"), Linear.init(96, 32, key=first, axes=("heads", "hidden"), **options))
    low = own.low_rank("sums", 3)
    assert isinstance(low, LowRank) and (low.a_proj.shape, low.b_proj.shape) == ((3, 32), (96, 3))
    assert (low.a_proj.axes, low.b_proj.axes) == (("rank", "hidden"), ("heads", "rank"))
    keys = jax.random.split(second)
    assert eqx.tree_equal(low.a_proj, Linear.init(3, 32, key=keys[0], axes=("rank", "hidden"), **options))
    assert draw()("sums", bias=True).bias.shape == (96,) and draw().low_rank("sums", None).shape == (96, 32)


@pytest.mark.parametrize(
    "config",
    thoroughly(
        [
            TINY,
            FLASH,
            Qwen3MoeConfig.from_dict(QWEN3_30B_A3B),
            DeepseekV4Config.from_dict(DEEPSEEK_V4_FLASH),
            Qwen3NextConfig.from_dict(QWEN3_NEXT_80B_A3B),
        ],
        but=[TINY, FLASH],
    ),
    ids=["tiny", "flash", "qwen3-moe", "v4", "qwen3-next"],
)
def test_every_matrix_of_a_layer_is_stated(config):
    """But for those of a low rank, and those of the model's own fields, which no layer has."""
    for leaf in array_leaves(structure(config)):
        if isinstance(leaf.module, Matrix) and leaf.path.startswith("model.layers"):
            layer, field = leaf.around[-2], leaf.path.split(".")[-2]
            stated = axes(type(layer), field)
            assert stated == leaf.module.axes or isinstance(layer, LowRank), leaf.path
