"""Parquet files: which columns of them are read, what is wrong with one, and where a sample stands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.data.jsonfile import KNOWN
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

# Begins the description of a data set, which goes along with every part that is taken of it.
_PLACES = "bigtrain: rows of files "


def with_rows(files: Sequence[Path]) -> tuple[list[Path], dict[str, Any]]:
    """(files with rows, the columns that all of them have): shards may be empty, or have columns more that mean nothing here.

    Raises:
        DataError: a file cannot be read, or lacks a column that another one trains on.
    """
    import pyarrow.parquet

    columns: dict[Path, list[str]] = {}
    for file in files:
        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                if opened.metadata.num_rows:
                    columns[file] = opened.schema_arrow.names
        except (OSError, ValueError) as error:  # what pyarrow raises is one of them
            raise DataError(f"{file}: {_sentence(error)}. It is damaged, or no Parquet file: get or write it anew") from error
    if not columns:
        raise DataError("holds 0 samples")
    for name in KNOWN:
        lacking = [file for file in columns if name not in columns[file]]
        if lacking and len(lacking) < len(columns) and name != "tools":
            raise DataError(f"{lacking[0]} has no column {name!r}, which other files have")
    first = next(iter(columns.values()))
    return list(columns), {"columns": [name for name in first if all(name in names for names in columns.values())]}


def why_not(files: Sequence[Path], why: str) -> str:
    """The reason `why` files could not be read, with the file, and rows or column of it: `datasets` names none."""
    return next((found for found in (_damage(files), _other_types(files)) if found), why)


def _damage(files: Sequence[Path]) -> str:
    """The first rows that cannot be read."""
    import pyarrow.parquet

    for file in files:
        begin = end = 0
        try:
            with pyarrow.parquet.ParquetFile(file) as opened:
                for group in range(opened.metadata.num_row_groups):
                    begin, end = end, end + opened.metadata.row_group(group).num_rows
                    opened.read_row_group(group)
        except (OSError, ValueError) as error:
            return f"{file}, rows {begin} to {end - 1}: {_sentence(error)}. It is damaged: get or write it anew"
    return ""


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _other_types(files: Sequence[Path]) -> str:
    """The first column that is of one type in one file, of another in another."""
    import pyarrow.parquet

    first: dict[str, tuple[Path, Any]] = {}
    for file in files:
        with pyarrow.parquet.ParquetFile(file) as opened:
            for field in opened.schema_arrow if opened.metadata.num_rows else ():
                there, kind = first.setdefault(field.name, (file, field.type))
                if kind != field.type:
                    return (
                        f"column {field.name!r} is {kind} in {there}, but {field.type} in {file}: write all files with one type"
                    )
    return ""


def note_places(dataset: Dataset, files: Sequence[Path]) -> None:
    """Let `place_of` know which rows come from which file."""
    import pyarrow.parquet

    rows = [(str(file), pyarrow.parquet.read_metadata(file).num_rows) for file in files]
    dataset.info.description = _PLACES + json.dumps(rows)


def place_of(dataset: Dataset, sample: int) -> str | None:
    """File and row of a sample of a data set that was read from Parquet files, or of a part of it; None: not known."""
    told = dataset.info.description or ""
    if not told.startswith(_PLACES) or "\n" in told:  # `datasets` puts a line between the descriptions of sets that are joined
        return None
    files = json.loads(told.removeprefix(_PLACES))
    if len(dataset.data) != sum(rows for _, rows in files):
        return None  # somebody has made other rows of it
    row = sample if dataset._indices is None else dataset._indices.column(0)[sample].as_py()
    return next(_places(files, row))


def _places(files: Sequence[tuple[str, int]], row: int) -> Iterator[str]:
    for file, rows in files:
        if row < rows:
            yield f"{file} row {row} (the first is 0)"
            return
        row -= rows
