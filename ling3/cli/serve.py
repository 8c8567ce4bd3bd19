"""`ling3 serve`: an HTTP server of OpenAI's and Anthropic's protocols."""

import dataclasses
import pathlib
from typing import Annotated

import tyro
from rich.console import Console

from ling3.cli import interruption
from ling3.cli.bench import EngineOptions
from ling3.cli.devices import Machines
from ling3.cli.loading import Loading
from ling3.cli.options import Command, FileOption, TextOption
from ling3.cli.terminal import compiling


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
    engine: EngineOptions


def run(command: Serve) -> None:
    """Serves until a signal. Raises ValueError if the extra `serve` is not installed, and for invalid options."""
    try:
        from ling3.server.app import build
        from ling3.server.origins import Hosts
        from ling3.server.run import bind
        from ling3.server.run import run as serve
        from ling3.server.service import Service
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is missing, which serving needs: pip install 'ling3[serve]'") from None
    from ling3.serve import Engine

    keys, adapters = _keys(command), _adapters(command)
    hosts = Hosts.of(command.host, command.allow_host)
    if command.timeout < 1:
        raise ValueError(f"--timeout is {command.timeout}, expected at least 1 second")
    if command.drain < 0:
        raise ValueError(f"--drain is {command.drain}, expected at least 0 seconds")
    bound = bind(command.host, command.port)  # before the model is loaded, to report a port in use at once
    # Requests for which slots are free also wait in the queue, until the next turn.
    most = command.engine.max_queue + command.engine.max_running_requests
    settings = dataclasses.replace(command.engine.settings(), max_queue=most)
    source = command.common.source(command.model, command.devices, settings.speculation)
    tokenizer = source.tokenizer()
    model = source.load(tokenizer)
    console = Console(stderr=True, highlight=False)
    source.introduce(model, console)
    engine = Engine(model, tokenizer, settings, adapters=adapters)
    with compiling(console):
        engine.warmup()
    name = _name(command)
    service = Service(engine, tokenizer, name, command.allow_unknown_fields)
    app = build(service, keys, command.allow_origin, command.timeout, hosts)
    bound.listen()  # before the address is printed: connections from now on are served
    host = f"[{command.host}]" if ":" in command.host else command.host
    console.print(f"serving {name} on http://{host}:{bound.getsockname()[1]}", markup=False, soft_wrap=True)
    interruption.raise_again()
    serve(app, service, bound, command.root_path, command.drain, command.timeout)


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
