"""A model on many devices on paper: its bytes by hand, and the page that shows them."""

import dataclasses
import importlib.util
import io
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from tiny import TINY

from ling3 import cli
from ling3.afd.cost import Hardware
from ling3.checkpoint.names import structure
from ling3.interpret import plan
from ling3.mesh import MeshError, Rules
from ling3.mesh.chips import Chip

CONFIG = dataclasses.replace(TINY, hidden_size=64, num_attention_heads=4)
"""A layer of KDA with a dense MLP, one of KDA with 8 experts, and one of MLA with as many."""
WORK = plan.Workload(max_running_requests=4, max_model_len=64, chunked_prefill_size=16, page_size=32)
DOCS = pathlib.Path(__file__).parents[2] / "docs"

spec = importlib.util.spec_from_file_location("docs_plan", DOCS / "plan.py")
assert spec is not None and spec.loader is not None
docs_plan = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs_plan)


def planned(tensor, data=1, rules=None, **how):
    mesh = jax.make_mesh((data, tensor), ("data", "tensor"), devices=jax.devices()[: data * tensor])
    return plan.report(structure(CONFIG, jnp.bfloat16), mesh, rules, WORK, **{"compiler": None, "platforms": (), **how})


@pytest.fixture(scope="module")
def two():
    return planned(2, compiler=plan.FOR_CPUS, platforms=("tpu", "abacus"))


@pytest.mark.slow
def test_bytes_of_a_device(two):
    recurrent, conv = 2 * 4 * 8 * 8 * 4, 2 * 3 * 3 * 32 * 2
    assert two.slots == 4 * (recurrent + conv) // 2, "two layers of KDA, and half of their heads"
    assert two.pages == 4 * 64 * (16 + 4) * 2, "one layer of MLA, whole on each device"
    assert two.adjustments == 4 * (8 * 96 + 3 * 4 + 1)
    assert two.all_weights == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(structure(CONFIG, jnp.bfloat16)))
    experts = 2 * 8 * 3 * 16 * 64 * 2
    assert experts / 2 + two.whole < two.weights < two.all_weights


@pytest.mark.slow
def test_bytes_of_a_device_in_groups(two):
    divided = planned(2, data=2, rules=Rules(experts=("data", "tensor")))
    experts = 2 * 8 * 3 * 16 * 64 * 2
    assert divided.slots == two.slots // 2 and divided.pages == two.pages // 2
    assert two.weights - divided.weights == experts / 4


@pytest.mark.slow
def test_programs_are_the_engines(two):
    decode, prefill = two.programs
    assert (decode.tokens, prefill.tokens) == (4, 16)
    assert decode.lowered["tpu"] == "yes" and decode.lowered["abacus"].startswith("no (")
    # A prefill samples nothing, and so leaves out the last layer's experts.
    for program, tokens, layers in ((decode, 4, 2), (prefill, 16, 1)):
        experts = [each for each in program.collectives if each.source.endswith(".mlp.experts")]
        assert [each.result for each in experts] == [f"f32[{tokens * 2},64]"] * layers, "a row for each choice"
        [o_proj, _] = [each for each in program.collectives if each.source.endswith("o_proj")]
        assert o_proj.bytes == tokens * 32 * 2, "bfloat16, as an accelerator has it"
        assert program.compiled is not None and program.compiled.temporaries > 0
        assert len(program.compiled.collectives) == len(program.collectives)


@pytest.mark.slow
def test_time_is_bounded_by_rates(two):
    decode, _ = two.programs
    chip = Chip("slow", Hardware(1.0, 1e6, 1e9, 1e3, 0.5), group=2)
    own = decode.seconds(chip)
    assert own["memory"] == decode.read / 1e6 and own["products"] == decode.flops / 1e9
    assert own["links"] == pytest.approx(sum(each.sent for each in decode.collectives) / 1e3 + 0.5 * 10)
    assert decode.bound(chip) == max(own["memory"], own["products"]) + own["links"]
    far = dataclasses.replace(chip, group=1, network=500.0)
    assert decode.seconds(far)["links"] == pytest.approx(2 * own["links"] - 5)
    seen = 1 - (1 - 2 / 8) ** 4
    routed = 2 * 8 * 3 * 16 * 64 * 2 // 2
    table = 64 * 2 * 64
    assert decode.read == two.weights - table - routed + round(routed * seen) + 2 * two.slots + two.pages


@pytest.mark.slow
def test_what_is_shown(two):
    out = io.StringIO()
    Console(file=out, width=160).print(two)
    for said in (
        "2 devices: 1 data x 2 tensor",
        "all-reduce  layers.*.mlp.experts",
        "lowered: tpu yes, abacus no",
        "by XLA for CPUs: ",
        "H200 SXM",
        "Real times are longer.",
    ):
        assert said in out.getvalue(), said
    raw = json.loads(json.dumps(two.to_dict()))
    assert raw["programs"][0]["sent"] == round(two.programs[0].sent)
    assert raw["programs"][0]["least_seconds"]["TPU v6e"]["all"] == two.programs[0].bound(plan.CHIPS[0])


def test_what_cannot_be_planned():
    with pytest.raises(MeshError, match="heads are 4"):
        planned(3)
    with pytest.raises(ValueError, match=r"^4 requests cannot be dealt to 3 groups"):
        planned(1, data=3)
    with pytest.raises(ValueError, match=r"^max_model_len is 0, expected at least 1$"):
        plan.Workload(max_model_len=0)


@pytest.mark.slow
def test_the_command(two, tmp_path, capsys, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    assert cli.main(["inspect", str(path), "--tp", "2"]) == 2
    assert "are for --plan: give it too" in capsys.readouterr().err
    monkeypatch.setattr(plan, "FOR_CPUS", None)  # not compiled once more
    work = ["--max-running-requests", "4", "--max-model-len", "64", "--chunked-prefill-size", "16"]
    assert cli.main(["inspect", str(path), "--tp", "2", "--plan", "--json", *work]) == 0
    raw = json.loads(capsys.readouterr().out)
    assert raw["sizes"] == {"data": 1, "tensor": 2} and raw["workload"]["max_model_len"] == 64
    assert raw["weights"] == two.weights and raw["slots"] == two.slots
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["inspect", str(path), "--tp", "2", "--plan", "--topology", "v6e:1x2"]) == 2
    assert "--topology needs libtpu, the TPUs' compiler: pip install libtpu" in capsys.readouterr().err
    assert cli.main(["inspect", str(path), "--tp", "16", "--plan"]) == 2
    assert "--dp 1 --tp 16 are 16 devices, and there are 8" in capsys.readouterr().err


NUMBERS = """
import json, sys
import jax
import jax.numpy as jnp
import ling3
jax.config.update("jax_num_cpu_devices", 16)
ling3.leave_types_unchecked()
from ling3.checkpoint.names import structure
from ling3.families.ling3_config import Ling3Config
from ling3.interpret import plan
model = structure(Ling3Config.from_dict(json.load(sys.stdin)), jnp.bfloat16)
mesh = jax.make_mesh((1, 16), ("data", "tensor"))
print(json.dumps(plan.report(model, mesh, compiler=None, platforms=()).to_dict()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", docs_plan.configs())
def test_the_page_is_current(name):
    """All but what a compiler says, for which `make plan` takes minutes."""
    given = json.dumps(docs_plan.configs()[name])
    done = subprocess.run([sys.executable, "-c", NUMBERS], input=given, capture_output=True, text=True, check=True)
    written = json.loads((DOCS / "plan.json").read_text())[name]
    for program in written["programs"]:
        assert program.pop("compiled")["temporaries"] > 0 and set(program.pop("lowered").values()) == {"yes"}
    current = json.loads(done.stdout)
    for program in current["programs"]:
        del program["compiled"], program["lowered"]
    assert current == written


def test_the_page_has_the_numbers():
    page = (DOCS / "mesh.md").read_text(encoding="utf-8")
    assert page == docs_plan.written(page, json.loads((DOCS / "plan.json").read_text()))
