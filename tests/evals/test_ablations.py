"""The table of ablations: what it lists, what it measures, and how it is shown."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from tiny import DEEP, open_model

import ling3
from ling3 import cli
from ling3.evals.ablations import ProblemRows, _right, ablations, compare, solution_perplexity, solution_rows
from ling3.train.nano.problems import ask, problems


@pytest.fixture(scope="module")
def nano():
    return ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")


@pytest.fixture(scope="module")
def report(nano):
    chosen = ablations(nano[0], "gates")[:1]
    return compare(*nano, chosen, questions=10, recalls=2, examples=3)


def names(config, suite="all"):
    return [ablation.name for ablation in ablations(open_model(config), suite)]


def test_a_model_is_cut_only_where_it_has_something():
    assert len(names(DEEP)) == len(set(names(DEEP))) == 23
    assert sum(len(names(DEEP, suite)) for suite in ("gates", "decay", "memory", "layers", "experts")) == 23
    only_mla = dataclasses.replace(DEEP, layer_group_size=1)
    assert not [name for name in names(only_mla) if "KDA" in name] and "MLA: no RoPE" in names(only_mla)
    dense = dataclasses.replace(DEEP, first_k_dense_replace=4, layer_group_size=5)
    assert not [name for name in names(dense) if "MLA" in name or "experts" in name]


@pytest.mark.slow
def test_every_line_is_a_model_that_differs():
    model = open_model(DEEP)
    tokens = jnp.asarray(jax.random.randint(jax.random.key(0), (2, 9), 0, DEEP.vocab_size), jnp.int32)
    rows = ProblemRows(tokens, jnp.ones((2, 9), bool), jnp.ones((2, 9), bool))
    variants = {ablation.name: ablation.cut(model, rows) for ablation in ablations(model)}
    by_weight = variants.pop("experts: 4 of 8 dropped")
    assert by_weight.config == DEEP and by_weight.model.layers[1].mlp.gate.expert_bias[0] == ling3.ablate.DROPPED
    assert variants.pop("experts: none but the shared").config == DEEP
    configs = [variant.config for variant in variants.values()]
    assert DEEP not in configs and len(set(configs)) == len(configs)
    # All of one kind at once is said once, and not of each layer.
    assert not [name for name, v in variants.items() if v.config.layer_overrides and not name.startswith("layer")]


@pytest.mark.slow
def test_what_is_cut_already_is_not_cut_again():
    model = ling3.ablate.no_decay(ling3.ablate.no_output_gate(open_model(DEEP), layers=[0]))
    listed = {ablation.name: ablation for ablation in ablations(model)}
    assert not [name for name in listed if "bound" in name or "decay" in name or "softplus" in name]
    tokens = jnp.zeros((1, 4), jnp.int32)
    held = listed["KDA: gate at its mean"].cut(model, ProblemRows(tokens, tokens == 0, tokens == 0)).config
    assert [held.at(i).kda_output_gate for i in range(3)] == ["none", "constant", "constant"]
    bare = ling3.ablate.no_output_gate(model)
    assert not [ablation.name for ablation in ablations(bare) if "gate" in ablation.name]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_perplexity_is_that_of_the_solutions_alone(nano):
    model, tokenizer = nano
    rows, valid, learned = solution_rows(tokenizer, itertools.islice(problems(2026, "held_out"), 64))
    first = next(problems(2026, "held_out"))
    text = tokenizer.decode([int(t) for t, one in zip(rows[0], learned[0]) if one])
    assert text.strip() == first.solution
    whole = tokenizer.decode([int(t) for t, one in zip(rows[0], valid[0], strict=True) if one])
    assert whole == f"{ask(first)} {first.solution}"
    total, count = 0.0, 0
    logits = jax.nn.log_softmax(model(rows))
    for row, mask, scores in zip(np.asarray(rows), np.asarray(learned), np.asarray(logits), strict=True):
        places = np.flatnonzero(mask)
        total += scores[places - 1, row[places]].sum(dtype=np.float64)
        count += len(places)
    assert solution_perplexity(model, tokenizer) == pytest.approx(np.exp(-total / count), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_whole_model_answers_and_the_gateless_does_not(report):
    whole, gateless = report.rows
    assert whole.name == "whole" and gateless.name == "KDA: no output gate"
    assert whole.perplexity < 1.05 < gateless.perplexity
    assert whole.problems.right >= 9 and gateless.problems.right <= 3
    assert whole.recall.total == 2 and 100 < report.context < 400


@pytest.mark.slow
def test_an_answer_counts_by_its_last_number(nano):
    asked = [next(problems(2026, "held_out"))]
    prompts = [nano[1].encode(ask(asked[0]))]
    assert _right(*nano, prompts, asked) == [True]
    other = next(problem for problem in problems(1, "train") if problem.answer != asked[0].answer)
    assert _right(*nano, prompts, [other]) == [False]


@pytest.mark.slow
def test_it_is_shown_as_table_json_and_picture(report, tmp_path):
    console = rich.console.Console(width=120, record=True)
    console.print(report)
    text = console.export_text()
    assert "KDA: no output gate" in text and "y = o_proj(RMSNorm(o))" in text and "perplexity of solutions" in text
    numbers = json.loads(json.dumps(report.to_dict()))
    assert [row["name"] for row in numbers["rows"]] == ["whole", "KDA: no output gate"]
    assert numbers["rows"][0]["problems"]["total"] == 10 and numbers["perplexity_of"] == "solutions"
    report.plot(tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected one of"):
        report.plot(tmp_path / "table.gif")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--questions", "0"], "--questions is 0, expected a whole number >= 1"),
        (["--questions", "5", "--recalls", "6"], "--recalls is 6, expected at most --questions, which is 5"),
        (["--json", "/nowhere/x.json"], "--json: there is no directory /nowhere"),
        (["--json", "/tmp"], "--json: /tmp is a directory"),
        (["--plot", "x.png", "--json", "x.png"], "--json and --plot name the same file"),
        (["--plot", "x.gif"], "ends in '.gif'"),
        (["--text", "/nowhere.txt"], "No such file"),
        (["--examples", "200", "--questions", "2", "--recalls", "1"], "there is room for 2048: show fewer"),
    ],
)
def test_what_cannot_be_measured_is_said_first(options, message, capsys):
    assert cli.main(["ablate", "nano", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_and_writes_what_was_found(report, tmp_path, capsys, monkeypatch):
    asked = {}

    def measured(model, tokenizer, chosen, **settings):
        asked.update(settings, names=[ablation.name for ablation in chosen])
        return report

    monkeypatch.setattr("ling3.evals.ablations.compare", measured)
    out = tmp_path / "found.json"
    options = ["--suite", "gates", "--questions", "10", "--recalls", "2", "--examples", "3"]
    assert cli.main(["ablate", "nano", *options, "--json", str(out), "--plot", str(tmp_path / "found.svg")]) == 0
    assert "KDA: no output gate" in capsys.readouterr().out
    assert (asked["questions"], asked["recalls"], asked["examples"], len(asked["names"])) == (10, 2, 3, 4)
    numbers = json.loads(out.read_text(encoding="utf-8"))
    assert numbers["settings"]["suite"] == "gates" and numbers["model"] == "nano"
    assert "<svg" in (tmp_path / "found.svg").read_text(encoding="utf-8")
    assert cli.main(["ablate", "nano", *options, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == numbers["rows"]
