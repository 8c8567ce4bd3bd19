"""A checkpoint's tokenizer: text to ids and back, and conversations to prompts by its chat template."""

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from ling3.checkpoint import hub
from ling3.runtime.quoting import named, shown
from ling3.text import added_tokens, chat_template, tiktoken_file
from ling3.text.byte_fallback import ByteFallback, TokenBytes
from ling3.text.chat_template import ChatTemplate
from ling3.text.detokenizer import StreamDecoder
from ling3.text.tokenizer_file import Reported, TokenizerError, read, read_object
from ling3.text.tool_calls import ToolForm, tool_form

VOCABULARY, MODEL, GENERATION = "tokenizer.json", "config.json", "generation_config.json"
PATTERNS = (VOCABULARY, tiktoken_file.VOCABULARY, MODEL, GENERATION, *added_tokens.FILES, *chat_template.FILES)


MOST_ROWS = 2**31


class Tokenizer:
    """The tokenizer of a checkpoint directory: its `tokenizer.json`, or `tiktoken.model` if that is missing.

    The file decides how a text is split. transformers has classes that rebuild parts of it, which are not imitated: its
    LlamaTokenizer drops spaces that SentencePiece and the file keep (tests/parity/test_tokenizers.py).

    `eos_token_ids` are the tokens that end a generation, from `config.json`, `generation_config.json` and
    `tokenizer_config.json` together; `pad_token_id` may be None, or an id without a row in the model's embedding;
    `special_tokens` are the named ones, such as `eos_token`; `chat_templates` are by name, and may be empty.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        model, generation = read_object(directory / MODEL), read_object(directory / GENERATION)
        settings = added_tokens.settings_of(directory)
        rows, ranks = _rows(model), directory / tiktoken_file.VOCABULARY
        if ranks.exists() and not (directory / VOCABULARY).exists():
            backend = tiktoken_file.read(ranks, settings, model.get("model_type"), rows)
        else:
            backend = read(directory / VOCABULARY)
        self.special_tokens = added_tokens.add(backend, settings, directory, rows)
        self.backend = added_tokens.without_token(backend, self.special_tokens.get("pad_token", ""), rows)
        self.chat_templates = chat_template.chat_templates(directory, settings)
        ends = [
            *_ids(model, "eos_token_id", directory / MODEL),
            *_ids(generation, "eos_token_id", directory / GENERATION),
            *self._id_of("eos_token"),
        ]
        pads = [
            *self._id_of("pad_token"),
            *_ids(generation, "pad_token_id", directory / GENERATION),
            *_ids(model, "pad_token_id", directory / MODEL),
        ]
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(set(ends)))
        self.pad_token_id: int | None = next(iter(pads), None)

    @property
    def name(self) -> str:
        """The name of the directory, or of the GGUF file, that the tokenizer was read from."""
        return named(self.directory)

    def __repr__(self) -> str:
        template = "a chat template" if self.chat_templates else "no chat template"
        return f"<Tokenizer of {self.name}: {self.vocab_size:,} tokens, {template}>"

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The default template, for a conversation without tools; None if the checkpoint has none."""
        return self.chat_templates.get(chat_template.DEFAULT)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token; a model's embedding may have more rows."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def tool_form(self) -> ToolForm | None:
        """The form in which the chat template writes tool calls; None if it shows no tools or uses an unknown form."""
        return tool_form(functools.partial(self.apply_chat_template, tokenize=False))

    @functools.cached_property
    def thinking_switch(self) -> bool:
        """True if the chat template's prompt changes when any of the usual variables switch thinking on and off."""
        question = [{"role": "user", "content": "question"}]
        try:
            on, off = (
                self.apply_chat_template(question, tokenize=False, **thinking(effort)) for effort in ("high", "none")
            )
        except ValueError:
            return False
        return on != off

    def check_fits(self, rows: int) -> None:
        """Raises TokenizerError if an id of this tokenizer has no row in an embedding of `rows`."""
        largest = max(self.vocab_size - 1, *self.eos_token_ids)
        if largest >= rows:
            raise TokenizerError(
                f"{self.directory}: the tokenizer's ids go up to {largest}, but the model's embedding has {rows} rows "
                f"(vocab_size in {MODEL}): the files are not of one checkpoint"
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens that are written in it are recognized.

        `add_special_tokens` adds the tokens that the post-processor of `tokenizer.json` puts around a text, such as a
        beginning of sequence; Ling-3 has none. `add_bos_token` and `add_eos_token` of the settings are ignored, as in
        transformers 5 (tests/parity/test_tokenizers.py).
        Raises ValueError for text with a lone surrogate, and TokenizerError if the tokenizer fails.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: a lone surrogate, {text[error.start]!r}, at position {error.start}, which has no UTF-8 form"
            ) from error
        with Reported(self.directory / VOCABULARY, "the tokenizer fails on this text"):
            # The methods for batches, unlike `encode` and `decode`, let other threads run meanwhile.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with U+FFFD for invalid bytes and nothing for ids without a token.

        Raises TokenizerError if the tokenizer fails.
        """
        shown = [int(token) for token in ids]
        if self._fallback.bytes:
            added = self.backend.get_added_tokens_decoder()
            hidden = {token for token in added if skip_special_tokens and added[token].special}
            named = (each for each in shown if each not in hidden and self.backend.id_to_token(each) is not None)
            shown = self._fallback.valid(named)
        with Reported(self._source, "the tokenizer fails on these ids"):
            [text] = self.backend.decode_batch([shown], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character; empty for an id without a token."""
        return self._bytes[token]

    @overload
    def apply_chat_template(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = ...,
        tokenize: Literal[True] = ...,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = ..., tokenize: Literal[False], **variables: Any
    ) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = True, tokenize: bool = True, **variables: Any
    ) -> list[int] | str:
        """The prompt for `messages`, dicts with `role` and `content`, as ids, or as text if `tokenize` is False.

        `add_generation_prompt` opens the assistant's turn at the end. `variables` go to the template: for Ling-3,
        `enable_thinking`. With `tools` among them, a template named `tool_use` is preferred to the default one.
        Raises ValueError for malformed messages, or if the checkpoint has no such chat template.
        """
        if not self.chat_templates:
            places = f"{chat_template.TEMPLATE} or {added_tokens.SETTINGS}"
            raise ValueError(f"{self.name} has no chat template (in {places}): use plain text")
        text = chat_template.chosen_template(self.chat_templates, variables.get("tools")).render(
            messages, add_generation_prompt=add_generation_prompt, **{**self.special_tokens, **variables}
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> StreamDecoder:
        """A streaming decoder for the tokens that follow `prompt_ids`."""
        return StreamDecoder(self.backend, prompt_ids, skip_special_tokens, self._source, self._fallback)

    @functools.cached_property
    def _source(self) -> str:
        return str(self.directory / VOCABULARY)

    @functools.cached_property
    def _fallback(self) -> ByteFallback:
        return ByteFallback(self.backend)

    @functools.cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    def token_named(self, name: str) -> int | None:
        """The id of a named special token such as `bos_token`; None without one."""
        return self.backend.token_to_id(self.special_tokens.get(name, ""))

    def _id_of(self, name: str) -> list[int]:
        token = self.token_named(name)
        return [] if token is None else [token]


def thinking(effort: str) -> dict[str, Any]:
    """A chat template's variables for a reasoning effort; thinking is off for `none` and `minimal`."""
    on = effort not in ("none", "minimal")
    return {"enable_thinking": on, "thinking": on, "reasoning_effort": effort}


def load_tokenizer(path: str | os.PathLike[str], *, revision: str | None = None) -> Tokenizer:
    """Loads the tokenizer in `path`: a checkpoint directory, a GGUF file, a hub id, or `"nano"`, which the package has.

    `revision` is a branch, a tag or a commit of the hub's repository.

    Raises FileNotFoundError if the checkpoint has no tokenizer, TokenizerError for a damaged file, naming file and
    field, CheckpointError for a GGUF file whose tokenizer ling3 does not read, and `hub.resolve`'s errors if there is
    no checkpoint.
    """
    directory = hub.resolve(path, PATTERNS, revision)
    if os.fspath(path).endswith(hub.GGUF):
        # Only a GGUF file pays for this import.
        from ling3.checkpoint import gguf_checkpoint  # noqa: PLC0415

        gguf_checkpoint.check_tokenizer(directory)
    return Tokenizer(directory)


def _rows(model: Mapping[str, Any]) -> int:
    """The number of rows of the model's embedding; `MOST_ROWS` if `config.json` does not give it."""
    rows = model.get("vocab_size")
    return rows if type(rows) is int and rows > 0 else MOST_ROWS


def _ids(fields: Mapping[str, Any], name: str, path: pathlib.Path) -> list[int]:
    value = fields.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if name == "pad_token_id":  # -1 means no padding token in published files
        ids = [token for token in ids if type(token) is not int or token >= 0]
    for token in ids:
        if type(token) is not int or token < 0:
            raise TokenizerError(f"{path}: {name} is {shown(value)}, where an id or a list of ids was expected")
    return ids
