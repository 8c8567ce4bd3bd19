"""An intervention is what its formula says: the model with other weights, or the other run that it patches in."""

import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_transformers
from exhaustive_cases import exhaustively
from tiny import FLASH, open_model, widened

import ling3
from ling3 import ablate
from ling3.cache import Span
from ling3.execution import Execution
from ling3.intervention import sites
from ling3.ops.kda_chunks import SUB_CHUNK
from ling3.runtime.recorder import Recorder

CHANGE = ling3.Intervention
SEQ = 37
TOKENS, THEIRS = jax.random.randint(jax.random.key(2), (2, 1, SEQ), 0, FLASH.vocab_size)
# Every model here computes in float64. What is left is the rounding of its logits to float32, 2.4e-7 at size 4.
ROUNDING = 1e-6
VECTOR = np.asarray(jax.random.normal(jax.random.key(3), (FLASH.hidden_size,)))
HEADS, EXPERTS, VALUE = FLASH.num_attention_heads, FLASH.num_experts, 8
KDA, MLA = (0, 2), (1, 3)


@pytest.fixture(scope="module", autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def model():
    return open_model(FLASH, dtype=jnp.float64)


@pytest.fixture(scope="module")
def plain(model):
    return np.asarray(model(TOKENS))


def seen(model, tokens):
    """What a recorder sees of a whole pass, by path."""

    @eqx.filter_jit
    def run(model, tokens):
        recorder = Recorder()
        model.watched(tokens, Span.whole(*tokens.shape, Execution.default(), recorder))
        return recorder.values

    return run(model, tokens)


def everywhere(site, value, layers=(*KDA, *MLA)):
    return [CHANGE.set(i, site, value) for i in layers]


def without_head(model, layer, name):
    """No weights from a head to the residual."""
    weight = lambda m: getattr(m.model.layers[layer].attention, name).weight  # noqa: E731
    return eqx.tree_at(weight, model, weight(model).at[:, VALUE : 2 * VALUE].set(0.0))


def without_expert(model, expert):
    """An expert that answers 0 in all layers."""
    for i in range(1, FLASH.num_hidden_layers):
        weight = operator.attrgetter("mlp.experts.down_proj.weight")
        changed = weight(model.model.layers[i]).at[expert].set(0.0)
        model = eqx.tree_at(lambda m, i=i, weight=weight: weight(m.model.layers[i]), model, changed)
    return model


def pinned(model, layer):
    """The layers after one, over a constant in place of words."""
    words = model.model.word_embeddings.weight
    words = jnp.broadcast_to(jnp.asarray(VECTOR, words.dtype), words.shape)
    return eqx.tree_at(
        lambda m: (m.model.word_embeddings.weight, m.model.layers), model, (words, model.model.layers[layer + 1 :])
    )


def shifted(model):
    """Words with a vector added to each."""
    weight = lambda m: m.model.word_embeddings.weight  # noqa: E731
    return eqx.tree_at(weight, model, weight(model) + jnp.asarray(VECTOR, jnp.float64)[None])


OTHER_WEIGHTS = {
    "gates": (everywhere("gate", 1.0), ablate.no_output_gate),
    "mla gates": (everywhere("gate", 1.0, MLA), lambda m: ablate.no_output_gate(m, "mla")),
    "decay": (everywhere("decay", 0.0, KDA), ablate.no_decay),
    "beta": (everywhere("beta", 0.5, KDA), lambda m: ablate.fixed_beta(m, 0.5)),
    "attended": (everywhere("attended", 0.0, [1]), lambda m: ablate.no_attention(m, [1])),
    "mla head": ([CHANGE.set(1, "heads", 0.0, head=1)], lambda m: without_head(m, 1, "dense")),
    "kda head": ([CHANGE.set(2, "heads", np.zeros(VALUE), head=1)], lambda m: without_head(m, 2, "o_proj")),
    "expert": ([CHANGE.expert(i, 5, 0.0) for i in (1, 2, 3)], lambda m: without_expert(m, 5)),
    "residual": (
        [CHANGE.set(1, "residual", VECTOR), CHANGE.add(1, -VECTOR), CHANGE.add(1, VECTOR)],
        lambda m: pinned(m, 1),
    ),
    "embeddings": ([CHANGE.add(None, VECTOR, site="embeddings")], shifted),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", exhaustively(OTHER_WEIGHTS, but=["expert", "residual"]))
def test_it_is_the_model_with_other_weights(model, plain, name):
    changes, other = OTHER_WEIGHTS[name]
    found = model(TOKENS, interventions=changes)
    np.testing.assert_allclose(found, other(model)(TOKENS), atol=ROUNDING)
    assert np.abs(found - plain).max() > 0.1


@pytest.mark.thorough
def test_adding_nothing_changes_no_bit(model, plain):
    changes = [CHANGE.add(i, np.zeros(FLASH.hidden_size)) for i in range(4)]
    assert np.array_equal(model(TOKENS, interventions=changes), plain)
    assert np.array_equal(model(TOKENS, interventions=[]), plain)


@pytest.mark.thorough
@pytest.mark.parametrize("site", ["residual", *exhaustively(["attended", "beta", "heads"])])
def test_no_token_knows_of_a_later_position(model, plain, site):
    """Bit for bit up to the chunk in which KDA's tokens share a reference point for their decays, to rounding in it."""
    start = SUB_CHUNK + 5
    change = CHANGE.add(0, -0.5, site=site, from_position=start)
    found = np.asarray(model(TOKENS, interventions=[change]))
    assert np.array_equal(found[:, :SUB_CHUNK], plain[:, :SUB_CHUNK])
    np.testing.assert_allclose(found[:, :start], plain[:, :start], atol=ROUNDING)
    assert np.abs(found[:, start] - plain[:, start]).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("layer", [*exhaustively(range(3)), 3])
def test_all_residuals_of_another_run_give_its_logits(model, layer):
    theirs = seen(model, THEIRS)[f"layers.{layer}.residual"][0]
    found = model(TOKENS, interventions=[CHANGE.patch(layer, theirs)])
    np.testing.assert_allclose(found, model(THEIRS), atol=ROUNDING)


@pytest.mark.slow
def test_a_patch_holds_at_its_positions_alone(model):
    """In any order of theirs, whole and for one head."""
    theirs, ours = (seen(model, tokens)["layers.0.attention.heads"][0] for tokens in (THEIRS, TOKENS))
    places = [30, 4, 11]
    expected = ours.at[jnp.asarray(places), 1].set(theirs[jnp.asarray(places), 1])
    change = CHANGE.patch(0, np.asarray(theirs)[places, 1], places, site="heads", head=1)
    every = CHANGE.patch(0, expected, site="heads")
    np.testing.assert_allclose(
        model(TOKENS, interventions=[change]), model(TOKENS, interventions=[every]), atol=ROUNDING
    )


@pytest.mark.slow
def test_an_expert_weighs_what_it_is_told(model):
    plain = ling3.trace(model, TOKENS).moe[1]
    expert = int(plain.chosen[0, 25, 0])
    moved = ling3.trace(model, TOKENS, interventions=[CHANGE.expert(1, expert, 0.75, from_position=20)]).moe[1]
    chose, top = np.asarray(plain.chosen[0] == expert), plain.chosen.shape[-1]
    assert 0 < chose[20:].any(-1).sum() < SEQ - 20, "some tokens choose the expert by themselves, and some do not"
    for place in range(SEQ):
        if place < 20:
            expected = plain.chosen[0, place], plain.weights[0, place]
        else:
            at = int(np.argmax(chose[place])) if chose[place].any() else top - 1
            expected = plain.chosen[0, place].at[at].set(expert), plain.weights[0, place].at[at].set(0.75)
        assert np.array_equal(moved.chosen[0, place], expected[0])
        np.testing.assert_allclose(moved.weights[0, place], expected[1], atol=ROUNDING)


@pytest.mark.slow
def test_a_trace_shows_what_was_set(model):
    changes = [*everywhere("gate", 0.25), *everywhere("decay", -1.5, KDA), CHANGE.set(0, "beta", 0.125, head=1)]
    found = ling3.trace(model, TOKENS, interventions=changes)
    assert all(np.all(layer.attention.gate == 0.25) for layer in found.layers)
    assert all(np.all(layer.decay == -1.5) for layer in found.kda.values())
    beta = found.kda[0].beta
    assert np.all(beta[..., 1] == 0.125) and np.all(beta[..., 0] != 0.125)
    np.testing.assert_allclose(found.logits, model(TOKENS, interventions=changes), atol=ROUNDING)


CHANGES = [
    CHANGE.add(1, VECTOR, from_position=9),
    CHANGE.set(0, "gate", 0.3, head=0),
    CHANGE.set(2, "decay", -0.5, positions=[3, 20]),
    CHANGE.set(0, "beta", 0.9),
    CHANGE.expert(3, 2, 1.5),
]


@pytest.mark.slow
def test_step_by_step_it_is_the_whole(model):
    """Prompts of unequal length in chunks, then single tokens: positions are absolute, and padding stays padding."""
    lengths = (SEQ - 6, 11)
    both = jnp.concatenate([TOKENS, THEIRS])
    whole = model(both, interventions=CHANGES)
    cache, done, step = model.init_cache(2, SEQ), [0, 0], 16
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        count = [min(step, n - d) for d, n in zip(done, lengths, strict=True)]
        chunk = jnp.stack([jnp.pad(row[d : d + n], (0, step - n)) for row, d, n in zip(both, done, count, strict=True)])
        logits, cache = model.step(chunk, cache, jnp.asarray(count, jnp.int32), interventions=CHANGES)
        for row, (d, n) in enumerate(zip(done, count, strict=True)):
            np.testing.assert_allclose(logits[row, :n], whole[row, d : d + n], atol=ROUNDING)
        done = [d + n for d, n in zip(done, count, strict=True)]
    for i in range(6):
        token = jnp.stack([row[d + i] for row, d in zip(both, done, strict=True)])[:, None]
        logits, cache = model.step(token, cache, interventions=CHANGES)
        for row, d in enumerate(done):
            np.testing.assert_allclose(logits[row, 0], whole[row, d + i], atol=ROUNDING)


@pytest.mark.thorough
def test_other_numbers_run_in_the_same_program(model):
    traces = []

    @jax.jit
    def run(changes):
        traces.append(changes)
        return model(TOKENS, interventions=changes)

    def settled(*changes):
        return [each.settled(sites(model)) for each in changes]

    first = run(settled(CHANGE.set(0, "gate", 0.3, head=0), CHANGE.patch(1, np.zeros((3, 32)), [4, 6, 8])))
    other = run(settled(CHANGE.set(0, "gate", np.ones(VALUE), head=1), CHANGE.patch(1, np.ones((4, 32)), [1, 2, 3, 4])))
    assert len(traces) == 1 and np.abs(first - other).max() > 0.1


@pytest.mark.slow
def test_a_vector_can_be_trained(model):
    """The gradient by the vector is the slope along it."""

    def total(vector):
        logits = model(TOKENS, interventions=[CHANGE.add(2, vector, from_position=8)])
        return jnp.sum(jax.nn.log_softmax(logits[0, -1])[:7])

    gradient, step = jax.grad(total)(jnp.asarray(VECTOR)), 1e-2
    along = gradient / jnp.linalg.norm(gradient)
    slope = (total(VECTOR + step * along) - total(VECTOR - step * along)) / (2 * step)
    # A central difference of float32 losses of tens: its own error is 1e-3 of the slope.
    np.testing.assert_allclose(slope, jnp.linalg.norm(gradient), rtol=2e-2)


@pytest.mark.slow
def test_generation_goes_on_under_it(model):
    """Greedy tokens are those of the logits under the interventions, prompt by prompt and in a batch."""
    prompts = [TOKENS[0].tolist(), THEIRS[0, :9].tolist()]
    batch = ling3.generate(model, prompts, max_tokens=5, ignore_eos=True, interventions=CHANGES)
    for prompt, new in zip(prompts, batch, strict=True):
        logits = model(jnp.asarray([[*prompt, *new]]), interventions=CHANGES)[0, len(prompt) - 1 : -1]
        assert np.argmax(logits, axis=-1).tolist() == new
    assert batch != ling3.generate(model, prompts, max_tokens=5, ignore_eos=True)


def test_other_families_have_the_sites_that_they_have():
    model, tokens = widened(tiny_transformers.open_model("llama")), TOKENS % tiny_transformers.SIZES["vocab_size"]
    found = model(tokens, interventions=[CHANGE.set(0, "heads", 0.0)])
    np.testing.assert_allclose(found, ablate.no_attention(model, [0])(tokens), atol=ROUNDING)
    with pytest.raises(ValueError, match="layer 0 has no gate; none has"):
        model(tokens, interventions=[CHANGE.set(0, "gate", 1.0)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CHANGE.set(0, "gates", 1.0), "site is 'gates', expected one of embeddings, attended"),
        (lambda: CHANGE.set(0, "router", 1.0), "site is 'router', expected another: Intervention.expert"),
        (lambda: CHANGE.add(0, VECTOR, head=1), "head is 1, expected None: residual has no heads"),
        (lambda: CHANGE.add(-1, VECTOR), "layer is -1, expected a whole number >= 0"),
        (lambda: CHANGE.add(0, VECTOR, from_position=-1), "from_position is -1"),
        (lambda: CHANGE.add(0, VECTOR, from_position=3, positions=[4]), "from_position and positions are both given"),
        (lambda: CHANGE.add(0, VECTOR, positions=[]), r"positions are \[\], expected whole numbers >= 0"),
        (lambda: CHANGE.add(0, VECTOR, positions=[4, 4]), r"positions are \[4, 4\], expected each once"),
        (lambda: CHANGE.add(0, "up"), "the value is 'up', expected numbers"),
        (lambda: CHANGE.add(0, [0.0, np.nan]), "the value has numbers that are not finite"),
        (lambda: CHANGE.set(0, "decay", 0.5), "a decay is above 0, expected nats of at most 0"),
        (lambda: CHANGE.expert(1, -1, 0.0), "expert is -1, expected a whole number >= 0"),
        (lambda: CHANGE.expert(1, 0, float("inf")), "weight is inf, expected a finite number"),
        (lambda: CHANGE.patch(0, np.zeros((3, 32)), [1, 2]), r"values have the shape \(3, 32\), expected a value for"),
    ],
)
def test_what_holds_of_no_model_is_refused_at_once(make, message):
    with pytest.raises(ValueError, match=f"^intervention: {message}"):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (CHANGE.add(4, VECTOR), r"layer is 4, expected one in \[0, 4\)"),
        (CHANGE.set(1, "decay", 0.0), "layer 1 has no decay; those that have: 0, 2"),
        (CHANGE.expert(0, 1, 0.0), "layer 0 has no router; those that have: 1, 2, 3"),
        (CHANGE.expert(1, EXPERTS, 0.0), rf"expert is {EXPERTS}, expected one in \[0, {EXPERTS}\)"),
        (CHANGE.set(0, "heads", 0.0, head=HEADS), rf"head is {HEADS}, expected one in \[0, {HEADS}\)"),
        (CHANGE.add(0, VECTOR[1:]), r"the value at residual of layer 0 has the shape \(31,\), expected .* \(32,\)"),
        (CHANGE.patch(1, np.zeros((3, 2, 2)), site="gate"), r"the value at gate of layer 1 has the shape \(2, 2\)"),
    ],
)
def test_what_does_not_hold_of_the_model_is_refused_before_any_work(model, change, message):
    changes = [change]
    for ask in (
        lambda: model(TOKENS, interventions=changes),
        lambda: ling3.trace(model, TOKENS, interventions=changes),
        lambda: ling3.generate(model, [[3]], interventions=changes),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


def test_numpys_whole_numbers_are_whole_numbers():
    two, three = np.int64(2), np.int32(3)
    for ours, theirs in (
        (CHANGE.add(2, VECTOR, positions=[2, 3]), CHANGE.add(two, VECTOR, positions=[two, three])),
        (CHANGE.add(2, VECTOR, from_position=3), CHANGE.add(two, VECTOR, from_position=three)),
        (CHANGE.set(2, "heads", 0.0, head=3), CHANGE.set(two, "heads", 0.0, head=three)),
        (CHANGE.expert(2, 3, 0.0), CHANGE.expert(two, three, 0.0)),
        (CHANGE.patch(2, [VECTOR], [3]), CHANGE.patch(two, [VECTOR], [three])),
    ):
        assert eqx.tree_equal(ours, theirs)


def test_every_site_of_every_layer_is_shown(model):
    found = sites(model)
    assert found["layers.0.attention.gate"] == (HEADS, VALUE) and found["layers.1.attention.gate"] == (HEADS,)
    assert found["layers.0.attention.decay"] == (HEADS, VALUE) and found["layers.0.attention.beta"] == (HEADS,)
    assert found["layers.3.mlp.router"] == (EXPERTS,) and "layers.0.mlp.router" not in found
    assert "layers.4.residual" not in found
