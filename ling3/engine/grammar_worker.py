"""Tries grammars where a crash costs one request: the module of a process with limits, which imports nothing of ling3.

llguidance bounds the states and items of a grammar, but neither its recursion nor all of its memory and time. Whatever
compiles here, and has its first mask computed, does so in the engine's process too: by then it is known to end, and to
take less of the stack than any thread has.
"""

# pyright: reportMissingImports=false
# llguidance is an extra, and types are checked without it too.

import threading
from typing import Any

import llguidance

STACK = 2**20
"""Bytes of the stack on which grammars are tried. Threads have 8 MiB, and 2 where `ulimit -s` is unlimited."""

_tools: list[Any] = []


def prepare(tokenizer: str, vocab: int, ends: list[int], limits: dict[str, Any]) -> None:
    """Reads the tokenizer, given as the text of a `tokenizer.json`, which all grammars have in common."""
    threading.stack_size(STACK)
    _tools[:] = [
        llguidance.LLTokenizer(tokenizer, n_vocab=vocab, eos_token=ends or None),
        llguidance.LLParserLimits(**limits, verbose_errors=False),
    ]


def answer(source: str) -> dict[str, Any]:
    """Whether a grammar `compiles`, and the `error` that it has there, or in its first mask; None if it has none."""
    found: list[Any] = []

    def attempt() -> None:
        try:
            found.append(_tried(source))
        except BaseException as error:  # a panic of llguidance's is no Exception
            found.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    if isinstance(found[0], MemoryError):
        raise found[0]
    return found[0] if isinstance(found[0], dict) else {"compiles": True, "error": repr(found[0])}


def _tried(source: str) -> dict[str, Any]:
    tokenizer, limits = _tools
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    compiles = not matcher.is_error()
    while compiles:
        if not (forced := matcher.compute_ff_tokens()):
            matcher.compute_bitmask()
            break
        if matcher.is_error() or not matcher.consume_tokens(forced):
            break
    return {"compiles": compiles, "error": matcher.get_error() if matcher.is_error() else None}
