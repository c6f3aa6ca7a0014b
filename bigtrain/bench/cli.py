"""`bigtrain bench GRID.yaml --output_dir OUT`, also launch/benchmark.py."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from bigtrain.errors import StoppedError, UsageError


def add_parsers(subparsers: Any) -> None:
    """Register the verb `bench`; the parser sets `run`, a function from args to exit code."""
    p = subparsers.add_parser(
        "bench",
        help="run a grid of training runs, one subprocess each: speed and memory, predicted beside measured",
        description="Every cell becomes a row of OUT/rows.jsonl, also one that does not fit, crashes or takes too long. "
        "Call it again with the same OUT: cells that have a row for this code and card are not run again.",
    )
    p.add_argument("grid", nargs="*", metavar="GRID", help="YAML or JSON files; none: only make the report again")
    p.add_argument("--output_dir", required=True, metavar="OUT", help="folder for rows, logs and the report")
    p.add_argument(
        "--max_cell_s", type=_positive, metavar="S", help="kill a cell after this many seconds (default: the grid's, 900)"
    )
    p.add_argument(
        "--total_s",
        type=_positive,
        metavar="S",
        help="end within so many seconds: start no cell after them, end one at them; the same command goes on",
    )
    p.add_argument(
        "--gpu_memory_cap", type=_positive, metavar="GiB", help="what a cell may take of each GPU, unless the grid says"
    )
    p.add_argument("--retry", action="store_true", help="run cells again that crashed, were killed, refused or timed out")
    p.add_argument("--dry_run", action="store_true", help="list the cells and what the planner says; run nothing")
    p.set_defaults(run=run)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number is needed, not {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """All cells, then the report. Rows that failed do not make the sweep fail; Ctrl-C ends it, to be continued later."""
    from bigtrain.bench import grid, refusals, sweep
    from bigtrain.bench.machine import this_machine

    if not args.grid:
        return _again(args)
    cells = [cell for path in args.grid for cell in grid.read_grid(path)]
    cells = sweep.with_limits(list({repr(c): c for c in cells}.values()), args.max_cell_s, args.gpu_memory_cap)
    machine = this_machine()
    refusals.refuse_impossible(cells, machine, run=not args.dry_run)
    if args.dry_run:
        return _dry_run(cells, machine)
    out = Path(args.output_dir)
    job = sweep.Sweep(out=out, machine=machine, code=sweep.code_version(), retry=args.retry, total_s=args.total_s)
    for stop in _STOPS:
        if signal.getsignal(stop) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(stop, _interrupt)
    print(f"{len(cells)} cells on {machine.card}, code {job.code}", flush=True)
    stopped = False
    try:
        for number, row in enumerate(job.run(cells), 1):
            print(f"{number:3}  {line(row)}", flush=True)
    except KeyboardInterrupt:
        stopped = True
        print("stopped: what was running is gone; the same command continues", file=sys.stderr)
    left = sum(job.waits(cell) for cell in cells)
    if left and not stopped:
        print(f"{left} cells are left for the next call", flush=True)
    _report(out)
    return StoppedError.exit_code if stopped else 0


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: Any) -> None:
    for stop in _STOPS:  # a second one would end this before the ranks are gone
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


def _again(args: argparse.Namespace) -> int:
    """Without a grid: the report of a sweep that may still be at work."""
    from bigtrain.bench.rows import latest_rows

    out = Path(args.output_dir)
    if args.dry_run:
        raise UsageError("--dry_run lists the cells of grids: name a GRID")
    if not latest_rows(out):
        why = "it holds no rows.jsonl with a row" if out.is_dir() else "there is no such folder"
        raise UsageError(f"--output_dir {out}: {why}, so there is nothing to report. To run cells, name a GRID")
    _report(out)
    return 0


def _report(out: Path) -> None:
    from bigtrain.bench.report import write
    from bigtrain.bench.rows import latest_rows

    rows = latest_rows(out)
    if not rows:
        print(f"no rows in {out}: there is nothing to report", file=sys.stderr)
        return
    try:
        print(write(out, rows))
    except ImportError as error:  # a bare GPU machine: the rows are what counts
        print(
            f"no report, since {error.name} is not installed here; elsewhere: bigtrain bench --output_dir {out}",
            file=sys.stderr,
        )


def _dry_run(cells: list[Any], machine: Any) -> int:
    from bigtrain.bench import grid, prediction

    for cell, label in zip(cells, grid.labels(cells)):
        said = prediction.prediction(cell, machine) if cell.runner == "bigtrain" else {"none": "a peer: not planned"}
        print(f"{label}: {said['none'] if 'none' in said else predicted_text(said)}")
    return 0


def predicted_text(said: dict[str, Any]) -> str:
    """What the planner said, in half a line."""
    parts = [f"host {said['host_bytes'] / 2**30:.2f} GiB a rank"]
    if said["gpu_allocated_bytes"]:
        parts.insert(0, f"GPU {said['gpu_allocated_bytes'] / 2**30:.2f} GiB allocated")
        parts.append(f"{said['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU")
    return ", ".join([*parts, "fits" if said["fits"] else "does not fit"])


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    if row["status"] != "ok":
        return f"{row['status']:8} {row['label']}: {row.get('error', '')[:200]}"
    time = row["step_time_s"]
    parts = [f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU",
             f"step {time['median']:.3f} s ({time['q1']:.3f} to {time['q3']:.3f})"]  # fmt: skip
    if row["mfu"] is not None:
        parts.append(f"MFU {row['mfu']:.1%}")
    for name, short in (("gpu_allocated_bytes", "allocated"), ("gpu_used_bytes", "used"), ("host_pss_bytes", "host")):
        if row.get(name):
            off = row["prediction_error"].get("host_bytes" if short == "host" else name)
            parts.append(f"{short} {row[name] / 2**30:.2f} GiB" + (f" (predicted {off:+.1%})" if off is not None else ""))
    return f"ok       {row['label']}: {', '.join(parts)}"
