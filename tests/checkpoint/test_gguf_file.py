"""The container: what a header says is read, and every damage is an error that names the file and the place."""

import struct
import time

import gguf_files
import numpy as np
import pytest

from ling3.checkpoint import CheckpointError
from ling3.checkpoint.gguf_file import open_gguf

METADATA = {
    "general.architecture": "llama",
    "a.whole": 7,
    "a.number": 1e-5,
    "a.flag": True,
    "a.words": ["of", "several", "", "bytes: é"],
    "a.numbers": [3, 1, 2],
    "a.none": [],
}
TENSORS = {
    "first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "blocks": ("Q8_0", np.arange(2 * 34, dtype=np.uint8), (2, 32)),
    "half": ("BF16", np.full(4, 0x3FC0, np.uint16), (4,)),
}


@pytest.fixture
def path(tmp_path):
    return gguf_files.write(tmp_path / "model.gguf", METADATA, TENSORS)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors(version, tmp_path):
    found = open_gguf(gguf_files.write(tmp_path / "model.gguf", METADATA, TENSORS, version))
    assert found.metadata == METADATA
    assert {name: (t.dtype, t.shape, t.block) for name, t in found.tensors.items()} == {
        "first": ("F32", (2, 3), ""),
        "blocks": ("U8", (2, 34), "Q8_0"),
        "half": ("BF16", (4,), ""),
    }
    np.testing.assert_array_equal(found.numbers("first"), TENSORS["first"])
    np.testing.assert_array_equal(found.tensors["blocks"].array().reshape(-1), TENSORS["blocks"][1])
    np.testing.assert_array_equal(found.numbers("half"), 1.5)


def test_every_truncation_is_an_error_that_names_the_file(path):
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        with pytest.raises(CheckpointError, match=r"model\.gguf: "):
            open_gguf(path)


def replaced(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


HUGE = struct.pack("<Q", 2**60)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", r"found b'GGML'; expected b'GGUF'"),
        (b"GGUF\x03\0\0\0", b"GGUF\x01\0\0\0", "version: found 1; expected 2 or 3"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "version: found a big-endian file"),
        (struct.pack("<QQ", 3, 7), HUGE + struct.pack("<Q", 7), "tensors and 7 keys; expected at most"),
        (struct.pack("<QQ", 3, 7), struct.pack("<Q", 3) + HUGE, "keys; expected at most"),
        (b"a.whole", b"a\xffwhole", "key 2 of 7: found .*, no UTF-8"),
        (b"a.whole", b"a.words", "a.words: is in the metadata twice"),
        (b"a.whole\x04", b"a.whole\x0f", "a.whole: found a value of type 15; expected 0 to 12"),
        (struct.pack("<Q", 7) + b"a.whole", HUGE + b"a.whole", "key 2 of 7: takes 1,152,921,504,606,846,976 bytes"),
        (struct.pack("<Q", 7) + b"several", HUGE + b"several", "a.words: takes 1,152,921,504,606,846,976 bytes"),
        (b"a.words" + struct.pack("<IIQ", 9, 8, 4), b"a.words" + struct.pack("<II", 9, 8) + HUGE, "a.words: takes"),
        (
            b"a.numbers" + struct.pack("<IIQ", 9, 4, 3),
            b"a.numbers" + struct.pack("<II", 9, 4) + HUGE,
            "a.numbers: takes",
        ),
        (
            b"first" + struct.pack("<I", 2),
            b"first" + struct.pack("<I", 9),
            "tensor first: found 9 axes; expected 1 to 4",
        ),
        (b"first" + struct.pack("<IQ", 2, 3), b"first" + struct.pack("<I", 2) + HUGE, r"tensor first: found the shape"),
        (b"first" + struct.pack("<IQ", 2, 3), b"first" + struct.pack("<IQ", 2, 0), r"found the shape \[2, 0\]"),
        (
            struct.pack("<QI", 2, 0),
            struct.pack("<QI", 2, 10),
            "tensor first: found the type Q2_K; expected one of F32, ",
        ),
        (struct.pack("<QI", 2, 0), struct.pack("<QI", 2, 99), "tensor first: found the type 99; expected one of F32, "),
        (
            struct.pack("<QI", 2, 0),
            struct.pack("<QI", 2, 2),
            "found rows of 3 numbers in Q4_0; expected a multiple of 32",
        ),
        (
            struct.pack("<IQ", 30, 128),
            struct.pack("<IQ", 30, 120),
            "tensor half: begins at 120, no multiple of the align",
        ),
        (struct.pack("<IQ", 30, 128), struct.pack("<IQ", 30, 2**40), "tensor half: ends at byte .*; it is truncated"),
        (struct.pack("<IQ", 30, 128), struct.pack("<IQ", 30, 0), "tensors first and half overlap"),
    ],
)
def test_damage_is_an_error_that_names_the_place(old, new, message, path):
    replaced(path, old, new)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=message) as raised:
        open_gguf(path)
    assert "model.gguf" in str(raised.value)
    assert time.monotonic() - start < 1


def test_two_tensors_of_one_name(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", {}, {"one": np.ones(8, np.float32), "two": np.ones(8, np.float32)})
    replaced(path, b"two", b"one")
    with pytest.raises(CheckpointError, match="tensor one: is in the file twice"):
        open_gguf(path)


def test_an_alignment_of_its_own(tmp_path):
    with pytest.raises(CheckpointError, match=r"general.alignment: found 48; expected a power of two"):
        open_gguf(gguf_files.write(tmp_path / "model.gguf", {"general.alignment": 48}, TENSORS))
    found = open_gguf(gguf_files.write(tmp_path / "model.gguf", {"general.alignment": 32}, TENSORS))
    np.testing.assert_array_equal(found.numbers("first"), TENSORS["first"])


def test_what_is_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="it is a directory"):
        open_gguf(tmp_path)
    with pytest.raises(CheckpointError, match=r"nonesuch.gguf: cannot be read"):
        open_gguf(tmp_path / "nonesuch.gguf")


def split(directory, count=3, **changes):
    """A split set with a tensor in each file; the path of the first one."""
    for number in range(count):
        metadata = METADATA if number == 0 else {}
        own = {"split.no": number, "split.count": count, "split.tensors.count": count}
        tensors = {f"tensor{number}": np.full(4, number, np.float32)}
        name = f"model-{number + 1:05}-of-{count:05}.gguf"
        gguf_files.write(directory / name, {**metadata, **own, **(changes if number == 1 else {})}, tensors)
    return directory / f"model-00001-of-{count:05}.gguf"


def test_a_split_set_is_read_by_its_first_file(tmp_path):
    found = open_gguf(split(tmp_path))
    assert found.metadata["general.architecture"] == "llama"
    assert [found.numbers(f"tensor{number}")[0] for number in range(3)] == [0, 1, 2]


def test_split_sets_that_are_not_whole(tmp_path):
    first = split(tmp_path)
    with pytest.raises(CheckpointError, match="this is file 2 of 3; give the first one"):
        open_gguf(tmp_path / "model-00002-of-00003.gguf")
    other = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(
        CheckpointError, match=r"renamed.gguf: is the first of 3 files; expected the name NAME-00001-of-"
    ):
        open_gguf(other)
    other.rename(first)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"found no model-00002-of-00003.gguf beside it \(1 of 3 files"):
        open_gguf(first)
    split(tmp_path, **{"split.no": 2})
    with pytest.raises(
        CheckpointError, match=r"model-00002.*split.no and split.count: found \(2, 3\); expected \(1, 3\)"
    ):
        open_gguf(first)
