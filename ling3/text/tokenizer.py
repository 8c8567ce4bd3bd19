"""A checkpoint's tokenizer: text to ids and back, with the checkpoint's own chat template."""

import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import tokenizers

from ling3.checkpoint import hub
from ling3.runtime import regular_file, strict_json
from ling3.runtime.quoting import shown
from ling3.text.chat_template import LONGEST_TEMPLATE, ChatTemplate
from ling3.text.detokenizer import StreamDecoder
from ling3.text.token_bytes import TokenBytes
from ling3.text.tokenizer_file import Reported, TokenizerError, read
from ling3.text.tool_calls import ToolForm
from ling3.text.tool_forms import tool_form

VOCABULARY, SETTINGS, MODEL, GENERATION = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
)
TEMPLATES = ("chat_template.jinja", "chat_template.json")
PATTERNS = (VOCABULARY, SETTINGS, MODEL, GENERATION, *TEMPLATES)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The Hugging Face fast tokenizer of a checkpoint directory.

    `eos_token_ids` are the tokens that end a generation, from `config.json`, `generation_config.json` and
    `tokenizer_config.json` together; `pad_token_id` may be None; `special_tokens` are the named ones, such as
    `eos_token`; `chat_template` is None if the checkpoint has none.
    """

    def __init__(self, directory: pathlib.Path):
        settings = _read(directory / SETTINGS)
        self.directory = directory
        self.backend = read(directory / VOCABULARY)
        self.special_tokens = _special_tokens(settings, self.backend, directory / SETTINGS)
        self.chat_template = _chat_template(directory, settings)
        self._added = self._added_by_encode(settings)

        model, generation = _read(directory / MODEL), _read(directory / GENERATION)
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
        self.pad_token_id: int | None = pads[0] if pads else None

    def __repr__(self) -> str:
        template = "no chat template" if self.chat_template is None else "a chat template"
        return f"<Tokenizer of {self.directory}: {self.vocab_size:,} tokens, {template}>"

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token; a model's embedding may have more rows."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @functools.cached_property
    def tool_form(self) -> ToolForm | None:
        """How the chat template writes tool calls; None if it shows no tools, or writes them in no known form."""
        return tool_form(functools.partial(self.apply_chat_template, tokenize=False))

    @functools.cached_property
    def thinking_switch(self) -> bool:
        """Whether the chat template writes other prompts with thinking on than off, by any of its variables' names."""
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
        largest = max(self.vocab_size - 1, *self.eos_token_ids, self.pad_token_id or 0)
        if largest >= rows:
            raise TokenizerError(
                f"{self.directory}: the tokenizer's ids go up to {largest}, but the model's embedding has {rows} rows "
                f"(vocab_size in {MODEL}): the files are not of one checkpoint"
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; control tokens in it are recognised.

        As in transformers, `add_special_tokens` adds the tokenizer's own tokens around a text; Ling-3 has none.
        Raises ValueError for text that is no Unicode (a lone surrogate), TokenizerError if the tokenizer fails.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: a lone surrogate, {text[error.start]!r}, at position {error.start}, which has no UTF-8 form"
            ) from error
        with Reported(self.directory / VOCABULARY, "the tokenizer fails on this text"):
            # As `encode` and `decode`, but other threads run meanwhile.
            [encoding] = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens and self._added is None
            )
        before, after = self._added if self._added and add_special_tokens else ([], [])
        return [*before, *encoding.ids, *after]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with U+FFFD for invalid bytes and nothing for ids without a token.

        Raises TokenizerError if the tokenizer fails.
        """
        with Reported(self.directory / VOCABULARY, "the tokenizer fails on these ids"):
            [text] = self.backend.decode_batch([[int(token) for token in ids]], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character; none of an id without a token."""
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
        `enable_thinking`. Raises ValueError for malformed messages, or if the checkpoint has no chat template.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.directory} has no chat template (in {SETTINGS} or {TEMPLATES[0]}): use plain text")
        text = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, **{**self.special_tokens, **variables}
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def stream(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> StreamDecoder:
        """A streaming decoder for the tokens that follow `prompt_ids`."""
        return StreamDecoder(self.backend, prompt_ids, skip_special_tokens, self._source)

    @functools.cached_property
    def _source(self) -> str:
        return str(self.directory / VOCABULARY)

    @functools.cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self.backend)

    def _added_by_encode(self, settings: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
        """The ids that `encode` adds before and after a text by `tokenizer_config.json`, as in transformers.

        None if that says nothing: then the post-processor of `tokenizer.json` adds them.
        """
        if "add_bos_token" not in settings and "add_eos_token" not in settings:
            return None
        before, after = (
            self._id_of(name) if settings.get(f"add_{name}") else [] for name in ("bos_token", "eos_token")
        )
        return before, after

    def _id_of(self, name: str) -> list[int]:
        token = self.backend.token_to_id(self.special_tokens.get(name, ""))
        return [] if token is None else [token]


def thinking(effort: str) -> dict[str, Any]:
    """A chat template's variables for an effort of thinking, which is off for `none` and `minimal`."""
    on = effort not in ("none", "minimal")
    return {"enable_thinking": on, "thinking": on, "reasoning_effort": effort}


def load_tokenizer(path: str | os.PathLike[str], *, revision: str | None = None) -> Tokenizer:
    """The tokenizer in `path`: a checkpoint directory, a hub id, or `"nano"` for the one in the package.

    `revision` is a branch, a tag or a commit of the hub's repository.

    Raises FileNotFoundError when there is none, TokenizerError for a damaged file, naming file and field, and
    `hub.resolve`'s errors where there is no checkpoint.
    """
    return Tokenizer(hub.resolve(path, PATTERNS, revision))


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = strict_json.read(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: a {type(value).__name__}, where an object was expected")
    return value


def _special_tokens(settings: Mapping[str, Any], backend: tokenizers.Tokenizer, path: pathlib.Path) -> dict[str, str]:
    """The named special tokens of `tokenizer_config.json`, which also become special tokens of `backend`."""
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if value is None:
            continue
        if not isinstance(token, str):
            raise TokenizerError(f"{path}: {name} is {shown(value)}, where a string or {{'content': …}} was expected")
        if backend.token_to_id(token) is None:
            raise TokenizerError(f"{path}: {name} is {shown(token)}, which is no token of {VOCABULARY}")
        tokens[name] = token
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in tokens.values()
            if token not in special
        ]
    )
    return tokens


def _chat_template(directory: pathlib.Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The template in a file of its own, as transformers 5 writes it, or else in `tokenizer_config.json`."""
    jinja, legacy = (directory / name for name in TEMPLATES)
    if jinja.exists():
        try:
            # UTF-8 has at most four bytes for a character.
            source = regular_file.read(jinja, 4 * LONGEST_TEMPLATE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{jinja}: not UTF-8 ({error})") from error
        except ValueError as error:
            raise TokenizerError(str(error)) from error
        return ChatTemplate(source, str(jinja))
    path, value = directory / SETTINGS, settings.get("chat_template")
    if value is None:
        path, value = legacy, _read(legacy).get("chat_template")
    if value is None:
        return None
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise TokenizerError(f"{path}: chat_template is neither a string nor a list with one of the name 'default'")
    return ChatTemplate(value, f"{path}: chat_template")


def _ids(fields: Mapping[str, Any], name: str, path: pathlib.Path) -> list[int]:
    value = fields.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            raise TokenizerError(f"{path}: {name} is {shown(value)}, where an id or a list of ids was expected")
    return ids
