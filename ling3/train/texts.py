"""Texts to learn from JSONL files, as token ids with a mask of the learnt ones; chats go through the template."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ling3.runtime import regular_file, strict_json
from ling3.runtime.quoting import QuotingError, shown
from ling3.text.tokenizer import Tokenizer

_FORMS = '{"messages": [...]}, {"prompt": "...", "completion": "..."} or {"text": "..."}'


class TrainingDataError(QuotingError):
    """Raised for texts that cannot be learnt from; names each file, line and field, and what was expected there."""


@dataclasses.dataclass(frozen=True)
class TrainingText:
    """A text to learn from: its token ids, and for each whether the loss counts it as a target."""

    ids: tuple[int, ...]
    learnt: tuple[bool, ...]
    source: str = ""
    """The file and line that the text is from, for messages."""

    def __post_init__(self) -> None:
        """Raises TrainingDataError unless there is a learnt token after the first one."""
        if len(self.ids) != len(self.learnt):
            raise TrainingDataError(f"{self.source}: {len(self.ids)} token ids, and a mask of {len(self.learnt)}")
        if not any(self.learnt[1:]):
            raise TrainingDataError(f"{self.source}: no token to learn; expected an answer, or a text of two tokens")


def read_texts(
    source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], tokenizer: Tokenizer, **variables: Any
) -> list[TrainingText]:
    """The texts of a JSONL file, or of such rows in memory, tokenized; `variables` go to the chat template.

    A row is one of three forms, and other fields of it are ignored:

        {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}     learnt: the assistant's turns
        {"prompt": "...", "completion": "..."}                                      learnt: the completion
        {"text": "..."}                                                             learnt: all but the first token

    An answer ends with the token that ends the generation. For each of the assistant's turns the prompt is what
    inference would render for the messages before it; the answer is the remainder of the chat rendered up to that turn.
    If the template leaves a part of its generation prompt out of that (as Ling-3's does with closed thoughts), the
    answer begins where the two part. Turns whose prompt begins with the text so far share a text. Where a template
    changes earlier turns (such as one that drops their reasoning), each turn is a text of its own, so that an answer is
    learnt behind the prompt that inference has.

    Raises TrainingDataError, with the line and field of everything that is wrong, and OSError.
    """
    texts: list[TrainingText] = []
    problems: list[str] = []
    for where, row in _rows(source, problems):
        try:
            found = _spans(row, tokenizer, variables)
            texts += [TrainingText(tuple(ids), tuple(learnt), where) for ids, learnt in found]
        except TrainingDataError as error:
            problems.append(str(error))
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if not texts and not problems:
        problems.append(f"{_name(source)}: no rows; expected one JSON object a line, such as {_FORMS}")
    if problems:
        raise TrainingDataError("\n".join(problems))
    return texts


def _name(source: object) -> str:
    return os.fspath(source) if isinstance(source, str | os.PathLike) else "the rows"


def _rows(source: str | os.PathLike[str] | Iterable[Mapping[str, Any]], problems: list[str]) -> Iterable[tuple]:
    """Where each row is, and the row; lines that are no JSON are added to `problems`."""
    if not isinstance(source, str | os.PathLike):
        yield from ((f"row {i}", row) for i, row in enumerate(source))
        return
    path = pathlib.Path(source).expanduser()
    regular_file.check(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if line.strip():
                try:
                    yield where, strict_json.parse_line(line, where)
                except ValueError as error:
                    problems.append(str(error))


def _spans(row: Any, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
    """The token ids and masks of a row's texts."""
    if not isinstance(row, Mapping):
        raise ValueError(f"found {shown(row)}; expected {_FORMS}")
    if "messages" in row:
        given = {"tools": row["tools"], **variables} if row.get("tools") is not None else dict(variables)
        return _of_chat(row["messages"], tokenizer, given)
    fields = ("prompt", "completion") if "prompt" in row or "completion" in row else ("text",)
    for field in fields:
        if not isinstance(row.get(field), str):
            found = shown(row[field]) if field in row else f"the fields {', '.join(map(str, row)) or 'none'}"
            raise ValueError(f"{field}: found {found}; expected a string, in {_FORMS}")
    if fields == ("text",):
        ids = _ended(tokenizer.encode(row["text"]), tokenizer)
        return [(ids, [False] + [True] * (len(ids) - 1))]
    prompt = tokenizer.encode(row["prompt"])
    answer = _ended(tokenizer.encode(row["completion"], add_special_tokens=False), tokenizer)
    return [(prompt + answer, [False] * len(prompt) + [True] * len(answer))]


def _of_chat(messages: Any, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> list[tuple[list[int], list[bool]]]:
    if not isinstance(messages, Sequence) or not all(isinstance(each, Mapping) for each in messages):
        raise ValueError(f"messages: found {shown(messages)}; expected a list of objects with 'role' and 'content'")
    turns = [i for i, each in enumerate(messages) if each.get("role") == "assistant"]
    if not turns:
        raise ValueError("messages: no turn of the assistant, so nothing to learn; expected at least one")
    if turns[0] == 0:
        raise ValueError("messages[0]: the assistant speaks first; expected a message before its turn")
    texts: list[tuple[list[int], list[bool]]] = []
    for turn in turns:
        prompt, answer = _turn(messages[: turn + 1], tokenizer, variables)
        ids, learnt = texts[-1] if texts else ([], [])
        if not texts or prompt[: len(ids)] != ids:
            texts.append(([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
        else:
            learnt += [False] * (len(prompt) - len(ids)) + [True] * len(answer)
            ids += [*prompt[len(ids) :], *answer]
    return texts


def _turn(messages: Sequence[Any], tokenizer: Tokenizer, variables: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt before the last message, which is the assistant's, and its answer."""
    how: dict[str, Any] = {**variables, "tokenize": False}
    before = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **how)
    after = tokenizer.apply_chat_template(messages, add_generation_prompt=False, **how)
    shared = next(
        (i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]),
        min(len(before), len(after)),
    )
    if shared < len(before):
        asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=False, **how)
        opened = before[shared:]
        if shared < len(asked) or ("<think>" in opened and "</think>" not in opened):
            raise ValueError(
                f"messages[{len(messages) - 1}]: the template's generation prompt ends with {shown(before[-40:])}, and "
                "its text of this turn does not go on from there, so the model could not learn to answer that prompt; "
                "switch thinking off, or give the turn its reasoning_content"
            )
    prompt, both = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after))
    # A tokenizer may join characters across the border, which a model that continues the prompt cannot do.
    apart = both[: len(prompt)] != prompt
    answer = tokenizer.encode(after[shared:], add_special_tokens=False) if apart else both[len(prompt) :]
    ends = [i for i, token in enumerate(answer) if token in tokenizer.eos_token_ids]
    return prompt, answer[: ends[-1] + 1] if ends else _ended(answer, tokenizer)


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The ids with the token that ends a generation, if they do not end with one already."""
    end = tokenizer.token_named("eos_token")
    end = next(iter(tokenizer.eos_token_ids), None) if end is None else end
    return ids if end is None or (ids and ids[-1] in tokenizer.eos_token_ids) else [*ids, end]


def runs(text: TrainingText) -> list[tuple[bool, list[int]]]:
    """The text's tokens in runs that are learnt, or not, as `--show` prints them."""
    pairs = zip(text.learnt, text.ids, strict=True)
    return [(learnt, [token for _, token in run]) for learnt, run in itertools.groupby(pairs, lambda pair: pair[0])]
