"""The page of `ling3.look` in a browser: pointer, keys and slider change what it shows, and it loads nothing."""

import re

import jax.numpy as jnp
import pytest
from browser import chromium, contrast, emulated, in_a_browser
from hostile_texts import HOSTILE, is_hurt, open_sinks, parts
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

import ling3
from ling3.interpret.look import TEMPLATE, page

MARKED = str.maketrans({c: f"U+{ord(c):04X}" for c in "\u2028\u2029\u202c\u202e"})
"""Characters that break lines or turn the direction of what follows, as the page shows them."""
PROMPT = "Question: Kate has 16 eggs. Then she gives away 12. How many eggs does Kate have?\nAnswer:"

pytestmark = in_a_browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture(scope="module")
def model():
    return ling3.load("nano", dtype=jnp.float32)


@pytest.fixture(scope="module")
def seen(model):
    return ling3.look(model, ling3.load_tokenizer("nano"), PROMPT, new_tokens=6, title="nano")


class Shown:
    """A page in a browser, by what a reader and a listener find there."""

    def __init__(self, driver, path, source):
        path.write_text(source, encoding="utf-8")
        driver.get_log("browser")
        driver.get(path.as_uri())
        self.driver = driver

    def __getitem__(self, name):
        return self.driver.find_element("id", name)

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def point(self, element, x=0, y=0):
        ActionChains(self.driver).move_to_element_with_offset(element, x, y).perform()

    def press(self, *keys):
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    @property
    def selected(self):
        """The selected token's number, as options, focus order and sentence agree on it."""
        chosen = [i for i, token in enumerate(self.all(".token")) if token.get_attribute("aria-selected") == "true"]
        assert chosen == [i for i, token in enumerate(self.all(".token")) if token.get_attribute("tabindex") == "0"]
        assert self["sentence"].text.startswith(f"Token {chosen[0]}, ")
        return chosen[0]

    @property
    def layer(self):
        """The selected layer's number, as title, slider and buttons agree on it."""
        number = int(re.match(r"Layer (\d+) of", self["layer"].text)[1])
        pressed = [button.get_attribute("aria-pressed") for button in self.all("#layers > button")]
        assert pressed.index("true") == number == int(self["slider"].get_property("value"))
        assert f"in layer {number}, " in self["sentence"].text
        return number

    def rows(self, table):
        return [
            [cell.text for cell in row.find_elements("css selector", "td")] for row in self.all(f"#{table} tbody tr")
        ]

    def complaints(self):
        loaded = self.driver.execute_script("return performance.getEntriesByType('resource').map((each) => each.name)")
        return loaded + [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture
def shown(browser, seen, tmp_path):
    opened = Shown(browser, tmp_path / "look.html", seen.html)
    yield opened
    assert opened.complaints() == []


def numbers(texts):
    return [float(text.replace("%", "")) for text in texts]


def test_it_shows_every_token_and_begins_at_the_prompts_last(shown, seen):
    tokens = seen.data["tokens"]
    marks = str.maketrans({"\n": "⏎", "␣": " "})
    texts = [token.text.replace("␣", " ") for token in shown.all(".token b")]
    assert texts == [token["text"].translate(marks) for token in tokens]
    assert (shown.selected, shown.layer) == (seen.data["prompt"] - 1, 0)
    assert shown.driver.title == shown["title"].text == "nano"
    assert len(shown.all(".token.new")) == len(tokens) - seen.data["prompt"] > 0


def test_the_pointer_selects_a_click_pins_and_escape_lets_go(shown):
    for token in (5, 11):
        shown.point(shown.all(".token")[token])
        assert shown.selected == token
    shown.all(".token")[11].click()
    shown.point(shown.all(".token")[3])
    assert shown.selected == 11 and "(pinned)" in shown["sentence"].text
    shown.press(Keys.ESCAPE)
    assert "(pinned)" not in shown["sentence"].text
    shown.point(shown.all(".token")[4])
    assert shown.selected == 4


def test_keys_move_over_tokens_layers_and_heads(shown, seen):
    last = len(seen.data["tokens"]) - 1
    shown.press(Keys.HOME)
    assert shown.selected == 0
    shown.press(Keys.ARROW_LEFT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert shown.selected == 2
    assert shown.driver.switch_to.active_element == shown.all(".token")[2]
    shown.press(Keys.ARROW_UP, Keys.ARROW_UP)
    assert (shown.selected, shown.layer) == (2, 2)
    shown.press(Keys.ARROW_DOWN)
    assert shown.layer == 1 and "KDA" in shown["heads-title"].text
    shown.press(Keys.ARROW_UP, Keys.ARROW_UP)
    assert shown.layer == 3 and "MLA" in shown["heads-title"].text
    shown.press("h")
    assert "Head 0 reads" in shown["sentence"].text and "head 0" in shown["map-title"].text
    shown.press("H", Keys.END, Keys.ENTER)
    assert shown.selected == last and "in the mean" in shown["sentence"].text and "(pinned)" in shown["sentence"].text
    aloud = f"Token {last}, “"
    WebDriverWait(shown.driver, 10).until(lambda _: shown["said"].get_property("textContent").startswith(aloud))
    assert shown["said"].aria_role == "status"


def test_slider_and_buttons_move_over_layers(shown, seen):
    shown["slider"].send_keys(Keys.ARROW_RIGHT)
    assert shown.layer == 1
    shown["slider"].send_keys(Keys.END)
    assert shown.layer == len(seen.data["layers"]) - 1
    assert shown["slider"].get_attribute("aria-valuetext") == "Layer 3 of 4: MLA, mixture of 32 experts"
    shown.all("#layers > button")[2].click()
    assert shown.layer == 2


def test_the_numbers_of_a_kda_layer_are_the_datas(shown, seen):
    shown.all("#layers > button")[2].click()
    shown.point(shown.all(".token")[11])
    own = seen.data["layers"][2]
    inside = own["attention"]
    for head, (name, life, beta, written, _, gate, _) in enumerate(shown.rows("heads")[1:]):
        expected = [
            0.693147 / inside["rate"][11][head][2],
            *(inside[key][11][head] for key in ("beta", "write", "gate")),
        ]
        assert name == str(head) and numbers([life, beta, written, gate]) == pytest.approx(expected, rel=0.06)
        assert numbers([life]) == pytest.approx(expected[:1], rel=0.006)
    for layer, row in zip(seen.data["layers"], shown.rows("lens"), strict=True):
        text = seen.data["texts"][str(layer["lens"]["tokens"][11][0])].replace(" ", "␣")
        word, likely = row[2].split("\n")
        assert word == text and numbers([likely]) == pytest.approx([100 * layer["lens"]["p"][11][0]], rel=0.006)
    chosen = own["moe"]["chosen"][11]
    assert shown["experts-title"].text == f"Experts: {', '.join(map(str, sorted(chosen)))} of 32"
    assert [i for i, bar in enumerate(shown.all("#experts > span")) if bar.get_attribute("class")] == sorted(chosen)
    assert f"expert {chosen[1]} with weight" in shown["chosen"].text
    added = re.search(r"attention adds ([\d.]+), feed-forward adds ([\d.]+)", shown["norm-values"].text).groups()
    assert numbers(added) == pytest.approx([own["norms"]["attention"][11], own["norms"]["mlp"][11]], rel=0.006)


def test_a_cell_of_the_map_is_the_traces(shown, seen):
    """The third of MLA's rows from the last, in the mean of the heads: its first column, and one that comes later."""
    shown.all("#layers > button")[3].click()
    box, count = shown["map"], len(seen.data["tokens"])
    size, row = box.size["width"], count - 3
    shown.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    shown.point(box, round(0.5 * size / count - size / 2), round((row + 0.5) * size / count - size / 2))
    weight = float(seen.trace.mla[3].attention_map[0, :, row, 0].mean())
    said = re.search(rf"\({row}\) reads .* \(0\) with ([\d.e−-]+)\.", shown["cell"].text)
    assert float(said[1].replace("−", "-")) == pytest.approx(weight, rel=0.06)
    shown.point(box, round((row + 1.5) * size / count - size / 2), round((row + 0.5) * size / count - size / 2))
    assert "cannot read it" in shown["cell"].text
    ActionChains(shown.driver).click().perform()
    assert shown.selected == row and "(pinned)" in shown["sentence"].text


def test_a_head_is_chosen_by_its_row(shown):
    shown.all("#heads input")[3].click()
    assert "Head 2 reads" in shown["sentence"].text
    shown.press(Keys.ARROW_UP)
    assert "Head 1 reads" in shown["sentence"].text
    assert shown.driver.switch_to.active_element == shown.all("#heads input")[2]


def test_everything_is_reached_by_keyboard_and_named(shown):
    shown["scheme"].click()
    names = [shown.driver.switch_to.active_element.accessible_name]
    for _ in range(30):
        shown.press(Keys.TAB)
        element = shown.driver.switch_to.active_element
        if element.tag_name == "body":
            break
        assert element.value_of_css_property("outline-style") == "solid", element.accessible_name
        names.append(element.accessible_name)
    kinds = ("KDA", "KDA", "KDA", "MLA")
    layers = [f"Layer {i} of 4: {kind}, mixture of 32 experts" for i, kind in enumerate(kinds)]
    for expected in ("Light", *layers, "all"):
        assert expected in names, names
    assert any(re.match(r"\d+: ", name) for name in names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 800, 1920])
def test_it_fits_and_has_both_schemes(browser, seen, tmp_path, scheme, width):
    with emulated(browser, width, 900, scheme):
        shown = Shown(browser, tmp_path / "look.html", seen.html)
        for button in shown.all("#layers > button"):
            button.click()
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        style = "return getComputedStyle(document.body).backgroundColor"
        own, other = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 22, 26)"}[scheme], browser.execute_script(style)
        assert own == other and browser.execute_script("return document.getAnimations().length") == 0
        shown["scheme"].click()
        assert browser.execute_script(style) != own


def test_colours_are_told_apart():
    pairs = {name: (a, b) for name, a, b in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", TEMPLATE)}
    for i in range(2):
        own = {name: pair[i] for name, pair in pairs.items()}
        for behind in ("page", "raised"):
            assert all(contrast(own[name], own[behind]) >= 4.5 for name in ("text", "muted", "accent"))
            assert all(contrast(own[name], own[behind]) >= 3 for name in ("plus", "minus", "line"))
        assert contrast(own["accent"], own["on-accent"]) >= 4.5


def test_texts_stay_text(browser, seen, tmp_path):
    """The page of hostile texts has the elements of any other, whatever is selected, and tries to load nothing."""
    clean, tokens = Shown(browser, tmp_path / "clean.html", seen.html), seen.data["tokens"]
    expected, title = parts(browser), " ".join(HOSTILE)
    texts = [HOSTILE[i % len(HOSTILE)] for i in range(len(tokens))]
    assert set(texts) == set(HOSTILE) and clean.complaints() == []
    data = {**seen.data, "title": title, "tokens": [{"id": 0, "text": text} for text in texts]}
    shown = Shown(browser, tmp_path / "hostile.html", page(data | {"texts": dict.fromkeys(data["texts"], title)}))
    marked = [text.translate(MARKED) for text in texts]
    assert [token.get_property("textContent") for token in shown.all(".token b")] == marked
    assert shown["title"].get_property("textContent") == browser.title == title
    for i, text in enumerate(marked):
        shown.all(".token")[i].click()
        assert f"“{text}”" in shown["sentence"].get_property("textContent") and shown.selected == i
        shown.press(Keys.ESCAPE)
    assert title.translate(MARKED) in shown["lens"].get_property("textContent")
    assert parts(browser) <= expected and not is_hurt(browser) and shown.complaints() == []


def test_the_policy_stops_what_a_fault_of_the_script_would_let_through(browser, seen, tmp_path):
    Shown(browser, tmp_path / "look.html", seen.html)
    assert open_sinks(browser) == [] and not is_hurt(browser)
    assert len(browser.get_log("browser")) >= 1


def test_a_notebooks_frame_shows_it(browser, seen, tmp_path):
    shown = Shown(browser, tmp_path / "notebook.html", f"<!doctype html><title>x</title>{seen._repr_html_()}")
    browser.switch_to.frame(shown.all("iframe")[0])
    try:
        shown.point(shown.all(".token")[5])
        assert shown.selected == 5
    finally:
        browser.switch_to.default_content()
    assert shown.complaints() == []


def test_every_layer_of_a_cut_model_is_shown(browser, model, tmp_path):
    cut = ling3.ablate.no_decay(ling3.ablate.no_output_gate(ling3.ablate.no_attention(model, [1])), [0])
    shown = Shown(browser, tmp_path / "cut.html", ling3.look(cut, None, [5, 6, 7]).html)
    for i, button in enumerate(shown.all("#layers > button")):
        button.click()
        assert shown.layer == i
    shown.all("#layers > button")[1].click()
    assert not shown["map"].is_displayed() and "do not see each other" in shown["heads-note"].text
    shown.all("#layers > button")[0].click()
    assert [row[1] for row in shown.rows("heads")[1:]] == ["∞"] * 4 and shown.complaints() == []
