"""What holds of every model, on a tiny one of each family of transformers and hybrids; and transformers' numbers."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformer_reference
from exhaustive_cases import exhaustively, thoroughly
from family_laws import answers_in_company_and_alone, losses_of_training
from rich.console import Console
from tiny_transformers import CASES, FROZEN, GREEDY, HYBRIDS, POSITIONS, TOKENS, VOCAB, open_model, write

import ling3
from ling3.evals.ablations import ablations
from ling3.interpret import ablate
from ling3.interpret.inspect import report

FEW = thoroughly(CASES, but=["mistral", "qwen3-moe"])
PLAIN = thoroughly([name for name in CASES if name not in HYBRIDS], but=["mistral", "qwen3-moe"])
# What takes long to compile: the tests of a change take one family, `make exhaustive` the rest.
SOME = exhaustively(CASES, but=["mistral"])
ROW = np.asarray([TOKENS], np.int32)


@pytest.mark.parametrize("name", FEW)
def test_logits_are_transformers_and_the_equations(name, tmp_path):
    """Within 2e-4 of frozen numbers, as in the parity suite; within float32's rounding of the float64 restatement."""
    model = open_model(name)
    logits = np.asarray(model(ROW)[0])
    np.testing.assert_allclose(logits[np.ix_(POSITIONS, VOCAB)], FROZEN[name], atol=2e-4)
    write(name, tmp_path)
    weights = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    np.testing.assert_allclose(logits, transformer_reference.forward(weights, model.config, TOKENS), atol=2e-5)


@pytest.mark.parametrize("name", exhaustively(CASES, but=["qwen2", "qwen3-moe"]))
def test_step_is_the_forward_pass(name):
    """Prompts of unequal lengths on a cache, and then a token: what whole sequences say, beyond a window too."""
    model, lengths = open_model(name), np.asarray([20, 5], np.int32)
    rows, here = np.concatenate([ROW, ROW]), np.arange(2)
    whole = model(rows)
    prompt, cache = model.step(rows, model.init_cache(2, 64), lengths)
    token, _ = model.step(rows[here, lengths][:, None], cache)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(prompt[row, :length], whole[row, :length], atol=2e-5)
        np.testing.assert_allclose(token[row, 0], whole[row, length], atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", exhaustively(CASES, but=["mistral", "qwen3-next"]))
def test_answers_are_generates_in_company_and_alone(name):
    """Greedy ones; and after preemption, with the same bits in their log-probabilities."""
    model = open_model(name)
    prompts = [TOKENS[:3], TOKENS, TOKENS[:9], TOKENS[5:19]]
    expected = ling3.generate(model, prompts, max_tokens=12, ignore_eos=True)
    assert expected[1] == GREEDY[name] and len({tuple(tokens) for tokens in expected}) == 4
    params = [ling3.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)] * len(prompts)
    crowd, alone = answers_in_company_and_alone(model, prompts, params)
    assert [list(tokens) for tokens, _ in crowd[: len(prompts)]] == expected
    assert crowd == alone


@pytest.mark.parametrize("name", FEW)
def test_it_is_saved_as_it_was_stored(name, tmp_path):
    """In the published layout, bit for bit, and matrices in bfloat16 beside norms in float32."""
    write(name, tmp_path)
    model = open_model(name)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, model)
    for kept, own in ((model, tmp_path / "whole"), (half, tmp_path / "half")):
        ling3.save(kept, own)
        loaded = ling3.load(own)
        assert loaded.config == model.config and eqx.tree_equal(loaded, kept)
    first, second = (safetensors.numpy.load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "whole"))
    assert first.keys() == second.keys() and all(first[n].tobytes() == second[n].tobytes() for n in first)


@pytest.mark.parametrize("name", PLAIN)
def test_tables_of_rope_are_skipped(name, tmp_path):
    """Llama 2's published files have them."""
    write(name, tmp_path)
    model = open_model(name)
    file, layers = tmp_path / "model.safetensors", len(model.model.layers)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(layers)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | tables, file)
    assert eqx.tree_equal(ling3.load(tmp_path), model)


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_inspected(name):
    model = open_model(name)
    config = model.config
    described = report(config, jnp.float32)
    assert described.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
    entry = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert described.memory.cache_per_token == 4 * entry
    kinds = [(layer["attention"], layer["mlp"]) for layer in described.to_dict()["layers"]]
    assert kinds == [("gqa", "dense"), ("gqa", "moe")][: config.num_hidden_layers]
    with (console := Console(width=80)).capture() as shown:
        console.print(described)
    assert "GQA" in shown.get() and "no RoPE" not in shown.get()


@pytest.mark.parametrize("name", PLAIN)
def test_it_is_traced(name):
    model = open_model(name)
    seen, config = ling3.trace(model, jnp.asarray(ROW)), model.config
    inside = seen.layers[-1].attention
    assert isinstance(inside, dict) and sorted(inside) == ["entries", "heads", "q"]
    assert inside["q"].shape == (1, len(TOKENS), config.num_attention_heads, config.head_dim)
    np.testing.assert_allclose(seen.layers[-1].logits, model(ROW), atol=2e-5)
    assert list(seen.moe) == [1][: config.num_hidden_layers - 1]


@pytest.mark.parametrize("name", SOME)
def test_training_lowers_the_loss(name):
    losses = losses_of_training(ling3.init(open_model(name).config, key=jax.random.key(0)), [TOKENS] * 2)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_it_is_ablated(name, tmp_path):
    """What a module may be without is cut. No config of these families has a word for it, so `save` refuses it."""
    model = open_model(name)
    cuts: dict[str, Callable[..., ling3.CausalLM]] = {"GQA: no RoPE": ablate.no_rope}
    if name == "qwen3-moe":
        cuts["GQA: no norms of q and k"] = ablate.no_qk_norm
        cuts["experts: top 1"] = lambda m: ablate.top_k(m, 1)
        cuts["experts: 1 of 4 dropped"] = lambda m: ablate.drop_experts(m, [0])
    layers = {f"layer {i}: no GQA" for i in range(model.config.num_hidden_layers)}
    assert {ablation.name for ablation in ablations(model)} == cuts.keys() | layers
    for cut in (*cuts.values(), lambda m: ablate.no_attention(m, [0])):
        without = cut(model)
        logits = np.asarray(without(ROW))
        assert np.all(np.isfinite(logits)) and not np.allclose(logits, model(ROW), atol=1e-3)
        with pytest.raises(ling3.CheckpointError, match="do not fit its configuration"):
            ling3.save(without, tmp_path / "cut")
    with pytest.raises(ling3.CheckpointError, match=r"layers\.0\.attention\.rotation: found None; expected Rope"):
        ling3.save(ablate.no_rope(model, [0]), tmp_path / "cut")
    with pytest.raises(ValueError, match=r"this model has no output gate that can be cut.* attention in layers"):
        ablate.no_output_gate(model)


def test_another_number_of_experts_is_another_config(tmp_path):
    fewer = ablate.variant(open_model("qwen3-moe"), num_experts_per_tok=1)
    ling3.save(fewer, tmp_path / "own")
    assert ling3.load(tmp_path / "own").config.num_experts_per_tok == 1
