"""`ling3 serve`: an HTTP server of OpenAI's and Anthropic's protocols."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from ling3.cli import descendants, interruption
from ling3.cli.bench import EngineOptions
from ling3.cli.devices import Machines
from ling3.cli.loading import Loading, ModelSource
from ling3.cli.options import Command, FileOption, TextOption, WholeNumber
from ling3.cli.terminal import announced, compiling

if TYPE_CHECKING:
    from ling3.engine.settings import EngineSettings
    from ling3.server.service import Service


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(Command):
    """Answer chats over HTTP, in OpenAI's and Anthropic's protocols (extra: serve).

    ling3 serve nano --port 8000
    """

    common: Loading
    devices: Machines
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: int = 8000
    """The port; 0 takes a free one."""
    api_key: TextOption = None
    """All requests but those for / and /health need this key; others on the machine can see it, so a file is better."""
    api_key_file: FileOption = None
    """Or one of the keys in this file, one per line."""
    served_model_name: TextOption = None
    """The model's name for clients; by default, the last part of MODEL."""
    lora_modules: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=DIR ...]")] = ()
    """LoRA adapters, each a model for clients under its name: a directory that PEFT or ling3 wrote, or a hub id."""
    root_path: str = ""
    """The path under which a proxy serves this server."""
    allow_origin: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="ORIGIN")] = ()
    """Pages of this origin (* is any) may send requests from a browser (CORS); may be given several times."""
    allow_unknown_fields: bool = False
    """Ignore unknown fields of requests, which front-ends of other servers send, instead of refusing them by name."""
    allow_host: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """A host name (* is any) that requests may use besides --host and localhost, as behind a proxy; may be given
    several times."""
    timeout: int = 600
    """Seconds that a request may take, from the end of its headers to the last byte of its answer."""
    drain: int = 30
    """Seconds that running requests have to finish after SIGTERM."""
    replicas: WholeNumber = None
    """Answer with this many engines, each in a process beside this one, and start again those that die; by default with
    one engine in this process."""
    engine: EngineOptions


def run(command: Serve) -> None:
    """Serves until a signal. Raises ValueError if the extra `serve` is not installed, and for invalid options."""
    try:
        from ling3.server.app import build
        from ling3.server.origins import Hosts
        from ling3.server.run import bind
        from ling3.server.run import run as serve
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing, which serving needs: pip install 'ling3[serve]'") from None

    keys, adapters = _keys(command), _adapters(command)
    hosts = Hosts.of(command.host, command.allow_host)
    if command.timeout < 1:
        raise ValueError(f"--timeout is {command.timeout}, expected at least 1 second")
    if command.drain < 0:
        raise ValueError(f"--drain is {command.drain}, expected at least 0 seconds")
    _check_replicas(command)
    bound = bind(command.host, command.port)  # before the model is loaded, to report a port in use at once
    # Requests for which slots are free also wait in the queue, until the next turn.
    most = command.engine.max_queue + command.engine.max_running_requests
    settings = dataclasses.replace(command.engine.settings(), max_queue=most)
    source = command.common.source(command.model, command.devices, settings.speculation)
    console = Console(stderr=True, highlight=False)
    serving = _in_process if command.replicas is None else _replicated
    with serving(command, source, settings, adapters, console) as service:
        app = build(service, keys, command.allow_origin, command.timeout, hosts)
        bound.listen()  # before the address is printed: connections from now on are served
        host = f"[{command.host}]" if ":" in command.host else command.host
        address = f"http://{host}:{bound.getsockname()[1]}"
        console.print(f"serving {service.name} on {address}", markup=False, soft_wrap=True)
        interruption.raise_again()
        serve(app, service, bound, command.root_path, command.drain, command.timeout)


@contextlib.contextmanager
def _in_process(
    command: Serve, source: ModelSource, settings: "EngineSettings", adapters: dict[str, str], console: Console
) -> "Iterator[Service]":
    """The service of an engine in this process."""
    from ling3.serve import Engine
    from ling3.server.service import Service

    tokenizer = source.tokenizer()
    model = source.load(tokenizer)
    source.introduce(model, console)
    engine = Engine(model, tokenizer, settings, adapters=adapters)
    with compiling(console):
        engine.warmup()
    yield Service(engine, tokenizer, _name(command), command.allow_unknown_fields)


@contextlib.contextmanager
def _replicated(
    command: Serve, source: ModelSource, settings: "EngineSettings", adapters: dict[str, str], console: Console
) -> "Iterator[Service]":
    """The service of engines in other processes, which end with it."""
    from ling3.fleet.replica import Plan
    from ling3.fleet.replicas import Replicas
    from ling3.server.service import Service

    assert command.replicas is not None, "asked for"
    interruption.do_last(descendants.kill)
    tokenizer = source.tokenizer()
    plan = Plan(source, settings, None, None, None, command.replicas, os.getcwd(), adapters)  # noqa: PTH109
    with announced("loading and compiling…", console):
        replicas = Replicas(plan, tokenizer, command.devices.count)
    with contextlib.closing(replicas):
        facts = replicas.facts
        source.say(facts["parameters"], facts["dtype"], f"{command.replicas} × {facts['platform']}", console)
        yield Service(replicas, tokenizer, _name(command), command.allow_unknown_fields, condition=replicas.condition)


def _check_replicas(command: Serve) -> None:
    """Raises ValueError for numbers of replicas and processes that do not fit together."""
    if command.replicas is None:
        return
    if command.replicas < 1:
        raise ValueError(f"--replicas is {command.replicas}, expected at least 1")
    if command.devices.nnodes is not None:
        raise ValueError("--nnodes is for one model over several machines, and --replicas for many: give one")
    if os.name != "posix":
        raise ValueError("--replicas of a server needs Linux or macOS: leave it out for one engine")


def _name(command: Serve) -> str:
    """The model's name for clients."""
    return command.served_model_name or pathlib.Path(command.model).name


def _adapters(command: Serve) -> dict[str, str]:
    """The paths of the adapters by their names.

    Raises ValueError for an option that is not NAME=DIR, for a name that is given twice, and beside --adapter.
    """
    found: dict[str, str] = {}
    for option in command.lora_modules:
        name, _, path = option.partition("=")
        if not (name and path):
            raise ValueError(f"--lora-modules: found {option!r}, expected NAME=DIR")
        if name in (*found, _name(command)):
            raise ValueError(f"--lora-modules: the name {name!r} is given twice, or is the model's: give another")
        found[name] = path
    if found and command.common.adapter is not None:
        raise ValueError("--lora-modules: --adapter changes the model that they are for; give it as one of them")
    return found


def _keys(command: Serve) -> list[str]:
    """The API keys. Raises ValueError for a blank key, and for a file without keys."""
    keys = [] if command.api_key is None else [command.api_key.strip()]
    if "" in keys:
        raise ValueError("--api-key is blank, expected a key; leave the option out to serve without one")
    if command.api_key_file is not None:
        lines = pathlib.Path(command.api_key_file).read_text(encoding="utf-8").splitlines()
        in_file = [line.strip() for line in lines if line.strip()]
        if not in_file:
            raise ValueError(f"--api-key-file: {command.api_key_file} has no key, expected one a line")
        keys += in_file
    return keys
