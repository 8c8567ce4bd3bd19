"""`ling3 inspect`: a checkpoint's module tree, layers and memory, and what it needs on many devices."""

import dataclasses
import importlib.util
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from ling3.cli.devices import Devices, fake_devices
from ling3.cli.options import Command, Common, FileOption, Model, MoreModels, NamesOption, TextOption, WholeNumber
from ling3.cli.terminal import compiling, print_json

if TYPE_CHECKING:
    from ling3.interpret.comparison import Comparison
    from ling3.interpret.inspect import ModelReport
    from ling3.interpret.kernels import KernelReport
    from ling3.interpret.plan import MeshReport
    from ling3.train.memory import TrainingMemory

# Columns if stdout is not a terminal, so that lines for grep and files are not wrapped.
WIDE = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planning:
    """A plan for an engine on many devices, none of which need be there."""

    plan: bool = False
    """Lower and compile an engine's programs for this many devices, in bfloat16, and show the bytes on each device, the
    communication, and the least time by published rates. The devices are fake ones on the CPU."""
    topology: TextOption = None
    """Compile for a TPU slice instead, such as v6e:4x4, with the TPU compiler: pip install libtpu."""
    max_running_requests: int = 64
    """How many requests run at once."""
    max_model_len: WholeNumber = None
    """Tokens of each request, prompt and output; by default 8,192, or the model's context if that is less."""
    chunked_prefill_size: int = 512
    """Prompt tokens of one prefill call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The memory of `ling3 train`, whose options these are."""

    train: bool = False
    """Compile the programs of a step of fine-tuning, and show the memory that it needs."""
    lora: WholeNumber = None
    """The rank of the adapter; by default 16."""
    full: bool = False
    """Train all weights instead, in float32."""
    targets: NamesOption = None
    """The modules that the adapter changes: comma-separated names of transformers, or their ends; by default all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the matrices; auto is the stored one, and float32 with --full."""
    batch: int = 8
    """Texts in a step."""
    tokens: int = 2048
    """Tokens of a forward and backward pass."""
    text_tokens: WholeNumber = None
    """Tokens of the longest text; by default --tokens: one text in a pass, which needs the most memory."""
    keep_activations: bool = False
    """Keep all activations for the backward pass, instead of recomputing each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Show a checkpoint's module tree, layers and memory; reads no weights.

    ling3 inspect tiny --tp 16 --plan

    ling3 inspect tiny flash --plot memory.png
    """

    model: Model
    """A checkpoint directory, a config.json, a GGUF file, a hub id, "nano" for the one in the package, or "tiny" or
    "flash" for the published configurations."""
    others: MoreModels = ()
    """More models, to compare parameters and the memory of a sequence."""
    common: Common
    mtp: bool = False
    """Show the multi-token-prediction layers too, which are otherwise not loaded."""
    kernels: bool = False
    """Show which form of each operator runs here, and why a kernel does not suit; compiles the C++ kernels."""
    plot: FileOption = None
    """Draw the memory of a sequence against its length, 1,024 to 1,048,576 tokens, as .png, .svg or .pdf."""
    json: bool = False
    """Print one JSON object."""
    devices: Devices
    planning: Planning
    training: TrainingPlan


def run(command: Inspect) -> None:
    """Prints the report on the checkpoint, the plan, the kernels, or the comparison of several models."""
    planning = command.planning
    if command.others or command.plot is not None:
        alone = planning, command.training, command.devices, command.kernels
        if alone != (Planning(), TrainingPlan(), Devices(), False):
            raise ValueError("--plan, --train and --kernels are for one model without --plot: give them apart")
        _print(_comparison(command), json=command.json)
        return
    if not planning.plan and (command.devices != Devices() or planning.topology is not None):
        raise ValueError("--tp, --dp, --ep and --topology are for --plan: give it too")
    training = command.training
    if not training.train and training != TrainingPlan():
        raise ValueError(f"{_given(training)}: for --train: give it too")
    if planning.plan + command.kernels + training.train > 1:
        raise ValueError(
            "--plan is for devices that are not here, --kernels for the engine on this machine, and --train for "
            "training: give one of them"
        )
    if planning.plan:
        fake_devices(command.devices.count)
    from ling3.interpret import inspect

    report = inspect.report(command.model, revision=command.common.revision, mtp=command.mtp)
    shown: ModelReport | MeshReport | KernelReport | TrainingMemory = report
    if planning.plan:
        shown = _plan(command, report)
    if training.train:
        shown = _train(command, report)
    if command.kernels:
        from ling3.interpret import kernels

        shown = kernels.report(report.source, report.model)
    _print(shown, json=command.json)


def _print(shown: "ModelReport | MeshReport | KernelReport | TrainingMemory | Comparison", *, json: bool) -> None:
    if json:
        print_json(shown.to_dict())
    else:
        Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE).print(shown)


def _comparison(command: Inspect) -> "Comparison":
    from ling3.interpret import comparison, inspect

    if command.plot is not None and pathlib.Path(command.plot).suffix not in comparison.SUFFIXES:
        raise ValueError(f"--plot is {command.plot!r}; expected a file named {', '.join(comparison.SUFFIXES)}")
    models, how = (command.model, *command.others), {"revision": command.common.revision, "mtp": command.mtp}
    found = comparison.Comparison(tuple(inspect.report(model, **how) for model in models))
    if command.plot is not None:
        found.draw(command.plot)
    return found


def _plan(command: Inspect, report: "ModelReport") -> "MeshReport":
    from ling3.interpret import plan

    planning = command.planning
    topology = None if planning.topology is None else _tpus(planning.topology)
    found = (Devices(tp=1) if command.devices == Devices() else command.devices).mesh(topology)
    assert found is not None, "with an option there is a mesh"
    context, compiler = planning.max_model_len, plan.FOR_CPUS if topology is None else f"libtpu for {planning.topology}"
    if context is None:
        context = min(plan.Workload().max_model_len, report.config.max_position_embeddings)
    work = plan.Workload(planning.max_running_requests, context, planning.chunked_prefill_size)
    with compiling(Console(stderr=True)):
        return plan.report(report.model, *found, work, compiler=compiler)


def _given(training: TrainingPlan) -> str:
    """The options that are not the defaults, as they are typed."""
    default = vars(TrainingPlan())
    given = [name for name, value in vars(training).items() if value != default[name]]
    return ", ".join(f"--{name.replace('_', '-')}" for name in given)


def _train(command: Inspect, report: "ModelReport") -> "TrainingMemory":
    from ling3.checkpoint.loading import planned
    from ling3.cli.train import settings_of
    from ling3.interpret import inspect
    from ling3.train.memory import predict

    training = command.training
    settings = settings_of(vars(training))
    dtype = "float32" if training.full and training.dtype == "auto" else training.dtype
    options = {"revision": command.common.revision, "mtp": command.mtp}
    if report.stored:
        model = planned(command.model, None if dtype == "auto" else dtype, **options)
    else:
        model = inspect.report(command.model, "bfloat16" if dtype == "auto" else dtype, **options).model
    with compiling(Console(stderr=True)):
        return predict(model, settings, training.text_tokens)


def _tpus(name: str) -> list[Any]:
    """The devices of a TPU slice, for compiling only."""
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("--topology needs libtpu, the TPUs' compiler: pip install libtpu, or leave --topology out")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks Google's cloud which machine this is
    try:
        return list(topologies.get_topology_desc(name, "tpu").devices)
    except Exception as error:
        raise ValueError(f"--topology is {name!r}, which libtpu does not know: {error}") from error
