"""What the commands share: options, and the checkpoint and files that they name."""

import contextlib
import dataclasses
import json
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.text import Text

from ling3.cli.terminal import count, print_json

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jaxtyping import DTypeLike

    from ling3.bench.report import Report
    from ling3.engine.sampling_params import SamplingParams
    from ling3.engine.settings import EngineSettings
    from ling3.interpret.ablation_report import Report as AblationReport
    from ling3.mesh import Rules
    from ling3.model import CausalLM
    from ling3.serve import Server
    from ling3.text.tokenizer import Tokenizer

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

# Seconds after which a first compilation is announced.
PATIENCE = 2.0


def _optional(metavar: str, read: Callable[[str], Any]) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    """How an optional value is read; the help text says what happens without it.

    tyro's own form of `int | None` shows NoneType in its help and accepts the text "None".
    """
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, (str, int)),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"found {word!r}, expected a whole number") from None


NO_DEFAULT = tyro.conf.arg(help_behavior_hint="")
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
TextOption = Annotated[str | None, _optional("TEXT", str), NO_DEFAULT]
FileOption = Annotated[str | None, _optional("FILE", str), NO_DEFAULT]
WholeNumber = Annotated[int | None, _optional("INT", _whole), NO_DEFAULT]
Thinking = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and where a text ends."""

    temperature: float = 0.0
    """0 takes the most likely token each time."""
    top_p: float = 1.0
    """Sample from the fewest tokens that together are at least this likely."""
    top_k: WholeNumber = None
    """Sample from this many most likely tokens."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and text less likely."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the text has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the text has it."""
    min_tokens: int = 0
    """No text ends before it has this many tokens."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="TEXT")] = ()
    """End a text before this string; may be given several times."""
    ignore_eos: bool = False
    """Go on to --max-tokens, past the model's own end."""

    def params(self, **others: Any) -> "SamplingParams":
        """These options and `others` as SamplingParams; ValueError for senseless values."""
        from ling3.engine.sampling_params import SamplingParams

        return SamplingParams(**dataclasses.asdict(self), **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """What is common to all commands."""

    model: Model
    """A checkpoint directory, a hub id, or "nano" for the checkpoint in the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Which version of the checkpoint, and how errors are shown."""

    revision: TextOption = None
    """A branch, a tag or a commit, where MODEL is a hub id; the branch main without it."""
    debug: bool = False
    """Show the traceback of an error, and check the types of what functions are given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading(Common):
    """Which weights, and how errors are shown."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The matrices' type; auto is as stored, and bfloat16 for random weights."""
    random_weights: bool = False
    """Draw weights at random. MODEL may then be a directory without weights, or a config.json."""
    weights_seed: WholeNumber = None
    """With --random-weights: what they are drawn from; 0 without it."""

    def source(self, model: str, devices: "Devices | None" = None) -> "Source":
        """Where MODEL and its tokenizer come from; a branch of the hub is resolved to a commit now."""
        from ling3.checkpoint import hub

        path, seed = model, None
        if self.random_weights:
            seed = self.weights_seed or 0
            if not 0 <= seed < 2**32:
                raise ValueError(f"--weights-seed is {seed}, expected a whole number in [0, 2**32)")
            file = pathlib.Path(path)
            path = str(file.parent) if file.is_file() else path
        elif self.weights_seed is not None:
            raise ValueError("--weights-seed is for --random-weights")
        return Source(model, path, hub.pin(path, self.revision), self.dtype, seed, devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """Over how many devices the model lies; on one without these."""

    tp: WholeNumber = None
    """Devices that share the heads, channels and vocabulary of every layer; 1 without it."""
    dp: WholeNumber = None
    """Groups of so many devices, each with its own requests; 1 without it."""
    ep: WholeNumber = None
    """Devices that share the experts: --tp of them, all of --dp times --tp, or --dp where each has all heads; as many
    as --tp without it. With 1 the channels of every expert are shared instead."""

    def slots(self, requests: int) -> int:
        """So many requests at once, or a few more, that each group of devices has as many."""
        groups = self._size("dp")
        return -(-requests // groups) * groups

    @property
    def count(self) -> int:
        """How many devices these are."""
        return self._size("dp") * self._size("tp")

    def mesh(self, devices: Sequence[Any] | None = None) -> "tuple[Mesh, Rules] | None":
        """The first of `devices` (JAX's own without them) as a mesh of ("data", "tensor"), and what is cut along it.

        None without options. ValueError for senseless numbers, and for more devices than there are.
        """
        import jax

        if self == type(self)():
            return None
        rules, devices = self.rules(), jax.devices() if devices is None else devices
        if self.count > len(devices):
            on_cpus = f"; XLA_FLAGS=--xla_force_host_platform_device_count={self.count} makes a CPU as many, for trials"
            raise ValueError(
                f"{self._named()} are {self.count} devices, and there are {len(devices)} "
                f"({devices[0].platform}){on_cpus if devices[0].platform == 'cpu' else ''}"
            )
        sizes = (self._size("dp"), self._size("tp"))
        return jax.make_mesh(sizes, ("data", "tensor"), devices=devices[: self.count]), rules

    def rules(self) -> "Rules":
        """What is cut along which axis; ValueError if no axes have --ep devices."""
        from ling3.mesh import Rules

        dp, tp = self._size("dp"), self._size("tp")
        shared = {dp * tp: ("data", "tensor"), dp: "data", 1: None, tp: "tensor"}
        ep = tp if self.ep is None else self._size("ep")
        if ep not in shared:
            fits = ", ".join(map(str, sorted(shared)))
            raise ValueError(f"--ep is {ep}, expected one of {fits}, which are axes of {self._named()}")
        return Rules(experts=shared[ep])

    def _size(self, name: str) -> int:
        size = getattr(self, name)
        if size is not None and size < 1:
            raise ValueError(f"--{name} is {size}, expected at least 1")
        return 1 if size is None else size

    def _named(self) -> str:
        return f"--dp {self._size('dp')} --tp {self._size('tp')}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines(Devices):
    """Over how many devices the model lies, and in how many processes; on one device without these."""

    tp: WholeNumber = None
    """Devices that share the heads, channels and vocabulary of every layer; 1 without it, with --nnodes all."""
    nnodes: WholeNumber = None
    """Processes that run this command together, each with its own devices. The first one prints and writes."""
    node_rank: WholeNumber = None
    """With --nnodes: this process's number, from 0 on; NODE_RANK without it."""
    dist_init_addr: TextOption = None
    """With --nnodes: HOST:PORT of the first process; DIST_INIT_ADDR without it. If neither is set, both are found from
    Slurm, Open MPI, Kubernetes or a TPU pod."""

    def connect(self) -> bool:
        """Connects this process with the others, if there are any; True if it is not the first.

        ValueError for options that do not fit together.
        """
        import os

        if self.nnodes is None:
            for name in ("node_rank", "dist_init_addr"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} is for --nnodes: say how many processes there are")
            return False
        import jax

        from ling3.runtime.processes import connect

        if self.nnodes < 1:
            raise ValueError(f"--nnodes is {self.nnodes}, expected at least 1")
        rank, address = self.node_rank, self.dist_init_addr or os.environ.get("DIST_INIT_ADDR")
        if rank is None and "NODE_RANK" in os.environ:
            try:
                rank = _whole(os.environ["NODE_RANK"])
            except ValueError as error:
                raise ValueError(f"NODE_RANK: {error}") from None
        if (rank is None) != (address is None):
            missing = "--node-rank (or NODE_RANK)" if rank is None else "--dist-init-addr (or DIST_INIT_ADDR)"
            raise ValueError(f"--nnodes is {self.nnodes}, and {missing} is missing: give both, or neither on a cluster")
        own = "waiting for" if rank is None else f"process {rank} waits at {address} for"
        with announced(f"{own} the others of {self.nnodes} processes…"):
            connect(self.nnodes if rank is not None else None, rank, address)
        if jax.process_count() != self.nnodes:
            raise ValueError(f"--nnodes is {self.nnodes}, and the cluster has started {jax.process_count()} processes")
        return jax.process_index() > 0

    def mesh(self, devices: Sequence[Any] | None = None) -> "tuple[Mesh, Rules] | None":
        """The same; of several processes all devices are to be used."""
        import jax

        if self.nnodes is not None and self.count < len(found := jax.devices()):
            raise ValueError(
                f"{self._named()} are {self.count} devices, and {self.nnodes} processes have {len(found)}: use all"
            )
        return super().mesh(devices)

    def _size(self, name: str) -> int:
        if name == "tp" and self.tp is None and self.nnodes is not None:
            import jax

            return max(1, len(jax.devices()) // self._size("dp"))
        return super()._size(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving(Loading):
    """Which weights, on how many engines, and how errors are shown."""

    replicas: WholeNumber = None
    """Share the prompts among so many engines, each in a process of its own (extra: fleet), with the same answers."""
    ray_address: TextOption = None
    """With --replicas: the Ray cluster to run them on, as HOST:PORT, or auto for this machine's; without it they run
    here."""

    def check(self, devices: "Machines") -> None:
        """ValueError for senseless options, before any work."""
        if self.replicas is not None and devices.nnodes is not None:
            raise ValueError("--nnodes is for one model over several machines, and --replicas for many: give one")
        if self.replicas is not None and self.replicas < 1:
            raise ValueError(f"--replicas is {self.replicas}, expected at least 1")
        if self.ray_address is not None and self.replicas is None:
            raise ValueError("--ray-address is for --replicas")

    @contextlib.contextmanager
    def serve(
        self, source: "Source", tokenizer: "Tokenizer", settings: "EngineSettings", console: Console
    ) -> "Iterator[Served]":
        """Loads the model, says which it is, and serves it."""
        from ling3.evals.predictions import fingerprint
        from ling3.serve import Engine

        if self.replicas is None:
            model = source.load(tokenizer)
            source.introduce(model, console)
            yield Served(Engine(model, tokenizer, settings), lambda: fingerprint(model))
            return
        from ling3.fleet import Fleet

        with Fleet(source, self.replicas, settings=settings, address=self.ray_address) as fleet:
            source.say(fleet.parameters, fleet.dtype, f"{self.replicas} × {fleet.platform}", console)
            yield Served(fleet, lambda: fleet.fingerprint)


@dataclasses.dataclass(frozen=True)
class Served:
    """What answers prompts, and how the model that it has is identified."""

    server: "Server"
    fingerprint: Callable[[], str]


def fake_devices(count: int) -> None:
    """Makes the CPU as many devices, and JAX's default; only before JAX has looked for devices."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # it has: `Devices.mesh` says if there are too few
        jax.config.update("jax_num_cpu_devices", count)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a command's model and tokenizer come from, both of one commit."""

    name: str
    """MODEL, as it was given."""
    path: str
    """`ling3.load`'s path; the directory if a config.json was given."""
    revision: str | None
    """The commit, for a hub id."""
    dtype: str
    seed: int | None
    """What random weights are drawn from; None for the checkpoint's own."""
    devices: Devices | None = None
    """Where the model lies; None for one device."""

    def config(self) -> Any:
        """The model's configuration, without its weights."""
        from ling3.checkpoint import hub
        from ling3.families import read_config

        given = pathlib.Path(self.name)
        return read_config(given if given.is_file() else hub.resolve(self.path, ("config.json",), self.revision))

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer; FileNotFoundError if there is none."""
        from ling3.text.tokenizer import load_tokenizer

        return load_tokenizer(self.path, revision=self.revision)

    def load(self, tokenizer: "Tokenizer | None") -> "CausalLM":
        """The model, which has to fit the tokenizer."""
        import jax.numpy as jnp

        from ling3 import checkpoint
        from ling3.runtime import compilation_cache

        compilation_cache.switch_on()
        dtype = None if self.dtype == "auto" else jnp.dtype(self.dtype)
        mesh, rules = (None if self.devices is None else self.devices.mesh()) or (None, None)
        if self.seed is None:
            model = checkpoint.load(self.path, dtype, revision=self.revision, mesh=mesh, rules=rules)
        else:
            model = self._random(self.seed, jnp.dtype(jnp.bfloat16) if dtype is None else dtype, mesh, rules)
        if tokenizer is not None:
            tokenizer.check_fits(model.config.vocab_size)
        return model

    def _random(self, seed: int, dtype: "DTypeLike", mesh: "Mesh | None", rules: "Rules | None") -> "CausalLM":
        """A model of random weights; ValueError if they do not fit into the free memory."""
        import jax

        from ling3.checkpoint.names import structure
        from ling3.engine.memory import free_bytes
        from ling3.families import init

        config = self.config()
        arrays = jax.tree.leaves(structure(config, dtype))
        # Each array is drawn in float32: its random bits, their values, and these scaled are there at once.
        needed = sum(array.size * array.dtype.itemsize for array in arrays) + 12 * max(array.size for array in arrays)
        if needed > (free := free_bytes()):
            raise ValueError(
                f"{self.name}: drawing {count(sum(array.size for array in arrays))} weights in "
                f"{dtype} takes {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free: give a smaller "
                "config.json, or a narrower --dtype"
            )
        return init(config, key=jax.random.key(seed), dtype=dtype, mesh=mesh, rules=rules)

    def follow(self, before: "Callable[[CausalLM], Any] | None" = None) -> None:
        """This process's part in what the first one does with the model, `before` it asks the engine anything."""
        from ling3.serve import Engine

        try:
            tokenizer = self.tokenizer()
        except FileNotFoundError:
            tokenizer = None
        model = self.load(tokenizer)
        engine = Engine(model, tokenizer)
        if before is not None:
            before(model)
        engine.follow()

    def introduce(self, model: "CausalLM", console: Console) -> None:
        """Says which model runs where."""
        import jax

        self.say(model.parameters, model.dtype.name, jax.default_backend(), console)

    def say(self, parameters: int, dtype: str, where: str, console: Console) -> None:
        """Says how large the model is."""
        kind = "parameters" if self.seed is None else "random parameters"
        console.print(Text(f"{self.name}: {count(parameters)} {kind}, {dtype}, on {where}", "bold"), soft_wrap=True)


def follow(command: Any) -> None:
    """The part of a process that is not the first in a command."""
    command.common.source(command.model, command.devices).follow()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where the numbers go besides, or instead of, the table."""

    json: FileOption = None
    """Write the numbers there as JSON; - prints them instead of the table."""
    plot: FileOption = None
    """Draw them there (PNG, PDF or SVG)."""

    def check(self) -> None:
        """ValueError for files that could not be written, before any work."""
        from ling3.bench.report import check_plot

        if self.json not in (None, "-"):
            check_directory("--json", self.json)
        if self.plot is None:
            return
        check_plot(self.plot)
        if self.json is not None and pathlib.Path(self.plot).absolute() == pathlib.Path(self.json).absolute():
            raise ValueError(f"--json and --plot name the same file, {self.json}: give two")

    def write(self, report: "Report | AblationReport", width: int) -> None:
        """Prints the table, of at least `width` columns since rich leaves out what does not fit, or JSON; the files."""
        if self.json == "-":
            print_json(report.to_dict(), indent=1)
        else:
            Console(width=max(width, Console().width)).print(report)
        if self.json not in (None, "-"):
            numbers = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
            pathlib.Path(self.json).write_text(numbers + "\n", encoding="utf-8")
        if self.plot is not None:
            report.plot(self.plot)


@contextlib.contextmanager
def compiling(console: Console) -> Iterator[None]:
    """Says on stderr that programs are being compiled, once that has taken `PATIENCE` seconds."""
    with announced("compiling (first time)…", console):
        yield


@contextlib.contextmanager
def announced(words: str, console: Console | None = None) -> Iterator[None]:
    """Says on stderr what is going on, once that has taken `PATIENCE` seconds."""
    console = Console(stderr=True, highlight=False) if console is None else console
    how = {"style": "dim", "markup": False, "soft_wrap": True}
    timer = threading.Timer(PATIENCE, console.print, [words], how)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def chat_ids(tokenizer: "Tokenizer", messages: list[dict[str, str]], thinking: Thinking) -> list[int]:
    """The prompt for `messages`, by the checkpoint's chat template; `auto` is the template's own choice."""
    if thinking == "auto":
        return tokenizer.apply_chat_template(messages)
    return tokenizer.apply_chat_template(messages, enable_thinking=thinking == "on")


def check_directory(option: str, path: str) -> None:
    """ValueError if `option` names no file, or one in no directory: before the work whose result would go there."""
    if not path:
        raise ValueError(f"{option}: it is empty, expected the name of a file")
    if pathlib.Path(path).is_dir():
        raise ValueError(f"{option}: {path} is a directory, expected the name of a file")
    directory = pathlib.Path(path).absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{option}: there is no directory {directory}: make it first")


def read_text(path: str) -> str:
    """The text of a file in UTF-8, or of standard input for -; ValueError if it is not UTF-8."""
    content = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}): convert it first") from error
