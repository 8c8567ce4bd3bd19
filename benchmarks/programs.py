"""The two programs of `ling3.generate`, lowered from shapes alone: no weights and no caches are allocated."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks.models import TINY, TOY
from ling3.cache import CacheSpec
from ling3.checkpoint.names import structure
from ling3.engine.forward import Batch, decode, extend
from ling3.engine.pool import Pool, Rows, cache_dtype
from ling3.engine.sampling import Sampling
from ling3.engine.sampling_params import SamplingParams
from ling3.execution import Execution
from ling3.generate import PREFILL_CHUNK
from ling3.ops.attention import BLOCK

COLUMNS = 32
"""Pages of the single row: 8,192 tokens."""


def lowered(scale: str, program: str) -> tuple[Any, int]:
    """The lowered `program`, `decode` or `prefill` of `ling3.generate` for one request, and its number of arrays.

    `scale` is "full" for Ling-3.0-tiny in bfloat16, or "toy".
    """
    config = TINY if scale == "full" else TOY
    model = structure(config, jnp.bfloat16)
    sampling = Sampling.build([(SamplingParams(), 0, 1, config.eos_token_id)], config.vocab_size, 8)
    spec = CacheSpec(1, COLUMNS, BLOCK, cache_dtype(model))
    pool = eqx.filter_eval_shape(Pool.empty, model, sampling, spec)
    rows = Rows(None, _ints(1, COLUMNS))
    arrays, execution = len(jax.tree.leaves((model, rows, pool))), Execution.default()
    if program == "decode":
        return decode.lower(model, Batch(rows, _ints(1, 0), _ints(1)), pool, execution), arrays
    return extend.lower(model, Batch(rows, _ints(1, PREFILL_CHUNK), _ints(1)), pool, execution), arrays


def _ints(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.int32)
