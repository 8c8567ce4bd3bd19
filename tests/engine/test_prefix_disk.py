"""Known prefixes on disk: another engine continues from them, to the same bits, and nothing else is taken for one."""

import functools
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from random_adapters import random_adapter
from small_engine import SETTINGS as SMALL
from small_engine import model as small_model

import ling3
from ling3.engine.prefix_files import PrefixFiles
from ling3.families.mistral import MistralConfig
from ling3.families.qwen2 import Qwen2Config

STEP = 32
SETTINGS = {**SMALL, "num_pages": 32}
PARAMS = ling3.SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "hidden_act": "silu",
}


def attention(config=Qwen2Config, dtype=jnp.bfloat16, **more):
    return ling3.init(config.from_dict(SIZES | more), key=jax.random.key(0), dtype=dtype)


KINDS = {"hybrid": small_model, "full attention": functools.cache(attention)}
every_kind = pytest.mark.parametrize("kind", KINDS)


def engine(directory, kind="hybrid", model=None, **changes):
    """A new engine, as after a restart: the memory of earlier ones is not its."""
    model = KINDS[kind]() if model is None else model
    return ling3.Engine(model, None, **{**SETTINGS, **changes}, prefix_dir=directory)


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(6, 60, count).tolist()


def ask(served, prompt, own=PARAMS):
    """The answer to a prompt, once everything is written, and how many of its tokens were known."""
    (output,) = served.generate([prompt], own)
    served.loop.disk.flush()
    served.loop.scheduler.check()
    one = output.outputs[0]
    return (one.token_ids, one.logprobs), output.cached_tokens


@functools.cache
def cold(kind, prompt):
    served = ling3.Engine(KINDS[kind](), None, **SETTINGS, prefix_cache=False)
    one = served.generate([list(prompt)], PARAMS)[0].outputs[0]
    return one.token_ids, one.logprobs


def names(directory):
    return {path.name for path in directory.iterdir()}


@every_kind
@pytest.mark.thorough
def test_another_engine_continues_from_them_with_the_same_bits(kind, tmp_path):
    prompt = ids(100)
    expected = cold(kind, tuple(prompt))
    assert ask(engine(tmp_path, kind), prompt) == (expected, 0)
    before, again = names(tmp_path), engine(tmp_path, kind)
    assert ask(again, prompt) == (expected, 3 * STEP)
    assert names(tmp_path) == before  # nothing is written twice
    assert ask(again, prompt) == (expected, 3 * STEP)
    other = prompt[: 2 * STEP + 5] + ids(60, seed=1)
    assert ask(engine(tmp_path, kind), other) == (cold(kind, tuple(other)), 2 * STEP)
    assert ask(engine(tmp_path, kind), other) == (cold(kind, tuple(other)), 4 * STEP)


@pytest.mark.thorough
def test_what_memory_has_is_continued_from_disk(tmp_path):
    """A prompt that goes on where another has ended reads the rest alone."""
    prompt = ids(150)
    ask(engine(tmp_path), prompt)
    served = engine(tmp_path)
    assert ask(served, prompt[:50])[1] == STEP
    assert ask(served, prompt) == (cold("hybrid", tuple(prompt)), 4 * STEP)
    assert served.stats().cached_pages == 4 * STEP // SETTINGS["page_size"]


@pytest.mark.thorough
def test_several_requests_at_once_share_what_is_read(tmp_path):
    prompts = [ids(100) + ids(5 + i, seed=i) for i in range(4)]
    ask(engine(tmp_path), prompts[0])
    served = engine(tmp_path)
    outputs = served.generate(prompts, PARAMS)
    assert [output.cached_tokens for output in outputs] == [3 * STEP] * 4
    for prompt, output in zip(prompts, outputs, strict=True):
        one = output.outputs[0]
        assert (one.token_ids, one.logprobs) == cold("hybrid", tuple(prompt))


@pytest.mark.thorough
def test_a_damaged_or_foreign_file_is_ignored(tmp_path, caplog):
    prompt = ids(100)
    expected = ask(engine(tmp_path), prompt)[0]
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6  # pages and states of three steps
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ("0" * 64 + "-pages.prefix")).write_text("foreign")
    for number, path in enumerate(files):
        content = path.read_bytes()
        changed = bytearray(content)
        changed[-1 - number] ^= 1
        for damaged in (bytes(changed), content[:-1], b"", files[number - 1].read_bytes()):
            path.write_bytes(damaged)
            caplog.clear()
            answer, known = ask(engine(tmp_path), prompt)
            assert answer == expected
            warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            if warned:
                assert known == 0 and len(warned) == 1 and str(path) in warned[0]
                assert path.read_bytes() == content  # written again
            else:  # the states after a step in the middle, which were not read
                assert known == 3 * STEP and "-states" in path.name
            path.write_bytes(content)
    assert {"notes.txt", "0" * 64 + "-pages.prefix"} <= names(tmp_path)


@pytest.mark.thorough
def test_they_are_for_one_model_and_its_settings(tmp_path):
    prompt, first = ids(100), engine(tmp_path)
    assert ask(first, prompt)[1] == 0
    changed = jax.tree.map(lambda x: x * 1.001 if x.ndim == 2 else x, small_model())
    assert ask(engine(tmp_path, model=changed), prompt)[1] == 0
    assert ask(engine(tmp_path, decode_steps=2), prompt)[1] == 0
    first.update(changed)
    assert ask(first, prompt)[1] == 3 * STEP  # of the engine that had these weights from the start


@pytest.mark.slow
def test_they_are_for_one_adapter(tmp_path):
    """Whatever its name is."""
    prompt, model = ids(100), small_model()
    assert ask(engine(tmp_path), prompt)[1] == 0
    adapted = engine(tmp_path, adapters={"a": random_adapter(model, size=0.6, seed=1)})
    own = ling3.SamplingParams(max_tokens=3, adapter="a")
    assert ask(adapted, prompt)[1] == 3 * STEP  # without the adapter
    assert ask(adapted, prompt, own)[1] == 0
    renamed = engine(tmp_path, adapters={"b": random_adapter(model, size=0.6, seed=1)})
    assert ask(renamed, prompt, ling3.SamplingParams(max_tokens=3, adapter="b"))[1] == 3 * STEP


@pytest.mark.thorough
def test_the_least_recently_used_are_deleted(tmp_path):
    prompts = [ids(40, seed=seed) for seed in range(4)]
    ask(engine(tmp_path), prompts[0])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    served = engine(tmp_path, prefix_disk_bytes=3 * size)
    for i in (1, 2, 0, 3):  # the first is used again, so that the second goes
        ask(served, prompts[i])
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * size
    assert [ask(engine(tmp_path), prompts[i])[1] for i in (0, 2, 3, 1)] == [STEP, STEP, STEP, 0]


@pytest.mark.thorough
def test_with_too_few_free_pages_a_prompt_is_computed(tmp_path):
    """Other requests have the pages at first; the bits stay."""
    prompts = [ids(200, seed=1), ids(200, seed=2), ids(150)]
    ask(engine(tmp_path), prompts[2])
    for output in engine(tmp_path).generate(prompts, PARAMS):
        one = output.outputs[0]
        assert (one.token_ids, one.logprobs) == cold("hybrid", tuple(output.prompt_token_ids))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prefix_cache": False}, "prefix_cache is off"),
        ({"max_model_len": 16}, "is less than a step of 32 tokens"),
        ({"prefix_disk_bytes": 0}, "prefix_disk_bytes is 0, expected"),
        ({"prefix_dir": 3}, "prefix_dir is 3, expected a path"),
    ],
)
def test_an_engine_that_keeps_none_says_why(changes, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        ling3.Engine(small_model(), None, **{**SETTINGS, "prefix_dir": tmp_path, **changes})


def test_a_window_has_none_on_disk(tmp_path):
    with pytest.raises(ValueError, match="sliding-window attention keeps none on disk"):
        engine(tmp_path, model=attention(MistralConfig, sliding_window=24))


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        engine(tmp_path / "file")


ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(3, ml_dtypes.bfloat16), np.zeros((0, 2), np.int8)]


def test_a_file_has_the_arrays_that_were_written(tmp_path):
    files = PrefixFiles(tmp_path / "new" / "one", 1000)
    files.prepare()
    files.write("a", ARRAYS)
    found = files.read("a", ARRAYS)
    assert found is not None and files.has("a") and not files.has("b") and files.read("b", ARRAYS) is None
    for one, other in zip(found, ARRAYS, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def test_a_write_that_fails_leaves_nothing(tmp_path, caplog, monkeypatch):
    files = PrefixFiles(tmp_path, 1000)
    files.write("a", ARRAYS)
    before = (tmp_path / "a.prefix").read_bytes()

    def full(path, content):
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        for name in "ab":
            files.write(name, ARRAYS)
    assert names(tmp_path) == {"a.prefix"} and (tmp_path / "a.prefix").read_bytes() == before
    assert len(caplog.records) == 2 and "No space left" in caplog.text
    files.write("large", [np.zeros(2000, np.int8)])
    assert "large.prefix" not in names(tmp_path)


def test_the_first_of_touched_files_is_the_last_to_be_deleted(tmp_path):
    files = PrefixFiles(tmp_path, 3 * (32 + 100))
    (tmp_path / "killed.1.partial").write_bytes(b"1" * 100)
    for name in "abc":
        files.write(name, [np.zeros(100, np.int8)])
    assert names(tmp_path) == {"a.prefix", "b.prefix", "c.prefix"}
    files.touch(["a", "b", "c", "missing"])
    files.write("d", [np.zeros(100, np.int8)])
    assert names(tmp_path) == {"a.prefix", "b.prefix", "d.prefix"}
