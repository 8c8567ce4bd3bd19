"""Custom tools, whose input is a text: the model sees and calls them as functions with one string argument."""

from typing import Literal

import pydantic

from ling3.engine.structured import Grammar, Regex
from ling3.server.errors import ApiError
from ling3.server.known_fields import Known
from ling3.server.reply_grammars import Callable
from ling3.server.tools import NAME
from ling3.text.custom_inputs import INPUT

FORM = "The input has to match this {syntax} grammar:\n{definition}"


class Syntax(Known):
    """The grammar of a custom tool's input."""

    definition: str
    syntax: Literal["lark", "regex"]


class ChatFormat(Known):
    """The inputs that a custom tool allows, in the form of chats."""

    type: Literal["text", "grammar"]
    grammar: Syntax | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> "ChatFormat":
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("expected a grammar for the type grammar alone")
        return self


class Custom(Known):
    """A custom tool, in the form of chats."""

    name: str = pydantic.Field(pattern=NAME)
    description: str | None = None
    format: ChatFormat | None = None

    @property
    def callable(self) -> Callable:
        """The tool as a function with one string argument. Raises ApiError 400 for an invalid grammar."""
        grammar, description = self.format and self.format.grammar, self.description or ""
        form = None
        if grammar is not None:
            try:
                form = Grammar(grammar.definition) if grammar.syntax == "lark" else Regex(grammar.definition)
            except ValueError as error:
                raise ApiError(400, f"tools: {self.name}: {error}", "tools") from None
            description = f"{description}\n\n{FORM.format(**grammar.model_dump())}".strip()
        schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        shown = {"name": self.name, **({"description": description} if description else {}), "parameters": schema}
        return Callable(self.name, schema, False, form, True, shown)


class CustomTool(Known):
    """A custom tool among the tools of a chat."""

    type: Literal["custom"]
    custom: Custom

    @property
    def callable(self) -> Callable:
        """The tool as a function with one string argument."""
        return self.custom.callable


class ResponseFormat(Known):
    """The inputs that a custom tool allows, in the form of `/v1/responses`."""

    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> "ResponseFormat":
        given = {self.definition is not None, self.syntax is not None}
        if given != {self.type == "grammar"}:
            raise ValueError("expected definition and syntax for the type grammar alone")
        return self

    @property
    def grammar(self) -> Syntax | None:
        """The grammar, which chats nest in an object; None for any text."""
        if self.definition is None or self.syntax is None:
            return None
        return Syntax(definition=self.definition, syntax=self.syntax)
