"""The published precision: bf16 weights and activations, in ling3 and in transformers, from one bf16 checkpoint."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

from oracle import Oracle  # noqa: E402
from random_checkpoint import FLASH_LIKE, REAL_HEADS, TINY_LIKE, draw_well_posed, write  # noqa: E402

import ling3  # noqa: E402

LENGTH = 130


@pytest.fixture(scope="module")
def distances(tmp_path_factory):
    """|difference| of three checkpoints' logits: ling3 in bf16, transformers in bf16 and fp32, and the truth."""
    found = {}
    for i, config in enumerate((TINY_LIKE, FLASH_LIKE, REAL_HEADS)):
        weights, tokens, truth, _ = draw_well_posed(config, LENGTH, bfloat16=True)
        path = tmp_path_factory.mktemp("bfloat16") / str(i)
        write(path, config, weights)
        model = ling3.load(path, dtype=jnp.bfloat16)
        assert model.model.layers[0].attention.q_proj.weight.dtype == jnp.bfloat16
        logits = {
            "truth": truth,
            "transformers fp32": Oracle(config, weights).logits(tokens),
            "transformers bf16": Oracle(config, weights, torch.bfloat16).logits(tokens),
            "ling3 bf16": np.asarray(model(jnp.array([tokens]))[0]),
        }
        for (a, x), (b, y) in itertools.product(logits.items(), repeat=2):
            found.setdefault((a, b), []).append(np.abs(x - y).ravel())
    return {pair: np.concatenate(parts) for pair, parts in found.items()}


def test_ling3_is_nearer_to_the_truth_than_transformers(distances):
    """ling3 keeps decays, writing strengths and SwiGLU products in fp32 where transformers rounds them."""
    ours, theirs = distances["ling3 bf16", "truth"], distances["transformers bf16", "truth"]
    assert np.median(ours) <= np.median(theirs)


def test_ling3_agrees_with_transformers(distances, show):
    """As well as two programs can whose roundings are independent and no larger than those of transformers.

    Were both equally far from the truth in random directions, they would be √2 times that distance apart. The median is
    compared: at the tail are tokens whose choice of experts hung on less than bf16's rounding, and went the other way.
    """
    between, own = distances["ling3 bf16", "transformers bf16"], distances["transformers bf16", "transformers fp32"]
    lines = ["bf16 logits, median (rms)"]
    for a, b in (
        ("transformers bf16", "transformers fp32"),
        ("ling3 bf16", "transformers bf16"),
        ("transformers bf16", "truth"),
        ("ling3 bf16", "truth"),
    ):
        lines.append(f"{a} - {b}: {np.median(distances[a, b]):.1e} ({np.sqrt(np.mean(distances[a, b] ** 2)):.1e})")
    show("\n".join(lines))
    assert np.median(between) <= np.sqrt(2) * np.median(own)
