"""What devices exchange in a decode step, as the compiler says: each collective, its bytes, and no weights."""

import dataclasses
import functools
import math
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import TINY

from ling3.checkpoint.names import structure
from ling3.engine.runner import Runner
from ling3.engine.shapes import Shapes
from ling3.execution import PLAIN
from ling3.interpret.collectives import by_source, collectives
from ling3.mesh import Rules, plan

pytestmark = pytest.mark.thorough

HIDDEN, HEADS, WIDTH, DENSE, SHARED, TOP_K, VOCAB = 256, 8, 32, 512, 256, 2, 500
CONFIG = dataclasses.replace(
    TINY,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    head_dim=WIDTH,
    v_head_dim=WIDTH,
    qk_nope_head_dim=WIDTH,
    kv_lora_rank=64,
    intermediate_size=DENSE,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=SHARED,
    vocab_size=VOCAB,
)
"""A layer of KDA with a dense MLP, one of KDA with experts, and one of MLA with experts."""
INNER = HEADS * WIDTH
ROWS = 2


@functools.cache
def shapes_of(tensor, data=1, rules=None):
    """The model on a mesh, without its numbers."""
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"), devices=jax.devices()[: data * tensor])
    model = structure(CONFIG, jnp.float32)
    return plan(model, mesh, rules).structure(model)


def compiled_step(model):
    """The collectives of `model.step` with one token for each row."""
    step = jax.jit(lambda model, tokens, cache: model.step(tokens, cache, execution=PLAIN))
    cache = eqx.filter_eval_shape(lambda model: model.init_cache(ROWS, 32), model)
    lowered = step.lower(model, jax.ShapeDtypeStruct((ROWS, 1), jnp.int32), cache)
    return collectives(lowered.compile().as_text() or "", model.placement.mesh.shape)


def engines_decode(shapes):
    """Those of the engine's own decode program."""
    model = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), shapes)
    groups = model.placement.row_groups
    shapes = Shapes(ROWS, 4, 16, 2, buckets=(16,), rows=(ROWS // groups,), groups=groups)
    runner = Runner(model, shapes, PLAIN)
    [(_, *call)] = [call for call in runner._empty_calls() if call[0] == f"decode of {ROWS // groups}"]
    function, inputs, *how = call
    return collectives(function.lower(*inputs, runner.pool, *how).compile().as_text(), model.placement.mesh.shape)


def listed(found):
    """(kind, module, bytes of the result, devices, loops around it) and how often."""
    counts = Counter()
    for each in found:
        counts[each.kind, each.source, each.bytes, each.devices, each.loops] += each.times
    return dict(counts)


def of_the_rules(tensor, rows, sums=False, loops=0, spread=None, all_rows=None):
    """What the rules say: float32, and `rows` on each device."""

    def gathered(channels):
        return rows * channels * 4

    every, shared = all_rows or rows, spread or tensor
    logits = tensor * -(-VOCAB // (tensor * 64)) * 64
    expected = {
        ("all-reduce", "word_embeddings", gathered(HIDDEN), tensor, loops): 1,
        # A row for each choice of a token: those of other devices' experts are zeros.
        ("all-reduce", "layers.*.mlp.experts", every * TOP_K * HIDDEN * 4, shared, loops): 2,
        ("all-gather", "lm_head", gathered(logits), tensor, loops): 1,
    }
    inputs = {
        "layers.*.attention.o_proj": (INNER, 2),
        "layers.*.attention.dense": (INNER, 1),
        "layers.*.mlp.down_proj": (DENSE, 1),
        "layers.*.mlp.shared_experts.down_proj": (SHARED, 2),
    }
    for source, (channels, layers) in inputs.items():
        if sums:
            expected["all-reduce", source, gathered(HIDDEN), tensor, loops] = layers
        else:
            for width in (channels, HIDDEN):  # of inputs and of outputs, of which each device computes some
                key = ("all-gather", source, gathered(width), tensor, loops)
                expected[key] = expected.get(key, 0) + layers
    if sums and shared == tensor:  # the compiler joins the two sums of a layer
        experts, own = "layers.*.mlp.experts", "layers.*.mlp.shared_experts.down_proj"
        for source, size in ((experts, every * TOP_K * HIDDEN * 4), (own, gathered(HIDDEN))):
            del expected["all-reduce", source, size, tensor, loops]
        expected["all-reduce", f"{own} + {experts}", every * TOP_K * HIDDEN * 4 + gathered(HIDDEN), tensor, loops] = 2
    return expected


def of_data(loops):
    """What is exchanged between two groups of devices that have a row each, and share experts."""
    gathered = [HIDDEN, TOP_K, TOP_K]  # tokens, their experts, and the weights of these
    sizes = Counter(ROWS * width * 4 for width in gathered)
    return {("all-gather", "layers.*.mlp.experts", size, 2, loops): 2 * count for size, count in sizes.items()}


@pytest.mark.parametrize("sums", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tensor", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_exchanges_what_the_rules_say(tensor, sums):
    found = compiled_step(shapes_of(tensor, 1, Rules(sums=sums)))
    assert listed(by_source(found)) == of_the_rules(tensor, ROWS, sums)
    assert {each.axes for each in found} == {("tensor",)}
    smallest = min(
        4 * x.size for x in jax.tree.leaves(structure(CONFIG, jnp.float32)) if x.ndim > 1 and x.shape[-1] >= HIDDEN
    )
    assert max(each.bytes for each in found) <= smallest, "less than the smallest matrix: no weights"
    assert {each.source for each in found if "layers" in each.source} >= {"layers.0.attention.o_proj"}


def test_the_engines_step_exchanges_the_same():
    assert listed(by_source(engines_decode(shapes_of(2)))) == of_the_rules(2, ROWS, loops=1)


@pytest.mark.slow
@pytest.mark.parametrize("sums", [False, True])
def test_the_engines_step_over_groups_of_devices(sums):
    """Rows lie over `data`, experts over all four devices; at the end all get every row's tokens."""
    found = engines_decode(shapes_of(2, 2, Rules(experts=("data", "tensor"), sums=sums)))
    inside = of_the_rules(2, ROWS // 2, sums, loops=1, spread=4, all_rows=ROWS) | of_data(loops=1)
    assert {key: count for key, count in listed(by_source(found)).items() if key[1]} == inside
    along = {(each.kind, each.source): each.axes for each in found if "experts" in each.source.split(".")}
    assert along["all-reduce", "layers.1.mlp.experts"] == ("data", "tensor")
    assert along["all-gather", "layers.1.mlp.experts"] == ("data",)
    outside = [each for each in found if not each.source]
    assert {each.axes for each in outside} == {("data",)}
    assert Counter((each.kind, each.loops) for each in outside) == {
        ("all-gather", 0): 4,  # tokens, log-probabilities, and the likeliest tokens with theirs
        ("all-reduce", 0): 1,  # whether any row is left
        ("all-reduce", 1): 1,
    }
    assert all(each.bytes == 4 for each in outside if each.kind == "all-reduce")


HLO = """HloModule jit_f, entry_computation_layout={()->f32[8]{0}}

%body.1 (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %x = f32[8]{0:T(8,128)S(1)} get-tuple-element(%p.1), index=1
  ROOT %all-to-all.1 = (f32[4]{0}, f32[4]{0}) all-to-all(%x, %x), replica_groups=[4,2]<=[2,4]T(1,0), metadata={}
}

%cond.1 (p.2: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%p.2, %p.2), direction=LT
}

%other.1 (p.3: bf16[2]) -> bf16[2] {
  ROOT %rs = bf16[2]{0} reduce-scatter(%p.3), replica_groups={}, dimensions={0}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %start = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, NAME
  %done = f32[8]{0} all-gather-done(%start)
  %send = (u8[3]{0}, u8[3]{0}, u32[], u32[]) collective-permute-start(%done), source_target_pairs={{0,4},{4,0}}
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%cond.1, body=%body.1, TRIPS
  %while.2 = (s32[], f32[8]{0}) while(%while.1), condition=%cond.1, body=%body.1
  ROOT %c = bf16[2]{0} conditional(%i, %done, %done), branch_computations={%other.1, %add}
}
""".replace("NAME", 'metadata={op_name="jit(f)/while/body/layers.7/mlp/all_gather"}').replace(
    "TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}'
)


def test_what_a_program_may_have():
    """Started ones, loops of known and unknown length, branches, and the several forms of groups."""
    found = collectives(HLO, {"data": 2, "tensor": 4})
    rows = [(x.kind, x.source, x.result, x.bytes, x.devices, x.axes, x.times, x.loops, x.sent) for x in found]
    assert rows == [
        ("all-gather", "layers.7.mlp", "f32[8]", 32, 4, ("tensor",), 1, 0, 24),
        ("collective-permute", "", "u8[3]", 3, 2, ("data",), 1, 0, 3),
        ("all-to-all", "", "f32[4], f32[4]", 32, 2, ("data",), 5, 0, 16),
        ("all-to-all", "", "f32[4], f32[4]", 32, 2, ("data",), 1, 1, 16),
        ("reduce-scatter", "", "bf16[2]", 4, 8, ("data", "tensor"), 1, 0, 28),
    ]
    with pytest.raises(ValueError, match="hlo has no ENTRY computation"):
        collectives("module @jit_f {}", {"tensor": 2})


@pytest.mark.parametrize(
    "form",
    [
        "{{0,2},{4,6},{1,3},{5,7}}",
        "[4,2]<=[2,2,2]T(0,2,1)",
        "mesh['a'=2,'b'=2,'c'=2] {'b'}",
        "mesh['a'=1,'b'=4,'c'=2], device_ids=([2,2,2]T(0,2,1)) {'c'}",
        "mesh['a'=4,'b'=2], device_ids=(6,4,2,0,1,3,5,7) {'b'}",
        "mesh['all'=8] {'all':(2)2}",
        "mesh['a'=1,'all'=8], device_ids=([4,2]T(1,0)) {'a','all':(4)2}",
    ],
)
def test_forms_of_groups(form):
    """Each says that devices exchange along the middle axis of three."""
    line = f"  ROOT %sum = f32[8]{{0}} all-reduce(%p), replica_groups={form}, to_apply=%add"
    [found] = collectives(f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}", {"data": 2, "tensor": 2, "stage": 2})
    assert (found.axes, found.devices) == (("tensor",), 2)


def test_groups_of_an_unknown_form():
    text = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %r = f32[8]{0} all-reduce(%p), replica_groups=ring(0,1)\n}"
    with pytest.raises(ValueError, match=r"unknown form, expected .*ring"):
        collectives(text, {"tensor": 2})


@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor"), ("tensor", "data"), ("one",)])
def test_what_a_program_sums_along(axes):
    """Before the compiler and after it; nothing along an axis of one device, or of each device with itself."""
    mesh = jax.make_mesh((2, 1, 4), ("data", "one", "tensor"))
    spec = PartitionSpec("data", "tensor")

    def summed(x):
        alone = [[device] for device in range(4)]
        return jax.lax.psum(jax.lax.all_gather(x, "tensor", axis_index_groups=alone, tiled=True), axes)

    mapped = jax.shard_map(summed, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
    lowered = jax.jit(mapped).lower(x)
    sizes = {"data": 2, "tensor": 4}
    inside = tuple(axis for axis in ("data", "tensor") if axis in axes)
    expected = [("all-reduce", inside, math.prod(sizes[axis] for axis in inside))] if inside else []
    for text in (lowered.as_text("hlo", debug_info=True), lowered.compile().as_text()):
        assert [(each.kind, each.axes, each.devices) for each in collectives(text, mesh.shape)] == expected


def test_what_the_compiler_exchanges_by_itself():
    """An array cut along an axis, wanted whole."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    cut, whole = NamedSharding(mesh, PartitionSpec(None, "tensor")), NamedSharding(mesh, PartitionSpec())
    program = jax.jit(lambda x: jax.reshard(x, whole)).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=cut))
    [found] = collectives(program.compile().as_text(), mesh.shape)
    assert (found.kind, found.axes, found.devices, found.bytes) == ("all-gather", ("tensor",), 4, 8 * 8 * 4)
