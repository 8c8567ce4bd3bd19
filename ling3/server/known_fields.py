"""Fields of the protocols' specifications that no class here declares: which are ignored, which are refused, and why.

A request's field is honoured (declared), ignored or refused; `tests/server/test_openai_schema.py` and
`test_anthropic_schema.py` check the fields of the specifications against the `FieldNames` of each type. Any other field
is unknown, and refused unless the server allows unknown fields.
"""

import dataclasses
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic

from ling3.server.errors import wrong

ALLOW = "allow_unknown_fields"
"""The key in a validation's context that says whether unknown fields are ignored."""

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
    """Known fields that are not honoured, each with the reason; that of a refused field is its error message."""

    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that change no answer."""
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Unsupported fields that would change an answer, or what is sent beside it."""

    def check(self, given: Mapping[str, Any], honoured: Set[str] | None, where: str = "", allow: bool = False) -> None:
        """Raises ApiError 400 for a field that is neither honoured nor ignored; null counts as absent.

        With `allow`, or if `honoured` is None, only the `refused` fields are errors.
        """
        for name, value in given.items():
            known = honoured is None or allow or name in honoured or name in self.ignored
            if value is not None and (name in self.refused or not known):
                why = f": {self.refused[name]}" if name in self.refused else ""
                raise wrong(f"{where}{name}", f"is not supported{why}", "unsupported_parameter")


Item = TypeVar("Item")
List = Annotated[list[Item], pydantic.Field(fail_fast=True)]
"""A list whose validation stops at the first wrong item; pydantic would report every one."""


class Known(pydantic.BaseModel):
    """Base class of requests and their parts. Nulls count as absent, and ignored fields are dropped."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    names: ClassVar[FieldNames] = FieldNames()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any, info: Any) -> Any:  # a ValidationInfo, unknown to run-time type checks
        if not isinstance(value, dict):
            return value
        given = {name: x for name, x in value.items() if x is not None and name not in cls.names.ignored}
        if (info.context or {}).get(ALLOW):
            names = {field.alias or name for name, field in cls.model_fields.items()} | cls.names.refused.keys()
            given = {name: x for name, x in given.items() if name in names}
        return given
