"""Runs over files of questions: what is written, what is asked again, what is refused."""

import dataclasses
import functools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine
from small_engine import idle

from ling3.engine.sampling_params import MAX_SEED, SamplingParams
from ling3.evals.answers import PARSERS, choice, number
from ling3.evals.predictions import Predictions, fingerprint
from ling3.evals.prompts import Question
from ling3.evals.run import Score, evaluate, prepare
from ling3.intervention import Intervention

QUESTIONS = [Question(f"{'more ' * (i % 3)}{i}?", str(i % 4)) for i in range(9)] + [Question("0?", "0")]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    return small_engine.engine()


@functools.cache
def asked(questions=tuple(QUESTIONS)):
    return prepare(small_engine.tokenizer(), questions)


@pytest.fixture
def ask(engine, tmp_path):
    """Runs the questions into `name` and counts what the engine was asked."""

    class Ask:
        out = tmp_path / "predictions.jsonl"
        asked = 0

        def __call__(self, name="predictions.jsonl", engine=engine, questions=QUESTIONS, **others):
            self.out, self.asked, stream_all = tmp_path / name, 0, engine.stream_all

            def counted(prompts, *arguments, **options):
                self.asked += len(prompts)
                return stream_all(prompts, *arguments, **options)

            engine.stream_all = counted
            try:
                return evaluate(engine, asked(tuple(questions)), number, self.out, **{"params": PARAMS, **others})
            finally:
                del engine.stream_all

        def lines(self):
            return [json.loads(line) for line in self.out.read_text(encoding="utf-8").splitlines()]

    return Ask()


def timeless(lines):
    """All of the lines that neither the clock nor chance decides, in the order of the questions."""
    return [{**line, "timings": None} for line in sorted(lines, key=lambda line: line["index"])]


def test_a_run(ask, engine):
    seen = []
    score = ask(on_start=lambda *seen_: seen.append(seen_), on_answer=lambda *seen_: seen.append(seen_))
    lines = timeless(ask.lines())
    assert [line["index"] for line in lines] == list(range(10)) and ask.asked == 10
    assert score == Score(sum(line["right"] for line in lines), 10)
    assert [found.total for found, _ in seen] == list(range(11)) and {total for _, total in seen} == {10}
    assert seen[-1][0] == score
    alone = engine.generate([question.ids for question in asked()], PARAMS)
    for line, question, answer in zip(lines, QUESTIONS, alone, strict=True):
        assert line["text"] == answer.text and line["output_tokens"] == 12
        assert line["parsed"] == number(answer.text) and line["right"] == (line["parsed"] == question.answer)
        assert line["expected"] == question.answer and line["finish_reason"] == "length" and line["error"] is None
        assert line["settings"]["sampling"] == {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    assert all(line["timings"]["total"] >= line["timings"]["first_token"] > 0 for line in ask.lines())
    # The same prompt twice is two questions.
    assert lines[0]["prompt_sha256"] == lines[9]["prompt_sha256"] and lines[0]["text"] == lines[9]["text"]
    assert idle(engine)


def test_two_runs_are_the_same(ask):
    assert ask("one.jsonl") == (first := ask("two.jsonl"))
    one = ask.lines()
    assert ask("three.jsonl", params=PARAMS) == first
    assert timeless(ask.lines()) == timeless(one)


def test_right_answers_are_counted(ask):
    ask()
    answers = [line["parsed"] for line in timeless(ask.lines())]
    given = [Question(q.prompt, a or "none") for q, a in zip(QUESTIONS, answers)]
    score = ask("again.jsonl", questions=given)
    assert score.right == sum(answer is not None for answer in answers) > 0
    assert {line["right"] for line in ask.lines() if line["parsed"]} == {True}
    assert not any(line["right"] for line in ask.lines() if line["parsed"] is None)


@pytest.mark.parametrize("cut", [0, 1, 300, 2000, -1, -2])
def test_a_file_cut_anywhere_is_taken_up(ask, cut):
    whole = ask()
    lines, content = timeless(ask.lines()), ask.out.read_bytes()
    ask.out.write_bytes(content[:cut])
    kept = content[:cut].count(b"\n")
    assert ask() == whole and ask.asked == 10 - kept
    assert timeless(ask.lines()) == lines
    assert ask.out.read_bytes().startswith(content[: content[:cut].rfind(b"\n") + 1])
    assert ask() == whole and ask.asked == 0


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_run_that_was_broken_off_is_taken_up(ask, engine, error):
    whole, content = ask("whole.jsonl"), timeless(ask.lines())

    def stop(score, total):
        if score.total == 4:
            raise error

    with pytest.raises(error):
        ask(on_answer=stop)
    assert len(ask.lines()) == 4 and idle(engine)
    assert ask() == whole and ask.asked == 6
    assert timeless(ask.lines()) == content


def test_more_and_fewer_questions(ask):
    three = ask(limit=3)
    assert three.total == 3 and [line["index"] for line in timeless(ask.lines())] == [0, 1, 2]
    whole = ask()
    assert ask.asked == 7 and whole.total == 10
    assert ask(limit=3) == three and ask.asked == 0
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit is {limit}, expected at least 1"):
            ask(limit=limit)


def test_more_questions_than_the_queue_holds(ask):
    score = ask()
    lines = timeless(ask.lines())
    assert ask("short.jsonl", engine=small_engine.engine(max_queue=1)) == score
    short = timeless(ask.lines())
    assert {line["schedule"]["max_queue"] for line in short} == {1}
    assert [{**line, "schedule": lines[0]["schedule"]} for line in short] == lines


@pytest.mark.thorough
def test_a_request_that_fails_is_a_wrong_answer(ask):
    broken = eqx.tree_at(lambda m: m.lm_head.weight, small_engine.model(), jnp.full((400, 32), jnp.nan))
    assert ask(engine=small_engine.engine(broken)) == Score(0, 10)
    for line in ask.lines():
        assert line["finish_reason"] == "error" and "NaN" in line["error"]
        assert (line["right"], line["parsed"]) == (False, None)


def test_choices_are_counted(tmp_path):
    """A model that says C whatever it is asked is right once of three times."""
    tokenizer = small_engine.tokenizer()
    mark, letter = tokenizer.encode("?"), tokenizer.encode("C")
    engine = small_engine.engine(small_engine.reciter([*mark, *letter, 5]))
    questions = [Question("Which?", answer) for answer in "BCD"]
    out = tmp_path / "out.jsonl"
    assert evaluate(engine, prepare(tokenizer, questions), choice, out) == Score(1, 3)
    lines = timeless(json.loads(line) for line in out.read_text().splitlines())
    assert [(line["text"], line["parsed"], line["right"]) for line in lines] == [
        ("C", "C", False),
        ("C", "C", True),
        ("C", "C", False),
    ]


def test_answers_take_what_room_there_is(ask):
    question = Question("long " * 40, "1")
    (prepared,) = asked((question,))
    ask(questions=[question], params=SamplingParams(max_tokens=2000, ignore_eos=True))
    (line,) = ask.lines()
    assert line["prompt_tokens"] == len(prepared.ids) and line["output_tokens"] == 256 - len(prepared.ids)


def test_a_prompt_without_room_is_named_before_any_work(ask, engine):
    before = engine.stats().steps
    with pytest.raises(ValueError, match=r"the prompt of question 1 has \d+ tokens, which leaves none .* room for 256"):
        ask(questions=[QUESTIONS[0], Question("long " * 300, "1")])
    assert engine.stats().steps == before and not ask.out.exists()
    with pytest.raises(ValueError, match="no question to ask"):
        ask(questions=[])


def test_other_settings_and_prompts_are_refused(ask):
    ask(limit=2)
    before = ask.out.read_bytes()
    with pytest.raises(
        ValueError, match=r"line 1 was written with other settings: sampling\.max_tokens is 12 there and 13"
    ):
        ask(params=SamplingParams(max_tokens=13, ignore_eos=True))
    with pytest.raises(ValueError, match="weights is None there and 'abc' now"):
        ask(settings={"weights": "abc"})
    with pytest.raises(ValueError, match=r"question \d, which is another one in these prompts \(prompt_sha256\)"):
        ask(questions=[Question("else", question.answer) for question in QUESTIONS])
    with pytest.raises(ValueError, match=r"another one in these prompts \(expected\)"):
        ask(questions=[Question(question.prompt, "77") for question in QUESTIONS])
    with pytest.raises(ValueError, match=r"another one in these prompts \(prompt_sha256, expected\)"):
        ask(questions=[QUESTIONS[5]])
    assert ask.out.read_bytes() == before and ask.asked == 0
    ask.out.write_bytes(before + before)
    with pytest.raises(ValueError, match=r"line 3 answers question \d a second time; remove this line"):
        ask()
    ask.out.write_bytes(before + b"\n")
    with pytest.raises(ValueError, match=r"line 3, column 1: no valid JSON .*; remove the line, or give another"):
        ask()


@pytest.mark.slow
def test_a_run_under_interventions_is_not_taken_up_with_others(ask):
    def under(*changes):
        return dataclasses.replace(PARAMS, interventions=[Intervention.set(0, "gate", value) for value in changes])

    assert ask(params=under(0.5)).total == 10 and ask.asked == 10
    [written] = ask.lines()[0]["settings"]["sampling"]["interventions"]
    assert written.keys() == {"layer", "site", "adds", "numbers_sha256"}
    assert ask(params=under(0.5)).total == 10 and ask.asked == 0
    for others in (PARAMS, under(0.25), under(0.5, 0.5)):
        with pytest.raises(ValueError, match="sampling"):
            ask(params=others)


def test_every_setting_of_the_engine_is_recorded(ask, engine):
    ask(limit=1)
    (line,) = ask.lines()
    recorded = {**line["settings"]["engine"], **line["schedule"]}
    assert recorded == {**dataclasses.asdict(engine.settings), "token_paddings": [16, 32]}
    assert line["settings"]["engine"].keys().isdisjoint(line["schedule"])


def test_worked_examples_are_computed_once(ask):
    """All questions after the first ones find them in the prefix cache, and have the answers they have without it."""
    questions = [Question(f"{'shown ' * 20}{i}?", "1") for i in range(8)]
    ask("cold.jsonl", engine=small_engine.engine(prefix_cache=False), questions=questions)
    cold = timeless(ask.lines())
    assert {line["timings"]["cached_tokens"] for line in ask.lines()} == {0}
    engine = small_engine.engine()
    ask("known.jsonl", engine=engine, questions=questions)
    known = timeless(ask.lines())
    cached = [line["timings"]["cached_tokens"] for line in ask.lines()]
    assert engine.stats().cached_tokens == sum(cached) > 0 and cached[-1] > 0
    for line, expected in zip(known, cold, strict=True):
        assert {**line, "schedule": expected["schedule"]} == expected


def test_a_run_from_before_the_prefix_cache_is_taken_up(ask):
    """Its lines say nothing of the cache's settings, on which no bit depends."""
    whole = ask()
    lines = timeless(ask.lines())
    old = ask.lines()[:4]
    for line in old:
        del line["schedule"]["prefix_cache"], line["schedule"]["snapshot_fraction"], line["timings"]["cached_tokens"]
    ask.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in old), encoding="utf-8")
    assert ask() == whole and ask.asked == 6
    for line, expected in zip(timeless(ask.lines()), lines, strict=True):
        assert {**line, "schedule": expected["schedule"]} == expected


@pytest.mark.slow
def test_a_run_is_taken_up_with_another_schedule_and_not_with_other_shapes(ask):
    whole = ask()
    lines = timeless(ask.lines())
    ask("more.jsonl", limit=3)
    other = {"max_running_requests": 2, "num_pages": 9, "max_queue": 3, "mem_fraction": 0.5, "overlap": False}
    other = small_engine.engine(**other, prefix_cache=False, snapshot_fraction=0.0)
    assert ask("more.jsonl", engine=other) == whole and ask.asked == 7
    for line, expected in zip(timeless(ask.lines()), lines, strict=True):
        assert {**line, "schedule": expected["schedule"]} == expected
    with pytest.raises(ValueError, match=r"with other settings: engine\.decode_rows is 4 there and 2 now; resume"):
        ask("more.jsonl", engine=small_engine.engine(decode_rows=2))


def test_two_runs_at_once_are_refused(ask):
    """The second neither loses nor repeats a line of the first, and may go on once that has ended."""
    pytest.importorskip("fcntl")
    whole = ask("whole.jsonl")
    content = timeless(ask.lines())
    questions = [question.record for question in asked()]

    def second(score, total):
        if score.total == 4:
            before = (ask.out.parent / "first.jsonl").read_bytes()
            with pytest.raises(BlockingIOError, match=r"first\.jsonl: another run is writing"):
                Predictions(ask.out.parent / "first.jsonl", questions, {}).__enter__()
            assert (ask.out.parent / "first.jsonl").read_bytes() == before
            seen.append(before)

    seen = []
    assert ask("first.jsonl", on_answer=second) == whole and len(seen) == 1
    assert timeless(ask.lines()) == content
    assert ask("first.jsonl") == whole and ask.asked == 0


def test_the_file_is_read_when_it_is_opened(ask):
    """What another run wrote since the object was made counts, and stays."""
    ask()
    content = ask.out.read_bytes()
    settings = ask.lines()[0]["settings"]
    ask.out.unlink()
    file = Predictions(ask.out, [question.record for question in asked()], settings)
    ask.out.write_bytes(content[:-7])
    with file:
        assert len(file.lines) == 9
    assert ask.out.read_bytes() == content[: content[:-7].rfind(b"\n") + 1]


def test_seeds_too_large_are_refused_before_any_work(ask):
    last = MAX_SEED - len(QUESTIONS) + 1
    with pytest.raises(ValueError, match=f"seed is {last + 1}, .* expected at most {last} with 10 questions"):
        ask(params=dataclasses.replace(PARAMS, seed=last + 1))
    assert ask.asked == 0 and not ask.out.exists()
    assert ask(params=dataclasses.replace(PARAMS, seed=last)).total == 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((line, "predictions.jsonl, line 1") for line in ('{"prompt": "a"}\n', "[]\n", "3\n", "text\n")),
        ('{"index": true, "right": true}\n', "line 1: this is not a line of predictions"),
        ('[{"prompt": "a", "answer": "3"}]', r"its last line, .* is not the beginning of a line of predictions"),
        ('{"prompt": "a", "answer": "3"}', r"its last line, .* is not the beginning of a line of predictions"),
    ],
)
def test_a_file_of_something_else_is_left_alone(ask, content, message):
    """Above all, the prompts by a slip of the hand."""
    ask.out.write_text(content)
    with pytest.raises(ValueError, match=message):
        ask()
    assert ask.out.read_text() == content


def test_each_line_is_on_the_disk_before_the_next_is_asked(ask):
    lengths = []
    ask(on_answer=lambda score, total: lengths.append((score.total, ask.out.read_bytes().count(b"\n"))))
    assert lengths == [(n, n) for n in range(1, 11)]


def test_a_chat_is_a_user_s_turn():
    tokenizer = small_engine.tokenizer()
    turn = [{"role": "user", "content": "3 + 4?"}]
    for chat, variables in (("auto", {}), ("on", {"enable_thinking": True}), ("off", {"enable_thinking": False})):
        (prepared,) = prepare(tokenizer, [Question("3 + 4?", "7")], chat)
        assert prepared.ids == tokenizer.apply_chat_template(turn, **variables)
    (raw,) = prepare(tokenizer, [Question("3 + 4?", "7")])
    assert raw.ids == tokenizer.encode("3 + 4?") and raw.record["prompt_sha256"] != prepared.record["prompt_sha256"]


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    # By Brown, Cai and DasGupta's formula (Statistical Science 16, 2001, §3.1.1), computed with 30 digits.
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (10, 20, 0.29930, 0.70070), (1119, 1319, 0.82800, 0.86671)],
)
def test_the_interval(right, total, low, high):
    found = Score(right, total).interval
    assert all(math.isclose(a, b, abs_tol=5e-6) for a, b in zip(found, (low, high)))  # the table has five digits
    assert 0.0 <= found[0] <= right / total <= found[1] <= 1.0


def test_the_last_line():
    assert str(Score(495, 500)) == "正确率: 495/500 = 0.9900"
    assert str(Score(1, 3)) == "正确率: 1/3 = 0.3333"


def test_a_fingerprint_tells_models_apart():
    model = small_engine.model()
    nudged = eqx.tree_at(lambda m: m.model.norm.weight, model, model.model.norm.weight.at[0].add(1e-3))
    assert fingerprint(model) == fingerprint(model) != fingerprint(nudged)
    assert fingerprint(model) != fingerprint(small_engine.reciter([7, 8]))


def test_a_fingerprint_sees_the_later_rows_and_experts():
    """An array of each shape, with all but the first slice of its first axis changed."""
    model = small_engine.model()
    prints = {fingerprint(model)}
    leaves, tree = jax.tree.flatten(model)
    large = {leaf.shape: i for i, leaf in enumerate(leaves) if leaf.ndim > 1 and leaf.shape[0] > 1}
    for i in large.values():
        changed = np.array(leaves[i])
        changed[1:] += 1
        prints.add(fingerprint(jax.tree.unflatten(tree, [*leaves[:i], jnp.asarray(changed), *leaves[i + 1 :]])))
    assert {2, 3} <= {len(shape) for shape in large}, "experts are among them"
    assert len(prints) == len(large) + 1


def test_parsers_have_the_names_that_settings_and_errors_give():
    assert {name: parser.__name__ for name, parser in PARSERS.items()} == {"number": "number", "choice": "choice"}


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="nowhere"), Predictions(tmp_path / "nowhere" / "out.jsonl", [], {}):
        pass
