"""A state says by its types what has a row per slot and what lies in pages; nothing else has to be known of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.cache import Cache, CacheSpec, KDAState, Paged, Span, map_pages, map_slots, pages_of, slots_of
from ling3.ops.packed_kv import ENTRIES, KEYS, hadamard, pack, pack_index
from ling3.runtime.recorder import SILENT, Recorder

SPEC = CacheSpec(2, 5, 16, jnp.float32)
PACKED = CacheSpec(2, 5, 16, jnp.bfloat16, packed=True)
# One layer with arrays of both kinds, and an entry that stands for four tokens.
MIXED = {"seen": jnp.ones((2, 3)), "compressed": Paged.empty(SPEC, (7,), tokens=4)}
STATES = (KDAState(jnp.ones((2, 1, 4, 4)), jnp.ones((2, 3, 12))), MIXED, Paged.empty(SPEC, (6,)))


def test_arrays_are_told_apart_by_type():
    assert [paged.entries.shape for paged in pages_of(STATES)] == [(5, 4, 7), (5, 16, 6)]
    assert [x.shape for x in jax.tree.leaves(slots_of(STATES))] == [(2, 1, 4, 4), (2, 3, 12), (2, 3)]


def test_each_kind_is_mapped_and_the_other_stays():
    doubled = map_slots(lambda x: 2 * x, STATES)
    assert float(doubled[0].conv[0, 0, 0]) == float(doubled[1]["seen"][0, 0]) == 2
    assert not np.any(doubled[1]["compressed"].entries)
    filled = map_pages(lambda x: x + 1, STATES)
    assert filled[1]["compressed"].tokens == 4 and np.all(filled[2].entries == 1)
    assert filled[0] is not None and np.all(filled[0].conv == 1)
    summed = map_slots(lambda x, y: x + y, doubled, STATES)
    assert float(summed[1]["seen"][0, 0]) == 3


def test_a_page_has_as_many_tokens_as_its_entries_stand_for():
    assert [paged.page_size for paged in pages_of(STATES)] == [16, 16]
    length, table = jnp.zeros(2, jnp.int32), jnp.zeros((2, 3), jnp.int32)
    assert Cache(STATES, length, table).capacity() == 48
    assert Cache(STATES[:1], length, table).capacity() == 2**31 - 1
    with pytest.raises(ValueError, match="page_size is 16, expected a multiple of 3"):
        Paged.empty(SPEC, (2,), tokens=3)


def test_entries_go_where_the_table_says():
    table = jnp.asarray([[3, 1], [9, 0]], jnp.int32)  # row 1 has no page for its first 16 positions
    span = Span(jnp.asarray([15, 15], jnp.int32), jnp.asarray([2, 2], jnp.int32), table)
    new = jnp.arange(1, 7, dtype=jnp.float32).reshape(2, 3, 1)  # the third column is padding
    entries = Paged.empty(SPEC, (1,)).append(new, span).entries[..., 0]
    assert (entries[3, 15], entries[1, 0], entries[0, 0]) == (1, 2, 5)
    assert np.count_nonzero(entries) == 3


def test_an_entry_of_several_tokens_is_there_when_they_are_complete():
    """Token 15 completes the fourth entry of four tokens, in row 0, and token 19 the fifth, in row 1."""
    table = jnp.asarray([[3, 1], [2, 0]], jnp.int32)
    span = Span(jnp.asarray([15, 18], jnp.int32), jnp.asarray([2, 2], jnp.int32), table)
    new = jnp.arange(1, 5, dtype=jnp.float32).reshape(2, 2, 1)
    entries = Paged.empty(SPEC, (1,), tokens=4).append(new, span).entries[..., 0]
    assert (entries[3, 3], entries[0, 0]) == (1, 3)
    assert np.count_nonzero(entries) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(("packing", "pack"), [(ENTRIES, pack), (KEYS, pack_index)], ids=["entries", "keys"])
def test_a_full_page_of_packed_entries_has_the_bytes_of_packing_them(packing, pack):
    """Of two rows, whose entries come in pieces of any length, to pages in any order."""
    table = jnp.asarray([[3, 1, 9], [2, 0, 4]], jnp.int32)  # row 0 has no third page
    x = jax.random.normal(jax.random.key(0), (2, 12, packing.channels))
    paged = Paged.empty(PACKED, (packing.channels,), tokens=4, packing=packing)
    assert (paged.entries.dtype, paged.page, paged.page_size) == (jnp.uint8, 4, 16)
    append = jax.jit(Paged.append)
    for start, length in ((0, 14), (14, 2), (16, 1), (17, 3), (20, 28)):
        first, count = start // 4, (start + length) // 4 - start // 4
        new = jnp.pad(x[:, first : first + count], ((0, 0), (0, 7 - count), (0, 0)), constant_values=jnp.nan)
        paged = append(paged, new, Span(jnp.full(2, start, jnp.int32), jnp.full(2, length, jnp.int32), table))
    for row, column, page in ((0, 0, 3), (0, 1, 1), (1, 0, 2), (1, 1, 0), (1, 2, 4)):
        entries = x[row, 4 * column : 4 * column + 4]
        entries = entries if packing is ENTRIES else hadamard(entries.astype(jnp.bfloat16))
        np.testing.assert_array_equal(paged.entries[page], pack(entries))
    with pytest.raises(ValueError, match=f"{packing.name} have 7 channels, and packed ones have {packing.channels}"):
        Paged.empty(PACKED, (7,), packing=packing)
    with pytest.raises(ValueError, match="no packed form"):
        Paged.empty(PACKED, (7,))


def test_a_recorder_files_by_path_and_silence_costs_nothing():
    recorder = Recorder()
    span = Span.whole(1, 2, recorder=recorder).within("layers.0").within("attention")
    span.recorder(q=1, k=2)
    recorder(embeddings=3)
    assert recorder.values == {"layers.0.attention.q": 1, "layers.0.attention.k": 2, "embeddings": 3}
    assert recorder.of("layers.0.attention") == {"q": 1, "k": 2} and recorder.of("layers.0") == {}
    silent = Span.whole(1, 2)
    assert silent.within("layers.0") is silent and silent.recorder is SILENT
