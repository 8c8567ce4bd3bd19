"""Qwen3-Next and Qwen3.5: the layouts of their files, what their configs refuse, and what looks into them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import native_kernels
import numpy as np
import pytest
import safetensors.numpy
from exhaustive_cases import exhaustively
from published_transformers import QWEN3_NEXT_80B_A3B, QWEN35_9B, QWEN35_35B_A3B
from quantized_models import FP8, compressed
from random_adapters import random_adapter
from tiny_transformers import TOKENS, open_model, write

import ling3
from ling3.adapters.adapter import adaptable
from ling3.engine.speculator import Speculator
from ling3.families import family_of, read_config
from ling3.formats import QuantizedMatrix
from ling3.interpret.inspect import report
from ling3.mesh import place

ROW = jnp.asarray([TOKENS], jnp.int32)


def equal(one, other):
    leaves = [jax.tree.leaves(tree) for tree in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(jnp.array_equal, *leaves))


def stacked(tensors):
    """The tensors of experts in the two stacks that the published files in floats have of a layer."""
    kept, parts = {}, {}
    for name, array in tensors.items():
        at, _, rest = name.partition(".experts.")
        if rest:
            number, part, _ = rest.split(".")
            parts.setdefault(f"{at}.experts", {})[int(number), part] = array
        else:
            kept[name] = array
    for at, each in parts.items():
        gate, up, down = (
            np.stack([each[e, f"{part}_proj"] for e in range(len(each) // 3)]) for part in ("gate", "up", "down")
        )
        kept |= {f"{at}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}.down_proj": down}
    return kept


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3.5-moe", *exhaustively(["qwen3.5"])])
def test_the_text_model_of_a_nested_file_is_read(name, tmp_path):
    """Vision and multi-token prediction are skipped; `save` writes the layout of transformers' text class."""
    write(name, tmp_path)
    text, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    whole = QWEN35_35B_A3B if name == "qwen3.5-moe" else QWEN35_9B
    nested = whole | {"text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    del text["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(nested))
    others = {"model.visual.blocks.0.norm.weight": np.ones(4, np.float32), "mtp.fc.weight": np.ones(4, np.float32)}
    safetensors.numpy.save_file(stacked(safetensors.numpy.load_file(file)) | others, file)
    model = ling3.load(tmp_path)
    assert model.config == open_model(name).config and equal(model, open_model(name))
    ling3.save(model, tmp_path / "own")
    assert equal(ling3.load(tmp_path / "own"), model)
    safetensors.numpy.save_file({"model.other.weight": np.ones(4, np.float32), **others}, file)
    with pytest.raises(ling3.CheckpointError, match=r"no place for:\n    model\.other\.weight, in [^\n]*$"):
        ling3.load(tmp_path)


AROUND = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3.5-moe", *exhaustively(["qwen3-next", "qwen3.5"])])
def test_the_layer_that_predicts_further_is_skipped_or_kept(name, tmp_path):
    """Under the names by which vLLM loads it; the files that stack a layer's experts have this layer's one by one."""
    write(name, tmp_path / "given")
    raw = json.loads((tmp_path / "given" / "config.json").read_text())
    field = "num_nextn_predict_layers" if name == "qwen3-next" else "mtp_num_hidden_layers"
    (tmp_path / "given" / "config.json").write_text(json.dumps(raw | {field: 1}))
    model = ling3.init(read_config(tmp_path / "given"), key=jax.random.key(0), mtp=True)
    ling3.save(model, tmp_path / "own")
    file = tmp_path / "own" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    further = {own for own in tensors if own.startswith("mtp.")}
    assert further >= AROUND | {f"mtp.layers.0.self_attn.{own}.weight" for own in ("q_proj", "q_norm", "o_proj")}
    assert ("mtp.layers.0.mlp.experts.3.down_proj.weight" in further) == (name != "qwen3.5")
    if name == "qwen3.5-moe":
        ours = {own: array for own, array in tensors.items() if own in further}
        safetensors.numpy.save_file(stacked({own: tensors[own] for own in tensors.keys() - further}) | ours, file)
    again = ling3.load(tmp_path / "own", mtp=True)
    assert again.config == model.config and equal(again, model)
    assert ling3.load(tmp_path / "own").mtp == ()
    ling3.save(ling3.load(tmp_path / "own"), tmp_path / "without")
    assert not any(own.startswith("mtp.") for own in safetensors.numpy.load_file(tmp_path / "without" / file.name))
    assert getattr(read_config(tmp_path / "without"), field) == 0


TEXT = QWEN35_9B["text_config"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (QWEN35_9B | {"tie_word_embeddings": True}, r"text_config\.tie_word_embeddings: found False; expected True"),
        (QWEN35_9B | {"text_config": 3}, r"text_config: 1 problem\s+found 3; expected a JSON object"),
        (QWEN35_9B | {"text_config": TEXT | {"output_gate_type": "sigmoid"}}, "output_gate_type: found 'sigmoid'"),
        (QWEN35_9B | {"text_config": TEXT | {"mlp_only_layers": [1]}}, r"mlp_only_layers: found \[1\]; expected \[\]"),
        (QWEN35_9B | {"text_config": TEXT | {"mamba_ssm_dtype": "bfloat16"}}, "mamba_ssm_dtype: found 'bfloat16'"),
        (QWEN35_9B | {"text_config": TEXT | {"layer_types": ["full_attention"]}}, "layer_types: found 1 entries"),
        (QWEN35_9B | {"text_config": TEXT | {"num_experts": 4}}, "num_experts: found 4; unknown field"),
        (QWEN3_NEXT_80B_A3B | {"full_attention_interval": 0}, "full_attention_interval: found 0; expected an integer"),
        (QWEN3_NEXT_80B_A3B | {"linear_num_key_heads": 5}, "linear_num_key_heads: found 5; expected a divisor of"),
        (QWEN3_NEXT_80B_A3B | {"mlp_only_layers": [48]}, r"mlp_only_layers: found \[48\]; expected layers from 0"),
        (QWEN3_NEXT_80B_A3B | {"num_experts_per_tok": 513}, "num_experts_per_tok: found 513; expected at most"),
        (QWEN3_NEXT_80B_A3B | {"partial_rotary_factor": 0.02}, "partial_rotary_factor: found 0.02; expected a share"),
        (QWEN3_NEXT_80B_A3B | {"linear_conv_bias": True}, "linear_conv_bias: found True; unknown field"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(tmp_path, raw, message):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ling3.ConfigError, match=message):
        read_config(tmp_path)


@pytest.mark.thorough
def test_it_is_inspected_traced_and_changed():
    model = open_model("qwen3-next")
    described = report(model.config, jnp.float32)
    kinds = [(layer["attention"], layer["mlp"]) for layer in described.to_dict()["layers"]]
    assert kinds == [("gateddeltanet", "dense"), ("gqa", "moe")]
    assert described.memory.cache_per_token == 4 * 2 * 2 * 8
    assert described.memory.state_per_sequence == {"recurrent": 4 * 4 * 6 * 8, "conv": 4 * 3 * (2 * 2 * 6 + 4 * 8)}
    seen = ling3.trace(model, ROW)
    assert seen.kda[0].decay.shape == (1, 24, 4, 1) and jnp.all(seen.kda[0].decay < 0)
    assert seen.kda[0].gate.shape == (1, 24, 4, 8)
    assert sorted(seen.layers[1].attention) == ["entries", "gate", "heads", "q"] and sorted(seen.moe) == [1]
    np.testing.assert_allclose(seen.logits, model(ROW), atol=2e-5)
    for site, value in (("decay", 0.0), ("beta", 0.0), ("gate", 1.0)):
        one = ling3.Intervention.set(0, site, value, head=3, from_position=9)
        logits = model(ROW, interventions=[one])
        assert jnp.array_equal(logits[:, :9], model(ROW)[:, :9]) and not jnp.allclose(logits, model(ROW), atol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-next", *exhaustively(["qwen3.5", "deepseek-v3"])])
def test_adapters_reach_every_matrix_under_transformers_names(name):
    """Each of another sum's order: 2e-4 as in parity."""
    model = open_model(name)
    adapter = random_adapter(model)
    beside, merged = ling3.with_adapter(model, adapter)(ROW), ling3.merge_adapter(model, adapter)(ROW)
    assert np.abs(np.asarray(beside - model(ROW))).max() > 0.1
    np.testing.assert_allclose(beside, merged, atol=2e-4)
    modules = {own.module for own in adaptable(model)}
    expected = {
        "qwen3-next": {
            *("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"),
            *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        },
        "qwen3.5": {
            *("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b", "linear_attn.in_proj_a"),
            *("linear_attn.out_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        },
        "deepseek-v3": {
            *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),
            *("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        },
    }[name]
    assert {own for own in modules if ".layers.0." in own} == {f"model.layers.0.{own}" for own in expected}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-next", *exhaustively(["qwen3.5-moe", "deepseek-v3"])])
def test_a_mesh_has_one_device_s_logits_and_tokens(name):
    """Gated DeltaNet is replicated, all else sharded. float32 both ways: 2e-5 as between forward pass and steps."""
    model = open_model(name)
    sharded = place(model, jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[:2]))
    np.testing.assert_allclose(sharded(ROW), model(ROW), atol=2e-5)
    prompts = [TOKENS, TOKENS[:5]]
    answers = ling3.generate(model, prompts, max_tokens=6, ignore_eos=True)
    assert ling3.generate(sharded, prompts, max_tokens=6, ignore_eos=True) == answers


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "method"), [("qwen3-next", FP8), *exhaustively([("qwen3.5-moe", compressed())])])
def test_quantized_files_are_kept_and_saved(name, method, tmp_path):
    """With what published files leave in floats: the small projections, routers and gates."""
    write(name, tmp_path)
    ignore = [r"re:.*in_proj_.*", r"re:.*shared_expert_gate", "lm_head"] if "ignore" in method else None
    left = {"modules_to_not_convert": ["lm_head", "in_proj_ba", "shared_expert_gate"]} if ignore is None else None
    raw = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": 32, "moe_intermediate_size": 32}
    raw |= {"shared_expert_intermediate_size": 32, "intermediate_size": 32, "linear_value_head_dim": 8}
    raw["quantization_config"] = method | (left or {"ignore": ignore})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = ling3.init(read_config(tmp_path), key=jax.random.key(0), dtype=jnp.bfloat16)
    delta, moe = model.model.layers[0].attention, model.model.layers[1].mlp
    assert isinstance(delta.out_proj, QuantizedMatrix) and isinstance(moe.experts.down_proj, QuantizedMatrix)
    assert not isinstance(moe.shared_expert_gate, QuantizedMatrix)
    ling3.save(model, tmp_path / "own")
    assert equal(ling3.load(tmp_path / "own"), model) and jnp.all(jnp.isfinite(model(ROW)))


@native_kernels.needs_compiler
@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["qwen3-next", *exhaustively(["qwen3.5"])])
def test_on_kernels_answers_keep_their_bits_with_guesses_too(name, monkeypatch):
    """Gated DeltaNet runs on KDA's kernels; guesses are checked whether that pays or not."""
    monkeypatch.setattr(Speculator, "depth", lambda own, _, chances: own.sizes.each if chances else 0)
    monkeypatch.setattr(Speculator, "measured", True)
    model, prompts = open_model(name), [TOKENS[:7] * 2, TOKENS]
    params = ling3.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)

    def answers(**settings):
        sizes = {"num_pages": 16, "page_size": 8, "chunked_prefill_size": 8, "token_paddings": (8,)}
        engine = ling3.Engine(model, max_running_requests=2, max_model_len=48, **sizes, **settings)
        outputs = [engine.generate([prompt], params)[0] for prompt in prompts]
        return [(output.token_ids, output.logprobs) for output in outputs + engine.generate(prompts, params)], outputs

    with native_kernels.installed():
        plain, _ = answers()
        known = [prompt + list(tokens) for prompt, (tokens, _) in zip(prompts, plain, strict=False)]

        def guess(tokens):
            """A right token and one that may be wrong."""
            own = next(own for own in known if own[: len(tokens)] == list(tokens))
            return [own[len(tokens)], 5] if len(tokens) < len(own) else []

        guessed, outputs = answers(speculation=guess, draft_tokens=2)
        assert plain[:2] == plain[2:] and guessed == plain
        assert sum(output.outputs[0].drafted_tokens for output in outputs)
        config = family_of(model.config).with_mtp_layers(model.config, 1)
        further = ling3.init(config, key=jax.random.key(0), mtp=True).mtp  # random: its guesses are mostly wrong
        model = dataclasses.replace(model, config=config, mtp=further)
        guessed, outputs = answers(speculation="mtp", draft_tokens=2)
        assert guessed == plain and sum(output.outputs[0].drafted_tokens for output in outputs)
