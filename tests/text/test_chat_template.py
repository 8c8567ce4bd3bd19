import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from exhaustive_cases import exhaustively
from hostile_templates import HOSTILE, IN_BOUNDS
from template_forms import LING

from ling3.runtime import limited_process
from ling3.text import chat_template
from ling3.text.chat_template import LONGEST_TEMPLATE, ChatTemplate, ChatTemplateError

HELLO = [{"role": "user", "content": "hello"}]


def render(source, messages=HELLO, **variables):
    return ChatTemplate(source).render(messages, **variables)


def test_ling_thinks_by_default():
    assert render(LING) == (
        "<role>SYSTEM</role>detailed thinking on<|role_end|><role>HUMAN</role>hello<|role_end|>"
        "<role>ASSISTANT</role>\n<think>"
    )


def test_ling_without_thinking():
    assert render(LING, enable_thinking=False).endswith("<role>ASSISTANT</role>\n<think></think>")
    assert "thinking off" in render(LING, enable_thinking=False)


def test_ling_over_several_turns():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>one and one</think>\n2"},
        {"role": "user", "content": "And 2 + 2?"},
    ]
    assert render(LING, messages, add_generation_prompt=False) == (
        "<role>SYSTEM</role>Be brief.\ndetailed thinking on<|role_end|><role>HUMAN</role>1 + 1?<|role_end|>"
        "<role>ASSISTANT</role>2<|role_end|><role>HUMAN</role>And 2 + 2?<|role_end|>"
    )


def test_a_refusal_is_told_in_the_template_s_words():
    with pytest.raises(ChatTemplateError, match="refuses these messages: no role tool"):
        render(LING, [{"role": "tool", "content": ""}])


def test_a_template_is_compiled_once_and_keeps_nothing():
    template = ChatTemplate("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ messages[0].content }}")
    assert [template.render(HELLO) for _ in range(3)] == ["1hello"] * 3


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ {'b': 'ä<', 'a': [1, none, true]} | tojson }}", '{"b": "ä<", "a": [1, null, true]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{% for i in 'abc' %}{% if i == 'a' %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "b"),
        ("{% for i in 'ab' %}{{ loop.index0 }}{{ i }}{{ loop.last }}{% else %}c{% endfor %}", "0aFalse1bTrue"),
        ("{% for i in [] %}{% else %}c{% endfor %}", "c"),
        ("{% for a, b in {'x': 1}.items() if b %}{{ a ~ b }}{% endfor %}", "x1"),
        ("{% for i in [1, [2]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}", "12"),
        ("{% macro m(a, b='-') %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3) }}", "1-()12(3,)"),
        ("{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}x{% endcall %}", "<x>"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% with c = 1 %}{{ c }}{% endwith %}", "AB1"),
        ("{% generation %}a{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "a1False"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '%.1f' | format(1.25) }}", "a-0071.2"),
        ("{{ '{:>3}|{a!r}'.format(1, a='x') }}", "  1|'x'"),
        ("{{ 'a,b'.split(',') | join('+') }}{{ ' x '.strip() }}{{ 'aXa'.replace('a', 'b') }}", "a+bxbXb"),
        ("{{ messages | map(attribute='content') | join }}", "hello"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ [3, 1, 2] | sort | first }}{{ [1, 2] | sum }}{{ [1, 1] | unique | list }}{{ 'ab' | reverse }}", "13[1]ba"),
        ("{{ messages[::-1][0].content }}{{ messages[0]['content'][1:3] }}", "helloel"),
        ("{{ 2 ** 3 + 7 // 2 - 5 % 3 * 1.0 }}{{ not 1 in [1] }}{{ 1 < 2 <= 2 }}", "9.0FalseTrue"),
        ("{{ nonesuch }}{{ nonesuch is defined }}{{ nonesuch | default('d') }}{{ messages[0].nonesuch }}", "Falsed"),
        ("{{ tools }}{{ documents is none }}{{ strftime_now('%%') }}", "NoneTrue%"),
        ("{{ '<' | e }}{{ ('<b>' | safe) + '<' }}", "&lt;<b>&lt;"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x' | center(3) }}|", "a\n  b x |"),
        ("{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}", "12"),
        ("{% set j = joiner('-') %}{{ j() }}a{{ j() }}b", "a-b"),
    ],
)  # fmt: skip
def test_what_templates_use(source, expected):
    assert render(source) == expected


@pytest.mark.parametrize("name", exhaustively(HOSTILE, but=list(HOSTILE)[::3]))
def test_hostile_templates_are_refused_early(name, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    begin = time.perf_counter()
    try:
        text = render(HOSTILE[name])
    except ChatTemplateError as error:
        assert str(error).startswith("the chat template") and len(str(error)) < 300
    else:
        assert name in IN_BOUNDS and len(text) <= 20_000_000
    assert time.perf_counter() - begin < 10  # on a busy machine: the process has to start again


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (HOSTILE["nested loops without a body"], r"chat template: it takes more than 0.2 seconds"),
        (HOSTILE["round"], r"chat template: it takes more than 0.2 seconds"),  # one operation in C
        ("{% for i in range(300) %}{{ 'a' * 99999 }}{% endfor %}", "29999700 characters, where at most 20000000"),
        ("{{ raise_exception('a' * 99999) }}", "refuses these messages: a{500,600}\\.\\.\\.$"),
        pytest.param(
            HOSTILE["string times"],
            "chat template: it takes more than 512 MiB of memory",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux"),
        ),
    ],
)
def test_a_bound_is_named(source, message, monkeypatch):
    if "seconds" in message:
        monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
def test_the_process_may_take_little_memory():
    render("")
    limits = pathlib.Path(f"/proc/{chat_template._worker()._process.pid}/limits").read_text()
    found = re.search(r"address space +(\d+) +(\d+) ", limits)
    assert found[1] == found[2] and 512 < int(found[1]) / 2**20 < 700  # beside what the interpreter has


def test_a_process_that_has_ended_is_started_again():
    template = ChatTemplate("{{ messages[0].content }}")
    process = chat_template._worker()._process
    assert template.render(HELLO) == "hello" and chat_template._worker()._process is process
    process.kill()
    process.wait()
    assert template.render(HELLO) == "hello" and chat_template._worker()._process is not process


def test_a_rendering_that_is_interrupted_leaves_nothing_for_the_next():
    def interrupt(*_):
        raise KeyboardInterrupt

    template = ChatTemplate("{% for i in range(messages[0].content | int) %}{{ range(100000) | sum }}{% endfor %}")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            template.render([{"role": "user", "content": "99999"}])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert template.render([{"role": "user", "content": "1"}]) == "4999950000"


def test_threads_get_their_own_texts():
    template = ChatTemplate("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda i: template.render([{"role": "user", "content": str(i)}]), range(100))
        assert list(texts) == [str(i) for i in range(100)]


def test_a_forked_process_starts_its_own(monkeypatch):
    render("")
    process = chat_template._worker()._process
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert render("a") == "a"
        assert chat_template._worker()._process.pid != process.pid
        chat_template._workers.pop(-1).stop()
    assert render("b") == "b" and chat_template._worker()._process is process


def test_an_interpreter_that_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setattr(chat_template._worker(), "module", tmp_path / "nonesuch.py")
    chat_template._worker().stop()
    with pytest.raises(RuntimeError, match=r"does not run .*nonesuch.py"):
        render("")


def test_a_process_that_starts_when_its_parent_is_gone_says_nothing():
    """As after Ctrl-C, while it was starting."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-S", "-P", str(limited_process.WORKER), str(chat_template.WORKER), "512"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.returncode != 0 and done.stderr == b""


def test_the_process_ends_with_its_parent():
    script = "from ling3.text import chat_template as c; c.ChatTemplate(''); print(c._worker()._process.pid)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_bounds_grow_with_the_conversation():
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 200} for i in range(2000)]
    text = render(LING, messages)
    assert len(text) > 2_000_000
    assert all(f">{i} word" in text for i in range(2000))


def test_an_error_names_file_and_line():
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config.json, line 3: Expected an expression"):
        ChatTemplate("a\nb\n{% for %}{% endif %}", "tokenizer_config.json")
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config.json, line 2: 'nonesuch' is undefined"):
        ChatTemplate("a\n{{ nonesuch.x }}", "tokenizer_config.json").render(HELLO)
    with pytest.raises(ChatTemplateError, match=f"{LONGEST_TEMPLATE} are allowed"):
        ChatTemplate("a" * (LONGEST_TEMPLATE + 1))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "a str, where a list"),
        (["hello"], r"messages\[0\]: a str"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]: 'role' is missing"),
        ([{"role": "user"}], "'content' is missing"),
        ([{"role": "user", "content": None}], "'content' is missing"),
        ([{"role": 1, "content": "x"}], "'role' is a int"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'content' is a list"),
        ([{"role": "user", "content": "x", "image": object()}], r"messages\[0\].image: a object"),
        ([{"role": "user", "content": "x", "more": {1: 2}}], "the key 1 is not a string"),
    ],
)
def test_malformed_messages(messages, message):
    with pytest.raises(ValueError, match=message):
        render(LING, messages)


def test_messages_may_carry_more():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1.5}}]}
    source = "{{ messages[0].content is defined }}{{ messages[0].tool_calls[0].arguments | tojson }}"
    assert render(source, [call]) == 'False{"x": 1.5}'


def test_variables_are_plain_values():
    assert render("{{ x.y[0] }}", x={"y": (1,)}) == "1"
    with pytest.raises(ValueError, match=r"x.y: a function"):
        render("", x={"y": lambda: 1})
