import io
import json

import pytest
from published_configs import KIMI_LINEAR, TINY
from rich.console import Console

from ling3 import cli
from ling3.interpret import inspect
from ling3.interpret.comparison import LENGTHS, Comparison

MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> tuple[inspect.ModelReport, ...]:
    directory = tmp_path_factory.mktemp("configs")
    found = []
    for name, config in {"tiny": TINY, "kimi": KIMI_LINEAR, "mistral": MISTRAL}.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
        found.append(inspect.report(directory / name / "config.json"))
    return tuple(found)


def test_a_sequences_memory(reports):
    tiny, kimi, mistral = (report.memory for report in reports)
    states = 18 * (16 * 128 * 128 * 4 + 3 * 2048 * 3 * 2)
    assert [tiny.sequence(tokens) for tokens in (0, 1000)] == [states, states + 1000 * 6 * 576 * 2]
    entry = 32 * 2 * 8 * 128 * 2
    assert [mistral.sequence(tokens) for tokens in (4095, 4096, 10**6)] == [4095 * entry, 4096 * entry, 4096 * entry]
    assert kimi.window is None and kimi.sequence(2**20) < 8 * 2**30


def test_the_table_and_the_plot_have_each_model(reports, tmp_path):
    comparison = Comparison(reports)
    found = comparison.to_dict()["models"]
    assert [model["bytes_per_sequence"][str(LENGTHS[0])] for model in found] == [
        report.memory.sequence(1024) for report in reports
    ]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(comparison)
    assert "512 MiB" in console.export_text()  # Mistral's window
    comparison.draw(tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("tiny", "kimi", "mistral"))


def test_the_command(tmp_path, capsys):
    assert cli.main(["inspect", "nano", "tiny", "--plot", str(tmp_path / "memory.png"), "--json"]) == 0
    assert [model["source"] for model in json.loads(capsys.readouterr().out)["models"]] == ["nano", "tiny"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["inspect", "nano", "--plot", "memory.txt"]) == 2
    assert "expected a file named .pdf, .png, .svg" in capsys.readouterr().err
    assert cli.main(["inspect", "nano", "tiny", "--kernels"]) == 2
    assert "are for one model" in capsys.readouterr().err
