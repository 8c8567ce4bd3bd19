"""The account that a chat template's work is charged to, before the work is done."""

from collections.abc import Iterable, Iterator
from typing import Any, no_type_check

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

# An integer of a chat template counts messages or characters; a big one is only there to eat time.
LARGEST_INTEGER_BITS = 256
# Deeper, and str() or json.dumps() would give up in any case.
DEEPEST = 1_000
CONTAINERS = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


@no_type_check  # checking arguments takes ten times as long as what the methods do
class Meter:
    """What one rendering may still spend: `steps` of the interpreter and `characters` of text made or looked through.

    A step is about a node of the template evaluated, or an element of a container visited (up to a microsecond); a
    character is up to four bytes of memory. Every method raises jinja2's SecurityError when an account is empty.
    """

    def __init__(self, steps: int, characters: int):
        self.steps = steps
        self.characters = characters

    def spend(self, steps: int, characters: int = 0) -> bool:
        """Takes `steps` and `characters` from the accounts; always True, so that it can stand in a condition."""
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise SecurityError("it takes too many steps: its work must stay in proportion to the messages")
        if self.characters < 0:
            raise SecurityError("it makes too much text: its output must stay in proportion to the messages")
        return True

    def afford(self, steps: int, characters: int = 0) -> None:
        """Raises what `spend` would, and takes nothing."""
        if steps > self.steps or characters > self.characters:
            self.spend(steps, characters)

    def weigh(self, value: Any) -> tuple[int, int, int]:
        """Charges for walking through all of `value`: its elements, characters and the depth of its containers.

        A container that appears twice is walked twice, as str(), ==, hash() and json.dumps() do: forty lines that
        each put a list into the next one twice make a value of 2^40 elements.
        """
        elements, characters, depth = 0, 0, -1
        level = [value]
        while level and elements <= self.steps and characters <= self.characters:
            depth += 1
            if depth > DEEPEST:
                raise SecurityError("it nests a value too deeply")
            elements += len(level)
            below: list[Any] = []
            for item in level:
                if isinstance(item, str):
                    characters += len(item)
                elif isinstance(item, CONTAINERS):
                    below.extend(item)
                elif isinstance(item, dict):
                    below.extend(item.keys())
                    below.extend(item.values())
                elif isinstance(item, int):
                    characters += 1 + item.bit_length() // 3
                elif isinstance(item, float):
                    characters += 24
                elif isinstance(item, range):
                    elements += len(item)
                elif isinstance(item, Namespace):
                    below.extend(item._Namespace__attrs.values())
                if elements + len(below) > self.steps:
                    break
            level = below
        self.spend(elements, characters)
        return elements, characters, depth

    def text(self, value: Any) -> str:
        """`str(value)`, charged before it is made."""
        if type(value) is not str:
            _, characters, _ = self.weigh(value)
            if not isinstance(value, str | Undefined):
                # repr writes some characters of a nested string as ten: \U000e0001.
                self.spend(0, 10 * characters)
            value = str(value)
        self.spend(0, len(value))
        return value

    def iterate(self, values: Iterable[Any], cost: int = 4) -> Iterator[Any]:
        """The items of `values`, each charged `cost` steps as it is taken."""
        for value in values:
            self.spend(cost)
            yield value

    def spread(self, values: Any) -> Any:
        """`values`, charged for the list of its items that will be made."""
        if isinstance(values, Iterator):
            return self.iterate(values)
        if hasattr(values, "__len__"):
            self.spend(4 * len(values))
        return values

    def made(self, value: Any) -> Any:
        """`value`, a result no larger than a small multiple of what was charged for, put on the account."""
        if isinstance(value, str):
            self.spend(0, len(value))
        elif isinstance(value, list | tuple | dict | set):
            self.spend(4 * len(value))
        elif isinstance(value, int):
            self.integer(value.bit_length())
        return value

    def integer(self, bits: int) -> None:
        """Refuses an integer of so many bits."""
        if bits > LARGEST_INTEGER_BITS:
            raise SecurityError(f"it computes an integer of {bits} bits")
