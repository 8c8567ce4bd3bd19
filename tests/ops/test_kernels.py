"""Every kernel against its operator's plain form, in Pallas' interpreter: no GPU is needed, and no time is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.ops.attention import latent_attention
from ling3.ops.experts import block_experts, dense_experts
from ling3.ops.gpu import attention, kda
from ling3.ops.gpu import experts as experts_of_gpu
from ling3.ops.gpu.attention import fused_latent_attention
from ling3.ops.gpu.experts import grouped_experts
from ling3.ops.gpu.kda import fused_kda_step
from ling3.ops.kda import kda_step
from ling3.ops.swiglu import SwiGLU

# jax 0.11 says that a later release drops Triton, for which `triton_params` is prepared.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

STEP = jax.jit(functools.partial(fused_kda_step, interpret=True))
PLAIN = jax.jit(kda_step)


def one_token(batch=3, heads=2, width=64, dtype=jnp.float32, seed=0):
    """q, k, v, g, beta and a state; the last row is padding, whose g and beta are 0."""
    draw = np.random.default_rng(seed)
    q, k, v = draw.normal(size=(3, batch, heads, width))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -5 / (1 + np.exp(-3 * draw.normal(size=(batch, heads, width))))
    beta = draw.uniform(size=(batch, heads))
    g[-1], beta[-1] = 0, 0
    state = draw.normal(size=(batch, heads, width, width))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, g, beta, state))


def lowered_for_a_gpu(program, *x):
    """A program as text for a GPU that is not here, and that jax 0.11 wants to be told of."""
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)):
        return program.trace(*x).lower(lowering_platforms=("cuda",)).as_text()


def largest(found, expected):
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(found, expected, strict=True))


class TestKDAStep:
    @pytest.mark.parametrize("width", [8, 32, 64, 128])
    def test_values(self, width):
        x = one_token(width=width)
        # Both add up 128 products of numbers near 1, in different orders.
        assert largest(STEP(*x), PLAIN(*x)) < 5e-6
        with jax.enable_x64(True):
            x = one_token(width=width, dtype=jnp.float64)
            assert largest(STEP(*x), PLAIN(*x)) < 1e-13

    def test_from_nothing_and_through_many_tokens(self):
        *_, state = one_token()
        fused = plain = jnp.zeros_like(state)
        for seed in range(20):
            x = one_token(seed=seed)[:-1]
            (o, fused), (expected, plain) = STEP(*x, fused), PLAIN(*x, plain)
            assert largest((o, fused), (expected, plain)) < 5e-6

    def test_padding_leaves_a_state_as_it_is(self):
        x = one_token()
        np.testing.assert_array_equal(STEP(*x)[1][-1], x[-1][-1])

    def test_the_same_bits_again_and_in_any_company(self):
        x = one_token(batch=8)
        whole = STEP(*x)
        for again, expected in zip(STEP(*x), whole, strict=True):
            np.testing.assert_array_equal(again, expected)
        some = jnp.asarray([5, 0, 7])
        for part, expected in zip(STEP(*(y[some] for y in x)), whole, strict=True):
            np.testing.assert_array_equal(part, expected[some])

    def test_a_row_of_nan_stays_alone(self):
        x = one_token()
        poisoned = STEP(*x[:-1], x[-1].at[1].set(jnp.nan))
        for found, expected in zip(poisoned, STEP(*x), strict=True):
            assert bool(jnp.isnan(found[1]).all())
            np.testing.assert_array_equal(found[jnp.asarray([0, 2])], expected[jnp.asarray([0, 2])])

    def test_for_a_gpu_it_is_one_call_that_writes_into_the_state(self):
        """Lowered here, without a GPU: what it is compiled to there is another matter."""
        text = lowered_for_a_gpu(jax.jit(fused_kda_step, donate_argnums=5), *one_token(width=128))
        assert text.count("stablehlo.custom_call") == 1
        assert "output_operand_alias<output_tuple_indices = [1], operand_index = 5" in text
        assert "tf.aliasing_output = 1" in text

    def test_a_width_that_does_not_divide(self):
        with pytest.raises(ValueError, match="48 value channels, expected a multiple of 32"):
            fused_kda_step(*one_token(width=48), interpret=True)


EXPERTS = jax.jit(functools.partial(grouped_experts, interpret=True), static_argnums=6)


def choice(tokens, top_k=3, experts=5, hidden=128, intermediate=64, dtype=jnp.float32):
    """x, chosen experts (some of them none, some rows two alike), weights, and the experts."""
    draw = np.random.default_rng(tokens)
    chosen = jnp.asarray(draw.integers(-1, experts + 1, size=(tokens, top_k)), jnp.int32)
    shapes = ((tokens, hidden), (tokens, top_k), (experts, intermediate, hidden), (experts, intermediate, hidden))
    x, weights, gate, up, down = (
        jnp.asarray(0.3 * draw.normal(size=shape), dtype) for shape in (*shapes, (experts, hidden, intermediate))
    )
    return x, chosen, weights.astype(jnp.float32), gate, up, down


class TestGroupedExperts:
    @pytest.mark.parametrize("tokens", [1, 2, 17, 100])
    @pytest.mark.parametrize("limit", [0.0, 0.2])
    def test_values(self, tokens, limit):
        x = choice(tokens)
        found, expected = EXPERTS(*x, SwiGLU(limit)), dense_experts(*x, SwiGLU(limit))
        # Sums of 128 and 64 products of either sign, in another order.
        assert largest([found], [expected]) < 2e-5 * float(jnp.max(jnp.abs(expected)) + 1)

    def test_values_in_bfloat16(self):
        x = choice(17, dtype=jnp.bfloat16)
        found = EXPERTS(*x)
        assert found.dtype == jnp.float32
        wide = tuple(y.astype(jnp.float32) if y.dtype == jnp.bfloat16 else y for y in x)
        # One rounding to 8 bits, of the numbers between the two products.
        assert largest([found], [dense_experts(*wide)]) < 0.01 * float(jnp.max(jnp.abs(found)))

    def test_nobody_chosen_and_all_the_same(self):
        x, chosen, *rest = choice(40)
        assert not bool(jnp.any(EXPERTS(x, jnp.full_like(chosen, 5), *rest)))
        same = jnp.full_like(chosen, 2)
        assert largest([EXPERTS(x, same, *rest)], [dense_experts(x, same, *rest)]) < 5e-5

    def test_the_same_bits_again_and_in_any_company(self):
        x, chosen, weights, *experts = choice(100)
        whole = EXPERTS(x, chosen, weights, *experts)
        np.testing.assert_array_equal(EXPERTS(x, chosen, weights, *experts), whole)
        for some in ([7], [50, 3, 99]):
            rows = jnp.asarray(some)
            part = EXPERTS(x[rows], chosen[rows], weights[rows], *experts)
            np.testing.assert_array_equal(part, whole[rows])

    @pytest.mark.parametrize("tokens", [1, 100])
    def test_the_tile_changes_no_bit(self, tokens, monkeypatch):
        """A prompt's tile depends on how many rows there are, and a token's numbers must not."""
        x = choice(tokens, experts=20, intermediate=128, dtype=jnp.bfloat16)
        found = []
        for tile in ((0, 16, 64), (0, 64, 128)):
            monkeypatch.setattr(experts_of_gpu, "TILES", (tile,))
            found.append(grouped_experts(*x, interpret=True))
        np.testing.assert_array_equal(*found)

    def test_for_a_gpu_no_weight_is_moved(self):
        """Lowered here, without a GPU: two kernels that are handed the experts whole, and nothing else reads them."""
        text = lowered_for_a_gpu(jax.jit(grouped_experts), *choice(17))
        assert text.count("xla.gpu.triton") == 2
        for stack in ("tensor<5x64x128xf32>", "tensor<5x128x64xf32>"):
            uses = [line for line in text.splitlines() if stack in line and "func.func" not in line]
            assert len(uses) == 1 and "xla.gpu.triton" in uses[0]

    def test_sizes_that_tiles_do_not_fit(self):
        with pytest.raises(ValueError, match="hidden size 100 and intermediate size 64, expected multiples of 64"):
            grouped_experts(*choice(3, hidden=100), interpret=True)


LATENTS = jax.jit(functools.partial(fused_latent_attention, interpret=True))
OVER_LATENTS = jax.jit(latent_attention)


def latents(lengths, rows=16, entry=96, page=64, dtype=jnp.float32):
    """Queries, their positions, pages in any order with NaN in what is not in use, the table and the lengths."""
    draw, batch, columns = np.random.default_rng(0), len(lengths), -(-max(lengths) // page) + 1
    pages = draw.normal(size=(batch * columns + 3, page, entry))
    table = draw.permutation(batch * columns).reshape(batch, columns)
    for row, length in zip(table, lengths, strict=True):
        pages[row[-(-length // page) :]] = np.nan
        pages[row[length // page], length % page :] = np.nan
    q = draw.normal(size=(batch, rows, entry)) * entry**-0.5
    positions = np.maximum(np.asarray(lengths) - 1, 0)[:, None] - np.zeros((1, rows), int)
    whole = (jnp.asarray(x, jnp.int32) for x in (positions, table, lengths))
    positions, table, length = whole
    return jnp.asarray(q, dtype), positions, jnp.asarray(pages, dtype), table, length


class TestLatentAttention:
    def test_a_small_page(self):
        x = latents((77, 20), page=16)
        assert largest([LATENTS(*x)], [OVER_LATENTS(*x)]) < 5e-6

    @pytest.mark.parametrize("lengths", [(1,), (0, 77, 2500, 64), (1024, 1025, 32)])
    def test_values(self, lengths):
        x = latents(lengths)
        found = LATENTS(*x)
        # Means of up to 2,500 numbers near 1, taken in another order.
        assert largest([found], [OVER_LATENTS(*x)]) < 5e-6
        assert not np.any(found[np.asarray(lengths) == 0])

    def test_values_in_bfloat16(self):
        x = latents((300, 1100), dtype=jnp.bfloat16)
        found = LATENTS(*x)
        assert found.dtype == jnp.float32
        # Both round the weights to 8 bits, relative to another largest score.
        assert largest([found], [OVER_LATENTS(*x)]) < 2**-7

    def test_a_row_sees_nothing_after_its_position(self):
        q, positions, *rest = latents((500,))
        early = positions.at[:, :8].set(99)
        found = LATENTS(q, early, *rest)
        shorter = LATENTS(q, early, *rest[:-1], jnp.asarray([100], jnp.int32))
        assert largest([found[:, :8]], [shorter[:, :8]]) < 5e-6
        assert largest([found], [OVER_LATENTS(q, early, *rest)]) < 5e-6

    def test_the_same_bits_again_and_in_any_company(self):
        q, positions, pages, table, length = latents((700, 1500, 3, 1024))
        whole = LATENTS(q, positions, pages, table, length)
        np.testing.assert_array_equal(LATENTS(q, positions, pages, table, length), whole)
        some = jnp.asarray([2, 1])
        part = LATENTS(q[some], positions[some], pages, table[some], length[some])
        np.testing.assert_array_equal(part, whole[some])

    def test_for_a_gpu_no_page_is_moved(self):
        """Lowered here, without a GPU, at Ling-3.0-tiny's sizes: the kernel alone is handed the pages."""
        x = latents((700, 1500), entry=576, page=256, dtype=jnp.bfloat16)
        text = lowered_for_a_gpu(jax.jit(fused_latent_attention), *x)
        assert text.count("xla.gpu.triton") == 2
        pool = "x".join(map(str, x[2].shape)) + "xbf16"
        uses = [line for line in text.splitlines() if pool in line and "func.func" not in line]
        assert len(uses) == 1 and "xla.gpu.triton" in uses[0]

    def test_a_page_that_tiles_do_not_fit(self):
        with pytest.raises(ValueError, match="a page holds 8 positions, expected a multiple of 16"):
            fused_latent_attention(*latents((5,), page=8), interpret=True)


class TestWhatAGPURuns:
    """Execution.default("gpu"): a kernel where it suits, and the plain form, bit for bit, where it does not."""

    def test_a_kda_step(self):
        x = one_token(width=64)
        assert largest(kda.kda_step(*x), PLAIN(*x)) < 5e-6
        x = one_token(width=48)
        for found, expected in zip(kda.kda_step(*x), kda_step(*x), strict=True):
            np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("change", [{"rows": 12}, {"rows": 8}, {"entry": 40}, {"page": 24}])
    def test_attention_over_latents(self, change):
        x = latents((40,))
        np.testing.assert_array_equal(attention.latent_attention(*x), fused_latent_attention(*x, interpret=True))
        x = latents((40,), **change)
        np.testing.assert_array_equal(attention.latent_attention(*x), latent_attention(*x))

    def test_experts(self):
        x = choice(3)
        np.testing.assert_array_equal(experts_of_gpu.experts(*x), grouped_experts(*x, interpret=True))
        x = choice(3, hidden=96)
        np.testing.assert_array_equal(experts_of_gpu.experts(*x), block_experts(*x))

    def test_experts_have_gradients(self):
        x, chosen, weights, *stacks = choice(3)
        found, expected = (
            jax.grad(lambda x, form=form: jnp.sum(form(x, chosen, weights, *stacks) ** 2))(x)
            for form in (experts_of_gpu.experts, dense_experts)
        )
        assert largest([found], [expected]) < 1e-4 * float(jnp.max(jnp.abs(expected)))
