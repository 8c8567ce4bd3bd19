"""The conversation: what is kept of it, what stops it, and how it is steered."""

import dataclasses
import io
import sys

import jax
import pytest
from scripted_engine import Script, ScriptedEngine

import ling3
from ling3 import cli
from ling3.cli import chat
from ling3.cli.conversation import SETTABLE, Conversation, Unanswered, settings_line, with_settings
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.text.tokenizer import load_tokenizer

QUESTION = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
ANSWER = "3 + 4 = 7. The answer is 7."


@pytest.fixture(scope="module")
def engine():
    """One on nano for all tests that need a model."""
    engine = ling3.Engine.from_pretrained(
        "nano",
        max_running_requests=1,
        chunked_prefill_size=128,
        token_paddings=(128,),
        max_model_len=160,
        decode_rows=2,
        decode_steps=4,
    )
    engine.warmup()
    return engine


@pytest.fixture
def typed(monkeypatch):
    """Makes a terminal of stdin and stdout, at which given lines are typed; an exception is what a key raises."""

    def type_lines(*lines):
        keys = iter(lines)

        def line(prompt=""):
            key = next(keys, EOFError())
            if not isinstance(key, str):
                raise key
            return key

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", line)

    return type_lines


def run(capsys, *argv):
    code = cli.main(["chat", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def piped(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def said(conversation, question):
    return "".join(delta.text for delta in conversation.ask(question))


def raise_(error):
    raise error


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.slow
def test_a_conversation_is_the_template_over_its_turns(engine):
    conversation = Conversation(engine, engine.tokenizer, SamplingParams(max_tokens=40))
    assert said(conversation, QUESTION) == ANSWER
    second = said(conversation, "And then?")
    prompt = turns(QUESTION, ANSWER, "And then?")
    assert second == engine.generate([prompt], SamplingParams(max_tokens=40))[0].text
    assert conversation.turns == [*prompt, {"role": "assistant", "content": second}]
    conversation.reset()
    assert said(conversation, QUESTION) == ANSWER
    assert not engine.has_work or engine.stats().running == 0


@pytest.mark.thorough
def test_an_answer_that_is_stopped_stays_as_far_as_it_was_said(engine, monkeypatch):
    conversation = Conversation(engine, engine.tokenizer, SamplingParams(max_tokens=40))
    for delta in conversation.ask(QUESTION):
        shown = delta.text
        break
    assert ANSWER.startswith(shown) and shown not in ("", ANSWER)
    assert conversation.turns == turns(QUESTION, shown)

    conversation.reset()
    stream = engine.stream

    def interrupted(*arguments, **options):
        for count, delta in enumerate(stream(*arguments, **options)):
            if count == 2:
                raise KeyboardInterrupt
            yield delta

    monkeypatch.setattr(engine, "stream", interrupted)
    shown = ""
    with pytest.raises(KeyboardInterrupt):
        for delta in conversation.ask(QUESTION):
            shown += delta.text
    assert conversation.turns == turns(QUESTION, shown)
    assert shown and ANSWER.startswith(shown)
    monkeypatch.undo()

    conversation.reset()
    assert said(conversation, QUESTION) == ANSWER, "the engine goes on"
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.free_slots, stats.free_pages) == (stats.slots, stats.pages)


@pytest.mark.thorough
def test_an_answer_that_said_nothing_is_forgotten_with_its_question(engine, monkeypatch):
    conversation = Conversation(engine, engine.tokenizer, SamplingParams(max_tokens=40), turns=turns("a", "b"))
    monkeypatch.setattr(engine, "stream", lambda *_, **__: (raise_(KeyboardInterrupt) for _ in "a"))
    with pytest.raises(KeyboardInterrupt):
        said(conversation, QUESTION)
    assert conversation.turns == turns("a", "b")


@pytest.mark.thorough
def test_a_full_context_ends_an_answer_and_then_refuses_questions(engine):
    conversation = Conversation(engine, engine.tokenizer, SamplingParams(max_tokens=1000, ignore_eos=True))
    *_, last = conversation.ask(QUESTION)
    assert (last.finish_reason, conversation.full, conversation.tokens) == ("length", True, 160)
    before = list(conversation.turns)
    with pytest.raises(Unanswered, match=r"context is full: .* tokens, and 160 is all; /reset"):
        said(conversation, "And then?")
    assert conversation.turns == before
    conversation.reset()
    assert not conversation.full
    with pytest.raises(Unanswered, match="ask a shorter one"):
        said(conversation, QUESTION * 10)
    conversation.params = SamplingParams(max_tokens=40)
    assert said(conversation, QUESTION) == ANSWER


@pytest.mark.thorough
def test_a_fault_of_the_engine_is_an_error_and_the_conversation_goes_on(engine, monkeypatch):
    conversation = Conversation(engine, engine.tokenizer, SamplingParams(max_tokens=40))

    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
    monkeypatch.setattr(engine, "stream", lambda *_, **__: (raise_(error) for _ in "a"))
    with pytest.raises(Unanswered, match="RESOURCE_EXHAUSTED"):
        said(conversation, QUESTION)
    monkeypatch.undo()
    assert conversation.turns == []
    assert said(conversation, QUESTION) == ANSWER


def test_a_part_of_an_answer_is_not_kept_after_a_fault(directory, monkeypatch):
    tokenizer = load_tokenizer(directory)
    engine = ScriptedEngine(Script(("one two",)), None, tokenizer, EngineSettings(max_model_len=512))
    engine.warmup()
    conversation, stream = Conversation(engine, tokenizer, SamplingParams(max_tokens=99)), engine.stream

    def broken(*args, **how):
        yield next(delta for delta in stream(*args, **how) if delta.text)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(engine, "stream", broken)
    with pytest.raises(Unanswered, match="RESOURCE_EXHAUSTED"):
        said(conversation, "1 + 1?")
    assert conversation.turns == []


def test_thoughts_do_not_stay_in_the_conversation(directory):
    tokenizer = load_tokenizer(directory)
    script = Script(("<think>one and one</think>\n\n2",))
    engine = ScriptedEngine(script, None, tokenizer, EngineSettings(max_model_len=512))
    engine.warmup()
    conversation = Conversation(engine, tokenizer, SamplingParams(max_tokens=99), thinking="on")
    assert said(conversation, "1 + 1?") == "one and one\n\n2"
    assert conversation.turns == turns("1 + 1?", "2")
    assert script.prompts == [tokenizer.apply_chat_template(turns("1 + 1?"), enable_thinking=True)]


def test_piped_questions_have_their_answers_on_stdout(directory, scripted, capsys, monkeypatch):
    script = scripted("one", "二", "three")
    piped(monkeypatch, "a", "", "b", "/reset", " /c")
    code, out, err = run(capsys, directory, "--system", "be kind")
    assert (code, out) == (0, "one\n二\nthree\n")
    tokenizer = load_tokenizer(directory)
    system = [{"role": "system", "content": "be kind"}]
    assert script.prompts == [
        tokenizer.apply_chat_template([*system, *messages])
        for messages in (turns("a"), turns("a", "one", "b"), turns(" /c"))
    ]
    assert "forgotten" in err


def test_options_reach_the_engine(directory, scripted, capsys, monkeypatch):
    script = scripted("x")
    piped(monkeypatch, "a")
    options = "--temperature 0.5 --top-p 0.9 --max-tokens 9 --seed 3 --stop a --stop b --repetition-penalty 1.1"
    run(capsys, directory, "--max-model-len", 100, *options.split())
    wanted = SamplingParams(
        temperature=0.5, top_p=0.9, max_tokens=9, seed=3, stop=("a", "b"), repetition_penalty=1.1, top_k=None
    )
    assert script.params == [wanted]
    assert script.settings[0].max_model_len == 100
    assert script.settings[0].max_running_requests == 1
    piped(monkeypatch, "a")
    run(capsys, directory)
    assert script.settings[1].max_model_len == 512
    assert script.params[1].max_tokens == 512 - len(script.prompts[1])


def test_params_are_shown_and_set(directory, scripted, capsys, monkeypatch):
    script = scripted("x")
    piped(monkeypatch, "/params", "/params temperature=0.7 top_p=0.9 seed=4 stop='. A' stop=\\n", "a")
    code, _, err = run(capsys, directory, "--max-tokens", 9)
    assert code == 0
    assert "temperature=0.0 top_p=1.0 top_k=none" in err
    assert "temperature=0.7 top_p=0.9" in err
    wanted = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=9, seed=4, stop=(". A", "\n"))
    assert script.params == [wanted]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/params temperature=x", "temperature is 'x', expected a number"),
        ("/params temperature=-1", "temperature is -1.0"),
        ("/params temperature=nan", "temperature is nan"),
        ("/params top_k=none max_tokens=2.5", "max_tokens is '2.5', expected a whole number"),
        ("/params top_k=0", "top_k is 0"),
        ("/params ignore_eos=1", "ignore_eos is '1', expected true or false"),
        ("/params n=2", "'n=2' is not name=value with one of the names temperature,"),
        ("/params temperature", "'temperature' is not name=value"),
        ("/params stop='", "No closing quotation"),
        ("/params top_p=0.5 top_k=0", "nothing was changed"),
        ("/exit", "'/exit' is not a command: /help lists them"),
        ("/reset now", "'/reset now' is not a command"),
    ],
)
def test_a_wrong_command_is_an_error_and_no_exit(directory, scripted, capsys, monkeypatch, line, message):
    script = scripted("x")
    piped(monkeypatch, line, "a")
    code, out, err = run(capsys, directory, "--max-tokens", 9)
    assert (code, out) == (0, "x\n")
    assert message in err
    assert script.params == [SamplingParams(max_tokens=9)]


@pytest.mark.parametrize("stop", [(), ("a b", "'", '"x'), ("\n",), ("=", "\\", "#")])
def test_what_params_shows_can_be_given_back(stop):
    params = SamplingParams(temperature=0.3, top_k=7, seed=5, ignore_eos=True, min_tokens=3, min_p=1e-9, stop=stop)
    assert with_settings(SamplingParams(), settings_line(params)) == params
    assert with_settings(params, "stop=").stop == ()
    assert set(SETTABLE) <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_questions_from_a_pipe_that_find_no_answer(directory, scripted, capsys, monkeypatch):
    scripted("x")
    piped(monkeypatch, "hello " * 500, "a")
    code, out, err = run(capsys, directory)
    assert (code, out) == (2, "x\n")
    assert "the context is full: this question has" in err
    assert err.endswith("ling3: error: 1 of 2 questions found no answer\n")


def test_an_error_of_the_model_is_no_exit(directory, scripted, capsys, typed):
    script = scripted("one, and more", "two", error="its logits were NaN")
    typed("a", "b")
    code, out, err = run(capsys, directory)
    assert (code, out) == (0, "two\n")
    assert "its logits were NaN" in err
    assert script.prompts[1] == load_tokenizer(directory).apply_chat_template(turns("b"))


def test_ctrl_c_stops_the_answer_and_not_the_program(directory, scripted, capsys, typed):
    script = scripted("one, two, three, four", "five", interrupt=KeyboardInterrupt())
    typed("a", "b", "/quit", "c")
    code, out, err = run(capsys, directory)
    answer, second = out.splitlines()
    assert (code, second) == (0, "five")
    assert answer and "one, two, three, four".startswith(answer) and answer != "one, two, three, four"
    assert "stopped" in err
    assert script.engines[0].aborted == 1
    assert script.prompts[1] == load_tokenizer(directory).apply_chat_template(turns("a", answer, "b"))


def test_ctrl_c_between_two_deltas(directory, scripted, capsys, typed, monkeypatch):
    script = scripted("one, two, three, four", "five")
    show, calls = chat.show, []

    def interrupted(text):
        calls.append(text)
        if len(calls) == 2:
            raise KeyboardInterrupt
        show(text)

    monkeypatch.setattr(chat, "show", interrupted)
    typed("a", "b")
    code, out, _ = run(capsys, directory)
    assert (code, out) == (0, f"{calls[0]}\nfive\n")
    assert script.prompts[1] == load_tokenizer(directory).apply_chat_template(turns("a", "".join(calls[:2]), "b"))


def test_ctrl_c_at_the_prompt_says_how_to_leave(directory, scripted, capsys, typed):
    scripted("one")
    typed(KeyboardInterrupt(), "a", KeyboardInterrupt())
    code, out, err = run(capsys, directory)
    assert (code, out) == (0, "one\n")
    assert err.count("Ctrl-D or /quit leaves") == 3


def test_ctrl_c_ends_a_run_over_a_pipe(directory, scripted, capsys, monkeypatch):
    scripted("one, two, three, four", interrupt=KeyboardInterrupt())
    piped(monkeypatch, "a", "b")
    code, out, err = run(capsys, directory)
    assert code == 130
    assert "one, two, three, four".startswith(out.strip())
    assert err.endswith("\ninterrupted\n")


def test_an_answer_that_ends_early_says_why(directory, scripted, capsys, typed):
    script = scripted("hello " * 300, end=False)
    typed("a", "/params max_tokens=5", "/reset", "b")
    code, _, err = run(capsys, directory)
    assert code == 0
    assert "the context of 512 tokens is full: /reset forgets it" in err
    assert "stopped after max_tokens=5: /params max_tokens=10 would allow more" in err
    assert len(script.prompts) == 2


def test_control_characters_are_shown(directory, scripted, capsys, typed):
    scripted("a\x1b[2Jb\r\n\tc\x9b")
    typed("x")
    assert run(capsys, directory)[1] == "a␛[2Jb␍\n\tc\ufffd\n"


def test_a_prompt_goes_to_stderr_where_stdout_is_a_file(directory, scripted, capsys, monkeypatch):
    scripted("one")
    piped(monkeypatch, "a")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, out, err = run(capsys, directory)
    assert (code, out) == (0, "one\n")
    assert err.count("> ") == 2


def test_help(directory, scripted, capsys, monkeypatch):
    scripted("x")
    piped(monkeypatch, "/help")
    _, out, err = run(capsys, directory)
    assert out == ""
    assert all(command in err for command in ("/reset", "/params", "/help", "/quit"))


def test_a_checkpoint_without_a_chat_template(directory, tmp_path, capsys):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "has no chat template" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-model-len", "0"], "max_model_len is 0, expected a whole number in"),
        (["--max-model-len", "513"], "max_model_len is 513, expected a whole number in [1, 512]"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--top-p", "2"], "top_p is 2.0"),
    ],
)
def test_errors_are_one_line(directory, capsys, options, message):
    code, out, err = run(capsys, directory, *options)
    assert (code, out) == (2, "")
    assert err.startswith("ling3: error: ") and message in err and err.count("\n") == 1
