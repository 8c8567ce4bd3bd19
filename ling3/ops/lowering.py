"""How an operator is written for XLA: the same numbers, in the form that a platform's compiler runs fast."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Lowering:
    """What is written differently for XLA on one platform. The defaults change nothing."""

    few_rows: int = 0
    """Products of up to so many rows are computed as (W xᵀ)ᵀ: XLA's CPU backend repacks the right side of a product."""
    read_in_branch: bool = False
    """Rows of a narrow array are read in a branch: XLA's CPU backend would first convert the whole array."""
    native: bool = False
    """Products with a large matrix run in C++, where there is a compiler."""
    barriers: bool = False
    """A KDA step computes the factors of its state once: XLA's CPU backend would fuse them into the product."""
    row_by_row: bool = False
    """Tokens are chosen for one row after the other, so that rows without a token cost nothing."""
    accumulation: str = "float32"
    """The dtype in which products with weights are summed, at least: float32 or float64. `Execution` sets it."""


XLA = Lowering()
XLA_CPU = Lowering(few_rows=32, read_in_branch=True, native=True, barriers=True, row_by_row=True)
