"""Fields of OpenAI's specification that no model here has: which are ignored, which are refused, and why.

A field of a request is honoured, as the models' fields are, ignored or refused; `tests/server/test_openai_schema.py`
holds the specification against the `FieldNames` of each type. What stands in none is unknown, and refused unless the
server allows it.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic

from ling3.server.errors import wrong

ALLOW = "allow_unknown_fields"
"""The key of a validation's context that says whether unknown fields are ignored."""

CACHING = "known prefixes are always used, and change no bit of an answer"
ACCOUNT = "it is about the account or the end user"
VERBOSITY = "a wish for the length of answers, which no chat template knows"
CITATIONS = "citations beside the text, which stays the same"
MODERATION = "answers are not moderated here"
REQUEST = {
    "user": ACCOUNT,
    "metadata": "labels for requests that are stored",
    "client_metadata": "labels that Codex gives its requests",
    "service_tier": "there is one tier",
    "safety_identifier": ACCOUNT,
    "prompt_cache_key": CACHING,
    "prompt_cache_options": CACHING,
    "prompt_cache_retention": CACHING,
}
"""Fields that every kind of request ignores, each with the reason."""


@dataclasses.dataclass(frozen=True)
class FieldNames:
    """Fields that are known and not honoured, each with the reason, which is the error message for those refused."""

    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that change no answer."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that would change an answer, or what is sent beside it, and that are not supported."""

    def check(self, given: Mapping[str, Any], honoured: Set[str] | None, where: str = "", allow: bool = False) -> None:
        """ApiError 400 for a field that is neither honoured nor ignored; null counts as absent.

        With `allow`, and where no set says what is honoured, only those that are `refused` are errors.
        """
        for name, value in given.items():
            known = honoured is None or allow or name in honoured or name in self.ignored
            if value is not None and (name in self.refused or not known):
                why = f": {self.refused[name]}" if name in self.refused else ""
                raise wrong(f"{where}{name}", f"is not supported{why}", "unsupported_parameter")


Item = TypeVar("Item")
List = Annotated[list[Item], pydantic.Field(fail_fast=True)]
"""A list that is checked up to its first wrong item: pydantic would report every one."""


class Known(pydantic.BaseModel):
    """A part of a request. Null counts as absent, and so do fields that change no answer."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    names: ClassVar[FieldNames] = FieldNames()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any, info: Any) -> Any:  # a ValidationInfo, which no run-time check knows
        if not isinstance(value, dict):
            return value
        given = {name: x for name, x in value.items() if x is not None and name not in cls.names.ignored}
        if (info.context or {}).get(ALLOW):
            names = {field.alias or name for name, field in cls.model_fields.items()} | cls.names.refused.keys()
            given = {name: x for name, x in given.items() if name in names}
        return given
