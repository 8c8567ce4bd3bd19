"""The peer llama.cpp: what is asked of its programs, what is read of their output, and what a failure leaves."""

import pytest

from benchmarks import llama_cpp_convert
from benchmarks.llama_cpp import LlamaCpp
from benchmarks.registry import Absent

BENCH = """#!/bin/sh
echo "$@" >> "$0.asked"
[ $(wc -l < "$0.asked") = 1 ] && exit  # the first time, its log is lost
echo 'a line of another kind'
echo '{"t_pp": 0.25, "t_tg": 0.5}'
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A build whose programs only write down what they are asked."""
    programs = tmp_path / "llama.cpp" / "build" / "bin"
    programs.mkdir(parents=True)
    for name, text in {"llama-quantize": '#!/bin/sh\ncp "$2" "$3"\n', "llama-batched-bench": BENCH}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    converter = tmp_path / "convert.py"
    converter.write_text("import sys; open(sys.argv[3], 'w').write('a GGUF')")
    monkeypatch.setattr(llama_cpp_convert, "__file__", str(converter))
    return tmp_path / "llama.cpp"


def test_times_are_those_of_its_programs(source, tmp_path):
    peer = LlamaCpp(source, tmp_path, "Q4_0")
    assert (tmp_path / "llama_cpp-Q4_0.gguf").read_text() == "a GGUF"
    assert peer.prefill(512) == 250
    assert peer.step(8, 64, 32) == 500 / 32
    asked = (source / "build/bin/llama-batched-bench.asked").read_text().splitlines()
    assert "-npp 512 -ntg 1 -npl 1 -c 513" in asked[0] == asked[1]
    assert "-npp 64 -ntg 32 -npl 8 -c 768" in asked[2]


def test_what_is_missing_is_told_and_leaves_no_file(source, tmp_path):
    with pytest.raises(Absent, match="--llama-cpp"):
        LlamaCpp(None, tmp_path, "BF16")
    (source / "build/bin/llama-batched-bench").write_text("#!/bin/sh\n")
    with pytest.raises(Absent, match=r"printed no times for 8 rows of 64 \+ 32 tokens in 8 tries"):
        LlamaCpp(source, tmp_path, "Q4_0").step(8, 64, 32)
    (tmp_path / "llama_cpp-Q4_0.gguf").unlink()
    (source / "build/bin/llama-quantize").write_text("#!/bin/sh\necho no such type >&2; : > $3; exit 3\n")
    with pytest.raises(Absent, match="llama-quantize ended with 3: no such type"):
        LlamaCpp(source, tmp_path, "Q9")
    assert [path.name for path in tmp_path.glob("llama_cpp-Q9*")] == []
    (source / "build/bin/llama-quantize").unlink()
    with pytest.raises(Absent, match=r"benchmarks/README\.md"):
        LlamaCpp(source, tmp_path, "Q4_0")
