"""The table of `ling3 inspect --kernels`: a form for every operator, and the reason."""

import dataclasses
import io
import logging

import jax
import jax.numpy as jnp
import pytest
from native_kernels import installed, needs_compiler
from rich.console import Console
from tiny import TINY, open_model

from ling3 import cli
from ling3.execution import CPU, PLAIN, Execution
from ling3.interpret import kernels
from ling3.ops import forms

pytestmark = pytest.mark.thorough


def by_operator(report):
    return {(row.operator, row.call): row for row in report.rows}


def operators(execution):
    return {name for name, form in vars(execution).items() if callable(form)}


def test_every_operator_has_a_form_and_a_reason():
    report = kernels.report("tiny", open_model(TINY), CPU)
    assert {row.operator for row in report.rows} == operators(CPU)
    rows = by_operator(report)
    assert rows["kda_step", "decode"].why == "a row's state has less than 16,384 bytes"
    assert rows["kda_step", "decode"].times == 2 and rows["kda_step", "decode"].form == "plain"
    assert rows["paged_attention", "prefill"].why == "entries are expanded to keys and values"
    assert not any(row.form.startswith("cpu.") for row in report.rows if row.times)
    out = io.StringIO()
    Console(file=out, width=160).print(report)
    assert "a row's state has less than 16,384 bytes" in out.getvalue()


def test_the_plain_table_asks_no_kernel():
    report = kernels.report("tiny", open_model(TINY), PLAIN)
    assert {(row.form, row.times) for row in report.rows} == {("plain", 0)}


@pytest.mark.slow
@needs_compiler
def test_kernels_that_run():
    with installed():
        rows = by_operator(kernels.report("tiny", open_model(TINY), CPU))
    for operator, call, form in (
        ("short_conv", "decode", "cpu.conv"),
        ("short_conv", "prefill", "cpu.conv"),
        ("kda_step", "decode", "cpu.kda"),
        ("chunk_kda", "prefill", "cpu.kda"),
        ("experts", "decode", "cpu.experts"),
        ("latent_attention", "decode", "cpu.attention"),
        ("latent_queries", "decode", "cpu.absorption"),
        ("take_rows", "decode", "cpu.rows"),
        ("likeliest", "decode", "cpu.logits"),
        ("draw", "decode", "cpu.drawing"),
    ):
        assert (rows[operator, call].form, rows[operator, call].why) == (form, forms.RUNS)


def test_a_missing_library_says_why():
    """As where LING3_NATIVE is off, which the tests say."""
    model = open_model(dataclasses.replace(TINY, head_dim=256, num_attention_heads=1))
    why = {row.why for row in kernels.report("wide", model, CPU).rows if row.operator == "kda_step"}
    assert why == {"LING3_NATIVE is off"}


def test_the_gpus_reasons():
    rows = by_operator(kernels.report("tiny", open_model(TINY), Execution.default("gpu")))
    assert rows["experts", "decode"].why == "the hidden or the intermediate size is no multiple of 64"
    assert rows["kda_step", "decode"].form == "gpu.kda"


def test_the_reasons_are_logged(caplog):
    state = jnp.zeros((1, 2, 8, 8))
    with caplog.at_level(logging.DEBUG, logger="ling3.forms"):
        jax.eval_shape(CPU.kda_step, *[state[..., 0]] * 4, state[:, :, 0, 0], state)
    assert caplog.messages == ["kda_step: a row's state has less than 16,384 bytes"]


def test_the_command(capsys):
    assert cli.main(["inspect", "nano", "--kernels"]) == 0
    assert "latent_attention" in capsys.readouterr().out
    assert cli.main(["inspect", "nano", "--kernels", "--plan"]) == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("execution", [PLAIN, CPU])
def test_tracing_leaves_the_log_as_it_was(execution):
    before = forms.LOG.level, list(forms.LOG.handlers)
    kernels.report("tiny", open_model(TINY), execution)
    assert (forms.LOG.level, forms.LOG.handlers) == before
