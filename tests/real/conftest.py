"""SmolLM2-135M-Instruct in transformers and in an engine, both in float32, opened once for all tests."""

import contextlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import jax.numpy as jnp
import native_kernels
import pytest
import smollm2
import tokenizer_cases
import torch
import transformers

import ling3
from ling3.engine.scheduler import Scheduler

# Every law of tokenizers and streams is tested on its vocabulary, too.
tokenizer_cases.MAKERS["smollm2"] = smollm2.write_tokenizer

LENGTH = 512
SLOTS, PAGES, PAGE = 8, 128, 32


@pytest.fixture(scope="session", autouse=True)
def kernels():
    """The kernels in C++, where there is a compiler: a user's answers come from these."""
    with native_kernels.installed() if native_kernels.HAS_COMPILER else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def directory():
    return smollm2.checkpoint()


@pytest.fixture(scope="session")
def oracle(directory):
    """transformers' model."""
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def oracle_tokenizer(directory):
    """transformers' reading of `tokenizer.json`.

    The class that the settings name, GPT2Tokenizer, puts GPT-2's pre-tokenizer in the place of the file's since
    transformers 5, which parts otherwise what is a number and no digit (½).
    """
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.fixture(scope="session")
def tokenizer(directory):
    return ling3.load_tokenizer(directory)


@pytest.fixture(scope="session")
def model(directory, kernels):
    return ling3.load(directory, dtype=jnp.float32)


@pytest.fixture(scope="session")
def make_engine(model, tokenizer):
    """An engine of the suite's shapes, whose programs are compiled once; `changes` may name another model."""

    def make(served=model, **changes):
        settings = {"max_running_requests": SLOTS, "max_model_len": LENGTH, "page_size": PAGE, "num_pages": PAGES}
        settings |= {"chunked_prefill_size": 128, "token_paddings": (32, 128)}
        return ling3.Engine(served, tokenizer, **{**settings, **changes})

    return make


@pytest.fixture(scope="session")
def engine(make_engine):
    return make_engine()


@pytest.fixture(scope="session")
def crowded(make_engine):
    """An engine whose requests preempt each other: it has pages for one of the longest and a few short ones."""
    made = make_engine()
    made._loop.dispatcher.scheduler = Scheduler(SLOTS, LENGTH // PAGE - 3, PAGE)
    return made


@pytest.fixture(scope="session")
def logits():
    """The logits of one sequence, compiled for a few lengths."""
    jitted = jax.jit(lambda model, tokens: model(tokens))

    def compute(model, ids):
        padded = jnp.asarray([[*ids, *[0] * (-len(ids) % 64)]])
        return jitted(model, padded)[0, : len(ids)]

    return compute
