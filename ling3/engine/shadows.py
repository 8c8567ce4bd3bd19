"""The nodes of the radix tree, and the two laws for what a node needs beside its slots: windows and snapshots."""

import dataclasses
from collections.abc import Sequence
from typing import Any, no_type_check

Page = tuple[int, ...]
"""The tokens of a page."""
Slot = Any
"""The name of a page's memory, which may be anything that can be in a set."""


@no_type_check
@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """The pages [end - len(key), end) of every sequence that goes through it. The root has none."""

    key: list[Page]
    slots: list[Slot]
    end: int
    parent: "Node | None"
    shadow: Any = None
    """None: it is a tombstone."""
    children: "dict[Page, Node]" = dataclasses.field(default_factory=dict)
    full_lock: int = 0
    """Locks on it or below it."""
    shadow_lock: int = 0
    """Those that need its shadow."""
    lock_end: int | None = None
    """The mark of the locks whose part of the shadows begins here."""

    @property
    def start(self) -> int:
        """Its first page's number."""
        return self.end - len(self.key)


@no_type_check
class Window:
    """Shadows of one slot a page, of which the last `pages` are needed. A node's shadow is the list of them."""

    # Decoding past the window needs a leaf's shadow no more, and hardly another sequence ends just there.
    kept_after_release = False

    def __init__(self, pages: int):
        self.pages = pages

    def size(self, shadow: list[Slot] | None) -> int:
        """What it takes of the memory for shadows."""
        return 0 if shadow is None else len(shadow)

    def parts(self, shadow: list[Slot]) -> list[Slot]:
        """What is handed to `free_shadow`."""
        return shadow

    def split(self, shadow: list[Slot] | None, pages: int) -> tuple[list[Slot] | None, list[Slot] | None]:
        """The shadows of a node's first `pages` and of the others."""
        return (None, None) if shadow is None else (shadow[:pages], shadow[pages:])

    def usable(self, path: Sequence[Node]) -> int:
        """How many nodes of a path from the root make the longest prefix that can be continued."""
        usable, since = 0, self.pages  # live pages since the last tombstone; the beginning is as good as a window
        for index, node in enumerate(path):
            if node.shadow is not None:
                since += len(node.key)
            else:
                usable, since = (index if since >= self.pages else usable), 0
        return len(path) if since >= self.pages else usable

    def needed(self, node: Node) -> list[Node]:
        """The nodes, the lowest first, whose shadows are needed after `node`. ValueError if one has none."""
        nodes, pages = [], 0
        while pages < self.pages and node.parent is not None:
            if node.shadow is None:
                raise ValueError("no sequence can be continued from this node: a page of its window has no shadow")
            nodes.append(node)
            pages, node = pages + len(node.key), node.parent
        return nodes

    def matched(self, nodes: Sequence[Node]) -> list[Slot]:
        """`Match.shadow`, given the nodes that are needed."""
        shadow = [slot for node in reversed(nodes) for slot in node.shadow]
        return shadow[max(len(shadow) - self.pages, 0) :]

    def offered(self, shadow: Sequence[Slot] | None, end: int, shared: int) -> list[Slot]:
        """The shadow slots given for a sequence of `end` pages, without those of its `shared` ones."""
        shadow = [] if shadow is None else list(shadow)
        if len(shadow) > (end if self.pages else 0):
            raise ValueError(f"{len(shadow)} shadow slots for {end} pages with a window of {self.pages} pages")
        return shadow[max(shared - (end - len(shadow)), 0) :]

    def first(self, shadow: list[Slot], a: int, b: int, end: int) -> int:
        """The first of the pages [a, b) from which on `offered` has their shadows; b if there is none."""
        return min(max(end - len(shadow), a), b) if self.pages else a

    def part(self, shadow: list[Slot], a: int, b: int, end: int) -> list[Slot]:
        """The shadow among `offered` of a node with the pages [a, b), none before `first`."""
        before = end - len(shadow)
        return shadow[a - before : b - before] if self.pages else []


@no_type_check
class Snapshots:
    """Shadows of one object with `nbytes`, which belongs to the end of its node."""

    # The copy that was taken of a snapshot makes it no less useful for other sequences.
    kept_after_release = True

    def size(self, shadow: Any) -> int:
        """What it takes of the memory for shadows."""
        return 0 if shadow is None else shadow.nbytes

    def parts(self, shadow: Any) -> list[Any]:
        """What is handed to `free_shadow`."""
        return [shadow]

    def split(self, shadow: Any, pages: int) -> tuple[Any, Any]:
        """The shadows of a node's first pages and of the others."""
        return None, shadow

    def usable(self, path: Sequence[Node]) -> int:
        """How many nodes of a path from the root make the longest prefix that can be continued."""
        return max((index + 1 for index, node in enumerate(path) if node.shadow is not None), default=0)

    def needed(self, node: Node) -> list[Node]:
        """The node itself, unless it is the root. ValueError if it has no snapshot."""
        if node.parent is None:
            return []
        if node.shadow is None:
            raise ValueError("no sequence can be continued from this node: it has no snapshot")
        return [node]

    def matched(self, nodes: Sequence[Node]) -> Any:
        """`Match.shadow`, given the nodes that are needed."""
        return nodes[0].shadow if nodes else None

    def offered(self, shadow: Any, end: int, shared: int) -> Any:
        """The snapshot given for a sequence of `end` pages."""
        if shadow is not None and end == 0:
            raise ValueError("a snapshot needs at least one whole page of tokens before it")
        return shadow

    def first(self, shadow: Any, a: int, b: int, end: int) -> int:
        """The first of the pages [a, b) if the snapshot belongs to their end; otherwise b."""
        return a if b == end and shadow is not None else b

    def part(self, shadow: Any, a: int, b: int, end: int) -> Any:
        """The snapshot as the shadow of a node with the pages [a, b), if it has any from `first` on."""
        return shadow if a < b == end else None
