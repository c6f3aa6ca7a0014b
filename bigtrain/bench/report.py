"""OUT/rows.csv, OUT/pareto.png and OUT/report.html, from the rows of a sweep. The page needs no scripts and no network."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigtrain.bench import pareto
from bigtrain.bench.accuracy import broken_promises
from bigtrain.diagnostics import pages

GIB = 2**30
Row = Mapping[str, Any]

_COLUMNS = (
    "cell", "label", "runner", "model", "num_gpus", "card", "code", "status", "error", "steps_done", "wall_s",
    "tokens_per_step", "tokens_per_s_per_gpu", "model_tflops", "mfu", "first_step_s", "untimed_steps",
    "gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_used_bytes", "host_rss_bytes", "host_pss_bytes", "host_node_pss_bytes",
    "first_loss", "last_loss", "predicted_at", "started", "ended",
)  # fmt: skip


def write(out: Path, rows: Sequence[Row]) -> Path:
    """Write all three; returns the path of the page."""
    write_csv(out / "rows.csv", rows)
    title = f"{len(rows)} cells on {', '.join(dict.fromkeys(row['card'] for row in rows))}"
    svg = pages.save(pareto.draw(rows, title), out / "pareto.png")
    (out / "report.html").write_text(page(rows, title, svg), encoding="utf-8")
    return out / "report.html"


def flat(row: Row) -> dict[str, Any]:
    """A row as plain columns: nested groups get their name in front."""
    time = row.get("step_time_s") or {}
    out = {name: row.get(name) for name in _COLUMNS}
    out |= {f"step_time_s_{name}": time.get(name) for name in ("median", "q1", "q3", "n")}
    for group in ("predicted", "prediction_error", "settings"):
        out |= {f"{group}.{name}": value for name, value in (row.get(group) or {}).items()}
    return out


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows; columns that only some rows have are empty in the others."""
    table = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in table for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(table)


def accuracy(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each predicted number: how many cells have both, mean absolute and worst relative error, and the worst cell."""
    out = []
    for name in dict.fromkeys(n for row in rows for n in row.get("prediction_error") or {}):
        found = [(abs(row["prediction_error"][name]), row) for row in rows if name in (row.get("prediction_error") or {})]
        worst, where = max(found, key=lambda pair: pair[0])
        mean = sum(size for size, _ in found) / len(found)
        out.append({"name": name, "cells": len(found), "mean": mean, "worst": worst, "where": where["label"]})
    return out


def page(rows: Sequence[Row], title: str, svg: str) -> str:
    """The HTML page."""
    return pages.fill(
        "bigtrain.bench",
        title=title,
        counts=Counter(row["status"] for row in rows).most_common(),
        lines=[_line(number, row) for number, row in enumerate(rows, 1)],
        accuracy=accuracy(rows),
        broken=broken_promises(rows),
        predicted_cells=sum("none" not in row["predicted"] for row in rows),
        formulas=_formulas(rows),
        codes=list(dict.fromkeys(row["code"] for row in rows)),
        versions=sorted((rows[-1].get("versions") or {}).items()),
        svg=svg,
    )


def _formulas(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(model, formula) once each."""
    return list(dict.fromkeys((row["model"], row["formula"]) for row in rows if row.get("formula")))


def _line(number: int, row: Row) -> dict[str, Any]:
    time, said = row.get("step_time_s"), row["predicted"]
    return {
        "number": number,
        "label": row["label"],
        "runner": row["runner"],
        "status": row["status"],
        "error": row.get("error", ""),
        "note": row.get("note", ""),
        "speed": f"{row['tokens_per_s_per_gpu']:,.0f}" if time else "",
        "time": f"{time['median']:.3f} ({time['q1']:.3f} to {time['q3']:.3f}, n {time['n']})" if time else "",
        "tflops": f"{row['model_tflops']:,.1f}" if row.get("model_tflops") else "",
        "mfu": f"{row['mfu']:.1%}" if row.get("mfu") is not None else "",
        "allocated": _both(row.get("gpu_allocated_bytes"), said.get("gpu_allocated_bytes")),
        "reserved": _both(row.get("gpu_reserved_bytes"), said.get("gpu_reserved_bytes")),
        "used": _both(row.get("gpu_used_bytes"), said.get("gpu_used_bytes")),
        "rss": _both(row.get("host_rss_bytes"), None),
        "pss": _both(row.get("host_pss_bytes"), said.get("host_bytes")),
        "fits": {True: "fits", False: "does not fit"}.get(said.get("fits"), ""),
    }


def _both(measured: int | None, predicted: int | None) -> str:
    """GiB as `measured / predicted`, either of which may be missing."""
    parts = [f"{size / GIB:.2f}" if size else "–" for size in (measured, predicted)]
    return "" if parts == ["–", "–"] else parts[0] if predicted is None else " / ".join(parts)
