"""The page that `bench_hang.py` writes: a row a fault and stage, in the order of the cases, kept over several calls."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from bigtrain.diagnostics.pages import put_table

HEAD = """# What ends a run in which one rank goes wrong

Written by `launch/bench_hang.py`: two CPU ranks (gloo) without a launcher, hang_s {hang_s:g}, {machine}.
Seconds from the fault until rank 0 / rank 1 has ended; exit codes of rank 0 / rank 1 (-9: killed by the signal of the case, or,
where it was stopped, by the watch of the other rank). The last column: the message of a rank that still could speak names the
rank at fault and the cause.

| fault | stage | seconds | exit codes | rank and cause named |
|---|---|---|---|---|
"""


def line(title: str, stage: int, seconds: Sequence[float | None], codes: Sequence[int | None], named: str) -> str:
    """One row: seconds from the fault to each rank's end (None: never), exit codes, whether rank and cause were named."""
    ended = " / ".join("never" if s is None else f"{s:.1f}" for s in seconds)
    return f"| {title} | {stage} | {ended} | {' / '.join(str(c) for c in codes)} | {named} |"


def kept_rows(table: str | None) -> dict[tuple[str, str], str]:
    """Rows of an earlier table, by title and stage: a call that runs some cases replaces theirs."""
    text = Path(table).read_text() if table and Path(table).exists() else ""
    cells = {row: [c.strip() for c in row.split("|")] for row in text.splitlines() if row.count("|") == 6}
    return {(c[1], c[2]): row for row, c in cells.items() if c[2].isdigit()}


def write_table(table: Path, rows: dict[tuple[str, str], str], titles: Sequence[str], hang_s: float) -> None:
    """The page; after each case, so that a run that is cut off has not been for nothing."""
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    known = sorted((key for key in rows if key[0] in titles), key=lambda key: (titles.index(key[0]), key[1]))
    put_table(table, HEAD.format(hang_s=hang_s, machine=machine) + "\n".join(rows[key] for key in known))
