"""The adapter for lm-evaluation-harness against the harness's own `hf`, on one checkpoint for each tokenizer."""

import functools
import shutil

import jax
import pytest
from tokenizer_cases import FAST, directory, load

import ling3
from ling3.evals.perplexity import perplexity, start_token
from ling3.families.llama import LlamaConfig

# ruff: noqa: E402
# What needs the harness is imported once it is known to be there.

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (the extra evals)")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from ling3.evals.harness import Ling3LM

LENGTH = 64
LONG = "the cat sat on the mat. 你好 😀 " * 12
TEXTS = ["the cat", " a  b\n", "", "<s>the cat", "<|role_end|>a", "<EOT>b", "你好 😀é"]
# Two sums of some ten float32 terms near 6, in another order.
CLOSE = {"rel": 2e-6, "abs": 2e-4}
every = pytest.mark.parametrize("name", FAST)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """ling3's and the harness's own adapter of a random Llama with one of the tokenizers."""

    @functools.cache
    def made(name):
        path = tmp_path_factory.mktemp("checkpoint")
        rows = -(-load(name).vocab_size // 128) * 128
        config = LlamaConfig(
            vocab_size=rows, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, rms_norm_eps=1e-5, rope_theta=1e4,
            rope_scaling=None, tie_word_embeddings=False, initializer_range=0.3, bos_token_id=None,
            eos_token_id=load(name).eos_token_ids, attention_bias=False, mlp_bias=False,
        )  # fmt: skip
        ling3.save(ling3.init(config, key=jax.random.key(0)), path)
        shutil.copytree(directory(name), path, dirs_exist_ok=True)
        # Its cache would answer for " cat" after "the" with the scores of "the cat" after nothing.
        theirs = HFLM(str(path), device="cpu", dtype="float32", batch_size=1, logits_cache=False)
        return Ling3LM(str(path), dtype="float32"), theirs

    return made


def instances(kind, *arguments):
    return [Instance(kind, {}, each, i, metadata=("t", i, 1)) for i, each in enumerate(arguments)]


@every
def test_ids(name, both):
    ours, theirs = both(name)
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    for text in TEXTS:
        for special in (None, True, False):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special), text


@every
def test_log_likelihoods(name, both):
    pairs = [("the cat sat", " on the mat"), ("", "the cat"), ("a ", "b"), ("<s>the", " cat"), (LONG, "a")]
    found, wanted = (lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True) for lm in both(name))
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], **CLOSE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]


@every
def test_rolling_log_likelihoods(name, both):
    texts = [("the cat sat on the mat",), (LONG,), ("x",)]
    found, wanted = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)) for lm in both(name))
    assert found == pytest.approx(wanted, **CLOSE)


@every
def test_texts(name, both):
    free = {"until": [], "max_gen_toks": 16, "do_sample": False}
    prompts = ["the cat", " a b", "你好 😀", LONG]
    found, wanted = (
        lm.generate_until(instances("generate_until", *[(prompt, dict(free)) for prompt in prompts]))
        for lm in both(name)
    )
    assert found == wanted and all(found)
    # A stop that is in the middle of each text.
    stops = [(prompt, {**free, "until": [text[3:5]]}) for prompt, text in zip(prompts, found, strict=True)]
    ours, theirs = (lm.generate_until(instances("generate_until", *stops)) for lm in both(name))
    assert ours == theirs != found


@every
def test_perplexity_has_the_harness_s_prefix(name, both):
    ours, theirs = both(name)
    assert start_token(ours.tokenizer) == theirs.prefix_token_id
    ids = ours.tok_encode("the cat sat", add_special_tokens=False)
    ((score, _),) = theirs._loglikelihood_tokens([(("", ""), [theirs.prefix_token_id], ids)], disable_tqdm=True)
    assert -perplexity(ours.model, ours.tokenizer, "the cat sat").nats == pytest.approx(score, **CLOSE)
