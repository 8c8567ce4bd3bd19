"""`EngineSettings`: how an engine runs, checked before any work is done."""

import dataclasses
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from ling3.runtime.parameters import ParameterError, make_plain, parameter, problems_of
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole

DECODE_STEPS = 16
"""The most decode steps of one call, and so the most tokens of a row before the host reads them."""
MAX_SLOTS = 2**16
"""The most slots of an engine, and the most rows of its decode call."""
MAX_PAGES = 2**26
"""The most pages: each also takes some memory of the host."""
MAX_TOKENS = 2**17
"""The most tokens of a page, and of a prefill call."""
MAX_PADDINGS = 64
"""The most sizes of a prefill call: each is a program to compile."""
LARGEST = 2**31 - 1
"""The largest int32, which is the type of positions."""
CacheDtype = Literal["auto", "float32", "bfloat16", "packed"]
CACHE_DTYPES: tuple[str, ...] = get_args(CacheDtype)
"""The possible values of `cache_dtype`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How an engine batches requests, and how much memory it takes.

    The last bits of an answer may depend on `page_size`, `chunked_prefill_size`, `token_paddings`, `decode_rows` and
    `decode_steps`, and without `batch_invariant` on how many requests run. `cache_dtype` may change more than the last
    bits; no other field here changes an answer. Raises ParameterError that names every invalid field.
    """

    max_running_requests: int = parameter(64, ge=1, le=MAX_SLOTS)
    """The number of slots: requests that run at once; further ones wait."""
    page_size: int = parameter(256, ge=1, le=MAX_TOKENS)
    """Tokens per page of the paged caches."""
    chunked_prefill_size: int = parameter(512, ge=1, le=MAX_TOKENS)
    """The most prompt tokens of a prefill call: longer prompts are split into chunks."""
    token_paddings: Sequence[int] | None = None
    """The sizes that prefill calls are padded to, each to the smallest that holds it. Without it, 16, 128 and 512 (for
    a large model on a CPU also others between them), and chunked_prefill_size if that is larger."""
    max_model_len: int | None = parameter(None, ge=1, le=LARGEST)
    """The most tokens of a request, prompt and output; without it, the model's context."""
    mem_fraction: float = parameter(0.6, gt=0, le=1)
    """The fraction of the memory left by the weights that slots and pages may take."""
    max_queue: int = parameter(1024, ge=1, le=LARGEST)
    """The most requests that wait."""
    num_pages: int | None = parameter(None, ge=1, le=MAX_PAGES)
    """The number of pages; without it, as many as fit into mem_fraction or could ever be used."""
    decode_rows: int | None = parameter(None, ge=1, le=MAX_SLOTS)
    """Rows of a decode call, one per request; without it, all slots, but at most 16 on a CPU."""
    decode_steps: int = parameter(8, ge=1, le=DECODE_STEPS)
    """The most tokens of each request in one decode call."""
    batch_invariant: bool = parameter(True)
    """False: if few requests run, they share a smaller decode call, which is faster, but the last bits of an answer
    then depend on how many there are."""
    prefix_cache: bool = parameter(True)
    """Prompts that begin like earlier ones reuse what these left in the pages, with the same bits. Prefixes are kept in
    steps of the least common multiple of page_size and chunked_prefill_size."""
    snapshot_fraction: float = parameter(0.1, ge=0, lt=1)
    """The fraction of mem_fraction's memory for snapshots of recurrent states, which a hybrid model needs to continue
    from a prefix."""
    prefix_dir: str | None = None
    """A directory where known prefixes outlive the engine: others of the same model and settings continue from them
    with the same bits. Prefixes are written as prompts are computed, and read when a prompt begins like one."""
    prefix_disk_bytes: int = parameter(10 * 2**30, ge=1)
    """The most bytes in prefix_dir; the least recently used files are deleted."""
    cache_dtype: CacheDtype = "auto"
    """The dtype of caches; "auto" is the weights' dtype, but at least float32 on a CPU. Recurrent states are float32 in
    any case. "packed" keeps pages of compressed entries as FP8 with scales, in 0.57 of bfloat16's bytes, and the rest
    as "auto" does; the model's entries must have the sizes of that format."""
    speculation: Literal["lookup", "mtp"] | Callable[[Sequence[int]], Sequence[int]] | None = None
    """What guesses tokens, which are checked several in a pass: "lookup" (what followed the same tokens before), "mtp"
    (the model's multi-token-prediction layer), or a function of a sequence's tokens; None for none. Answers keep their
    bits (`ling3.engine.speculation`)."""
    draft_tokens: int = parameter(3, ge=1, le=DECODE_STEPS - 1)
    """The most guesses in a pass; fewer, if as many and one more do not divide decode_rows."""
    overlap: bool = parameter(True)
    """False: the host waits for each turn's results before it plans the next turn; slower, with the same bits."""

    def __post_init__(self) -> None:
        problems = [(name, f"{name} {problem}") for name, problem in problems_of(self)]
        if type(self.cache_dtype) is not str or self.cache_dtype not in CACHE_DTYPES:
            names = ", ".join(map(repr, CACHE_DTYPES))
            problems.append(("cache_dtype", f"cache_dtype is {shown(self.cache_dtype)}, expected one of {names}"))
        if not (self.speculation in (None, "lookup", "mtp") or callable(self.speculation)):
            wanted = "None, 'lookup', 'mtp' or a function of the tokens so far that returns guesses"
            problems.append(("speculation", f"speculation is {shown(self.speculation)}, expected {wanted}"))
        if self.speculation is not None and not self.batch_invariant:
            wanted = "expected True with speculation, whose guesses are rows beside the sequence's own"
            problems.append(("batch_invariant", f"batch_invariant is {shown(self.batch_invariant)}, {wanted}"))
        if not isinstance(self.prefix_dir, (str, os.PathLike, type(None))):
            problem = f"prefix_dir is {shown(self.prefix_dir)}, expected a path or None"
            problems.append(("prefix_dir", problem))
        problems += [("token_paddings", problem) for problem in self._padding_problems()]
        if problems:
            raise ParameterError.of("engine settings", problems)
        make_plain(self)
        if self.prefix_dir is not None:
            object.__setattr__(self, "prefix_dir", os.fspath(self.prefix_dir))
        if self.token_paddings is not None:
            object.__setattr__(self, "token_paddings", tuple(sorted(set(map(operator.index, self.token_paddings)))))

    def _padding_problems(self) -> list[str]:
        sizes, chunk = self.token_paddings, self.chunked_prefill_size
        if sizes is None:
            return []
        if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
            return [f"token_paddings is {shown(sizes)}, expected a list of whole numbers or None"]
        if len(sizes) > MAX_PADDINGS:
            return [f"the number of token_paddings is {len(sizes)}, expected at most {MAX_PADDINGS}"]
        wrong = [
            f"token_paddings[{i}] is {shown(size)}, expected a whole number in [1, {MAX_TOKENS}]"
            for i, size in enumerate(sizes)
            if not _is_within(size, MAX_TOKENS)
        ]
        if not wrong and _is_within(chunk, MAX_TOKENS) and max(sizes, default=0) < chunk:
            wrong = [
                f"token_paddings are {shown(tuple(sizes))}, expected one of at least chunked_prefill_size, which is "
                f"{chunk}"
            ]
        return wrong

    @property
    def most_steps(self) -> int:
        """The most tokens of a sequence in one decode call."""
        return self.decode_steps * (1 if self.speculation is None else self.draft_tokens + 1)

    @property
    def prefix_step(self) -> int:
        """Known prefixes are multiples of this many tokens."""
        return math.lcm(self.page_size, self.chunked_prefill_size)

    def most_pages(self, length: int, window: int | None, step: int | None = None) -> int:
        """The most pages that a sequence of up to `length` tokens holds at once.

        With a `window` these are the pages of one call: of its tokens and of the window - 1 tokens before them, which
        may begin anywhere in a page, or in a `step`, the number of tokens whose pages are kept together.
        """
        pages = -(-length // self.page_size)
        if window is None:
            return pages
        tokens = window - 1 + max(self.chunked_prefill_size, self.most_steps)
        before = (self.page_size if step is None else step) - 1
        return min(pages, (before + tokens - 1) // self.page_size + 1)


def changed(settings: EngineSettings | None, changes: dict[str, Any]) -> EngineSettings:
    """The settings with some of them changed; raises TypeError for an unknown name."""
    if settings is not None and not isinstance(settings, EngineSettings):
        raise TypeError(f"settings is {shown(settings)}, expected EngineSettings; give single ones by name")
    names = [field.name for field in dataclasses.fields(EngineSettings)]
    unknown = [name for name in changes if name not in names]
    if unknown:
        raise TypeError(f"no engine setting is called {', '.join(unknown)}; there are {', '.join(names)}")
    return dataclasses.replace(settings or EngineSettings(), **changes)


def _is_within(value: Any, most: int) -> bool:
    return is_whole(value) and 1 <= operator.index(value) <= most
