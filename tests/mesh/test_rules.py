"""What rules refuse, and what is done with sizes that devices cannot share evenly."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import TOKENS, logits_as_computed, mesh, model, placed, tolerance

from ling3.formats import GgufBlocks
from ling3.layers.linear import Linear
from ling3.leaves import array_leaves
from ling3.mesh import MeshError, Rules, place
from ling3.mesh.rules import share_of
from ling3.mesh.share import Share


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"heads": "data"}, r"heads along 'data', where devices have different rows of a batch"),
        ({"vocab": "x", "intermediate": "x", "batch": "x"}, r"intermediate and vocab along 'x'"),
        ({"experts": ("tensor", "tensor")}, r"experts are cut along \('tensor', 'tensor'\), expected different axes"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        Rules(**rules)


@pytest.mark.parametrize(
    ("rules", "sizes", "message"),
    [
        (
            Rules(experts="expert"),
            {},
            r"experts along 'expert', and the mesh has the axes 'data' \(1\), 'tensor' \(2\)",
        ),
        (Rules(), {"pipeline": 2}, r"the rules put nothing along 'pipeline', whose devices would all do the same"),
    ],
)
def test_rules_that_do_not_fit_the_mesh_are_refused(rules, sizes, message):
    with pytest.raises(MeshError, match=message):
        place(model("tiny"), mesh(2, 1, **sizes), rules)


def test_an_array_whose_axes_have_no_names_is_refused():
    whole = model("tiny")
    bare = eqx.tree_at(lambda m: m.lm_head, whole, Linear(whole.lm_head.weight))
    with pytest.raises(MeshError, match=r"lm_head.weight: its axes have no names"):
        place(bare, mesh(2, 1))


@pytest.mark.parametrize(("size", "devices", "multiple"), [(157184, 6, 64), (96, 5, 1), (10, 4, 1), (3, 8, 1)])
def test_parts_of_a_size_that_does_not_divide_have_every_number_once(size, devices, multiple):
    share = Share.even(0, size, ("tensor",), {"tensor": devices}, multiple)
    numbers = np.arange(1, size + 1)
    parts = [share.part(numbers, i) for i in range(devices)]
    assert {part.size for part in parts} == {share.width} and share.width % multiple == 0
    stored = np.concatenate(parts)
    np.testing.assert_array_equal(share.whole(stored), numbers)
    np.testing.assert_array_equal(stored[share.places((np.arange(size),))[0]], numbers)
    assert stored.sum() == numbers.sum()  # the rest are zeros


def test_heads_that_do_not_divide_name_what_would_fit():
    leaf = next(leaf for leaf in array_leaves(model("tiny")) if leaf.path.endswith("q_proj.weight"))
    with pytest.raises(MeshError, match=r"heads are 8, which 5 devices cannot share evenly; 1, 2, 4, 8 can"):
        share_of(leaf, {"tensor": 5}, Rules())


@pytest.mark.slow
def test_everything_else_that_does_not_divide_is_padded():
    """Vocabulary, channels and experts over three devices: the padding is in no logit."""
    rules = Rules(heads=None)
    own = model("tiny")
    assert any(size % 3 for size in (own.config.vocab_size, own.config.num_experts))
    cut = placed("tiny", 3, 1, rules)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    np.testing.assert_allclose(
        logits_as_computed(cut, tokens), logits_as_computed(own, tokens), rtol=0, atol=tolerance("tiny")
    )


def test_rows_of_ggmls_blocks_are_cut_and_columns_are_not():
    like = Linear(jnp.zeros((256, 64)), axes=("hidden", "intermediate"))
    matrix = GgufBlocks.init(like, key=jax.random.key(0), std=1.0, block="Q8_0")
    (leaf,) = array_leaves(matrix)
    share, _ = share_of(leaf, {"tensor": 2}, Rules())
    assert share.spans == ((0, 128), (128, 256)) and share.axis == 0
    with pytest.raises(MeshError, match=r"2 devices would have 32 columns each of 64.* leave intermediate whole"):
        share_of(leaf, {"tensor": 2}, Rules(sums=True))
    assert share_of(leaf, {"tensor": 1}, Rules(sums=True))[0].axis is None
