"""OUT/report.html and OUT/report.png: how a run went, from the files that the run left behind.

    python -m bigtrain.diagnostics.report OUT              # again, or for a run that was killed
    python -m bigtrain.diagnostics.report OUT_A OUT_B ...  # several runs side by side, as a table on standard output

The page is one file without scripts or network: plots are inline SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigtrain.diagnostics import pages
from bigtrain.diagnostics.metrics import read_rows, steady, summarise
from bigtrain.diagnostics.pages import MUTED
from bigtrain.errors import UsageError
from bigtrain.stopping import exit_code

LINE, SECOND = "#2563a8", "#d9822b"
GIB = 2**30
MAX_POINTS = 1500

Rows = Sequence[Mapping[str, Any]]


def write_report(out_dir: str | Path) -> Path:
    """Write report.html and report.png into a run's folder from its run.json, metrics.jsonl and ds_config.resolved.json.

    Returns:
        The path of report.html.

    Raises:
        UsageError: there is no metrics row to report on.
    """
    out = Path(out_dir)
    rows = read_rows(out / "metrics.jsonl")
    if not rows:
        raise UsageError(f"{out} holds no metrics.jsonl with at least one row: nothing to report")
    run = _read_json(out / "run.json")
    evaluations = read_rows(out / "eval.jsonl")
    svg = pages.save(draw(rows, evaluations, title=_title(run)), out / "report.png")
    page = _page(run, rows, evaluations, _read_json(out / "ds_config.resolved.json"), svg)
    (out / "report.html").write_text(page, encoding="utf-8")
    return out / "report.html"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _title(run: Mapping[str, Any]) -> str:
    model = run.get("arguments", {}).get("model_name_or_path", "training run")
    world = run.get("world_size")
    card = run.get("device", "")
    where = f"{world} x {card}" if world and card else ""
    return "   ".join(t for t in (str(model).rstrip("/").split("/")[-1], where) if t)


# ---------------------------------------------------------------- pictures


def draw(rows: Rows, evaluations: Rows = (), title: str = "") -> Any:
    """Six panels over the steps: loss, learning rate, gradient norm, tokens/s, GPU memory (or step time), host memory."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with pages.drawing() as plt:
        figure, axes = plt.subplots(2, 3, figsize=(13.5, 7), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        if title:
            figure.suptitle(title, x=0.008, ha="left", fontsize=12, fontweight="bold")
        panels = axes.flat
        _loss(next(panels), rows, evaluations)
        rate = next(panels)
        _line(rate, rows, "lr", "learning rate", low=0)
        rate.yaxis.set_major_formatter(lambda value, _: f"{value:.1e}" if value else "0")
        _line(next(panels), rows, "grad_norm", "gradient norm before clipping", low=0)
        _throughput(next(panels), rows)
        if any(r.get("gpu_reserved_bytes") for r in rows):
            _memory(next(panels), rows, "GPU memory, fullest rank", ("gpu_reserved_bytes", "gpu_allocated_bytes"))
        else:
            _line(next(panels), rows, "step_time_s", "step time (s)", low=0, robust=True)
        _memory(next(panels), rows, "host memory, fullest rank", ("host_rss_bytes",))
        for axis in axes[-1]:
            axis.set_xlabel("step")
        plt.close(figure)
    return figure


def thin(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MAX_POINTS points that keep every bucket's extremes, so that spikes stay visible."""
    if len(steps) <= MAX_POINTS:
        return list(steps), list(values)
    size = -(-len(steps) // (MAX_POINTS // 2))
    keep: list[int] = []
    for begin in range(0, len(steps), size):
        bucket = range(begin, min(begin + size, len(steps)))
        keep += sorted({min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)})
    return [steps[i] for i in keep], [values[i] for i in keep]


def _known(rows: Rows, name: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows that have the number."""
    known = [r for r in rows if r.get(name) is not None]
    return [r["step"] for r in known], [r[name] * scale for r in known]


def _line(axis: Any, rows: Rows, name: str, title: str, low: float | None = None, robust: bool = False) -> None:
    steps, values = _known(rows, name)
    axis.set_title(title)
    if name == "lr":
        axis.plot(*thin(steps, values), color=LINE, linewidth=1.6, marker="o" if len(steps) < 3 else None)
    else:
        _curve(axis, steps, values)
    _fit(axis, values, low, robust)


def _curve(axis: Any, steps: Sequence[float], values: Sequence[float], label: str | None = None) -> None:
    """A line; long and noisy ones are drawn pale under their moving average."""
    many = len(values) >= 50
    marker = "o" if len(values) < 3 else None
    axis.plot(
        *thin(steps, values), color=LINE, linewidth=0.8 if many else 1.4, alpha=0.3 if many else 1, marker=marker, label=label
    )
    if many:
        axis.plot(*thin(steps, smooth(values)), color=LINE, linewidth=1.8, label=f"{label}, smoothed" if label else None)


def _fit(axis: Any, values: Sequence[float], low: float | None, robust: bool) -> None:
    """Axis limits; `robust` looks past the warm-up, whose first step would flatten everything else."""
    shown = steady(values) if robust else values
    if low is not None and shown and max(shown) > 0:
        axis.set_ylim(low, 1.15 * max(shown))
    axis.margins(x=0.01)
    axis.xaxis.get_major_locator().set_params(integer=True)


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over a 25th of the run: it follows a falling loss without lagging behind it."""
    half = max(1, len(values) // 50)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    out = []
    for at in range(len(values)):
        begin = max(0, at - half)
        end = min(len(values), at + min(half, at) + 1)  # symmetric at the start, where a loss falls most
        out.append((sums[end] - sums[begin]) / (end - begin))
    return out


def _loss(axis: Any, rows: Rows, evaluations: Rows) -> None:
    steps, values = _known(rows, "loss")
    axis.set_title("loss (nats per token)")
    _curve(axis, steps, values, "training")
    if evaluations:
        points = ([r["step"] for r in evaluations], [r["eval_loss"] for r in evaluations])
        axis.plot(*points, color=SECOND, marker="o", markersize=4, linewidth=1.2, label="evaluation")
    skipped = [r["step"] for r in rows if r.get("skipped")]
    if skipped:
        axis.plot(skipped, [0] * len(skipped), "x", color="#b42318", transform=axis.get_xaxis_transform(), label="skipped")
    if len(axis.lines) > 1:
        axis.legend(frameon=False, fontsize=8)
    _fit(axis, values, None, False)


def _throughput(axis: Any, rows: Rows) -> None:
    median = summarise(rows)["tokens_per_s"]["median"]
    _line(axis, rows, "tokens_per_s", f"tokens per second, all ranks: median {median:,.0f}", low=0)
    axis.axhline(median, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _memory(axis: Any, rows: Rows, title: str, names: Sequence[str]) -> None:
    axis.set_title(f"{title} (GiB)")
    top = 0.0
    for name, colour in zip(names, (LINE, SECOND)):
        steps, values = thin(*_known(rows, name, 1 / GIB))
        axis.plot(steps, values, color=colour, linewidth=1.4, label=name.split("_")[1])
        top = max([top, *values])
    if len(names) > 1:
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    _fit(axis, [top], 0, False)


# ---------------------------------------------------------------- page


def _page(run: Mapping[str, Any], rows: Rows, evaluations: Rows, resolved: Mapping[str, Any], svg: str) -> str:
    return pages.fill(
        "bigtrain.diagnostics",
        title=_title(run) or "training run",
        run=run,
        cards=headline(summarise(rows), evaluations),
        numbers=flatten(run.get("summary") or summarise(rows)),
        engine=spelled(run.get("engine") or {}),
        settings=sorted((k, v) for k, v in run.get("arguments", {}).items() if v not in (None, [], "")),
        versions=sorted(run.get("versions", {}).items()),
        decisions=run.get("decisions", []),
        planned=beside(run.get("planned") or {}, summarise(rows)),
        config=json.dumps(resolved, indent=2),
        svg=svg,
    )


def headline(summary: Mapping[str, Any], evaluations: Rows = ()) -> list[tuple[str, str]]:
    """The five or six numbers that one looks at first, as (what, value)."""
    cards = [("steps", f"{summary['steps']:,}"), ("tokens", f"{summary['tokens']:,}")]
    if summary["first_loss"] is not None:
        cards.append(("loss, first to last", f"{summary['first_loss']:.3f} → {summary['last_loss']:.3f}"))
    if evaluations:
        cards.append(("evaluation loss", f"{evaluations[-1]['eval_loss']:.3f}"))
    cards.append(("tokens per second", f"{summary['tokens_per_s']['median']:,.0f}"))
    if "mfu" in summary:
        cards.append(("MFU", f"{100 * summary['mfu']['median']:.1f} %"))
    kind = "gpu_reserved_bytes" if summary["peak_gpu_reserved_bytes"] else "host_rss_bytes"
    where = "GPU" if kind.startswith("gpu") else "host"
    cards.append((f"{where} memory, fullest rank", f"{summary[f'peak_{kind}'] / GIB:.2f} GiB"))
    return cards


def beside(planned: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, planned, measured) of the memory that the plan predicted and the run measured."""
    pairs = (
        ("GPU memory allocated", "gpu_peak_allocated_bytes", "peak_gpu_allocated_bytes"),
        ("GPU memory reserved", "gpu_reserved_bytes", "peak_gpu_reserved_bytes"),
        ("GPU memory used", "gpu_used_bytes", "peak_gpu_used_bytes"),
        ("host memory of a rank, steps", "host_steps_bytes", "peak_host_rss_bytes"),  # no step shows what saving takes
    )
    both = [(what, planned.get(before), summary.get(after)) for what, before, after in pairs]
    return [(what, f"{a / GIB:.2f} GiB", f"{b / GIB:.2f} GiB") for what, a, b in both if a and b]


def spelled(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as flat (dotted name, text) pairs."""
    out: list[tuple[str, str]] = []
    for name, value in values.items():
        if value == []:
            continue
        if isinstance(value, Mapping):
            out += spelled(value, f"{prefix}{name}.")
        else:
            out.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return out


def flatten(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Numbers with their units made readable: bytes as GiB, seconds and rates with few digits. Without a GPU, nothing of its memory."""
    out = []
    for name, value in numbers.items():
        if name.startswith("peak_gpu_") and not value:
            continue
        shown = name.removesuffix("_bytes")  # the value says its unit
        if isinstance(value, Mapping):
            out.append((shown, f"{_readable(name, value['median'])}  (p10 {_readable(name, value['p10'])}, "
                              f"p90 {_readable(name, value['p90'])})"))  # fmt: skip
        else:
            out.append((shown, _readable(name, value)))
    return out


def _readable(name: str, value: Any) -> str:
    if name.endswith("_bytes") and value is not None:
        return f"{value / GIB:.2f} GiB"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def compare(folders: Sequence[str | Path]) -> str:
    """Final numbers of several runs as a Markdown table; a run without a row says how it ended."""
    lines = ["| run | steps | last loss | tokens/s (p10 to p90) | MFU | GPU GiB | host GiB |", "|---|---|---|---|---|---|---|"]
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
        rows = read_rows(folder / "metrics.jsonl")
        if not rows:
            lines.append(f"| {folder.name} | {_read_json(folder / 'run.json').get('outcome', 'did not start')} | | | | | |")
            continue
        s = summarise(rows)
        speed = s["tokens_per_s"]
        mfu = f"{100 * s['mfu']['median']:.1f} %" if "mfu" in s else ""
        loss = "" if s["last_loss"] is None else f"{s['last_loss']:.3f}"
        memory = [f"{size / GIB:.2f}" if (size := s[f"peak_{kind}_bytes"]) else "" for kind in ("gpu_reserved", "host_rss")]
        spread = f"{speed['median']:,.0f} ({speed['p10']:,.0f} to {speed['p90']:,.0f})"
        lines.append(f"| {folder.name} | {s['steps']} | {loss} | {spread} | {mfu} | {memory[0]} | {memory[1]} |")
    return "\n".join(lines)


def main(folders: Sequence[str]) -> int:
    """Command line; returns the exit code."""
    return exit_code(lambda: _run(folders))


def _run(folders: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bigtrain.diagnostics.report",
        description="Make the report of a run again, or put several runs side by side.",
    )
    parser.add_argument("out", nargs="+", metavar="OUT", help="output folder of a run")
    folders = parser.parse_args(folders).out
    print(write_report(folders[0]) if len(folders) == 1 else compare(folders))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
