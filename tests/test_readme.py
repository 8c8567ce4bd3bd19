"""The README's Python runs as it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ten_lines, engine, cut = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    scope = {}
    exec(ten_lines, scope)
    assert capsys.readouterr().out.strip() == "16 - 12 = 4. 4 + 18 = 22. The answer is 22."
    assert scope["logits"].shape == (1, len(scope["ids"]), scope["model"].config.vocab_size)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    exec(engine, scope)
    assert "The answer is 22. stop" in capsys.readouterr().out
    exec(cut, scope)
    assert scope["cut"].config.at(0).kda_output_gate == "none" and scope["seen"].kda[0].decay.shape[:2] == (
        1,
        len(scope["ids"]),
    )


def test_the_map_names_every_file():
    root = README.parent / "ling3"
    text = README.read_text(encoding="utf-8")
    for path in root.iterdir():
        if path.name not in ("__pycache__", "py.typed", "version.py"):
            name = f"{path.name}/" if path.is_dir() else path.name
            assert name in text, f"{name} is not on the README's map"
