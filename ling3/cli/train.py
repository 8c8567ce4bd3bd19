"""`ling3 train`: fine-tunes a checkpoint on chats or other texts."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from ling3.cli.options import (
    Command,
    Common,
    DirectoryOption,
    FileOption,
    FloatOption,
    NamesOption,
    Thinking,
    WholeNumber,
)
from ling3.cli.terminal import VISIBLE, count

if TYPE_CHECKING:
    from ling3.text.tokenizer import Tokenizer
    from ling3.train.fine_tuning import FineTuning
    from ling3.train.texts import TrainingText

RANK = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Fine-tune a checkpoint: a LoRA adapter, or with --full all weights. Killed, it continues when it is run again.

    ling3 train nano --data chats.jsonl --out tuned --lora 16
    """

    common: Common
    data: str
    """The texts: a JSONL file of {"messages": [...]}, {"prompt", "completion"} or {"text"}."""
    out: DirectoryOption = None
    """The directory for the adapter or checkpoint; its subdirectory training has the log, the plot and the state."""
    lora: WholeNumber = None
    """The rank of the adapter, which is the only part that is trained; by default 16."""
    full: bool = False
    """Train all weights instead, in float32."""
    alpha: FloatOption = None
    """The adapter's alpha; by default its rank."""
    targets: NamesOption = None
    """The modules that the adapter changes: comma-separated names of transformers, or their ends; by default all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the matrices; auto is the stored one, and float32 with --full."""
    mtp: bool = False
    """With --full: keep the multi-token-prediction layer, and train it too."""
    thinking: Thinking = "auto"
    """The chat template's thinking mode; auto is the template's choice."""
    eval_data: FileOption = None
    """Held-out texts to measure the loss on, in the same forms."""
    eval_share: float = 0.0
    """Hold out this share of the texts instead, such as 0.1."""
    eval_every: int = 50
    """Steps between two measurements."""
    epochs: float = 3.0
    """How often each text is learnt, unless --steps is given."""
    steps: WholeNumber = None
    """The number of steps."""
    batch: int = 8
    """Texts in a step."""
    tokens: int = 2048
    """Tokens of a forward and backward pass; a step takes as many passes as its texts need."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Put several texts into a row, which no layer mixes; auto does where all layers can."""
    learning_rate: FloatOption = None
    """The highest learning rate; by default 2e-4, and 1e-5 with --full."""
    warmup: WholeNumber = None
    """Steps in which the learning rate grows from 0; by default 3 % of all."""
    weight_decay: float = 0.0
    """The weight decay of AdamW, on matrices."""
    clip: float = 1.0
    """The largest norm of the gradient, which is scaled down to it."""
    keep_activations: bool = False
    """Keep all activations for the backward pass, instead of recomputing each layer: faster, in more memory."""
    save_every: int = 50
    """Steps between two saved states, from which a killed training continues."""
    seed: int = 0
    """Draws the adapter's first weights, the order of the texts, and the held-out ones."""
    show: WholeNumber = None
    """Print this many texts, with the learnt tokens in colour, and do not train."""

    def settings(self) -> "FineTuning":
        """The options as FineTuning. Raises ValueError for options that exclude each other or are out of range."""
        if self.mtp and not self.full:
            raise ValueError("--mtp is for --full: an adapter leaves multi-token-prediction layers as they are")
        return settings_of(vars(self))


def settings_of(options: Mapping[str, Any]) -> "FineTuning":
    """FineTuning by options that are named as those of `Train`, and may be fewer.

    Raises ValueError for options that exclude each other or are out of range.
    """
    from ling3.train.fine_tuning import FineTuning

    full, rank, targets = options["full"], options["lora"], options["targets"]
    if full and rank is not None:
        raise ValueError("--full trains all weights, and --lora an adapter: give one of them")
    names = {field.name for field in dataclasses.fields(FineTuning)}
    given = {name: value for name, value in options.items() if name in names}
    given["lora"] = None if full else RANK if rank is None else rank
    given["targets"] = None if targets is None else tuple(targets.split(","))
    given["recompute"] = not options["keep_activations"]
    if "packing" in options:
        given["packing"] = {"auto": None, "on": True, "off": False}[options["packing"]]
    return FineTuning(**given)


def run(command: Train) -> None:
    """Shows the texts, or fine-tunes the model and writes the result."""
    from ling3.checkpoint import hub, load
    from ling3.runtime import compilation_cache
    from ling3.text.tokenizer import load_tokenizer
    from ling3.train.fine_tuning import check_target, finetune
    from ling3.train.texts import read_texts

    settings, console = command.settings(), Console(stderr=True, highlight=False)
    if command.out is None and command.show is None:
        raise ValueError("--out: absent; expected a directory for the result (or --show, which only prints texts)")
    if command.out is not None:
        check_target(command.out)
    revision = hub.pin(command.model, command.common.revision)
    tokenizer = load_tokenizer(command.model, revision=revision)
    variables = {} if command.thinking == "auto" else {"enable_thinking": command.thinking == "on"}
    texts = read_texts(command.data, tokenizer, **variables)
    held_out = [] if command.eval_data is None else read_texts(command.eval_data, tokenizer, **variables)
    if command.show is not None:
        show(texts[: command.show], tokenizer, Console(soft_wrap=True, highlight=False))
        return
    compilation_cache.switch_on()
    dtype = "float32" if command.full and command.dtype == "auto" else command.dtype
    model = load(command.model, None if dtype == "auto" else dtype, revision=revision, mtp=command.mtp)
    tokenizer.check_fits(model.config.vocab_size)
    console.print(
        Text(f"{command.model}: {count(model.parameters)} parameters, {_data(texts)}", "bold"), soft_wrap=True
    )
    tuned = finetune(model, texts, command.out, settings, eval_texts=held_out)
    last = tuned.log[-1]
    measured = f", on held-out texts {last['eval_loss']:.4f}" if "eval_loss" in last else ""
    print(f"{command.out}: loss {last['loss']:.4f}{measured} after {last['step']} steps", file=sys.stderr)


def _data(texts: list["TrainingText"]) -> str:
    tokens, learnt = sum(len(text.ids) for text in texts), sum(sum(text.learnt) for text in texts)
    return f"{len(texts):,} texts of {tokens:,} tokens, {learnt:,} of them learnt"


def show(texts: list["TrainingText"], tokenizer: "Tokenizer", console: Console) -> None:
    """Prints texts with their learnt tokens in colour; where there are no colours, in brackets ⟦ ⟧."""
    from ling3.train.texts import runs

    for text in texts:
        console.print(Text(f"{text.source}: {len(text.ids):,} tokens, {sum(text.learnt):,} learnt", "bold"))
        line: Any = Text()
        for learnt, ids in runs(text):
            words = tokenizer.decode(ids, skip_special_tokens=False).translate(VISIBLE)
            brackets = learnt and not console.is_terminal
            line.append(f"⟦{words}⟧" if brackets else words, "black on green" if learnt else "dim")
        console.print(line)
