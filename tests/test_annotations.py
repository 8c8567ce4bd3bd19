"""Every array type that is written is checked: each in turn, made a false one, is an error."""

import ast
import dataclasses
import importlib.util
import inspect
import pathlib
import sys
import tempfile

import gguf_files
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from tiny import TINY, open_model

import ling3
from ling3 import afd
from ling3.cache import CacheSpec, Span
from ling3.checkpoint.gguf_file import open_gguf
from ling3.engine.masks import words
from ling3.engine.pool import Pool, Rows
from ling3.engine.sampling import Sampling
from ling3.engine.sampling_params import SamplingParams
from ling3.execution import PLAIN
from ling3.families.gguf import AS_STORED
from ling3.families.ling3 import kda_config, mla_config, moe_config
from ling3.formats.gguf_blocks import BLOCKS
from ling3.layers.draw import Draw
from ling3.layers.linear import Linear
from ling3.layers.mla import MLA, MLAConfig
from ling3.layers.rope import Rope
from ling3.mesh import plan
from ling3.mesh.exchange import Exchange
from ling3.ops.adapters import AdapterRows, StackedUpdates
from ling3.ops.kda import recurrent_kda
from ling3.ops.packed_kv import ENTRIES, KEYS
from ling3.runtime import checks
from ling3.train import Batch

ROOT = pathlib.Path(ling3.__file__).parent
KEY = jax.random.key(0)
BATCH, SEQ, PAGE = 2, 5, 8
SPEC = CacheSpec(BATCH, 4, PAGE, jnp.float32)
SHORT = dataclasses.replace(TINY, num_hidden_layers=2, layer_group_size=2)
OPTIONS = {"key": KEY, "dtype": jnp.float32}


def numbers(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


def span(seq, batch=BATCH):
    start, table = jnp.zeros(batch, jnp.int32), jnp.arange(2 * batch, dtype=jnp.int32).reshape(batch, 2)
    return Span(start, jnp.full(batch, seq, jnp.int32), table)


IN_TURN = dataclasses.replace(PLAIN, kda_in_turn=recurrent_kda, kda_look=lambda *x: recurrent_kda(*x)[0])
X, ONE = numbers(BATCH, SEQ, TINY.hidden_size), numbers(BATCH, 1, TINY.hidden_size)
WHOLE = Span.whole(BATCH, SEQ)


# What runs every function of a module, of the package's own or of a mutant of it.


def gate(module):
    draw = Draw(MLA, {"heads": 3, "hidden": 4}, iter([KEY]), jnp.float32, 1.0)
    module.output_gate("sigmoid", module.gate_projection("sigmoid", draw)(numbers(2, 4)))


def norm(module):
    module.RMSNorm.init(4, 1e-6)(X[..., :4])
    module.RMSNorm.init(4, 1e-6, zero_centered=True)(X[..., :4])
    module.GatedRMSNorm.init(4, 1e-6)(numbers(2, 3, 2, 4), numbers(2, 3, 2, 4))
    module.LayerNorm.init(4, 1e-6)(numbers(2, 4))


def rope(module):
    for interleaved in (True, False):
        module.Rope.plain(1e4, 4, interleaved)(numbers(BATCH, SEQ, 2, 4), WHOLE.positions(SEQ))


def linear(module):
    onto = module.Linear.init(3, TINY.hidden_size, std=1.0, bias=True, **OPTIONS)
    module.LowRank(onto, module.Linear.init(5, 3, std=1.0, **OPTIONS))(X, PLAIN)
    module.Constant.init(3)(X)
    table = module.Linear.init(7, 4, std=1.0, **OPTIONS)
    table.embed(jnp.zeros((BATCH, SEQ), jnp.int32))
    assert table.operand is table.dense()


def adapted(module):
    base = Linear.init(3, 4, std=1.0, **OPTIONS)
    matrix = module.AdaptedMatrix(base, numbers(2, 4), numbers(3, 2), scale=1.0)
    matrix(X[..., :4])
    matrix.embed(jnp.zeros((BATCH, SEQ), jnp.int32))
    assert matrix.operand.shape == (3, 4)
    updates = StackedUpdates(numbers(2, 2, 4), numbers(2, 3, 2), numbers(2))
    several = module.RowAdaptedMatrix(base, (updates,), stacks=((0, 1),))
    several.for_rows({(0, 1): AdapterRows.of(jnp.zeros(BATCH, jnp.int32), (0, 1))})(X[..., :4])
    several.for_rows({(0, 1): AdapterRows.of(jnp.zeros(1, jnp.int32), (0, 1))}).dense()
    several.embed(jnp.zeros((BATCH, SEQ), jnp.int32))


def adapter(module):
    module.LowRankUpdate(numbers(2, 4), numbers(3, 2), alpha=1.0)


def by_row(module):
    real = open_model.__wrapped__(SHORT)  # this runs while programs are traced: no other test may find the arrays
    adapters = {"a": ling3.new_adapter(real, rank=2, key=KEY)}
    module.for_rows(module.with_adapters(real, adapters), jnp.zeros(BATCH, jnp.int32))


def row_updates(module):
    rows = module.AdapterRows.of(jnp.zeros(BATCH, jnp.int32), (0, 1))
    own = module.StackedUpdates(numbers(2, 3, 4), numbers(2, 5, 3), numbers(2))
    module.added(numbers(BATCH, 5), [(own, rows)], lambda own, i: own.product(numbers(BATCH, 4), i, PLAIN.times))
    own.dense(jnp.asarray(0, jnp.int32))


def conv(module):
    module.ShortConv.init(TINY.hidden_size, 4, key=KEY)(X, numbers(BATCH, 3, TINY.hidden_size), WHOLE)


def mlp(module):
    module.MLP.init(TINY.hidden_size, 8, std=1.0, **OPTIONS)(X, WHOLE)


def kda(module):
    layer = module.KDA.init(module.KDAConfig(**vars(kda_config(TINY))), **OPTIONS)
    state = layer(X, None, WHOLE)[1]
    layer(ONE, state, span(1))
    layer.convolved(X, state.conv, WHOLE)
    drafted = dataclasses.replace(span(1, 2 * BATCH), rows_each=2, execution=IN_TURN)
    _, after = layer(jnp.concatenate([ONE, ONE]), state, drafted)
    after.kept(jnp.ones(BATCH, jnp.int32))


def gated_deltanet(module):
    for grouped in (True, False):
        config = module.GatedDeltaNetConfig(TINY.hidden_size, 4, 2, 6, 10, eps=1e-6, std=1.0, grouped=grouped)
        layer = module.GatedDeltaNet.init(config, **OPTIONS)
        layer(ONE, layer(X, None, WHOLE)[1], span(1))


def mla(module):
    layer = module.MLA.init(module.MLAConfig(**vars(mla_config(TINY))), **OPTIONS)
    state = layer.empty_state(SPEC)
    layer(X, None, WHOLE)
    layer(ONE, state, span(1))


def gqa(module):
    config = module.GQAConfig(TINY.hidden_size, 4, 2, 6, std=1.0, rope=Rope.plain(1e4, 6), norm_eps=1e-6)
    layer = module.GQA.init(config, **OPTIONS)
    layer(X, None, WHOLE)
    layer(ONE, layer.empty_state(SPEC), span(1))
    options = {"rope": Rope.plain(1e4, 4), "norm_eps": 1e-6, "gated": True, "zero_centered": True}
    module.GQA.init(module.GQAConfig(TINY.hidden_size, 4, 2, 6, std=1.0, **options), **OPTIONS)(X, None, WHOLE)


def csa(module):
    def config(**options):
        sizes = {"hidden": TINY.hidden_size, "heads": 4, "head_dim": 8, "q_rank": 6, "groups": 2, "o_rank": 5}
        rope = Rope.plain(1e4, 4, interleaved=True)
        return module.CSAConfig(**sizes, window=3, eps=1e-6, std=1.0, rope=rope, **options)

    module.CSA.init(config(ratio=8, sink=False), **OPTIONS)(X, None, WHOLE)
    for top in (1, 9):
        chooses = {"index_heads": 3, "index_dim": 6, "index_top": top}
        layer = module.CSA.init(config(ratio=4, overlaps=True, **chooses), **OPTIONS)
        layer(X, None, WHOLE)
        for x in (X, ONE):
            layer(x, layer.empty_state(SPEC), span(x.shape[1]))


def indexed_mla(module):
    config = MLAConfig(TINY.hidden_size, 3, q_rank=6, latent=16, nope=8, rope=0, value=6, eps=1e-6, std=1.0)
    for top in (1, 9):
        sizes = {"hidden": TINY.hidden_size, "q_rank": 6, "index_heads": 2, "index_dim": 5}
        index = module.PoolIndexerConfig(**sizes, pool=2, top=top, std=1.0)
        layer = module.IndexedMLA.init(dataclasses.replace(config, gate_law="none"), index, **OPTIONS)
        layer(X, None, WHOLE)
        for x in (X, ONE):
            layer(x, layer.empty_state(SPEC), span(x.shape[1]))


def hyper(module):
    config = module.HyperConfig(hidden=TINY.hidden_size, streams=3, iterations=2, eps=1e-6, norm_eps=1e-6, std=1.0)
    head = module.HyperHead.init(config, key=KEY)
    streams = jnp.stack([X] * 3, axis=2)
    h, streams = module.HyperConnection.init(config, key=KEY)(streams)
    module.HyperMean(3)(streams + h)
    head(streams + h)


def compressed_attention(module):
    q, start, table = numbers(BATCH, SEQ, 2, 6), WHOLE.start, span(SEQ).table
    seen, pages, entries = WHOLE.positions(SEQ), numbers(4, PAGE, 6), numbers(BATCH, 7, 6)
    module.pooled(numbers(BATCH, SEQ + 1, 12), start, numbers(2, 6))
    sums = module.over_window(module.sink(q, numbers(2)), q, numbers(BATCH, SEQ + 3, 6), start)
    chosen = module.highest(module.index_scores(q, numbers(BATCH, SEQ, 2), entries, seen), 2)
    sums = module.over_entries(sums, q, entries, seen, chosen)
    chosen = module.highest(module.index_scores_of_pages(q, numbers(BATCH, SEQ, 2), pages, table, seen), 2)
    module.over_pages(sums, q, pages, table, seen, chosen)
    one, few = q[:, :1], jnp.zeros((BATCH, 2), jnp.int32)
    module.over_chosen(module.sink(one, None), one, pages, table, seen[:, :1], few)
    q, weights = numbers(BATCH, 1, 2, 512), numbers(BATCH, 1, 2)
    packed, seen = numbers(4, ENTRIES.bytes(PAGE), dtype=jnp.uint8), seen[:, :1]
    module.over_pages(module.sink(q, None), q, packed, table, seen, None, ENTRIES)
    module.over_chosen(module.sink(q, None), q, packed, table, seen, few, ENTRIES)
    packed = numbers(4, KEYS.bytes(PAGE), dtype=jnp.uint8)
    module.index_scores_of_pages(q[..., :128], weights, packed, table, seen, KEYS)


def tails(module):
    module.continued(numbers(BATCH, 3, 6), numbers(BATCH, SEQ, 6), WHOLE.length)


def logits(module):
    module.likeliest(numbers(BATCH, 11), jnp.ones(BATCH, bool))


def drawing(module):
    keys = jax.vmap(jax.random.key)(jnp.arange(BATCH))
    some = jnp.full(BATCH, 0.5)
    module.draw(numbers(BATCH, 11), jnp.ones(BATCH, bool), keys, some, jnp.full(BATCH, 3), some, some)


def convolution(module):
    tail = numbers(BATCH, 3, 2 * TINY.hidden_size)
    oldest = WHOLE.positions(SEQ)
    module.short_conv(X, numbers(TINY.hidden_size, 4), tail, WHOLE.length, TINY.hidden_size, oldest)


def moe(module):
    config = module.MoEConfig(**vars(moe_config(TINY, 1)))
    layer = module.MoE.init(config, **OPTIONS)
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    layer(X, dataclasses.replace(WHOLE, tokens=tokens))
    module.Router.init(dataclasses.replace(config, hashed=9), key=KEY)(X[0], tokens[0])
    module.MoE.init(dataclasses.replace(config, shared_gate=True), **OPTIONS)(X, WHOLE)


def attention(module):
    q, k, v = numbers(BATCH, 2, SEQ, 12), numbers(BATCH, 2, 256, 12), numbers(BATCH, 2, 256, 8)
    module.attention(q, k, v, numbers(BATCH, SEQ, 256, dtype=bool))
    positions, length = WHOLE.positions(SEQ), WHOLE.length
    expansion = module.Expansion(numbers(2 * (8 + 8), 16), heads=2, nope=8)
    module.block_attention(q, positions, numbers(BATCH, 256, 20), length, expansion)
    module.block_attention(q, positions, numbers(BATCH, 256, 48), length, module.PerHead(heads=2, value=12), positions)
    pages, table = numbers(4, PAGE, 20), span(SEQ).table
    module.paged_attention(q, positions, pages, table, length, expansion)
    module.latent_attention(numbers(BATCH, 2, 20), positions[:, :2], pages, table, length)


def packed_kv(module):
    module.unpack(module.pack(numbers(PAGE, 512)), PAGE)
    module.unpack_index(module.pack_index(numbers(PAGE, 128)), PAGE)
    module.hadamard(numbers(BATCH, SEQ, 128))
    pages, first, packing = numbers(4, 132 * PAGE, dtype=jnp.uint8), jnp.zeros(BATCH, jnp.int32), module.KEYS
    packing.read(packing.write(pages, first, first, numbers(BATCH, 128)), first, first)
    packing.read_pages(pages, first)


def cache(module):
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    own = module.Span(WHOLE.start, WHOLE.length, span(SEQ).table, tokens=tokens)
    own.positions(SEQ), own.valid(SEQ), own.seen, own.cleared(numbers(BATCH, SEQ, 3))
    joined = dataclasses.replace(module.Span.whole(BATCH, SEQ), text_starts=tokens)
    joined.positions(SEQ), joined.oldest(SEQ, 3), joined.forgotten(numbers(BATCH, SEQ, 3))
    spec, packed = (module.CacheSpec(BATCH, 4, PAGE, jnp.float32, how) for how in (False, True))
    module.Paged.empty(spec, (3,)).append(numbers(BATCH, SEQ, 3), own)
    module.Paged.empty(packed, (128,), packing=KEYS).append(numbers(BATCH, SEQ, 128), own)
    state = module.KDAState(numbers(BATCH, 2, 4, 4), numbers(BATCH, 3, 12))
    module.Cache((state,), own.length, own.table)
    dataclasses.replace(own, rows_each=2).by_sequence(numbers(2 * BATCH, 1, 3))

    class Kept(module.Drafted):
        def kept(self, count):
            return count

    module.kept((Kept(),), jnp.ones(BATCH, jnp.int32))


def model(module):
    real = open_model.__wrapped__(SHORT)  # this runs while programs are traced: no other test may find the arrays
    layers = tuple(
        module.DecoderLayer(layer.input_layernorm, layer.attention, layer.post_attention_layernorm, layer.mlp)
        for layer in real.model.layers
    )
    scored(module.CausalLM(module.Decoder(real.model.word_embeddings, layers, real.model.norm), real.lm_head, SHORT))


def scored(model):
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    model(tokens)
    model.step(tokens, model.init_cache(BATCH, PAGE), WHOLE.length, last=True)


def mtp(module):
    real = ling3.init(dataclasses.replace(SHORT, num_nextn_predict_layers=1), mtp=True, **OPTIONS)
    [layer] = real.mtp
    own = module.MTP(**{field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)})
    module.mtp_logits(dataclasses.replace(real, mtp=(own,)), jnp.zeros((BATCH, SEQ), jnp.int32))


def sharded(module):
    real = open_model.__wrapped__(SHORT)  # this runs while programs are traced: no other test may find the arrays
    mesh = jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[:2])
    placed = plan(real, mesh).model(real, jax.tree.leaves(real))
    scored(module.Sharded(placed.model, placed.lm_head, SHORT, placement=placed.placement))
    alone = module.ShardedMatrix(matrix=real.lm_head, exchange=Exchange(), axes=(), name="")
    alone.product(jnp.zeros((BATCH, alone.in_features)), PLAIN)


def pool(module):
    real = open_model.__wrapped__(SHORT)  # this runs while programs are traced: no other test may find the arrays
    sampling = Sampling.build([(SamplingParams(), 0, SEQ, ())] * BATCH, TINY.vocab_size, 1)
    table = span(SEQ).table
    own = module.Pool.empty(real, sampling, SPEC)
    slots = jnp.arange(BATCH, dtype=jnp.int32)
    rows = module.Rows(slots, table)
    view = own.take(rows)
    own.put(rows, view.after(view.cache(table), slots, slots < 1))
    slot, one = jnp.asarray(0, jnp.int32), jax.tree.map(lambda x: x[:1], sampling)
    contents = module.SlotContents(module.swap_out(slot, own), slot, slot, slot, one)
    module.swap_in(slot, contents, own)
    module.write_pages(slots, module.read_pages(slots, own), own)


def forward(module):
    real = ling3.init(dataclasses.replace(SHORT, num_nextn_predict_layers=1), mtp=True, **OPTIONS)
    sampling = Sampling.build([(SamplingParams(), 0, SEQ, ())] * BATCH, TINY.vocab_size, 1)
    own, tokens = Pool.empty(real, sampling, dataclasses.replace(SPEC, mtp=1)), jnp.zeros((BATCH, SEQ), jnp.int32)
    rows = Rows(jnp.arange(BATCH, dtype=jnp.int32), span(SEQ).table)
    batch = module.Batch(rows, tokens, WHOLE.length, targets=tokens, following=tokens, want=("layers.0.residual",))
    _, own = module.extend(real, batch, own, PLAIN)
    masks = jnp.ones((BATCH, words(TINY.vocab_size)), jnp.uint32)
    module.decode(real, module.Batch(rows, tokens, WHOLE.length, masks, adapter=WHOLE.start), own, PLAIN)


def verification(module):
    real = ling3.init(dataclasses.replace(SHORT, num_nextn_predict_layers=1), mtp=True, **OPTIONS)
    sampling = Sampling.build([(SamplingParams(), 0, SEQ, ())] * BATCH, TINY.vocab_size, 1)
    own, none = Pool.empty(real, sampling, dataclasses.replace(SPEC, mtp=1)), jnp.zeros(BATCH, jnp.int32)
    rows = Rows(jnp.arange(BATCH, dtype=jnp.int32), span(SEQ).table)
    for mtp in (False, True):
        drafts = module.Drafts(jnp.zeros((BATCH, 7), jnp.int32), none, none, 3, mtp)
        allowed = module.AllowedTokens(
            jnp.full((BATCH, 4), -1, jnp.int32), jnp.ones((BATCH, words(TINY.vocab_size)), jnp.uint32)
        )
        module.verified(module.Passes(real, rows, WHOLE.length, drafts, allowed, IN_TURN), own)


def masks(module):
    forced, allowed = jnp.full((3, 2), -1, jnp.int32), jnp.ones((3, 3), jnp.uint32)
    module.masked(numbers(3, 70), module.masks_of_steps(forced, allowed, jnp.ones((3, 1), jnp.int32))[:, 0])


def batching(module):
    area = afd.FfnArea.empty(2, 3, 4, 5, 512)
    module.ffn_worker_batching(area, expert_num=6, max_out_shape=(2, 4, 5, 7), need_schedule=1, layer_num=2)


def returning(module):
    out, attn = (
        afd.FfnBatch(**dict.fromkeys((f.name for f in dataclasses.fields(afd.FfnBatch)), jnp.zeros(9, jnp.int32))),
        afd.AttentionArea.empty(3, 4, 5, 512),
    )
    out = dataclasses.replace(out, actual_token_num=jnp.asarray(9, jnp.int32))
    attn = module.ffn_to_attention(attn, numbers(9, 7), out, session_id=0)
    module.attention_worker_combine(attn, numbers(4, 3), 0, hidden_size=7, dtype=jnp.float16, need_schedule=1)


def sending(module):
    ids, table = jnp.zeros((4, 3), jnp.int32), jnp.ones((8, 9), jnp.int32)
    route = {"session_id": 0, "micro_batch_id": 0, "expert_ids": ids, "expert_rank_table": table, "moe_expert_num": 6}
    area, attn = afd.FfnArea.empty(2, 3, 4, 5, 512), afd.AttentionArea.empty(3, 4, 5, 512)
    for token_dtype, dtype in ((0, jnp.float16), (2, jnp.float32)):
        module.attention_to_ffn(area, numbers(4, 7, dtype=dtype), layer_id=0, rank=0, token_dtype=token_dtype, **route)
    module.complete_unrouted(attn, **route)


def windows(module):
    module.from_bytes(module.to_bytes(numbers(2, 3)), jnp.dtype(jnp.float32))
    module.within(jnp.zeros(3, jnp.int32), 2)


def gguf_file(module):
    with tempfile.TemporaryDirectory() as directory:
        path = gguf_files.write(pathlib.Path(directory) / "one.gguf", {}, {"one": np.ones((2, 3), np.float32)})
        module.open_gguf(path).numbers("one")


def gguf_arrays(module):
    module._moves_whole(np.arange(64), 32)
    module._moved(np.zeros((2, 68), np.uint8), np.arange(64), BLOCKS["Q8_0"])
    with tempfile.TemporaryDirectory() as directory:
        path = gguf_files.write(pathlib.Path(directory) / "one.gguf", {}, {"one": np.ones((2, 3), np.float32)})
        module.ArrangedArray(open_gguf(path), "model.norm.weight", ("one",), AS_STORED).made()


SLOW = (
    *("layers/csa", "layers/hyper", "layers/indexed_mla", "ops/compressed_attention"),
    *("afd/operators/sending", "afd/operators/batching", "model", "mesh/sharded", "engine/pool", "ops/attention"),
    *("layers/mla", "engine/forward", "engine/verification", "ops/packed_kv"),
)
"""Those that take longest."""


def learnt_loss(module):
    batch = Batch(jnp.zeros((BATCH, SEQ), jnp.int32), numbers(BATCH, SEQ))
    module.summed_loss(module.recomputed(open_model.__wrapped__(SHORT)), batch, PLAIN)


def packing(module):
    module._reached(MLA.init(CONFIG, **OPTIONS), numbers(1, 4, CONFIG.hidden))


FILES = {
    "layers/gate": gate,
    "layers/norm": norm,
    "layers/rope": rope,
    "layers/linear": linear,
    "layers/adapted": adapted,
    "adapters/adapter": adapter,
    "adapters/by_row": by_row,
    "layers/conv": conv,
    "layers/mlp": mlp,
    "layers/kda": kda,
    "layers/gated_deltanet": gated_deltanet,
    "layers/mla": mla,
    "layers/gqa": gqa,
    "layers/moe": moe,
    "ops/attention": attention,
    "ops/adapters": row_updates,
    "ops/tails": tails,
    "ops/logits": logits,
    "ops/drawing": drawing,
    "ops/conv": convolution,
    "cache": cache,
    "train/learnt_loss": learnt_loss,
    "train/packing": packing,
    "model": model,
    "mtp": mtp,
    "mesh/sharded": sharded,
    "engine/pool": pool,
    "engine/forward": forward,
    "engine/verification": verification,
    "engine/masks": masks,
    "checkpoint/gguf_file": gguf_file,
    "checkpoint/gguf_arrays": gguf_arrays,
    "layers/csa": csa,
    "layers/hyper": hyper,
    "layers/indexed_mla": indexed_mla,
    "ops/compressed_attention": compressed_attention,
    "ops/packed_kv": packed_kv,
    "afd/operators/windows": windows,
    "afd/operators/sending": sending,
    "afd/operators/batching": batching,
    "afd/operators/returning": returning,
}


def is_array_type(node):
    """True for the likes of `Float[Array, "batch seq"]`."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and len(node.slice.elts) == 2
        and isinstance(node.slice.elts[1], ast.Constant)
        and isinstance(node.slice.elts[1].value, str)
        and ast.unparse(node.value) not in ("Literal", "Annotated")  # which tests/layers/test_draw.py asks
    )


def array_types(tree):
    """Those of a module, in order; without those of a protocol that no function of the module is a form of."""
    formed = {
        ast.unparse(n.args[0]) for n in ast.walk(tree) if isinstance(n, ast.Call) and "form_of" in ast.dump(n.func)
    }
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name not in formed]
    protocols = [n for n in classes if ast.unparse(n.bases) == "Protocol"]
    idle = {id(node) for protocol in protocols for node in ast.walk(protocol)}
    return [node for node in ast.walk(tree) if is_array_type(node) and id(node) not in idle]


def mutants(source):
    """The module with one array type made false, by an axis that its array lacks; each with the type, and its line."""
    lines = source.encode().splitlines(keepends=True)
    for node in array_types(ast.parse(source)):
        shape = node.slice.elts[1]
        end = sum(map(len, lines[: shape.lineno - 1])) + shape.end_col_offset - 1  # before the closing quotation mark
        mutant = source.encode()[:end] + b" 997" + source.encode()[end:]
        yield mutant.decode(), f"line {node.lineno}: {ast.unparse(node)}"


def test_every_module_with_arrays_is_checked():
    """jaxtyping's hook makes each module that it decorates import jaxtyping."""
    unchecked = []
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if any(ast.unparse(node.value) in ("Wide", *dir(jaxtyping)) for node in array_types(tree)):
            name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
            if name == "ling3.evals.harness" and not importlib.util.find_spec("lm_eval"):
                continue
            if "jaxtyping" not in vars(importlib.import_module(name)):
                unchecked.append(name)
    assert not unchecked


@pytest.mark.thorough
@pytest.mark.parametrize("file", exhaustively(FILES, but=FILES.keys() - set(SLOW)))
def test_every_array_type_is_checked(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = (ROOT / f"{file}.py").read_text()

    def run(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        with checks.install([name]):
            module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        jax.eval_shape(lambda: FILES[file](module))

    stem = file.replace("/", "_")
    run(f"{stem}_as_it_is", source)
    unchecked = []
    for i, (mutant, place) in enumerate(mutants(source)):
        try:
            run(f"{stem}_{i}", mutant)
        except jaxtyping.TypeCheckError:
            continue
        unchecked.append(place)
    assert not unchecked


# All sizes differ, so that none can stand for another.
ROTATION = Rope.plain(1e4, 4, interleaved=True)
CONFIG = MLAConfig(32, 3, q_rank=12, latent=16, nope=8, rope=4, value=6, eps=1e-6, std=0.2, rotation=ROTATION)
FREE = {"batch": BATCH, "seq": SEQ, "1": 1, "any": 7}
SIZES = {**vars(CONFIG), **FREE, "entry": CONFIG.latent + CONFIG.rope, "nope+rope": CONFIG.nope + CONFIG.rope}
SIZES["heads·(nope+value)"] = CONFIG.heads * (CONFIG.nope + CONFIG.value)
MLA_TENSORS = {
    "__call__": {"x": "batch seq hidden"},
    "query_input": {"x": "batch seq hidden"},
    "queries": {"qa": "batch seq q_rank"},
    "_split_queries": {"q": "batch seq heads nope+rope"},
    "entries": {"x": "batch seq hidden"},
    "_compressed_kv": {"compressed": "batch seq entry"},
    "_k_rope": {"compressed": "batch seq entry"},
    "_rotated": {"x": "batch seq any rope"},
    "_expanded": {"q_nope": "batch seq heads nope", "q_rope": "batch seq heads rope", "held": "batch seq entry"},
    "_absorbed": {"q_nope": "batch 1 heads nope", "q_rope": "batch 1 heads rope"},
    "over_latents": {"q_nope": "batch 1 heads nope", "q_rope": "batch 1 heads rope"},
    "_absorbed_queries": {
        "q_nope": "batch 1 heads nope",
        "q_rope": "batch 1 heads rope",
        "weight": "heads·(nope+value) latent",
    },
    "_summed_latents": {"summed": "batch heads entry"},
    "output_gate": {"x": "batch seq hidden"},
    "gated": {"pre_o_proj": "batch seq heads value", "gate": "batch seq heads"},
    "projected": {"heads": "batch seq heads value"},
}


def call(method, arrays):
    """Calls a method of an MLA layer on these arrays, and on what else it takes."""
    layer = MLA.init(CONFIG, **OPTIONS)
    seq = 1 if "absorbed" in method else SEQ
    state = layer.empty_state(SPEC) if method == "_absorbed" else None
    others = {"positions": span(seq).positions(seq), "state": state, "span": span(seq), "execution": PLAIN}
    others |= {"dtype": jnp.float32, "attend": lambda q: q}
    taken = inspect.signature(getattr(MLA, method)).parameters
    others = {name: other for name, other in others.items() if name in taken}
    return jax.eval_shape(lambda: getattr(layer, method)(**arrays, **others))


@pytest.mark.parametrize("method", MLA_TENSORS)
def test_the_tensors_of_mla_have_the_sizes_of_the_config(method):
    """A tensor with one more along an axis that the config knows is refused by name."""
    shapes = {name: axes.split() for name, axes in MLA_TENSORS[method].items()}

    def arrays(grown=None):
        return {
            name: numbers(*(SIZES[axis] + (grown == (name, i)) for i, axis in enumerate(axes)))
            for name, axes in shapes.items()
        }

    call(method, arrays())
    for name, axes in shapes.items():
        for i, axis in enumerate(axes):
            if axis in FREE:
                continue
            with pytest.raises(jaxtyping.TypeCheckError, match=rf"MLA\.{method}: argument '{name}'"):
                call(method, arrays(grown=(name, i)))


@pytest.mark.parametrize(("dtype", "taken"), [("float32", True), ("float64", True), ("bfloat16", False)])
def test_the_gate_is_float32_or_wider(dtype, taken):
    with jax.enable_x64(True):
        gate, pre_o_proj = numbers(BATCH, SEQ, 3, dtype=dtype), numbers(BATCH, SEQ, 3, 6)
        if taken:
            call("gated", {"pre_o_proj": pre_o_proj, "gate": gate})
            return
        with pytest.raises(jaxtyping.TypeCheckError, match="argument 'gate'"):
            call("gated", {"pre_o_proj": pre_o_proj, "gate": gate})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_gate_of_any_weights_is_wide(dtype):
    with jax.enable_x64(True):
        layer = MLA.init(CONFIG, key=KEY, dtype=dtype)
        gate = jax.eval_shape(lambda: layer.output_gate(X.astype(dtype)))
        assert gate.dtype == ("float64" if dtype == "float64" else "float32")


def test_no_local_variable_has_an_array_type():
    """Python looks at no annotation of a local variable: it would hold whether true or false."""
    for path in ROOT.rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        assigned = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.AnnAssign)]
        typed = [node for node in assigned if any(map(is_array_type, ast.walk(node.annotation)))]
        assert not typed, f"{path.name}, line {typed[0].lineno}: {ast.unparse(typed[0])}"
