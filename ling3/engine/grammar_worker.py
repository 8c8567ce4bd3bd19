"""Tries grammars in a process with limits, where a crash costs only one request. Imports nothing of ling3.

llguidance bounds the states and items of a grammar, but not its recursion, nor all of its memory and time. A grammar
that compiles here and yields its first mask does so in the engine's process too: it is then known to terminate, and to
need less stack than any thread has.
"""

# pyright: reportMissingImports=false
# llguidance is an extra, and types are checked without it too.

import threading
from typing import Any

import llguidance

STACK = 2**20
"""Stack size in bytes for trying grammars. Threads have 8 MiB, or 2 MiB if `ulimit -s` is unlimited."""

_tools: list[Any] = []


def prepare(tokenizer: str, vocab: int, ends: list[int], limits: dict[str, Any]) -> None:
    """Loads the tokenizer that all grammars share, given as the text of a `tokenizer.json`."""
    threading.stack_size(STACK)
    _tools[:] = [
        llguidance.LLTokenizer(tokenizer, n_vocab=vocab, eos_token=ends or None),
        llguidance.LLParserLimits(**limits, verbose_errors=False),
    ]


def answer(source: str) -> dict[str, Any]:
    """Returns whether a grammar `compiles`, and the `error` of compiling it or of its first mask, or None."""
    found: list[Any] = []

    def attempt() -> None:
        try:
            found.append(_tried(source))
        except BaseException as error:  # a panic in llguidance is a BaseException
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
