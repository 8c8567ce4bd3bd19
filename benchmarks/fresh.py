"""Measurements that need a fresh process: the time of a cold start, and peak memory.

    python -m benchmarks.fresh ACTION ARGUMENT

prints one JSON object on stdout. `ask` starts such a process and reads the object.
"""

import importlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROBES = ("lm_head.weight", "model.layers.1.mlp.experts.3.gate_proj.weight", "model.norm.weight")
"""Tensors whose sums are compared between ways to load them."""


def ask(action: str, argument: str | Path = "", environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The object that a fresh process prints. Raises RuntimeError with the end of its stderr if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fresh", action, str(argument)],
        cwd=ROOT,
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a fresh process for {action} ended with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def load_ling3(directory: str) -> dict[str, Any]:
    """Loads a checkpoint as float32 and touches every page of it."""
    import jax  # noqa: PLC0415 -- an action imports only what it needs
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    import ling3  # noqa: PLC0415

    before, begin = _peak(), time.perf_counter()
    model = ling3.load(directory, dtype=jnp.float32)
    arrays = jax.tree.leaves(model)
    # numpy shares the buffers; this reads one number of each page.
    touched = sum(float(np.asarray(array).reshape(-1)[::1024].sum()) for array in arrays)
    seconds = time.perf_counter() - begin
    sums = [
        np.asarray(model.lm_head.weight[:8]),
        np.asarray(model.model.layers[1].mlp.experts.gate_proj.weight[3, :8]),
        np.asarray(model.model.norm.weight[:8]),
    ]
    return {
        "seconds": seconds,
        "peak_bytes": _peak(),
        "before_bytes": before,
        "model_bytes": sum(array.nbytes for array in arrays),
        "sums": [float(np.sum(x, dtype=np.float64)) for x in sums],
        "touched": touched,
    }


def load_stored(directory: str) -> dict[str, Any]:
    """Loads a checkpoint in its stored dtypes and touches every page of it."""
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    import ling3  # noqa: PLC0415
    from ling3.leaves import array_leaves  # noqa: PLC0415

    begin = time.perf_counter()
    model = ling3.load(directory)
    touched = sum(int(np.asarray(array).reshape(-1).view(np.uint8)[::4096].sum()) for array in jax.tree.leaves(model))
    seconds, peak = time.perf_counter() - begin, _peak()
    whole = [leaf for leaf in array_leaves(model) if ".experts." not in leaf.path and leaf.value.ndim == 2]
    sums = {leaf.path: float(np.asarray(leaf.value).astype(np.float64).sum()) for leaf in whole[-3:]}
    return {"seconds": seconds, "peak_bytes": peak, "touched": touched, "sums": sums}


def read(file: str) -> dict[str, Any]:
    """Reads a file into memory, with numpy."""
    import numpy as np  # noqa: PLC0415

    begin = time.perf_counter()
    found = np.fromfile(file, np.uint8)
    return {"seconds": time.perf_counter() - begin, "bytes": found.nbytes}


def load_transformers(directory: str) -> dict[str, Any]:
    """Does the same as `load_ling3` with transformers."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.set_num_threads(os.cpu_count() or 1)
    transformers.utils.logging.disable_progress_bar()
    before, begin = _peak(), time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tensors = [*model.parameters(), *model.buffers()]
    touched = sum(float(tensor.detach().reshape(-1)[::1024].sum()) for tensor in tensors)
    seconds = time.perf_counter() - begin
    gate_up = model.model.layers[1].mlp.experts.gate_up_proj
    sums = [model.lm_head.weight[:8], gate_up[3, :8], model.model.norm.weight[:8]]
    return {
        "seconds": seconds,
        "peak_bytes": _peak(),
        "before_bytes": before,
        "model_bytes": sum(tensor.nbytes for tensor in tensors),
        "sums": [float(x.detach().double().sum()) for x in sums],
        "touched": touched,
    }


def train_ling3(argument: str) -> dict[str, Any]:
    """Fine-tunes an adapter with ling3; `argument` is a JSON object with what `benchmarks.cases.training` gives."""
    import jax.numpy as jnp  # noqa: PLC0415

    import ling3  # noqa: PLC0415
    from ling3 import train  # noqa: PLC0415

    given = json.loads(argument)
    before, model = _peak(), ling3.load(given["model"], dtype=jnp.dtype(given["dtype"]))
    texts = [train.TrainingText(tuple(row), (False, *[True] * (len(row) - 1))) for row in given["rows"]]
    how = {"lora": given["rank"], "targets": tuple(given["targets"]), "steps": given["steps"], "warmup": 0}
    settings = train.FineTuning(batch=len(texts), tokens=given["tokens"], **how)
    log = train.finetune(model, texts, None, settings).log
    seconds = (log[-1]["seconds"] - log[0]["seconds"]) / (len(log) - 1)
    return {"losses": [p["loss"] for p in log], "seconds": seconds, "peak_bytes": _peak(), "before_bytes": before}


def train_peft(argument: str) -> dict[str, Any]:
    """Does the same as `train_ling3` with transformers and PEFT, from the same first adapter."""
    import peft  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    given, steps = json.loads(argument), []
    torch.set_num_threads(os.cpu_count() or 1)
    transformers.utils.logging.disable_progress_bar()
    before = _peak()
    base = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, given["dtype"]))
    model: Any = peft.PeftModel.from_pretrained(base, given["adapter"], is_trainable=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, given["steps"])
    rows = torch.tensor(given["rows"])
    passes = rows.split(max(1, given["tokens"] // rows.shape[1]))
    for _ in range(given["steps"]):
        optimizer.zero_grad()
        loss = 0.0
        for batch in passes:
            part = model(batch, labels=batch, use_cache=False).loss * len(batch) / len(rows)
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        steps.append((loss, time.perf_counter()))
    seconds = (steps[-1][1] - steps[0][1]) / (len(steps) - 1)
    return {"losses": [loss for loss, _ in steps], "seconds": seconds, "peak_bytes": _peak(), "before_bytes": before}


def compile_program(which: str) -> dict[str, Any]:
    """Traces and compiles one of the engine's programs for the whole Ling-3.0-tiny, from shapes alone."""
    scale, program = which.split(":")
    import jax  # noqa: PLC0415

    from benchmarks.programs import lowered  # noqa: PLC0415

    jax.config.update("jax_enable_compilation_cache", False)
    begin = time.perf_counter()
    low, arguments = lowered(scale, program)
    traced = time.perf_counter() - begin
    compiled = low.compile()
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    return {
        "seconds": seconds,
        "trace_seconds": traced,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "arguments": arguments,
    }


def import_package(name: str) -> dict[str, Any]:
    """Imports a package and its public names, which may be loaded lazily."""
    begin = time.perf_counter()
    package = importlib.import_module(name)
    for public in getattr(package, "__all__", ()):
        getattr(package, public)
    return {"seconds": time.perf_counter() - begin, "peak_bytes": _peak()}


def _peak() -> int:
    """The peak resident memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


ACTIONS = {
    "load-ling3": load_ling3,
    "load-stored": load_stored,
    "load-transformers": load_transformers,
    "train-ling3": train_ling3,
    "train-peft": train_peft,
    "read": read,
    "compile": compile_program,
    "import": import_package,
}

if __name__ == "__main__":
    print(json.dumps(ACTIONS[sys.argv[1]](sys.argv[2])))
