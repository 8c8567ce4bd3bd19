"""A GGUF of a random checkpoint: `python llama_cpp_convert.py SOURCE CHECKPOINT FILE`, by llama.cpp's own converter.

SOURCE is the directory of llama.cpp's source code. The file is in bfloat16 and has no vocabulary, which a random
checkpoint lacks too.
"""

import json
import sys
from pathlib import Path


def main(source: str, checkpoint: str, file: str) -> None:
    """Writes FILE from the config and the tensors in CHECKPOINT. Raises ImportError if SOURCE has no converter."""
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    import gguf  # noqa: PLC0415 -- they are in `source`
    from conversion import TextModel, get_model_class  # noqa: PLC0415

    # By default the config is transformers', which drops what it does not know.
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    converter = get_model_class(config["architectures"][0])
    converter.set_vocab = TextModel._set_vocab_none
    converter(Path(checkpoint), gguf.LlamaFileType.MOSTLY_BF16, Path(file), hparams=config).write()


if __name__ == "__main__":
    main(*sys.argv[1:])
