"""Tools of a request: which functions may be called, how they are shown to the model, and what holds it to them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import pydantic

from ling3.engine.structured import Structured
from ling3.server.errors import ApiError, wrong
from ling3.server.known_fields import Known
from ling3.server.reply_grammars import Callable, calls
from ling3.text.tokenizer import Tokenizer
from ling3.text.tool_calls import ToolForm

MOST = 128
"""The most tools of a request."""
NAME = r"^[A-Za-z0-9_.:/-]{1,64}$"
"""The names that a tool may have."""

Functional = TypeVar("Functional")
Textual = TypeVar("Textual")


def _type(tool: Any) -> str:
    """The name of the model of `ToolOf` that checks a tool; a tool of an unknown type is checked as a function."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "of a custom tool" if kind == "custom" else "of a function"


ToolOf = Annotated[
    Annotated[Functional, pydantic.Tag("of a function")] | Annotated[Textual, pydantic.Tag("of a custom tool")],
    pydantic.Discriminator(_type),
]
"""A protocol's tool, by its type: the models of its functions and of its custom tools."""


class Function(Known):
    """A function that the model may call."""

    name: str = pydantic.Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def callable(self) -> Callable:
        """The function as the chat template shows it to the model."""
        shown = self.model_dump(include=set(Function.model_fields), exclude_none=True)
        return Callable(self.name, self.parameters or {}, bool(self.strict), shown=shown)


class Tool(Known):
    """A function as a tool of a chat."""

    type: Literal["function"]
    function: Function

    @property
    def callable(self) -> Callable:
        """The function as the chat template shows it to the model."""
        return self.function.callable


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a request, and what `tool_choice` and `parallel_tool_calls` make of them."""

    offered: Sequence[Callable]
    form: ToolForm | None
    allowed: frozenset[str]
    """The names of the tools that the model may call."""
    required: bool
    """Whether one has to be called."""
    several: bool
    """Whether more than one call may come."""

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as the chat template takes them."""
        return [{"type": "function", "function": each.shown} for each in self.offered]

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schema of each function's parameters, by name."""
        return {each.name: each.parameters for each in self.offered}

    @property
    def customs(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(each.name for each in self.offered if each.custom)

    @property
    def held(self) -> bool:
        """Whether the calls are held to a grammar; else the model writes what it likes."""
        some = any(each.strict or each.form is not None for each in self.offered)
        return self.required or len(self.allowed) < len(self.offered) or some or not self.several

    def grammar(self, answer: Structured | None, tokenizer: Tokenizer) -> Structured | None:
        """The grammar of the reply, if it is a call or an `answer`; ApiError 400 for schemas that cannot be held."""
        if self.form is None or (not self.held and answer is None):
            return answer
        functions = [each for each in self.offered if each.name in self.allowed]
        otherwise = False if self.required else True if answer is None else answer
        try:
            return calls(functions, self.form, tokenizer, self.several, otherwise)
        except (ValueError, TypeError, AttributeError) as error:
            # Malformed schemas raise the latter two.
            raise ApiError(400, f"tools: {error}", "tools") from None


def chosen(offered: Sequence[Callable], choice: Any, parallel: bool | None, tokenizer: Tokenizer) -> Tools:
    """The tools, without any where none may be called.

    ApiError 400 for a choice that there is not, and for a model without a form of calls.
    """
    none = Tools((), None, frozenset(), required=False, several=True)
    if not offered:
        if choice not in (None, "none", "auto") or parallel is not None:
            name = "parallel_tool_calls" if choice is None else "tool_choice"
            raise wrong(name, "needs tools")
        return none
    names = [each.name for each in offered]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise wrong("tools", f"has several functions {repeated}")
    form = tokenizer.tool_form
    if form is None:
        raise ApiError(400, "tools: this model's chat template has no tools", "tools", "unsupported_parameter")
    mode, allowed = _choice(choice, names)
    if mode == "none":
        return none
    return Tools(offered, form, frozenset(allowed), mode == "required", parallel is not False)


def _choice(choice: Any, names: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The mode, and which functions it is about."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", names
    mode, wanted = "required", [choice]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        inner = inner if isinstance(inner, dict) else {}
        mode, wanted = inner.get("mode"), inner.get("tools")
    allowed = [_name(each) for each in wanted] if isinstance(wanted, list) else []
    if mode not in ("auto", "required") or not allowed or None in allowed:
        expected = "auto, none, required, a function, a custom tool or allowed_tools"
        raise ApiError(400, f"tool_choice: expected {expected}", "tool_choice")
    if unknown := next((name for name in allowed if name not in names), None):
        raise ApiError(400, f"tool_choice: there is no tool {unknown!r:.80}", "tool_choice")
    return mode, [name for name in allowed if name is not None]


def _name(tool: Any) -> str | None:
    """The tool's name, under its type (chats) or beside it (responses)."""
    if not isinstance(tool, dict) or tool.get("type") not in ("function", "custom"):
        return None
    inner = tool.get(tool["type"], tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None
