"""Reads Parquet files of questions, the format of data sets on the Hugging Face hub, with pyarrow (in an extra)."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

MAX_ROWS, MAX_BYTES = 1_000_000, 2**28
"""The most rows of a file, and decoded bytes of the columns read. MMLU-Pro's test set has 12,032 rows in 9 MB."""

# Few rows at a time, because a small file may repeat one long text in every row.
BATCH = 16


def read(path: pathlib.Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of `path`, with those of `columns` that it has; other columns are not read.

    Columns hold texts, numbers or lists of texts. Raises ValueError, naming the file, if pyarrow is not installed, or
    if the file is damaged, has none of the columns, has one of another type or twice, or exceeds `MAX_ROWS` or
    `MAX_BYTES`. Raises OSError if it cannot be opened.
    """
    try:
        import pyarrow  # noqa: PLC0415 -- from an extra
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path}: Parquet needs pyarrow, which is not installed: pip install 'ling3[evals]', or convert the file "
            "to JSONL"
        ) from error
    with path.open("rb") as file:
        try:
            return list(_rows(path, file, columns))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: damaged, or no Parquet file ({error}); fetch it again") from error


def _rows(path: pathlib.Path, file: BinaryIO, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet  # noqa: PLC0415 -- from an extra

    content = parquet.ParquetFile(file, page_checksum_verification=True)
    names = content.schema_arrow.names
    wanted = [name for name in names if name in columns]
    if not wanted:
        raise ValueError(f"{path}: no column {', '.join(map(repr, columns))}; there is {', '.join(names) or 'none'}")
    for name in wanted:
        if wanted.count(name) > 1:
            raise ValueError(f"{path}: the same column twice: {name!r}; leave one out")
        if not _is_plain(kind := content.schema_arrow.field(name).type):
            raise ValueError(f"{path}: the column {name!r} is of {kind}, expected texts, numbers or lists of texts")
    rows = nbytes = 0
    _check_size(path, content.metadata.num_rows, 0)
    for batch in content.iter_batches(BATCH, columns=wanted, use_threads=False):
        rows, nbytes = rows + batch.num_rows, nbytes + batch.nbytes
        _check_size(path, rows, nbytes)
        yield from batch.to_pylist()


def _is_plain(kind: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415 -- from an extra

    if types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind):
        kind = kind.value_type
        return types.is_string(kind) or types.is_large_string(kind)
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_integer, types.is_floating))


def _check_size(path: pathlib.Path, rows: int, nbytes: int) -> None:
    if rows > MAX_ROWS or nbytes > MAX_BYTES:
        raise ValueError(
            f"{path}: {rows:,} rows or more, of {nbytes:,} bytes or more in the needed columns; expected at most "
            f"{MAX_ROWS:,} rows and {MAX_BYTES:,} bytes: give a part of it"
        )
