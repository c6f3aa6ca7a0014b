"""rows.jsonl and predictions.jsonl of a sweep: one JSON object a line, appended whole, read back with every line looked at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigtrain.errors import UsageError

_NUMBER = (int, float)
# What is read of every row, and of one that ran.
_ROW: dict[str, Any] = {
    "cell": str, "label": str, "runner": str, "model": str, "num_gpus": int, "card": str, "code": str, "status": str, "settings": dict,
    "ds_config": (dict, str), "max_cell_s": _NUMBER, "predicted": dict,
}  # fmt: skip
_RAN: dict[str, Any] = {"step_time_s": dict, "tokens_per_s_per_gpu": _NUMBER, "prediction_error": dict}


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """One line, on the disk before this returns; what is torn at the end of the file does not swallow it."""
    with open(path, "a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row, default=str).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file, in order; of none if it does not exist. A line that was torn when its writer died is left out.

    Raises:
        UsageError: a line is JSON, but no row of a sweep; names file, line and what is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if wrong := _wrong(row):
            raise UsageError(f"{path}, line {number} is no row of a sweep: {wrong}. Take that line out, or name another file.")
        rows.append(row)
    return rows


def _wrong(row: Any) -> str:
    if not isinstance(row, dict):
        return f"a JSON object is needed, not {json.dumps(row)[:60]}"
    wanted = _ROW | (_RAN if row.get("status") == "ok" else {})
    if absent := [name for name in wanted if name not in row]:
        return f"it has no {', '.join(absent[:5])}"
    odd = [name for name, kind in wanted.items() if not isinstance(row[name], kind)]
    if not odd and not isinstance(row["settings"].get("seq_len"), int):
        return "its settings have no seq_len"
    return f"{odd[0]} is {json.dumps(row[odd[0]])[:60]}" if odd else ""


def latest_rows(out: Path) -> list[dict[str, Any]]:
    """The last row of every cell."""
    return list({row["cell"]: row for row in read_rows(out / "rows.jsonl")}.values())
