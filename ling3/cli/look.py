"""`ling3 look`: writes a page that shows a forward pass."""

import dataclasses
import pathlib
from typing import Annotated

import tyro
from rich.console import Console

from ling3.cli.files import check_directory, prompt_from_stdin
from ling3.cli.loading import Precise
from ling3.cli.options import Command, TextOption, Thinking, hint_at_chat, prompt_ids
from ling3.cli.terminal import compiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look(Command):
    """Write a page that shows a forward pass: what each layer does with each token.

    The page is one file that works offline in any browser, with pointer or keyboard. It shows decays and half-lives,
    what is written and read, attention maps, experts, the logit lens and norms.

    ling3 look nano --chat -p "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?" --out look.html
    """

    common: Precise
    prompt: Annotated[TextOption, tyro.conf.arg(aliases=["-p"])] = None
    """The text to look into; by default, standard input."""
    chat: bool = False
    """Put the prompt into the checkpoint's chat template, as a user message."""
    system: TextOption = None
    """The system message, with --chat."""
    thinking: Thinking = "auto"
    """The template's thinking mode, with --chat; auto is the template's own choice."""
    new_tokens: int = 0
    """Continue the text by this many of the model's likeliest tokens, and show these too."""
    longest: int = 256
    """The most tokens, prompt and new ones. The page's size grows with their square."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """The file for the page (HTML)."""


def run(command: Look) -> None:
    """Runs the model and writes the page."""
    from ling3.interpret.look import check_page_length, look

    check_directory("--out", command.out)
    prompt = prompt_from_stdin() if command.prompt is None else command.prompt
    source = command.common.source(command.model)
    tokenizer = source.tokenizer()
    ids = prompt_ids(tokenizer, prompt, chat=command.chat, system=command.system, thinking=command.thinking)
    check_page_length(len(ids), command.new_tokens, command.longest, source.config().max_position_embeddings)
    console = Console(stderr=True, highlight=False)
    hint_at_chat(tokenizer, command.chat, console)
    model = source.load(tokenizer)
    source.introduce(model, console)
    name, numbers = pathlib.Path(source.name).name, {"new_tokens": command.new_tokens, "longest": command.longest}
    with compiling(console):
        seen = look(model, tokenizer, ids, title=name, **numbers)
    seen.save(command.out)
    console.print(f"{command.out}: {seen}", markup=False, soft_wrap=True)
