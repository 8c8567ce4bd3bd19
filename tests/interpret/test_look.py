"""The page's numbers are the trace's, its texts are data, and what cannot be shown is refused before any work."""

import base64
import html
import json
import re
from html.parser import HTMLParser

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile_texts import HOSTILE
from tiny import DEEP, FLASH, open_model

import ling3
from ling3.interpret.look import LONGEST, page, token_text
from ling3.runtime.page_policy import content_policy

pytestmark = pytest.mark.thorough

IDS = np.random.default_rng(1).integers(3, DEEP.vocab_size, size=17).tolist()
DIGITS = {"rtol": 5.1e-4, "atol": 1e-30}  # of four digits
HALF = {"rtol": 2**-11, "atol": 2**-25}  # of float16, and of its subnormal numbers
TEXTS = " \ud800 ".join(HOSTILE)


class Elements(HTMLParser):
    """The tags of a page's elements, and its title."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.title = [], ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "title":
            self.title += data


def embedded(source):
    """The data in a page."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    return json.loads(text)


def unpacked(packed):
    return np.frombuffer(base64.b64decode(packed["f16"]), "<f2").astype(np.float32).reshape(packed["shape"])


@pytest.fixture(scope="module")
def seen():
    return ling3.look(open_model(FLASH), None, IDS, title="flash")


@pytest.fixture(scope="module")
def shown(seen):
    return embedded(seen.html)


@pytest.fixture(scope="module")
def traced():
    return ling3.trace(open_model(FLASH), jnp.asarray([IDS]))


@pytest.fixture(scope="module")
def nano():
    return ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")


@pytest.mark.slow
def test_kdas_numbers_are_the_traces(shown, traced):
    for i, inside in traced.kda.items():
        own = shown["layers"][i]["attention"]
        rates = np.sort(-inside.decay[0], axis=-1)  # of 8 channels: the places 1.75, 3.5 and 5.25 are between two
        np.testing.assert_allclose(np.asarray(own["rate"])[..., [0, 1, 3, 4]], rates[..., [0, 2, 5, 7]], **DIGITS)
        medians, (below, above) = np.asarray(own["rate"])[..., 2], (rates[..., 3], rates[..., 4])
        assert np.all(np.isclose(medians, below, **DIGITS) | np.isclose(medians, above, **DIGITS))
        np.testing.assert_allclose(own["beta"], inside.beta[0], **DIGITS)
        np.testing.assert_allclose(own["gate"], inside.gate[0].mean(-1), **DIGITS)
        np.testing.assert_allclose(own["write"], inside.write_norm[0], **DIGITS)
        np.testing.assert_allclose(own["state"], inside.state_norm[0], **DIGITS)


@pytest.mark.slow
def test_maps_and_gates_are_the_traces(shown, traced):
    seq = len(IDS)
    for i, layer in enumerate(traced.layers):
        own, heads = shown["layers"][i]["attention"], layer.attention.attention_map.shape[1]
        whole = np.zeros((heads, seq, seq), np.float32)
        whole[:, *np.tril_indices(seq)] = unpacked(own["map"])
        np.testing.assert_allclose(whole, layer.attention.attention_map[0], **HALF)
    for i, inside in traced.mla.items():
        np.testing.assert_allclose(shown["layers"][i]["attention"]["gate"], inside.gate[0], **DIGITS)


@pytest.mark.slow
def test_experts_and_norms_are_the_traces(shown, traced):
    np.testing.assert_allclose(shown["embedding"], traced.embedding_norm[0], **DIGITS)
    for own, layer in zip(shown["layers"], traced.layers, strict=True):
        for name in ("attention", "mlp", "residual"):
            np.testing.assert_allclose(own["norms"][name], getattr(layer, f"{name}_norm")[0], **DIGITS)
        assert (own["moe"] is None) == (layer.moe is None)
        if layer.moe is not None:
            np.testing.assert_allclose(unpacked(own["moe"]["scores"]), layer.moe.scores[0], **HALF)
            assert np.array_equal(own["moe"]["chosen"], layer.moe.chosen[0])
            np.testing.assert_allclose(own["moe"]["weights"], layer.moe.weights[0], **DIGITS)


def test_the_lens_has_the_likeliest_tokens_and_the_texts_own(shown, traced):
    for own, layer in zip(shown["layers"], traced.layers, strict=True):
        p = np.asarray(jax.nn.softmax(layer.logits[0], axis=-1))
        assert np.array_equal(own["lens"]["tokens"], np.argsort(-p, axis=-1, kind="stable")[:, :5])
        np.testing.assert_allclose(own["lens"]["p"], -np.sort(-p, axis=-1)[:, :5], rtol=1e-3)
        np.testing.assert_allclose(own["lens"]["next"][:-1], p[np.arange(len(IDS) - 1), IDS[1:]], rtol=1e-3)
        assert own["lens"]["next"][-1] is None
    named = {str(token) for own in shown["layers"] for row in own["lens"]["tokens"] for token in row}
    assert shown["texts"].keys() == named


def test_the_trace_behind_the_page_is_the_models(seen, shown, traced):
    assert shown == json.loads(json.dumps(seen.data)) and seen.trace.layers[0].logits is None
    np.testing.assert_allclose(seen.trace.logits, traced.logits, atol=1e-5)
    assert repr(seen).startswith("<Look into 17 tokens and 4 layers: a page of ")


@pytest.mark.slow
def test_what_is_written_is_what_the_state_gains(traced):
    """‖S_t - exp(g_t) S_{t-1}‖; the first token writes into an empty state."""
    before = ling3.trace(open_model(FLASH), jnp.asarray([IDS[:-1]]))
    for i, inside in traced.kda.items():
        np.testing.assert_allclose(inside.write_norm[:, 0], inside.state_norm[:, 0], rtol=1e-6)
        gained = inside.state - jnp.exp(inside.decay[:, -1])[..., None] * before.kda[i].state
        # A difference of float32 states, whose numbers are below 3.
        np.testing.assert_allclose(inside.write_norm[:, -1], jnp.linalg.norm(gained, axis=(-2, -1)), atol=1e-5)


@pytest.mark.slow
def test_the_tokens_texts_are_the_prompt_and_the_models_answer(nano):
    model, tokenizer = nano
    prompt = "Question: Sam has 3 pens.\n\tHe gets 4 more: 你好"
    seen = ling3.look(model, tokenizer, prompt, new_tokens=8)
    ids = tokenizer.encode(prompt)
    new = ling3.generate(model, [ids], max_tokens=8, stop_token_ids=tokenizer.eos_token_ids)[0]
    assert [token["id"] for token in seen.data["tokens"]] == ids + new and seen.data["prompt"] == len(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == prompt
    texts = [token["text"] for token in seen.data["tokens"]]
    assert "".join(texts[: len(ids)]).startswith("Question: Sam has 3 pens.\n\tHe gets 4 more: ")
    assert texts == [token_text(tokenizer, token) for token in ids + new] and all(texts)
    assert len(seen.html) < 250_000
    chat = [{"role": "user", "content": "Sam?"}]
    expected = tokenizer.apply_chat_template(chat)
    assert [token["id"] for token in ling3.look(model, tokenizer, chat).data["tokens"]] == expected


def test_tokens_without_a_text_have_one(nano, monkeypatch):
    _, tokenizer = nano
    parts = {0: b"", 1: "你".encode()[:2], 2: "ü".encode()}
    monkeypatch.setattr(tokenizer, "token_bytes", parts.get)
    assert [token_text(tokenizer, token) for token in range(3)] == ["#0", "\\xe4\\xbd", "ü"]
    assert token_text(None, 7) == "#7"


def test_texts_are_data_and_never_html(seen):
    tokens = [{"id": 0, "text": TEXTS}] * len(IDS)
    data = {**seen.data, "title": TEXTS, "tokens": tokens, "texts": dict.fromkeys(seen.data["texts"], TEXTS)}
    whole = page(data)
    assert embedded(whole) == data
    clean, dirty = Elements(seen.html), Elements(whole)
    assert dirty.tags == clean.tags and "img" not in dirty.tags
    assert dirty.title.rstrip("\n") == TEXTS.replace("\ud800", "?") and whole.encode("utf-8")


def test_the_page_states_its_policy(seen):
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', seen.html)
    assert policy == content_policy(seen.html)


def test_a_notebook_has_it_in_a_frame_of_its_own(seen):
    [(sandbox, inside)] = re.findall(r'^<iframe .*sandbox="(.*?)".*srcdoc="([^"<>]*)"></iframe>$', seen._repr_html_())
    assert sandbox == "allow-scripts" and html.unescape(inside) == seen.html


def test_a_file_is_written_whole_or_not_at_all(seen, tmp_path, monkeypatch):
    path = tmp_path / "look.html"
    path.write_text("an older one")
    monkeypatch.setattr("pathlib.Path.replace", lambda *given: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        seen.save(path)
    assert path.read_text() == "an older one" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    seen.save(path)
    assert path.read_text(encoding="utf-8") == seen.html and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1, 2, 96], {}, r"prompt, token 2 is 96, expected an id in \[0, 96\)"),
        ("text", {}, "the prompt is text, and there is no tokenizer: give one, or token ids"),
        ([1] * 300, {}, r"the prompt has 300 tokens, expected at most 256 together .* raise longest to 300$"),
        ([1] * 9, {"new_tokens": 4, "longest": 12}, "has 9 tokens and new_tokens is 4, expected at most 12 together"),
        ([1] * 2048, {"new_tokens": 1, "longest": 4000}, "expected at most 2,048 together .*max_position_embeddings"),
        ([1], {"new_tokens": -1}, "new_tokens is -1, expected a whole number >= 0"),
        ([1], {"longest": 0}, "longest is 0, expected a whole number >= 1"),
    ],
)
def test_what_cannot_be_shown_is_refused_before_any_work(monkeypatch, prompt, options, message):
    monkeypatch.setattr("ling3.interpret.look.seen", None)
    monkeypatch.setattr("ling3.interpret.look.generate", None)
    assert LONGEST == 256
    with pytest.raises(ValueError, match=message):
        ling3.look(open_model(DEEP), None, prompt, **options)


def test_logits_that_are_no_numbers_are_refused():
    broken = eqx.tree_at(lambda m: m.model.norm.weight, open_model(FLASH), replace_fn=lambda w: w * jnp.nan)
    with pytest.raises(FloatingPointError, match=r"the logits are NaN: .*try dtype=jnp.float32"):
        ling3.look(broken, None, IDS)


@pytest.mark.slow
def test_a_cut_model_and_one_token_in_bfloat16():
    model = ling3.ablate.no_attention(open_model(FLASH, dtype=jnp.bfloat16), [1])
    model = ling3.ablate.no_decay(ling3.ablate.no_output_gate(model), [0])
    seen = ling3.look(model, None, IDS[:1])
    first, second, *_ = embedded(seen.html)["layers"]
    assert np.all(np.asarray(first["attention"]["rate"]) == 0) and first["attention"]["gate"] is None
    assert (second["kind"], second["attention"]) == ("no attention", None)
    assert first["lens"]["next"] == [None]
