import io
import itertools
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ling3.checkpoint import safetensors_file
from ling3.checkpoint.safetensors_file import CheckpointError, open_file, read_stack


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_file(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


ARRAYS = {
    "half": np.arange(12, dtype=np.float16).reshape(3, 4),
    "brain": np.linspace(-3, 3, 10).astype(ml_dtypes.bfloat16),
    "single": np.arange(6, dtype=np.float32).reshape(1, 2, 3),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "whole": np.arange(5, dtype=np.int64),
}


def numbers(tensor):
    """All of a tensor, flat."""
    out = np.empty(tensor.shape, safetensors_file.DTYPES[tensor.dtype]).reshape(-1)
    tensor.read(0, out[None], out.size)
    return out


def test_reads_what_safetensors_writes(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "x.safetensors")
    tensors = open_file(tmp_path / "x.safetensors")
    assert set(tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        found = tensors[name]
        assert safetensors_file.DTYPES[found.dtype] == array.dtype and found.shape == array.shape
        np.testing.assert_array_equal(numbers(found), array.reshape(-1))
        assert found.nbytes == array.nbytes


@pytest.mark.parametrize("order", ["0123", "3210", "0231", "1023"])
def test_a_stack_is_its_tensors_end_to_end(tmp_path, monkeypatch, order):
    """From any number on, wherever the file has them; neighbours are read together, and every byte once."""
    arrays = {f"x{i}": np.arange(6, dtype=np.int32).reshape(2, 3) + 10 * int(i) for i in order}
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    safetensors_file.write(tmp_path / "x.safetensors", specs, arrays.__getitem__)
    tensors, names = open_file(tmp_path / "x.safetensors"), sorted(arrays)
    expected, reads, preadv = np.concatenate([arrays[name].reshape(-1) for name in names]), [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *at: reads.append(preadv(*at)) or reads[-1])
    for start, end in itertools.combinations(range(expected.size + 1), 2):
        reads.clear()
        out = np.zeros((1, end - start), np.int32)
        read_stack([tensors[name] for name in names], start, out)
        np.testing.assert_array_equal(out[0], expected[start:end])
        touched = [order.index(str(i)) for i in range(start // 6, (end - 1) // 6 + 1)]
        assert len(reads) == 1 + sum(after != before + 1 for before, after in itertools.pairwise(touched))
        assert sum(reads) == out.nbytes


def test_safetensors_reads_what_is_written(tmp_path):
    specs = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}
    safetensors_file.write(tmp_path / "x.safetensors", specs, ARRAYS.__getitem__)
    read = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert set(read) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
    for tensor in open_file(tmp_path / "x.safetensors").values():
        assert tensor.start % safetensors_file.DTYPES[tensor.dtype].itemsize == 0


def test_writing_asks_for_one_array_at_a_time_and_checks_it(tmp_path):
    specs = {"a": (np.dtype(np.float32), (2,)), "b": (np.dtype(np.float32), (3,))}
    with pytest.raises(ValueError, match="b: found float64"):
        safetensors_file.write(
            tmp_path / "x", specs, lambda name: np.zeros(specs[name][1], "f4" if name == "a" else "f8")
        )


def test_reading_a_part(tmp_path):
    array = np.arange(100, dtype=np.float32).reshape(4, 25)
    safetensors.numpy.save_file({"a": array[0], "b": array}, tmp_path / "x.safetensors")
    tensor = open_file(tmp_path / "x.safetensors")["b"]
    part = np.empty((1, 30), np.float32)
    tensor.read(20, part, 100)
    np.testing.assert_array_equal(part[0], np.arange(20, 50))
    columns = np.zeros((3, 9), np.float32)
    tensor.read(25 + 4, columns[:, :7], 25)
    np.testing.assert_array_equal(columns[:, :7], array[1:, 4:11])
    assert not columns[:, 7:].any()


def test_a_file_that_is_cut_while_it_is_open(tmp_path):
    safetensors.numpy.save_file({"a": np.zeros(100, np.float32)}, tmp_path / "x.safetensors")
    tensors = open_file(tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", 300)
    with pytest.raises(CheckpointError, match=r"x\.safetensors: ends within a; it has been cut"):
        numbers(tensors["a"])


def test_a_truncated_file(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for length in (0, 4, 8, 60, len(whole) - 1):
        (tmp_path / "x.safetensors").write_bytes(whole[:length])
        assert "no valid safetensors file" in refusal(tmp_path / "x.safetensors")


def test_trailing_bytes(tmp_path):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("ab") as file:
        file.write(b"\0")
    assert "damaged or incomplete" in refusal(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("header", "data"),
    [
        pytest.param({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12), id="overlap"),
        pytest.param({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, bytes(20), id="hole"),
        pytest.param({"a": entry("F32", [3], 0, 8)}, bytes(8), id="size-mismatch"),
        pytest.param({"a": entry("F32", [2], 8, 0)}, bytes(8), id="backwards"),
        pytest.param({"a": entry("F32", [2**62, 2**62], 0, 8)}, bytes(8), id="huge"),
        pytest.param({"a": entry("F32", [-2], 0, 8)}, bytes(8), id="negative"),
        pytest.param({"a": entry("F31", [2], 0, 8)}, bytes(8), id="unknown-dtype"),
        pytest.param({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), id="no-offsets"),
        pytest.param([1, 2], b"", id="list"),
        pytest.param(b"not json", b"", id="text"),
        pytest.param(b"\xff\xfe\xfd", b"", id="bytes"),
        pytest.param(b'{"a":' * 100000 + b"1" + b"}" * 100000, b"", id="deep"),
    ],
)
def test_damaged_headers(tmp_path, header, data):
    refusal(raw_file(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("length", [2**63, 2**40, 10**9, 1])
def test_a_lying_header_length(tmp_path, length):
    safetensors.numpy.save_file(ARRAYS, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + whole[8:])
    refusal(tmp_path / "x.safetensors")


def test_a_key_twice_in_one_header(tmp_path):
    text = (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    path = raw_file(tmp_path / "x.safetensors", text, bytes(4))
    assert safetensors.numpy.load_file(path).keys() == {"a"}, "the format's own parser does not see it"
    assert "the same key twice: 'a'" in refusal(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps({"a": 1}), "pickle"),
        (pickle.dumps({"a": 1}, protocol=2), "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"GGUF\x03\0\0\0", "GGUF"),
    ],
)
def test_other_kinds_of_files(tmp_path, data, said):
    (tmp_path / "x.safetensors").write_bytes(data)
    assert said in refusal(tmp_path / "x.safetensors")


@pytest.mark.parametrize("length", [0x80, 0x3C + 0x100])
def test_a_header_length_that_looks_like_another_format(tmp_path, length):
    header = json.dumps({"a": entry("F32", [1], 0, 4)}).encode().ljust(length)
    path = raw_file(tmp_path / "x.safetensors", header, np.float32(7).tobytes())
    assert numbers(open_file(path)["a"]) == [7]


def test_what_torch_save_writes(tmp_path):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("archive/data.pkl", pickle.dumps(None))
    (tmp_path / "x.safetensors").write_bytes(archive.getvalue())
    assert "pickle inside, which ling3 never reads" in refusal(tmp_path / "x.safetensors")


def test_a_missing_file_and_a_directory(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "x.safetensors")
    assert "cannot be read" in refusal(tmp_path)


def test_a_header_that_is_too_large(tmp_path, monkeypatch):
    path = raw_file(tmp_path / "x.safetensors", {"a": entry("F32", [2], 0, 8)}, bytes(8))
    monkeypatch.setattr(safetensors_file, "HEADER_BYTES", 40)
    assert "its header would have" in refusal(path)


def test_a_type_that_numpy_lacks_is_listed_with_its_name(tmp_path):
    path = raw_file(tmp_path / "x.safetensors", {"a": entry("F8_E5M2", [4], 0, 4)}, bytes(4))
    assert open_file(path)["a"].dtype == "F8_E5M2"
    assert "F8_E5M2" not in safetensors_file.DTYPES
