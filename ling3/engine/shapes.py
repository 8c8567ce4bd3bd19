"""The sizes that the engine's programs are compiled for."""

import dataclasses
from collections.abc import Sequence

import jax

from ling3.engine.memory import Footprint
from ling3.engine.settings import MAX_PAGES, CacheDtype, EngineSettings
from ling3.engine.speculation import check_drafts, fitting
from ling3.execution import Execution
from ling3.model import CausalLM

WIDTHS = (16, 128, 512)
"""The default `token_paddings`; a larger `chunked_prefill_size` is added to these."""
FINE_WIDTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
"""The default for a large model on a CPU, where the time of a call grows with its padded tokens."""
CPU_ROWS = 16
"""The default `decode_rows` on a CPU: more rows slow a decode call down there."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where known prefixes may end, and how much memory their snapshots take."""

    step: int
    """Tokens per step: a multiple of the page size and of the prefill chunk."""
    snapshot: int
    """Bytes of a snapshot, a sequence's memory outside its pages; 0 if the model has no such memory."""
    budget: int
    """The most bytes of all snapshots together."""


@dataclasses.dataclass(frozen=True)
class DraftShapes:
    """The sizes of decode calls that check drafts: as many rows as other calls have, shared by fewer sequences."""

    sequences: int
    each: int
    """The most drafts of a sequence in a pass, which has a row for each and one for the newest token."""
    tokens: int
    """The most tokens of a sequence in a call."""
    mtp: bool
    """True if the model's multi-token-prediction layer guesses."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of an engine's memory and of its calls."""

    slots: int
    pages: int
    page_size: int
    columns: int
    """Columns of a block table: the pages of the longest request."""
    buckets: tuple[int, ...]
    """Prefill buckets: a prefill call's tokens are padded to the smallest that holds them."""
    rows: tuple[int, ...]
    """Decode buckets: a decode call's rows are padded likewise."""
    window: int | None = None
    """A sequence needs only the pages of its last `window` tokens; None: all its pages."""
    most_pages: int = 2**31 - 1
    """The most pages that a sequence holds at once."""
    grid: Grid | None = None
    """Where known prefixes may end; None if none are kept."""
    groups: int = 1
    """Groups of devices, each with its own part of the slots and pages, and its own rows of a call."""
    drafts: DraftShapes | None = None
    """The sizes of calls with drafts; None without speculation."""
    cache_dtype: CacheDtype = "auto"
    """The dtype of the caches, as in the settings."""

    @property
    def step(self) -> int:
        """Tokens whose pages are kept, found and freed together; one page's if no prefixes are kept."""
        return self.page_size if self.grid is None else self.grid.step

    def first_page(self, position: int) -> int:
        """The first page that the token at `position` needs; the pages before it are in steps behind its window."""
        behind = 0 if self.window is None else max(position - self.window + 1, 0)
        return behind // self.step * (self.step // self.page_size)


def settle(settings: EngineSettings, model: CausalLM, execution: Execution) -> tuple[EngineSettings, Shapes]:
    """The settings with which an engine of `model` runs, every None replaced by its value, and its shapes.

    Raises ValueError if max_model_len exceeds the model's context, if slots and pages need more memory than is free or
    cannot be divided among the device groups, and for a cache dtype that the model's caches cannot have.
    """
    context = int(model.config.max_position_embeddings)
    length = context if settings.max_model_len is None else settings.max_model_len
    if length > context:
        raise ValueError(
            f"engine settings: max_model_len is {length}, expected a whole number in [1, {context}], the model's "
            "context"
        )
    if settings.cache_dtype == "packed" and (why := model.unpackable) is not None:
        raise ValueError(
            "engine settings: cache_dtype is 'packed', expected 'auto', 'float32' or 'bfloat16' for this model: " + why
        )
    slots, page_size = settings.max_running_requests, settings.page_size
    footprint = Footprint.of(model, settings)
    groups, window = footprint.groups, footprint.window
    for name, count in (("max_running_requests", slots), ("num_pages", settings.num_pages)):
        if count is not None and count % groups:
            raise ValueError(
                f"engine settings: {name} is {count}, expected a multiple of {groups}: as many groups of devices share "
                "the slots and pages of a model on this mesh"
            )
    grid = _grid(footprint, settings, length)
    most_pages = settings.most_pages(length, window, grid.step if grid else None)
    pages = settings.num_pages
    if pages is None:
        share = settings.mem_fraction * (1 - settings.snapshot_fraction if grid and grid.snapshot else 1)
        pages = min(footprint.pages_that_fit(slots, most_pages, share), MAX_PAGES // groups * groups)
    else:
        footprint.check(slots, pages)
    rows, widths = call_sizes(settings, model, execution, groups)
    settled = dataclasses.replace(
        settings, max_model_len=length, decode_rows=rows, num_pages=pages, token_paddings=widths
    )
    drafts = _drafts(settled, rows, model, execution)
    settled = settled if drafts is None else dataclasses.replace(settled, draft_tokens=drafts.each)
    return settled, Shapes(
        slots=slots,
        pages=pages,
        page_size=page_size,
        columns=-(-length // page_size),
        buckets=buckets_of(settings, widths),
        # XLA compiles the code between matmuls anew for each number of rows, and its results may differ in bits.
        rows=(rows,) if settings.batch_invariant else _row_counts(slots // groups),
        window=window,
        most_pages=most_pages,
        grid=grid,
        groups=groups,
        drafts=drafts,
        cache_dtype=settings.cache_dtype,
    )


def call_sizes(
    settings: EngineSettings, model: CausalLM, execution: Execution, groups: int = 1
) -> tuple[int, tuple[int, ...]]:
    """`decode_rows` and `token_paddings`, and where they are None their default values; bits depend on both."""
    rows, widths = settings.decode_rows, settings.token_paddings
    if rows is None:
        rows = settings.max_running_requests // groups
        rows = min(rows, CPU_ROWS) if jax.default_backend() == "cpu" else rows
    if widths is None:
        own, chunk = FINE_WIDTHS if _is_large(model, execution) else WIDTHS, settings.chunked_prefill_size
        widths = own if chunk <= own[-1] else (*own, chunk)
    return rows, tuple(widths)


def buckets_of(settings: EngineSettings, widths: Sequence[int]) -> tuple[int, ...]:
    """The `token_paddings` that prefill calls use: up to the smallest that holds `chunked_prefill_size` tokens."""
    return tuple(width for width in widths if width <= smallest(widths, settings.chunked_prefill_size))


def _drafts(settings: EngineSettings, rows: int, model: CausalLM, execution: Execution) -> DraftShapes | None:
    """The sizes of calls with drafts. Raises ValueError if rows or model do not suit them."""
    if settings.speculation is None:
        return None
    each, mtp = fitting(settings.draft_tokens, rows), settings.speculation == "mtp"
    check_drafts(model, execution, mtp)
    return DraftShapes(rows // (each + 1), each, settings.decode_steps * (each + 1), mtp)


def _grid(footprint: Footprint, settings: EngineSettings, length: int) -> Grid | None:
    """Where the prefixes of prompts of up to `length` tokens may end; None if none are kept.

    If a model had both a sliding window and recurrent states, a prefix would need both at its end. No family has both,
    and such a model keeps no prefixes.
    """
    snapshot = footprint.states
    # Snapshots are replicated: every group of devices has those of all groups.
    budget = int(settings.snapshot_fraction * settings.mem_fraction * (footprint.free // footprint.groups))
    possible = snapshot <= budget and not (snapshot and footprint.window)
    if not (settings.prefix_cache and possible and settings.prefix_step <= length):
        return None
    return Grid(settings.prefix_step, snapshot, budget if snapshot else 0)


def _is_large(model: CausalLM, execution: Execution) -> bool:
    """True if all matrices are so large that narrower prefill calls pay (`Execution.narrow_from`)."""
    least = execution.narrow_from
    weights = jax.tree.leaves((model.model, model.lm_head))
    return least is not None and all(x.nbytes >= least for x in weights if x.ndim > 1)


def smallest(sizes: Sequence[int], needed: int) -> int:
    """The smallest of the ascending `sizes` that is at least `needed`."""
    return next(size for size in sizes if size >= needed)


def _row_counts(most: int) -> tuple[int, ...]:
    """2, 8, 16, 24, 32, 48, 64, 96, … and `most`: up to 8 rows, a step mostly waits for the weights."""
    counts = (2, 8, *(size * 2**i for i in range(3, most.bit_length()) for size in (2, 3)))
    return (*(count for count in counts if count < most), most)
