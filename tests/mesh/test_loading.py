"""Checkpoints on a mesh: each part from its own bytes, the same files back, the same random numbers, errors for all."""

import dataclasses
import filecmp
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import conftest
import deepseek_v4_checkpoint
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_transformers
from meshes import FAMILIES, delta
from tiny import FLASH, TINY

import ling3
from ling3.checkpoint.names import structure, weights_of
from ling3.leaves import array_leaves
from ling3.mesh import MeshError, Rules, place, plan

pytestmark = pytest.mark.thorough

SCRIPT = pathlib.Path(__file__).with_name("loading_process.py")
SUMS, WITHIN_EXPERTS = Rules(sums=True), Rules(experts=None)
EVERYWHERE = Rules(experts=("data", "tensor"))
slow = pytest.mark.slow


@functools.cache
def config(name):
    if name == "nano":
        return ling3.load("nano").config
    if name == "grouped":
        return tiny_transformers.open_model("qwen3-moe").config
    if name in FAMILIES:
        return delta(name)
    return dataclasses.replace({"tiny": TINY, "flash": FLASH}[name], hidden_size=64, num_attention_heads=8)


def mesh(tensor, data=1):
    return jax.make_mesh((data, tensor), ("data", "tensor"), devices=jax.devices()[: data * tensor])


def shard_bytes(name):
    return 1_000_000 if name == "nano" else 60_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of each model a checkpoint with several files."""

    @functools.cache
    def written(name):
        directory = tmp_path_factory.mktemp(name)
        if name == "nano":
            model = ling3.load("nano")
        else:
            model = ling3.init(config(name), key=jax.random.key(0), dtype=jnp.bfloat16)
        ling3.save(model, directory / "x", max_shard_bytes=shard_bytes(name), check_finite=False)
        return directory / "x"

    return written


def tensors(directory):
    stored = {}
    for file in directory.glob("*.safetensors"):
        stored |= safetensors.numpy.load_file(file)
    return stored


def gathered(model, rules):
    """The published tensors of a model on a mesh, put together from its parts as its layout says."""
    tree, found = structure(model.config), {}
    layout = plan(tree, model.placement.mesh, rules)
    for leaf, share, array in zip(array_leaves(tree), layout.shares, jax.tree.leaves(model), strict=True):
        whole = share.whole(np.asarray(array))
        for weight in weights_of(leaf):
            own = whole if weight.expert is None else whole[weight.expert]
            found[weight.name] = own.reshape(weight.shape)
    return found


def assert_same_bytes(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def assert_same_files(found, expected):
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    assert filecmp.cmpfiles(found, expected, names, shallow=False)[0] == names


CASES = [
    ("tiny", 2, 1, Rules()),
    ("tiny", 8, 1, SUMS),
    ("grouped", 8, 1, Rules()),
    *((name, 4, 1, Rules()) for name in FAMILIES),
    *(
        pytest.param(name, tensor, 1, rules, marks=slow)
        for name in ("tiny", "flash", "nano", "grouped")
        for tensor, rules in [(1, Rules()), (2, SUMS), (4, Rules()), (4, WITHIN_EXPERTS), (8, Rules()), (8, SUMS)]
    ),
    pytest.param("tiny", 2, 2, EVERYWHERE, marks=slow),
]


@pytest.mark.parametrize(("name", "tensor", "data", "rules"), CASES)
def test_parts_are_the_files_bit_for_bit_and_are_saved_as_they_were(checkpoint, tmp_path, name, tensor, data, rules):
    directory = checkpoint(name)
    model = ling3.load(directory, mesh=mesh(tensor, data), rules=rules)
    assert_same_bytes(gathered(model, rules), tensors(directory))
    ling3.save(model, tmp_path / "out", max_shard_bytes=shard_bytes(name), check_finite=False)
    assert_same_files(tmp_path / "out", directory)


@pytest.mark.parametrize("sums", [False, True])
def test_a_loaded_model_is_the_placed_one(checkpoint, sums):
    rules = Rules(sums=sums)
    expected = place(ling3.load(checkpoint("tiny"), jnp.float32), mesh(4), rules)
    found = ling3.load(checkpoint("tiny"), jnp.float32, mesh=mesh(4), rules=rules)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.sharding == theirs.sharding and ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(("tensor", "rules"), [(4, Rules()), (8, SUMS)])
def test_every_byte_is_read_once_for_all_devices(checkpoint, monkeypatch, tensor, rules):
    directory, reads, preadv = checkpoint("tiny"), [], os.preadv

    def counted(file, buffers, offset):
        count = preadv(file, buffers, offset)
        reads.append((file, offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    ling3.load(directory, mesh=mesh(tensor), rules=rules)
    reads.sort()
    assert all(before[0] != after[0] or before[2] <= after[1] for before, after in itertools.pairwise(reads))
    assert sum(end - start for _, start, end in reads) == sum(array.nbytes for array in tensors(directory).values())


def test_quantized_tensors_are_cut_by_rows_and_columns(tmp_path):
    """Into whole blocks of their formats; experts, and with sums other matrices, by columns too."""
    sizes = {"moe_intermediate_size": 256, "num_attention_heads": 8, "num_hidden_layers": 3}
    raw = deepseek_v4_checkpoint.BLOCKS | sizes | {"compress_ratios": [0, 4, 128, 0]}
    weights = deepseek_v4_checkpoint.draw(deepseek_v4_checkpoint.reference.Config(raw), 0)
    deepseek_v4_checkpoint.write(tmp_path, raw, deepseek_v4_checkpoint.quantise(weights))
    rules = Rules(sums=True, experts=None)
    expected = place(ling3.load(tmp_path), mesh(2), rules)
    found = ling3.load(tmp_path, mesh=mesh(2), rules=rules)
    for leaf, ours, theirs in zip(
        array_leaves(expected), jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), leaf.path


def test_random_numbers_are_those_of_one_device():
    for name, tensor, rules in [("tiny", 4, Rules()), ("grouped", 8, SUMS), ("delta", 4, Rules())]:
        own = ling3.init(config(name), key=jax.random.key(3), dtype=jnp.bfloat16)
        expected = place(own, mesh(tensor), rules)
        found = ling3.init(config(name), key=jax.random.key(3), dtype=jnp.bfloat16, mesh=mesh(tensor), rules=rules)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert ours.sharding == theirs.sharding
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


EXPERT = "model.layers.1.mlp.experts.7.up_proj.weight"


def second_file(directory):
    return sorted(directory.glob("*.safetensors"))[1]


def spoil(directory):
    """Makes a number of an expert NaN."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    path = directory / index["weight_map"][EXPERT]
    stored = safetensors.numpy.load_file(path)
    stored[EXPERT][-1, -1] = np.nan
    safetensors.numpy.save_file(stored, path)


def test_what_is_refused(checkpoint, tmp_path):
    directory = checkpoint("tiny")
    nan = shutil.copytree(directory, tmp_path / "nan")
    spoil(nan)
    with pytest.raises(ling3.CheckpointError, match=f"NaN or infinite.*\n.*{re.escape(EXPERT)}, in model-"):
        ling3.load(nan, mesh=mesh(2))
    model = ling3.load(nan, mesh=mesh(2), check_finite=False)
    with pytest.raises(ling3.CheckpointError, match=f"NaN or infinite.*\n.*{re.escape(EXPERT)}$"):
        ling3.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="rules: found some, and no mesh"):
        ling3.load(directory, rules=Rules())
    with pytest.raises(ValueError, match="rules: found some, and no mesh"):
        ling3.init(TINY, key=jax.random.key(0), rules=Rules())
    with pytest.raises(MeshError, match="heads are 2, which 3 devices cannot share"):
        ling3.init(TINY, key=jax.random.key(0), mesh=jax.make_mesh((3,), ("tensor",), devices=jax.devices()[:3]))
    missing = shutil.copytree(directory, tmp_path / "missing")
    second_file(missing).unlink()
    with pytest.raises(ling3.CheckpointError, match=r"model-00002-of-000..\.safetensors: cannot be found"):
        ling3.load(missing, mesh=mesh(2))


LARGE = dataclasses.replace(TINY, vocab_size=2**18, hidden_size=64)


@pytest.fixture(scope="module")
def processes(checkpoint, tmp_path_factory):
    """The directory of two processes that load and save together, and what each has found."""
    directory = tmp_path_factory.mktemp("processes")
    (directory / "0").mkdir()
    shutil.copytree(checkpoint("tiny"), directory / "0" / "small")
    ling3.save(ling3.init(LARGE, key=jax.random.key(0), dtype=jnp.bfloat16), directory / "0" / "large")
    for name in ("missing", "cut", "infinite", "another"):
        shutil.copytree(directory / "0" / "small", directory / "0" / name)
    shutil.copytree(directory / "0", directory / "1")
    second_file(directory / "1" / "missing").unlink()
    os.truncate(second_file(directory / "1" / "cut"), 20_000)
    spoil(directory / "1" / "infinite")
    raw = json.loads((directory / "1" / "another" / "config.json").read_text())
    (directory / "1" / "another" / "config.json").write_text(json.dumps(raw | {"rope_theta": 5.0}))

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(ling3.__file__).parents[1])}
    environment |= {"PROGRAMS": str(conftest.PROGRAMS), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment.pop("XLA_FLAGS", None)
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(process), str(port), str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    answers = []
    for out, errors in printed:
        assert "found " in out, errors
        answers.append(json.loads(out.partition("found ")[2]))
    return directory, answers


@slow
def test_a_process_reads_no_more_than_its_own_parts(processes):
    directory, answers = processes
    headers = sum(
        32 + 8 + int.from_bytes(path.read_bytes()[:8], "little")
        for path in (directory / "0" / "small").glob("*.safetensors")
    )
    for answer in answers:
        for sums in (False, True):
            read = answer[f"read {sums}"]
            assert read["own"] < read["bytes"] <= read["own"] + headers
        large = answer["large"]
        size = (directory / "0" / "large" / "model.safetensors").stat().st_size
        assert large["bytes"] < 0.51 * size
        assert 0.9 * large["shard"] <= large["grown"] <= 1.15 * large["shard"] + large["largest"]


@slow
def test_what_processes_save_together_are_the_same_files(processes):
    directory, _ = processes
    model = ling3.load(directory / "0" / "small")
    ling3.save(model, directory / "expected", max_shard_bytes=30_000)
    for sums in (False, True):
        assert_same_files(directory / f"saved {sums}", directory / "expected")
    ling3.save(model, directory / "expected alone")
    assert_same_files(directory / "saved alone", directory / "expected alone")


@slow
def test_an_error_in_one_process_is_raised_in_all(processes):
    directory, answers = processes
    host, file = socket.gethostname(), second_file(directory / "0" / "small").name
    for name, told in {
        "missing": f"{file}: cannot be found",
        "cut": f"{file}: no valid safetensors file",
        "infinite": f"{EXPERT}, in model-",
    }.items():
        (kind, other), (own_kind, own, note) = (answer[name] for answer in answers)
        assert kind == own_kind == "CheckpointError"
        assert told in own and note == f"in process 1, on {host}"
        assert other == f"process 1, on {host}: {own}"
    for answer, names in zip(answers, ("process 0 and 1", "process 1 and 0"), strict=True):
        assert answer["another"] == ["CheckpointError", f"{names} have found different checkpoints; give all the same"]
    for name, kind, told in [("taken", "CheckpointError", "is not empty"), ("full", "OSError", "nothing was replaced")]:
        (own_kind, own, note), (other_kind, other) = (answer[name] for answer in answers)
        assert (own_kind, other_kind) == (kind, "CheckpointError")
        assert told in own and note == f"in process 0, on {host}" and other == f"process 0, on {host}: {own}"
    assert not (directory / "full").exists()
    assert "none of its 2 devices is one of process 0" in answers[0]["foreign"][1]
