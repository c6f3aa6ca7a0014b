"""From what a cell left behind to its row. Pure, but for reading the cell's files."""

from __future__ import annotations

import itertools
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigtrain.bench.processes import Ended
from bigtrain.diagnostics.metrics import FlopsFormula, read_rows
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.plan.cards import peak_bf16_flops

# ok      all steps ran                       oom      GPU memory ran out
# refused the plan said before building that it does not fit (exit 3)
# usage   arguments or config were refused (exit 2)
# killed  a rank got SIGKILL from outside, as from the kernel when host memory runs out
# timeout the time limit was reached          crash    anything else
_OOM = re.compile(
    r"OutOfMemoryError|(?:CUDA|GPU) out of memory|out of GPU memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_ERROR = re.compile(r"^(?:\[rank ?\d+\]:? ?)*((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
_SIGKILL = -9
_LOG_BYTES = 4 << 20


def classify(ended: Ended, text: str, steps_done: int, steps: int) -> str:
    """What became of a cell.

    Args:
        ended: of its ranks. text: all that the failed ones said. steps_done: rows written, of `steps`.
    """
    codes = ended.exit_codes
    if all(code == 0 for code in codes):
        return "ok" if steps_done >= steps else "crash"
    if ended.timed_out:
        return "timeout"
    if _OOM.search(text):
        return "oom"
    if DoesNotFitError.exit_code in codes:
        return "refused"
    if UsageError.exit_code in codes and not steps_done:
        return "usage"
    return "killed" if _SIGKILL in codes else "crash"


def error_line(text: str) -> str:
    """The line of a log that says what went wrong: the last exception, with its list if it announces one, else the last line."""
    found = list(_ERROR.finditer(text))
    if not found:
        return _last_line(text)
    told = found[-1].group(1)
    if told.rstrip().endswith(":"):
        after = text[found[-1].end() :].lstrip("\n").splitlines()
        told += "".join(" " + line.strip() for line in itertools.takewhile(lambda line: line.startswith("  "), after))
    return told.strip()[:400]


def _last_line(text: str) -> str:
    return next((line.strip()[:400] for line in reversed(text.splitlines()) if line.strip()), "")


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; of one value all three are that value."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0], "n": 1}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high, "n": len(values)}


def timing(rows: Sequence[Mapping[str, Any]], warmup: int) -> dict[str, Any]:
    """Step time without the first `warmup` steps, and losses.

    Each step ends with the device's loss on the host, so its time needs no further synchronisation.
    """
    measured = rows[warmup:]
    if not measured:
        return {}
    return {
        "step_time_s": quartiles([row["step_time_s"] for row in measured]),
        "first_step_s": rows[0]["step_time_s"],
        "untimed_steps": warmup,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "skipped_steps": sum(bool(row.get("skipped")) for row in rows),
    }


def speed(median_s: float, tokens_per_step: int, world: int, formula: FlopsFormula | None, card: str | None) -> dict[str, Any]:
    """Tokens/s, model TFLOP/s and MFU of one device. Recomputation is not counted.

    Args:
        tokens_per_step: of all ranks. card: its name, for the peak.
    """
    tokens_per_s = tokens_per_step / median_s / world
    out: dict[str, Any] = {"tokens_per_s_per_gpu": tokens_per_s, "model_tflops": None, "mfu": None}
    if formula is not None:
        out["model_tflops"] = formula.per_token * tokens_per_s / 1e12
        out["mfu"] = formula.mfu(tokens_per_s, card)
        out["formula"] = str(formula)
        peak = peak_bf16_flops(card)
        if peak is not None:
            out["formula"] += f"; MFU = FLOPs per token x tokens/s per GPU / {peak:.4g} FLOP/s ({card}, dense bf16)"
    if out["mfu"] is not None and out["mfu"] > 1:
        out["note"] = f"MFU {out['mfu']:.2f} is above 1: tokens, time or the card's peak is wrong, do not use this row"
    return out


_PEAKS = ("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_used_bytes")


def memory(per_rank_rows: Sequence[Sequence[Mapping[str, Any]]], ended: Ended) -> dict[str, int | None]:
    """Peaks in bytes: the fullest GPU, the fullest rank on the host, and all ranks of the host together; and the allocator's retries."""
    rows = [row for one in per_rank_rows for row in one]
    out: dict[str, int | None] = {name: max((row.get(name) or 0 for row in rows), default=0) or None for name in _PEAKS}
    # Of the last step: in the first ones caches fill.
    out["gpu_alloc_retries"] = max((one[-1].get("gpu_alloc_retries") or 0 for one in per_rank_rows if one), default=0)
    if ended.gpu_used_bytes > ended.gpu_used_before_bytes:
        out["gpu_used_bytes"] = max(out["gpu_used_bytes"] or 0, ended.gpu_used_bytes)
    rss = [*ended.rss_bytes.values(), *(row.get("host_rss_bytes") or 0 for row in rows)]
    pss = [*ended.pss_bytes.values(), *(row.get("host_pss_bytes") or 0 for row in rows)]
    out["host_rss_bytes"] = max(rss, default=0) or None
    out["host_pss_bytes"] = max(pss, default=0) or None
    out["host_node_pss_bytes"] = max(ended.node_pss_bytes, out["host_pss_bytes"] or 0) or None
    return out


_COMPARED = {
    "gpu_allocated_bytes": "gpu_allocated_bytes",
    "gpu_reserved_bytes": "gpu_reserved_bytes",
    "gpu_used_bytes": "gpu_used_bytes",
    "host_bytes": "host_pss_bytes",
    "step_time_s": "step_time_s",
}


def errors(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Relative error of each predicted number, (predicted - measured) / measured; only where both are known."""
    out = {}
    for name, other in _COMPARED.items():
        said, seen = predicted.get(name), measured.get(other)
        seen = seen.get("median") if isinstance(seen, Mapping) else seen
        if said and seen:
            out[name] = said / seen - 1
    return out


def read_cell(out: Path, ended: Ended, steps: int, limit: str) -> tuple[str, str, list[list[dict[str, Any]]]]:
    """(status, error line, rows of each file) from a cell's folder: logs of ranks, metrics of one or all of them.

    Args:
        limit: which one ends the cell, as its user wrote it: "max_cell_s 900", "--total_s 3600".
    """
    files = [out / "metrics.jsonl", *sorted(out.glob("metrics-rank*.jsonl"))]
    rows = [read_rows(file) for file in files]
    logs = [_end_of(out.parent / f"rank{r}.log") for r in range(len(ended.exit_codes))]
    failed = [log for log, code in zip(logs, ended.exit_codes) if code != 0]
    status = classify(ended, "\n".join(failed), len(rows[0]), steps)
    if status == "ok":
        return status, "", rows
    if status == "timeout":
        last = _last_line(failed[0])
        return status, _out_of_time(len(rows[0]), steps, limit, ended.seconds) + (f"; last words: {last}" if last else ""), rows
    return status, error_line(_most_telling(logs, ended, status)), rows


def _out_of_time(done: int, steps: int, limit: str, seconds: float) -> str:
    """Which limit ended a cell, what it was at, and what to do: `--total_s` leaves the rest to the next call."""
    at = "" if done else " before the end of the first, which builds and tunes kernels (minutes, with experts)"
    more = "the same command runs it again" if limit.startswith("--") else "give a larger --max_cell_s"
    return f"{done} of {steps} steps in {seconds:.0f} s: {limit} was over{at}; {more}"


def _end_of(log: Path) -> str:
    """What a rank said last: a log may be larger than the memory here."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        return file.read().decode(errors="replace")


def _most_telling(logs: Sequence[str], ended: Ended, status: str) -> str:
    """The log of the rank that failed by itself: others only lost their partner."""
    if status == "oom":
        found = [line for log in logs for line in log.splitlines() if _OOM.search(line)]
        return found[-1] if found else ""
    if status == "refused":
        found = [line.strip() for line in logs[0].splitlines() if "DOES NOT FIT" in line or line.strip().startswith("nearest:")]
        if found:
            return "; ".join(found)
    pairs = [(log, code) for log, code in zip(logs, ended.exit_codes) if code not in (0, None)]
    plain = [log for log, _ in pairs if "RanksDisagreeError" not in error_line(log)]
    return (plain or [log for log, _ in pairs] or [""])[0]
