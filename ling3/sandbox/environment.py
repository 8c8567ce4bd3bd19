"""A jinja2 sandbox that also bounds memory and time.

jinja2's own sandbox keeps a template from escaping; it does not stop `'a' * 10**9`, a filter that pads to a billion
characters, or loops inside loops. Here every operation that can make something large, or take long, is charged to a
`Meter` before it runs: operators through the sandbox's hook, calls, filters and tests through lists of those that are
known, the rest through a rewriting of the syntax tree. What is not on a list is refused by name.
"""

import functools
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, no_type_check

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from markupsafe import Markup

from ling3.sandbox import rewriting
from ling3.sandbox.meter import Meter

# A call or a filter takes about as long as this many nodes.
CALL = 8
# The widest padding, deepest indentation, and so on.
WIDEST = 10_000


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHALLOW_FILTERS = _names(
    "abs attr batch count d default first items last length list map reject rejectattr reverse round select selectattr "
    "slice"
)
ORDER_FILTERS = _names("dictsort groupby max min sort sum unique")
TEXT_FILTERS = _names(
    "capitalize center e escape float format indent int join lower replace safe string title tojson trim truncate "
    "upper wordcount"
)

STRING_METHODS = _names(
    "capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title "
    "upper zfill"
)
CONTAINER_METHODS = {
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
}

# These look only at the value itself; other tests compare it or turn it into text.
SHALLOW_TESTS = _names(
    "boolean callable defined divisibleby escaped even false filter float integer iterable mapping none number odd "
    "sameas sequence string test true undefined"
)


class GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`, with which templates mark the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """The statements between the two tags, in a scope of their own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@no_type_check  # called for every node, and the meter checks what matters
class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering: jinja2's sandbox as transformers sets it up, all work charged to `meter`.

    `functions` are the globals and `tojson` the filter that the caller adds; a function bounds its own work.
    Compiling evaluates nothing, so code compiled in one environment serves any number of others.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, meter: Meter, functions: dict[str, Callable[..., Any]], tojson: Callable[..., str]):
        # Without the optimizer, and with a `finalize` that wants the context, no constant is folded at compile time.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, GenerationTag],
            optimized=False,
            finalize=self._finalize,
        )
        self.meter = meter
        self.globals = {
            "range": self._range,
            "dict": self._dict,
            "namespace": self._namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            **functions,
        }
        self._callable = {id(value) for value in self.globals.values()}
        known = {**FILTERS, "tojson": tojson}
        names = SHALLOW_FILTERS | ORDER_FILTERS | TEXT_FILTERS
        self.filters = {name: self._filter(name, known[name]) for name in names}
        self.filters |= {
            rewriting.SPEND: meter.spend,
            rewriting.WEIGH: self._weigh,
            rewriting.MEMBER: self._member,
            rewriting.CONCAT: self._concat,
            rewriting.MADE: meter.made,
            rewriting.SPREAD: meter.spread,
        }
        self.tests = {name: self._test(name, test) for name, test in TESTS.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return rewriting.metered(super()._parse(source, name, filename))

    @pass_context
    def _finalize(self, context: Context, value: Any) -> str:
        return self.meter.text(value)

    def _range(self, *args: int) -> range:
        span = range(*args)
        if len(span) > 100_000:
            raise SecurityError(f"range() of {len(span)} items, where a template has at most 100000")
        return span

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        self.meter.weigh(args)
        return self.meter.made(dict(*args, **kwargs))

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        attributes = self._dict(*args, **kwargs)
        for name in attributes:
            if not isinstance(name, str) or name.startswith("_"):
                raise SecurityError(f"a namespace has no attribute {name!r}")
        return Namespace(attributes)

    def _weigh(self, value: Any) -> Any:
        self.meter.weigh(value)
        return value

    def _member(self, value: Any) -> Any:
        # Looking into a dict or a range is one step however large it is.
        if isinstance(value, dict | range):
            self.meter.spend(1)
        else:
            self.meter.weigh(value)
        return value

    def _concat(self, parts: tuple[Any, ...]) -> str:
        return self.meter.made("".join([self.meter.text(part) for part in parts]))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscripts; the hash of a tuple visits all of it."""
        if isinstance(argument, tuple):
            self.meter.weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator if there is room for its result."""
        match operator:
            case "*":
                for one, other in ((left, right), (right, left)):
                    if isinstance(one, str | list | tuple) and isinstance(other, int):
                        self._afford(one, len(one) * max(0, other))
                if isinstance(left, int) and isinstance(right, int):
                    self.meter.integer(left.bit_length() + right.bit_length())
            case "**" if isinstance(left, int) and isinstance(right, int):
                self.meter.integer(left.bit_length() * abs(right))
            case "%" if isinstance(left, str):
                self._percent(left, right)
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self._afford(left, len(left) + len(right))
            case "-":
                self.meter.weigh((left, right))
        return self.meter.made(super().call_binop(context, operator, left, right))

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Applies a filter that the template names at run time, as `map` does."""
        if name not in SHALLOW_FILTERS | ORDER_FILTERS | TEXT_FILTERS:
            raise SecurityError(f"it applies the filter {name!r}, which a chat template may not")
        return super().call_filter(name, *args, **kwargs)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template may call: globals, macros, loops, and the methods that are on the lists."""
        self.meter.spend(CALL)
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, LoopContext) and args:
            args = (self.meter.iterate(args[0]), *args[1:])
        elif isinstance(owner, LoopContext | Cycler):
            self.meter.weigh(args)
        elif id(obj) not in self._callable and not isinstance(obj, Macro | Undefined | Joiner | MeteredFormat):
            if not isinstance(obj, types.BuiltinMethodType | types.MethodType):
                raise SecurityError(f"it calls a {type(obj).__name__}, which a chat template may not")
            if isinstance(owner, str) and obj.__name__ == "join" and args:
                args = (list(self.meter.iterate(args[0])), *args[1:])
            # jinja2 adds its own keyword arguments, such as `_loop_vars`, and takes them out again.
            self._allow_method(obj.__name__, owner, [*args, *(kwargs[key] for key in kwargs if key[0] != "_")])
        return self.meter.made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """Puts `MeteredFormat` in the place of `str.format` and `str.format_map`."""
        if super().wrap_str_format(value) is None:
            return None
        return MeteredFormat(self, value.__self__, mapping=value.__name__ == "format_map")

    def _allow_method(self, name: str, owner: Any, args: list[Any]) -> None:
        """Charges for a method of a string or a container, if it is on the list."""
        for kind, names in CONTAINER_METHODS.items():
            if isinstance(owner, kind) and name in names:
                self.meter.weigh((owner, args) if name in ("count", "index") else args)
                return
        if not isinstance(owner, str) or name not in STRING_METHODS:
            raise SecurityError(f"it calls {name}() of a {type(owner).__name__}, which a chat template may not")
        self.meter.spend(0, len(owner))
        self.meter.weigh(args)
        first = args[0] if args else None
        match name:
            case "center" | "ljust" | "rjust" | "zfill":
                self.meter.spend(0, self._width(first))
            case "replace" if len(args) > 1:
                self._replacement(owner, *args[:2])
            case "join" if isinstance(first, list):
                self.meter.spend(0, self._escaped(owner) * (len(owner) * len(first)))
                self.meter.spend(0, self._escaped(owner) * sum(len(part) for part in first if isinstance(part, str)))
            case "split" | "rsplit" if isinstance(first, str) and first:
                self.meter.spend(4 * owner.count(first))
            case "split" | "rsplit" | "splitlines":
                self.meter.spend(len(owner) // 2)
        if name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition") and isinstance(first, str):
            # Their time is the product of the two lengths.
            self.meter.spend(len(owner) * len(first) // 1024)

    def _filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # jinja2 passes some filters the context or the environment first.
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(CALL)
            value, rest = args[leading], args[leading + 1 :]
            # Some of these are dotted paths, which are followed for each item.
            path = sum(len(item) for item in (*rest, *kwargs.values()) if isinstance(item, str))
            if name not in SHALLOW_FILTERS:
                if isinstance(value, Iterator):
                    value = list(self.meter.iterate(value))
                elements, characters, _ = self.meter.weigh(value)
                self.meter.weigh((rest, kwargs))
                if name in ORDER_FILTERS:
                    self.meter.spend(16 * elements + path * elements, 16 * characters)
                elif not isinstance(value, str):
                    self.meter.spend(path * elements, 10 * characters)
            self._allow_filter(name, value, rest, kwargs)
            result = function(*args[:leading], value, *rest, **kwargs)
            return self.meter.iterate(result, 4 + path) if isinstance(result, Iterator) else self.meter.made(result)

        return metered

    def _allow_filter(self, name: str, value: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Charges for what a filter's arguments add to the size of its value."""

        def argument(position: int, keyword: str, default: Any = None) -> Any:
            return rest[position] if len(rest) > position else kwargs.get(keyword, default)

        match name:
            case "list":
                self.meter.spread(value)
            case "center":
                self.meter.spend(0, self._width(argument(0, "width", 80)))
            case "indent":
                width, text = argument(0, "width", 4), self.meter.text(value)
                blank = len(width) if isinstance(width, str) else self._width(width)
                lines = len(text) // 2 if len(text) < 1000 else text.count("\n")
                self.meter.spend(len(text) // 2, blank * (1 + lines))
            case "replace":
                old, new, *_ = (*rest, *kwargs.values(), "", "")
                self._replacement(self.meter.text(value), old, new)
            case "join":
                separator = self.meter.text(argument(0, "d", ""))
                count = len(self.meter.spread(value)) if hasattr(value, "__len__") else 0
                self.meter.spend(0, len(separator) * count)
            case "format":
                self._percent(self.meter.text(value), kwargs or rest)
            case "tojson":
                elements, characters, depth = self.meter.weigh(value)
                indent, separators = argument(1, "indent"), argument(2, "separators")
                blank = len(indent) if isinstance(indent, str) else self._width(indent)
                between = sum(len(str(separator)) for separator in separators or ())
                # A control character is written as six: \u0000.
                self.meter.spend(0, 6 * characters + elements * (6 + depth * blank + between))
            case "batch" if argument(1, "fill_with") is not None:
                self.meter.spend(4 * self._width(argument(0, "linecount")))
            case "slice":
                self.meter.spread(value)
                self.meter.spend(4 * self._width(argument(0, "slices")))
            case "round":
                self._width(argument(0, "precision"), widest=64)
            case "trim" if isinstance(chars := argument(0, "chars"), str):
                self.meter.spend(len(self.meter.text(value)) * len(chars) // 1024)
            case "sum":
                self.meter.weigh(argument(1, "start"))
                lists = sum(len(item) for item in value if isinstance(item, list | tuple))
                self.meter.spend(4 * lists * len(value) if lists else 0)

    def _test(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        leading = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def metered(*args: Any) -> Any:
            self.meter.spend(2)
            if name == "in":
                self._weigh(args[0])
                self._member(args[1])
            elif name not in SHALLOW_TESTS:
                self.meter.weigh(args[leading:])
            return function(*args)

        return metered

    def _afford(self, value: Any, size: int) -> None:
        """Makes sure that there is room for a string or list like `value` of `size` elements."""
        self.meter.afford(*((0, self._escaped(value) * size) if isinstance(value, str) else (4 * size, 0)))

    def _escaped(self, value: Any) -> int:
        # What is joined to a Markup is escaped: a quote becomes five characters.
        return 5 if isinstance(value, Markup) else 1

    def _width(self, width: Any, widest: int = WIDEST) -> int:
        if not isinstance(width, int):
            return 0
        if abs(width) > widest:
            raise SecurityError(f"a width of {width}, where a template has at most {widest}")
        return abs(width)

    def _replacement(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self._afford(text, len(text) + text.count(old) * len(new))

    def _percent(self, pattern: str, values: Any) -> None:
        """Charges for `pattern % values`: each conversion may write all of the values, padded to its width."""
        _, characters, _ = self.meter.weigh(values)
        widths = [int(digits[:9]) for digits in re.findall(r"\d+", pattern)]
        if "*" in pattern and isinstance(values, tuple):
            widths += [value for value in values if isinstance(value, int)]
        conversions = pattern.count("%")
        widest = max(map(self._width, widths), default=0)
        # The longest float has 309 digits before the point.
        self.meter.spend(conversions, conversions * (400 + 10 * characters + 2 * widest))


@no_type_check
class MeteredFormat:
    """`text.format` or `text.format_map` as a template may call it."""

    def __init__(self, environment: BoundedEnvironment, text: str, mapping: bool):
        self.environment = environment
        self.text = text
        self.mapping = mapping

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """The formatted text, each field charged before it is written."""
        if self.mapping:
            (kwargs,), args = args, ()
        self.environment.meter.spend(0, len(self.text))
        if isinstance(self.text, Markup):
            formatter = _EscapeFormatter(self.environment, escape=self.text.escape)
        else:
            formatter = _Formatter(self.environment)
        return self.environment.meter.made(type(self.text)(formatter.vformat(self.text, args, kwargs)))


@no_type_check
class _Formatter(SandboxedFormatter):
    def __init__(self, env: Any, **kwargs: Any):
        super().__init__(env, **kwargs)
        self.environment = env

    def convert_field(self, value: Any, conversion: Any) -> Any:
        _, characters, _ = self.environment.meter.weigh(value)
        self.environment.meter.spend(2 * CALL, 10 * characters)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in re.findall(r"\d+", format_spec):
            self.environment._width(int(digits[:9]))
        return self.environment.meter.made(super().format_field(value, format_spec))


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass
