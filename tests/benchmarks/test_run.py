"""The suite's promise: a side that fails its oracle has no number, and takes nobody else's with it."""

import itertools
import json
import math
import pathlib
import sys

import jax.numpy as jnp
import pytest
from exhaustive_cases import exhaustively
from rich.console import Console

from benchmarks import __main__ as suite
from benchmarks import cases, report
from benchmarks.cases import model as model_cases
from benchmarks.cases import prefixes as prefix_cases
from benchmarks.models import TOY, checkpoint, prompts
from benchmarks.oracles import close, likeliest
from benchmarks.plots import draw
from benchmarks.record import where
from benchmarks.registry import CASES, Absent, Case, Line, Setting, Side, Trial, Wrong, case, chosen
from benchmarks.run import run
from ling3.execution import Execution
from ling3.ops.experts import block_experts

ROOT = pathlib.Path(cases.__file__).parent.parent


@pytest.fixture
def toy(tmp_path):
    return Setting("toy", tmp_path)


def counting(*values):
    """Measures these values, one after the other."""
    return iter(values).__next__


def recorded(trial, setting, rounds=2, **wanted):
    return run(Case("group/name", "How long?", lambda setting: trial, **wanted), setting, rounds)


def fails(error):
    def check():
        raise error

    return check


def test_ratios_are_taken_within_a_round(toy):
    sides = [
        Side("ours", counting(9.0, 1.0, 2.0, 4.0), lambda: "same"),
        Side("theirs", counting(9.0, 3.0, 4.0, 20.0), lambda: "oracle"),
    ]
    record = recorded(Trial(sides), toy, rounds=3, wanted=2.0)
    assert record["sides"][0]["values"] == {"median": 2, "least": 1, "most": 4, "all": [1, 2, 4]}  # not the first 9
    assert record["times_faster_than"]["theirs"]["all"] == [3, 2, 5]
    assert record["outcome"] == "measured"  # toy sizes are not judged
    assert {"command", "machine", "question"} <= record.keys() and record["machine"]["jax"]


def test_no_ratio_is_taken_to_zero(toy):
    sides = [Side("ours", counting(9.0, 0.0, 2.0), lambda: "same"), Side("theirs", lambda: 3.0, lambda: "oracle")]
    record = recorded(Trial(sides), toy, wanted=2.0)
    assert record["sides"][0]["values"]["all"] == [0, 2] and record["times_faster_than"] == {}


@pytest.mark.parametrize(
    ("wanted", "outcome"),
    [
        ({"wanted": 3.0}, "met"),
        ({"wanted": 3.1}, "missed"),
        ({"limit": 1.0}, "missed"),
        ({"limit": 2.0, "wanted": 1.0}, "met"),
    ],
)
def test_what_is_wanted(tmp_path, wanted, outcome):
    trial = Trial([Side("ours", lambda: 2.0, lambda: "same"), Side("theirs", lambda: 6.0, lambda: "oracle")])
    assert recorded(trial, Setting("full", tmp_path), **wanted)["outcome"] == outcome


@pytest.mark.parametrize("error", [Absent("no such package"), Wrong("off by 3")])
def test_without_its_peer_a_race_is_not_won(tmp_path, error):
    """Another form of ours is not what was to be outrun."""
    others = [Side("theirs", lambda: 6.0, fails(error)), Side("ours, slowly", lambda: 9.0, lambda: "same")]
    trial = Trial([Side("ours", lambda: 2.0, lambda: "same"), *others])
    record = recorded(trial, Setting("full", tmp_path), wanted=3.0)
    assert record["outcome"] == "measured" and record["why"] == "theirs has no number"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(Wrong("off by 3"), "wrong"), (Absent("no such package"), "absent"), (OSError("broken"), "failed")],
)
def test_a_red_check_means_no_number(toy, error, outcome):
    measured = []
    sides = [
        Side("ours", lambda: measured.append(1) or 1.0, fails(error)),
        Side("theirs", lambda: 2.0, lambda: "oracle"),
    ]
    record = recorded(Trial(sides), toy)
    ours, theirs = record["sides"]
    assert record["outcome"] == outcome and str(error) in ours[outcome]
    assert "values" not in ours and measured == [] and record["times_faster_than"] == {}
    assert theirs["values"]["all"] == [2, 2]
    assert "no number" in shown([record]) and str(error) in shown([record])


def test_a_side_that_breaks_down_later_has_no_number(toy):
    record = recorded(Trial([Side("ours", counting(1.0), lambda: "same")]), toy)
    assert record["outcome"] == "failed" and "values" not in record["sides"][0] and "check" not in record["sides"][0]


def test_a_case_that_cannot_be_built(toy):
    def build(setting):
        raise Absent("needs a telescope")

    record = run(Case("group/name", "How far?", build), toy)
    assert (record["outcome"], record["why"], record["sides"]) == ("absent", "needs a telescope", [])
    assert "telescope" in shown([record])


@pytest.mark.thorough
def test_a_wrong_operator_is_caught(toy, monkeypatch):
    """Expert weights that are not applied: plausible numbers, and no speed for them."""

    def unweighted(x, chosen, weights, *rest):
        return block_experts(x, chosen, jnp.ones_like(weights), *rest)

    wrong = Execution(experts=unweighted)
    monkeypatch.setattr(Execution, "default", lambda platform=None: wrong)
    record = run(CASES["operators/experts-8"], toy, rounds=1)
    assert record["outcome"] == "wrong" and "values" not in record["sides"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    exhaustively(
        [
            "operators/kda-chunk",
            "operators/kda-step-8",
            "operators/mla-prefill",
            "operators/mla-decode-8",
            "operators/experts-512",
            "operators/router-512",
            "growth/memory",
        ],
        but=["operators/kda-chunk", "operators/mla-decode-8", "growth/memory"],
    ),
)
def test_light_cases_run_at_toy_sizes(toy, name):
    """Peers are there where torch is, and absent elsewhere: ling3's side has a number in both."""
    record = run(CASES[name], toy, rounds=1)
    assert record["outcome"] == "measured" and record["sides"][0]["values"]["median"] > 0
    json.dumps(record, allow_nan=False)


@pytest.mark.slow
def test_the_prefix_cache_has_its_cases(toy):
    """Answers with it are those without it, and what is found is at most what could be."""
    record = run(CASES["prefixes/few-shot"], toy, rounds=1)
    assert record["outcome"] == "measured" and record["times_faster_than"]["without"]["median"] > 0
    record = run(CASES["prefixes/hits-tree"], toy, rounds=1)
    assert record["lines"] == {"suffixes of 8 tokens": {}, "suffixes of 40 tokens": {}}
    scarce, unlimited = (side["values"]["median"] for side in record["sides"][2:])
    assert 0 < scarce < unlimited == 100
    assert "100 % of the ideal" in shown([record]) and draw([record]).axes[0].get_yscale() == "linear"
    json.dumps(record, allow_nan=False)


# Eight snapshots, where prompts end or part, find at most 0.877, 0.726, 0.974 and 0.782 of the ideal, even if all later
# prompts were known. With the least recently used evicted first, they find 0.66, 0.25, 0.92 and 0.46.
@pytest.mark.parametrize(
    ("workload", "length", "share"),
    [("chat", 376, 0.83), ("chat", 2000, 0.67), ("tree", 376, 0.97), ("tree", 2000, 0.7)],
)
def test_eight_snapshots_find_most_of_what_they_could(workload, length, share):
    sizes = prefix_cases.full_sizes(length)
    found, possible, _ = prefix_cases.hits(8, getattr(prefix_cases, workload), sizes, 128, 512)
    assert share * possible <= found <= possible


def test_the_ideal_of_a_prefix_cache():
    ideal = prefix_cases.Ideal(4)
    assert ideal.of([1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert ideal.of([1, 2, 3, 4, 5, 6, 7, 8]) == 4  # the last token is computed
    assert ideal.of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert ideal.of([1, 2, 3, 4, 5, 6, 7, 9, 9]) == 4
    assert ideal.of([5, 6, 7, 8, 9]) == 0


# Cases whose question another one asks of other sizes, weights or a shorter context.
REPEATED = (
    "model/decode-1",
    "model/decode-32",
    "model/bfloat16-*",
    "families/qwen3-*",
    "families/*-bfloat16-*",
    "families/*-decode-1",
    "families/*-decode-32",
    "gpu/decode-*-at-1024",
)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("group", sorted({case.group for case in CASES.values()}))
def test_the_cases_of_a_group_run_at_toy_sizes(tmp_path, group):
    repeated = {case.name for case in chosen(REPEATED)}
    wanted = [case for case in chosen([f"{group}/*"]) if case.name not in repeated]
    records = suite.run_all(wanted, quick=True, rounds=1, out=tmp_path / "out", scratch=tmp_path / "scratch")
    assert len(records) == len(wanted) > 0
    assert {record["outcome"] for record in records} <= {"measured", "met", "missed", "absent"}
    assert {path.name for path in (tmp_path / "out" / "toy").iterdir()} == {f"{group}.json", f"{group}.png"}


def test_a_step_s_time_is_never_negative(monkeypatch):
    """The one-token call took 3 s and the other 2: once that is measured again, for ever it is an error."""
    clock = iter([0.0, 3.0, 3.0, 5.0, 5.0, 6.0, 6.0, 9.0])
    monkeypatch.setattr(model_cases.time, "perf_counter", lambda: next(clock))
    assert model_cases.per_step(lambda batch, count: batch, [[1]], 5)() == 500
    clock = itertools.cycle([0.0, 3.0, 3.0, 5.0])
    with pytest.raises(RuntimeError, match="9 times 5 tokens took no longer than one"):
        model_cases.per_step(lambda batch, count: batch, [[1]], 5)()


def test_sweeps_have_lines_beside_predictions(toy):
    sides = [Side("time", lambda x=x: 3.0 + 2.0 * x, lambda: "same", x=x) for x in (1.0, 2.0, 4.0)]
    record = recorded(Trial(sides, axis="tokens", predicted={"time": Line(1.5, "by thought")}), toy)
    line = record["lines"]["time"]
    assert (line["slope"], line["at_0"]) == pytest.approx((2.0, 3.0)) and line["predicted"]["slope"] == 1.5
    assert "predicted 1.5" in shown([record])


def test_records_of_a_group_are_kept_by_case(tmp_path, toy):
    first, second, again = (
        recorded(Trial([Side("ours", lambda v=v: v, lambda: "same")]), toy) for v in (1.0, 2.0, 3.0)
    )
    second["name"] = "group/other"
    for record in (first, second, again):
        report.keep(tmp_path, record)
    kept = report.read(tmp_path / "group.json")
    assert kept["group/name"]["sides"][0]["values"]["median"] == 3 and set(kept) == {"group/name", "group/other"}
    assert (tmp_path / "group.png").read_bytes().startswith(b"\x89PNG")


def test_names():
    assert [case.name for case in chosen(["start/import", "gpu/kda-step-*"])] == [
        "gpu/kda-step-1",
        "gpu/kda-step-128",
        "start/import",
    ]
    with pytest.raises(ValueError, match=r"no case is named 'kda'.*'gpu/\*'"):
        chosen(["kda"])
    with pytest.raises(ValueError, match="two cases named growth/memory"):
        case("growth/memory", "Twice?")(lambda setting: Trial([]))


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    suite.main(only=("growth/memory", "operators/router-512"), quick=True, out=tmp_path, scratch=tmp_path)
    assert "growth/memory" in capsys.readouterr().out and (tmp_path / "toy" / "growth.json").exists()
    suite.main(only=("model/*",), show=True)
    assert capsys.readouterr().out.startswith("model/prefill-512: A prompt of 512")
    with pytest.raises(SystemExit, match="--only: no case"):
        suite.main(only=("nothing",))
    with pytest.raises(SystemExit, match="--rounds is 0"):
        suite.main(rounds=0)
    monkeypatch.setitem(
        CASES,
        "growth/memory",
        Case("growth/memory", "?", lambda setting: Trial([Side("x", lambda: 1.0, fails(Wrong("no")))])),
    )
    with pytest.raises(SystemExit) as ended:
        suite.main(only=("growth/memory",), quick=True, out=tmp_path, scratch=tmp_path)
    assert ended.value.code == 1


def test_a_command_is_repeated_without_this_machine_s_directories(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--only", "a/*", "--scratch", "/here", "--out=there", "--rounds", "3"])
    assert where()["command"] == "python -m benchmarks --only 'a/*' --rounds 3"


def test_close():
    ones = jnp.ones(3)
    assert "within" in close(lambda: ones, lambda: ones, 1e-6)()
    for other, message in ((2 * ones, "off by"), (jnp.ones(2), "shapes"), (ones * jnp.nan, "not finite")):
        with pytest.raises(Wrong, match=message):
            close(lambda other=other: other, lambda: ones, 1e-6)()


def test_likeliest():
    logits = jnp.asarray([[[0.0, 3.0], [1.0, 1.01]]])
    assert likeliest([[1, 0]], lambda: logits).startswith("100.0 %")
    with pytest.raises(Wrong, match=r"50.0 % .* at worst 3.00 below"):
        likeliest([[0, 1]], lambda: logits)
    with pytest.raises(Wrong):
        likeliest([[1, 0]], lambda: logits * math.nan)


@pytest.mark.thorough
def test_random_checkpoints(tmp_path):
    """Rows say different things, and a second call draws nothing anew."""
    directory = checkpoint(TOY, tmp_path)
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert checkpoint(TOY, tmp_path) == directory and (directory / "model.safetensors").stat().st_mtime_ns == written
    import ling3  # noqa: PLC0415

    model = ling3.load(directory, dtype=jnp.float32)
    logits = model(jnp.asarray(prompts(TOY, 2, 16)))
    assert 0.3 < float(logits.std()) < 3 and not bool(jnp.allclose(logits[0], logits[1]))


def shown(records):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.table(records))
    return captured.get()
