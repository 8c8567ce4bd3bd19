"""Nano's recipe: the model's size and pattern, what can be left out, and a run of two steps."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively

import ling3
from experiments import nano_probes
from experiments.nano_probes import NEEDED
from ling3.cache import Span
from ling3.families import init
from ling3.layers.kda import KDA
from ling3.train.__main__ import main
from ling3.train.nano.mixture import DRILLS, TEXTS, BatchShape, corpus
from ling3.train.nano.recipe import (
    BEGINNING,
    LASTING,
    LOCAL,
    LONG,
    NANO,
    SHORT,
    WITHOUT,
    Recipe,
    quieted,
)
from ling3.train.nano.skills import SKILLS
from ling3.train.tokenizer import train_tokenizer

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "n_group": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus(0, size=400), NANO.vocab_size)


def shapes(config):
    return eqx.filter_eval_shape(init, config, key=jax.random.key(0), dtype=jnp.bfloat16)


@pytest.mark.slow
def test_it_has_ling_3s_pattern_and_fits_eight_mebibytes(tokenizer):
    config = NANO.config(tokenizer)
    kinds = [(config.attention_kind(layer), config.mlp_kind(layer)) for layer in range(config.num_hidden_layers)]
    assert kinds == [("kda", "moe"), ("kda", "moe"), ("kda", "moe"), ("mla", "moe")]
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes(config)))
    assert 2 * 2**20 < nbytes < 8 * 2**20 - 200_000  # room for the file's header and a tokenizer of all words
    longest = max(rows.length for rows in NANO.cycle)
    assert longest <= config.max_position_embeddings


@pytest.mark.parametrize("without", WITHOUT)
def test_what_is_left_out_is_not_there(without, tokenizer):
    config = Recipe(without=without).config(tokenizer)
    whole, model = shapes(NANO.config(tokenizer)), shapes(config)
    same = jax.tree.structure(model) == jax.tree.structure(whole)
    assert same == (without == "nothing")
    if without == "routed experts":
        size = NANO.config(tokenizer).moe_shared_expert_intermediate_size
        assert [layer.mlp.gate_proj.shape[0] for layer in model.model.layers] == [size] * 4


def test_an_unknown_mechanism_is_an_error():
    with pytest.raises(ValueError, match="without is 'wings', expected one of nothing, KDA"):
        Recipe(without="wings")


def test_every_skill_has_a_share_and_room():
    shares = SHORT.shares | LONG.shares
    assert set(shares) == {*SKILLS, DRILLS}
    for rows in (BEGINNING, SHORT, LONG, *(rows for probe in nano_probes.PROBES.values() for rows in probe.cycle)):
        assert sum(rows.shares.values()) == pytest.approx(1.0)
        assert all(TEXTS[name].longest < rows.length for name in rows.shares if name != DRILLS)


def test_a_run_is_two_trainings_the_first_on_answers_that_stand_in_the_text():
    first, whole = Recipe(steps=50, beginning=20, warmup=30).trainings()
    assert first[1] == (BEGINNING,) and whole[1] == NANO.cycle
    assert [first[0].steps, whole[0].steps] == [20, 50]
    assert [first[0].warmup, whole[0].warmup] == [19, 30]
    assert [first[0].learning_rate, whole[0].learning_rate] == [NANO.beginning_rate, NANO.learning_rate]
    assert len(Recipe(beginning=0).trainings()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "without", ["nothing", *exhaustively(["KDA", "decay", "bound", "bound -0.1", "beta", "shared expert"])]
)
def test_a_new_model_is_quiet(without, tokenizer):
    """No MLP says anything, and what a token leaves behind in a state is hardly heard six tokens later."""
    config = Recipe(without=without, changes=TINY).config(tokenizer)
    model = init(config, key=jax.random.key(1))
    quiet = quieted(model)
    assert jax.tree.structure(quiet) == jax.tree.structure(model)
    changed = 0
    for before, after in zip(model.model.layers, quiet.model.layers, strict=True):
        x = jax.random.normal(jax.random.key(2), (1, 12, config.hidden_size))
        span = Span.whole(1, 12)
        assert float(jnp.abs(before.mlp(x, span)).max()) > 0 and float(jnp.abs(after.mlp(x, span)).max()) == 0
        if without in ("KDA", "decay") or not isinstance(after.attention, KDA):
            assert jax.tree.all(jax.tree.map(jnp.array_equal, before.attention, after.attention))
            continue
        mixers = (before.attention, after.attention)
        told = [mixer(x, None, span)[0] - mixer(x.at[:, 0].add(1.0), None, span)[0] for mixer in mixers]
        loud, silent = (float(jnp.abs(change[:, 6:]).max()) for change in told)
        assert silent < loud * (0.9 if without == "bound -0.1" else 0.05)  # such a bound lets no state forget
        changed += 1
    assert changed == (0 if without in ("KDA", "decay") else 3)


@pytest.mark.parametrize("without", ["nothing", *exhaustively(["bound -20", "bound -0.1", "bound"])])
def test_states_forget_at_first_by_the_same_rates_whatever_the_bound(without, tokenizer):
    model = quieted(init(Recipe(without=without).config(tokenizer), key=jax.random.key(1)))
    kda = model.model.layers[0].attention
    assert isinstance(kda, KDA)
    rates = -kda.gates(jnp.zeros((1, 1, 128)), Span(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)))[0].ravel()
    wanted = np.concatenate([np.geomspace(*LASTING, 64), np.linspace(*LOCAL, 64)])
    np.testing.assert_allclose(rates, np.minimum(wanted, 0.09) if without == "bound -0.1" else wanted, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_steps_write_a_checkpoint_a_record_and_a_curve(tmp_path, capsys):
    cycle = (BatchShape(2, 128, {"recall": 0.5, "facts": 0.5}),)
    out = tmp_path / "made"
    main(out, Recipe(steps=2, warmup=1, beginning=1, predictor=2, cycle=cycle, changes=TINY), questions=8, every=1)
    record = json.loads((out / "training.json").read_text())
    assert [point["step"] for point in record["curve"]] == [1, 2, 3]
    assert [point["tokens"] for point in record["curve"]] == [3072, 3328, 3584]
    assert json.loads(capsys.readouterr().out) == record["right"]
    assert set(record["right"]) == {"recall", "facts"} == set(record["curve"][0]["right"])
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    model = ling3.load(out)
    assert model.lm_head.weight.dtype == jnp.bfloat16
    assert model.model.norm.weight.dtype == jnp.float32
    assert record["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(model))
    assert [point["step"] for point in record["predictor"]] == [2]
    assert len(ling3.load(out, mtp=True).mtp) == 1
    assert ling3.load_tokenizer(out).eos_token_ids == (0, 1)


def test_a_stored_probe_is_not_repeated(tmp_path, monkeypatch):
    made = []

    def fake(out, recipe, questions, every):
        made.append(recipe)
        own = {
            name: getattr(recipe, name)
            for name in ("seed", "steps", "learning_rate", "weight_decay", "quiet", "without")
        }
        return {"recipe": own, "curve": [], "right": {}}

    monkeypatch.setattr(nano_probes, "make", fake)
    monkeypatch.setattr(nano_probes, "decays", lambda made, names: {})
    nano_probes.main("short", ("nothing", "RoPE"), seeds=(0, 1), out=tmp_path)
    nano_probes.main("short", ("RoPE", "decay"), seeds=(1,), out=tmp_path)
    assert [(recipe.without, recipe.seed) for recipe in made] == [
        ("nothing", 0),
        ("RoPE", 0),
        ("nothing", 1),
        ("RoPE", 1),
        ("decay", 1),
    ]
    nano_probes.main("recall", ("decay",), seeds=(1,), out=tmp_path)
    assert {recipe.beginning for recipe in made} == {0}  # what a probe trains on is what it names
    nano_probes.main("whole", ("nothing",), seeds=(1,), out=tmp_path / "whole")
    assert made.pop().beginning == NANO.beginning
    nano_probes.main("needed", ("RoPE",), seeds=(1,), out=tmp_path / "needed")
    assert [made.pop().learning_rate for _ in NEEDED] == [own.learning_rate for own in NEEDED.values()][::-1]
    stored = [nano_probes.finished(tmp_path / "needed" / "nano_probes.jsonl", name) for name in NEEDED]
    assert list(map(len, stored)) == [1, 1, 1] and not nano_probes.finished(tmp_path / "nano_probes.jsonl", "in_states")
    assert len(made) == 6 and len((tmp_path / "nano_probes.jsonl").read_text().splitlines()) == 6


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_decay_of_every_token_is_in_the_histogram():
    model, tokenizer = ling3.load("nano"), ling3.load_tokenizer("nano")
    counts = nano_probes.decays("nano", ["resets", "problems"], texts=2)
    exams = [text for name in ("resets", "problems") for text in SKILLS[name].exam(2)]
    tokens = sum(len(tokenizer.encode(text.prompt + text.answer)) for text in exams)
    channels = model.config.num_attention_heads * model.config.head_dim
    kda = [str(i) for i, layer in enumerate(model.model.layers) if isinstance(layer.attention, KDA)]
    assert {layer: sum(own) for layer, own in counts.items()} == dict.fromkeys(kda, tokens * channels)
    first = nano_probes.EDGES.index(5.0)
    assert all(not any(own[first:]) for own in counts.values())  # nano's bound is -5
