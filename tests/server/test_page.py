"""The chat page, in a browser: it streams the API's own answers, stops, folds thinking, and says what went wrong."""

import asyncio
import contextlib
import dataclasses
import json
import re
import time

import httpx
import pytest
from browser import chromium, contrast, emulated, in_a_browser
from hostile_texts import HOSTILE, is_hurt, open_sinks, parts
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import ling3
from ling3.runtime.page_policy import content_policy
from ling3.server import page

QUESTION = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
ANSWER = "<b>3 + 4</b>"


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


class Page:
    """The page in a browser, by what a reader and a listener find there."""

    def __init__(self, driver, url, **settings):
        self.driver = driver
        driver.get(url)
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.execute_script("localStorage.settings = JSON.stringify(arguments[0])", settings)
        driver.get_log("browser")
        driver.get(url)

    def __getitem__(self, name):
        return self.driver.find_element("id", name)

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def wait(self, condition):
        return WebDriverWait(self.driver, 30, 0.05).until(lambda _: condition())

    def named(self, name):
        return self.wait(lambda: next((x for x in self.all("button") if x.is_displayed() and x.text == name), None))

    def ask(self, text):
        self["message"].send_keys(text + Keys.ENTER)

    def answered(self, count=1):
        self.wait(lambda: len(self.all(".assistant > :is(.below, .error)")) == count)
        return self.all(".assistant")[-1]

    def complaints(self):
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def url(nano, nano_app, serving):
    with serving(nano_app(nano)) as address:
        yield f"{address}/"


def events(*deltas, end=True):
    for delta in deltas:
        yield f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': None}]})}\n\n"
    if end:
        yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def scripted(serving):
    """The page over a server that answers as the question says; and the requests that it got."""
    asked = []

    async def models(request):
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def chat(request):
        asked.append(await request.json())
        question = asked[-1]["messages"][-1]["content"]
        if question.isdigit():
            error = {"error": {"message": "top_p is 3"}} if question == "400" else None
            return JSONResponse(error, int(question), {"Retry-After": "7"} if question == "429" else None)
        said = [{"reasoning_content": "3 and 4"}, {"content": ANSWER}, {"content": "\n= 7"}]

        async def slowly():
            for event in events(*said, end=question != "break"):
                yield event
                await asyncio.sleep(0.3 if question == "slow" else 0)
            if question == "break":
                raise ConnectionError

        return StreamingResponse(slowly(), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    with serving(Starlette(routes=[Route("/", page.answer), *routes])) as address:
        yield f"{address}/", asked


def test_the_page_needs_no_key_and_runs_its_own_script_alone(nano, nano_app, serving):
    with serving(nano_app(nano, keys=["secret"])) as address:
        answer = httpx.get(f"{address}/")
        assert httpx.get(f"{address}/v1/models").status_code == 401
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"].removesuffix("; frame-ancestors 'none'")
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in answer.text
    assert policy == f"{content_policy(answer.text)}; img-src data:; connect-src 'self'"
    assert answer.headers["content-security-policy"] != policy and answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_colours_are_told_apart():
    schemes = re.findall(r":root \{(.*?)\n *\}", page.PAGE, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        for behind in ("page", "raised"):
            assert all(contrast(colours[name], colours[behind]) >= 4.5 for name in ("text", "muted", "accent", "wrong"))
        assert contrast(colours["accent"], colours["on-accent"]) >= 4.5
        assert contrast(colours["line"], colours["page"]) >= 3


@in_a_browser
def test_an_answer_streams_and_is_the_engines(nano, url, browser):
    shown = Page(browser, url, temperature="0", max_tokens="40")
    shown.wait(lambda: shown["name"].text == "nano")
    assert browser.switch_to.active_element == shown["message"]
    shown.ask(QUESTION)
    item = shown.answered()
    messages = [{"role": "user", "content": QUESTION}]
    first = nano.generate(messages, ling3.SamplingParams(max_tokens=40))[0]
    assert item.find_element("css selector", ".text").text == first.text
    assert f"{len(first.token_ids)} tokens" in item.text and shown["status"].get_property("textContent") != ""
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And Ann?"}]
    shown.ask("And Ann?")
    second = nano.generate(messages, ling3.SamplingParams(max_tokens=40))[0]
    assert shown.answered(2).find_element("css selector", ".text").get_property("textContent") == second.text
    assert shown.complaints() == []


@in_a_browser
@pytest.mark.parametrize("how", ["button", "escape", "new chat", "leave"])
def test_stopping_frees_the_slot(nano, url, browser, monkeypatch, how):
    begin, before = nano.astream_all, nano.stats().finished["abort"]

    async def slowly(prompts, params, name):
        async with contextlib.aclosing(begin(prompts, dataclasses.replace(params, ignore_eos=True))) as deltas:
            async for item in deltas:
                yield item
                await asyncio.sleep(0.1)

    monkeypatch.setattr(nano, "astream_all", slowly)
    shown = Page(browser, url)
    shown.ask(QUESTION)
    shown.wait(lambda: shown.all(".assistant .text")[0].text)
    if how == "escape":
        shown["message"].send_keys(Keys.ESCAPE)
    elif how == "leave":
        browser.get("about:blank")
    else:
        shown.named("Stop" if how == "button" else "New chat").click()
    for _ in range(100):
        if nano.stats().finished["abort"] == before + 1:
            break
        time.sleep(0.02)
    assert nano.stats().finished["abort"] == before + 1 and nano.stats().running == 0
    if how in ("button", "escape"):
        assert "stopped" in shown.answered().text and shown.named("Send")
        assert browser.switch_to.active_element == shown["message"]
        assert shown.complaints() == []
    elif how == "new chat":
        assert not shown.all("#log > *") and shown["empty"].is_displayed()


@in_a_browser
def test_nano_offers_problems_to_click(url, browser):
    shown = Page(browser, url)
    shown.wait(shown["examples"].is_displayed)
    shown.all("#examples button")[0].click()
    assert "3 + 4 = 7. The answer is 7." in shown.answered().text and not shown["examples"].is_displayed()
    assert shown.complaints() == []


@in_a_browser
def test_thinking_is_folded(scripted, browser):
    url, asked = scripted
    shown = Page(browser, url, thinking="on", system="Be short.", top_p="0.5")
    shown.ask(QUESTION)
    item = shown.answered()
    fields = {"top_p": 0.5, "chat_template_kwargs": {"enable_thinking": True}, "stream": True, "model": "scripted"}
    assert fields.items() <= asked[-1].items() and "temperature" not in asked[-1]
    assert [message["role"] for message in asked[-1]["messages"]] == ["system", "user"]
    assert item.find_elements("css selector", ".text")[1].text == f"{ANSWER}\n= 7"
    assert browser.title == "scripted"
    thought, summary = shown.all("details .text")[0], shown.all("summary")[0]
    assert (summary.text, thought.is_displayed()) == ("Thinking", False)
    summary.send_keys(Keys.ENTER)
    assert (thought.text, thought.is_displayed()) == ("3 and 4", True)
    assert shown.complaints() == []


@pytest.fixture(scope="module")
def hostile(serving):
    """The page over a server whose every text is hostile: the model's name, thinking, answers and errors."""
    name = " ".join(HOSTILE)

    async def models(request):
        return JSONResponse({"data": [{"id": name}]})

    async def chat(request):
        question = (await request.json())["messages"][-1]["content"]
        if question == "refuse":
            return JSONResponse({"error": {"message": name}}, 400)
        cut = [text[i : i + 5] for text in HOSTILE for i in range(0, len(text), 5)]  # as tokens would be
        deltas = [{kind: part} for kind in ("reasoning_content", "content") for part in cut]
        said = [*events(*deltas, end=question != "break")]
        said += [f"data: {json.dumps({'error': {'message': name}})}\n\n"] if question == "break" else []
        return StreamingResponse(iter(said), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    with serving(Starlette(routes=[Route("/", page.answer), *routes])) as address:
        yield f"{address}/"


@in_a_browser
def test_hostile_texts_stay_text(hostile, scripted, browser):
    """The page has no more kinds of elements than with plain texts, runs none of it, and tries to load nothing."""
    plain, name = Page(browser, scripted[0]), " ".join(HOSTILE)
    for i, question in enumerate(("answer", "400")):
        plain.ask(question)
        plain.answered(i + 1)
    expected, shown = parts(browser), Page(browser, hostile)
    for i, question in enumerate((name, "refuse", "break")):
        shown.ask(question)
        shown.answered(i + 1)
    assert parts(browser) <= expected and not is_hurt(browser)
    texts = [each.get_property("textContent") for each in shown.all("h1, .text")]
    assert texts[:4] == [name, name, "".join(HOSTILE), "".join(HOSTILE)]
    alerts = [each.get_property("textContent") for each in shown.all("[role=alert] p")]
    assert alerts == [f"The server refuses this: {name}.", f"The server broke off: {name}."]
    assert [each for each in shown.complaints() if "status of 400" not in each] == []


@in_a_browser
def test_the_policy_stops_what_a_fault_of_the_script_would_let_through(scripted, browser):
    Page(browser, scripted[0])
    assert open_sinks(browser) == [] and not is_hurt(browser)


@in_a_browser
def test_what_is_said_aloud(scripted, browser):
    """The log is busy while an answer comes, so that it is read once; then the status says that it is there."""
    shown = Page(browser, scripted[0])
    shown.ask("slow")
    shown.wait(lambda: shown["log"].get_attribute("aria-busy") == "true")
    assert shown["status"].get_property("textContent") == "The model is answering."
    shown.answered()
    assert shown["log"].get_attribute("aria-busy") == "false" and shown["log"].aria_role == "log"
    assert shown["status"].get_property("textContent") == "The answer is complete."


@in_a_browser
@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("429", "The server is busy: try again in 7 s."),
        ("400", "The server refuses this: top_p is 3."),
        ("500", "The server failed: status 500."),
        ("401", "The server wants an API key"),
        ("break", "The connection broke off amid the answer."),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_errors_are_said_in_words_and_can_be_tried_again(scripted, browser, question, words):
    url, asked = scripted
    shown = Page(browser, url)
    shown.ask(question)
    shown.answered()
    [alert] = shown.all("[role=alert]")
    assert alert.text.startswith(words) or (question == "break" and alert.text.startswith("The connection broke off"))
    before = len(asked)
    shown.named("Try again").click()
    shown.wait(lambda: len(asked) == before + 1)
    shown.answered()
    assert asked[-1]["messages"] == [{"role": "user", "content": question}]


@in_a_browser
def test_a_server_that_is_gone(nano, nano_app, serving, browser):
    with serving(nano_app(nano)) as address:
        shown = Page(browser, f"{address}/")
        shown.wait(lambda: shown["name"].text == "nano")
    shown.ask(QUESTION)
    shown.answered()
    assert shown.all("[role=alert] p")[0].text == "The connection broke off: the server does not answer."


@in_a_browser
def test_a_key_is_asked_for_and_used(nano, nano_app, serving, browser):
    with serving(nano_app(nano, keys=["secret"])) as address:
        shown = Page(browser, f"{address}/", max_tokens="5")
        shown.wait(lambda: "wants an API key" in shown["notice"].text)
        shown["open-settings"].send_keys(Keys.ENTER)
        shown["key"].send_keys("secret" + Keys.ENTER)
        shown.wait(lambda: shown["name"].text == "nano")
        assert not shown["notice"].is_displayed()
        shown.ask(QUESTION)
        assert "cut off at 5 tokens" in shown.answered().text
        assert "secret" not in browser.execute_script("return localStorage.settings")


@in_a_browser
def test_everything_is_reached_by_keyboard_and_named(scripted, browser):
    shown = Page(browser, scripted[0])
    shown.ask(QUESTION)
    shown.answered()
    body, order = browser.switch_to.active_element, []
    for _ in range(12):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        element = browser.switch_to.active_element
        if element.tag_name != "body":
            assert element.value_of_css_property("outline-style") == "solid", element.accessible_name
            order.append(element.accessible_name)
    assert body == shown["message"] and "Send" in order
    start = order.index("New chat")
    assert order[start : start + 8] == [
        "New chat",
        "Settings",
        "Conversation",
        "Copy question",
        "Thinking",
        "Copy answer",
        "Regenerate",
        "Message",
    ]
    shown["open-settings"].send_keys(Keys.ENTER)
    assert shown["settings"].accessible_name == "Settings" and shown["settings"].aria_role == "dialog"
    fields = shown.all("#settings :is(input, select, textarea, button)")
    names = ["System prompt", "Thinking", "Temperature", "Top p", "Most tokens of an answer", "API key"]
    assert [field.accessible_name for field in fields] == [*names, "Reset", "Done"]
    shown["temperature"].send_keys("3" + Keys.ENTER)
    assert shown["settings"].is_displayed(), "a temperature of 3 is no setting"
    shown["temperature"].send_keys(Keys.BACKSPACE, "1" + Keys.ENTER)
    shown.wait(lambda: not shown["settings"].is_displayed())
    assert browser.switch_to.active_element == shown["open-settings"]


@in_a_browser
def test_regenerating_copying_and_beginning_anew(scripted, browser):
    url, asked = scripted
    shown = Page(browser, url)
    shown["message"].send_keys("one" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "two" + Keys.ENTER)
    shown.answered()
    before = len(asked)
    shown.named("Regenerate").click()
    shown.wait(lambda: len(asked) == before + 1)
    shown.answered()
    assert asked[-1]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    browser.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    shown.all(".assistant button")[0].click()
    assert shown.wait(lambda: browser.execute_script("return window.copied")) == f"{ANSWER}\n= 7"
    shown.named("New chat").click()
    shown.ask("again")
    shown.answered()
    assert asked[-1]["messages"] == [{"role": "user", "content": "again"}]


@in_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1920])
def test_it_fits_and_has_both_schemes(scripted, browser, scheme, width):
    with emulated(browser, width, 700, scheme):
        shown = Page(browser, scripted[0])
        shown.ask("slow " * 30)
        shown.answered()
        style = "return getComputedStyle(document.body).backgroundColor"
        assert browser.execute_script(style) == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 23, 27)"}[scheme]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script("return document.querySelector('main').scrollWidth") <= width
        assert all(
            x.rect["x"] >= 0 and x.rect["x"] + x.rect["width"] <= width for x in shown.all("button, textarea, li")
        )
        assert browser.execute_script("return document.getAnimations().length") == 0
