"""The picture of a sweep: memory against throughput, prediction beside measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bigtrain.bench.grid import differing, word
from bigtrain.diagnostics.pages import INK, MUTED, drawing

COLOURS = {"bigtrain": "#2563a8", "raw_deepspeed": "#d9822b", "hf_trainer": "#7a5195"}
MARKERS = {"bigtrain": "o", "raw_deepspeed": "s", "hf_trainer": "D"}
SPELLED = {"gpu_allocated_bytes": "GPU allocated", "gpu_used_bytes": "GPU used", "host_bytes": "host"}
GIB = 2**30
COLUMNS = 3
LISTED = 5

Row = Mapping[str, Any]


def memory_name(rows: Sequence[Row]) -> str:
    """The memory that the picture is about: what the driver counts on the card, or the host's on a CPU."""
    return "gpu_used_bytes" if any(row.get("gpu_used_bytes") for row in rows) else "host_pss_bytes"


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in both: less of the first and more of the second; by the first number."""
    best, out = float("-inf"), []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            best = points[index][1]
            out.append(index)
    return out


def panels(rows: Sequence[Row]) -> dict[tuple[str, int, int], list[tuple[int, Row]]]:
    """Measured rows with their numbers in the table (from 1), by what may be compared: model, ranks, sequence length."""
    out: dict[tuple[str, int, int], list[tuple[int, Row]]] = {}
    name = memory_name(rows)
    for number, row in enumerate(rows, 1):
        if row["status"] == "ok" and row.get(name):
            out.setdefault((row["model"], row["num_gpus"], row["settings"]["seq_len"]), []).append((number, row))
    return out


def draw(rows: Sequence[Row], title: str) -> Any:
    """A matplotlib figure: one panel for each model, number of ranks and sequence length, and one of prediction errors."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    groups, name = panels(rows), memory_name(rows)
    count = len(groups) + 1
    columns = min(COLUMNS, count)
    lines = -(-count // columns)
    with drawing() as plt:
        figure, axes = plt.subplots(
            lines, columns, figsize=(5.4 * columns, 4.9 * lines), squeeze=False,
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        )  # fmt: skip
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        flat = list(axes.flat)
        for axis, (key, group) in zip(flat, groups.items()):
            _panel(axis, key, group, name)
        _errors(flat[len(groups)], rows)
        for axis in flat[count:]:
            axis.set_visible(False)
        plt.close(figure)
    return figure


def _panel(axis: Any, key: tuple[str, int, int], group: Sequence[tuple[int, Row]], name: str) -> None:
    model, gpus, seq_len = key
    axis.set_title(f"{word('model_name_or_path', model)}, {gpus} rank{'s' * (gpus > 1)}, seq {seq_len:,}")
    axis.set_ylabel("tokens/s per GPU" if name.startswith("gpu") else "tokens/s per rank")
    points = [(row[name] / GIB, row["tokens_per_s_per_gpu"]) for _, row in group]
    for (number, row), (x, y) in zip(group, points):
        _prediction(axis, row, name, (x, y))
        axis.plot(x, y, MARKERS[row["runner"]], color=COLOURS[row["runner"]], markersize=6, zorder=3)
        axis.annotate(str(number), (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7.5, color=MUTED)
    best = front(points)
    axis.plot([points[i][0] for i in best], [points[i][1] for i in best], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    for runner in dict.fromkeys(row["runner"] for _, row in group):
        axis.plot([], [], MARKERS[runner], color=COLOURS[runner], label=runner)
    if any(_predicted_memory(row, name) for _, row in group):
        axis.plot([], [], "o", color=MUTED, markerfacecolor="none", label="predicted")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.margins(0.12)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel(f"{_axis_name(name)} (GiB)\n{_listing(group, best)}")


def _axis_name(name: str) -> str:
    return "GPU memory used, fullest card" if name.startswith("gpu") else "host memory (PSS), largest rank"


def _predicted_memory(row: Row, name: str) -> int | None:
    return row["predicted"].get("host_bytes" if name == "host_pss_bytes" else name)


def _prediction(axis: Any, row: Row, name: str, at: tuple[float, float]) -> None:
    """A hollow marker where the planner expected the cell, joined to where it was."""
    size = _predicted_memory(row, name)
    if not size:
        return
    there = (size / GIB, row["predicted"].get("tokens_per_s_per_gpu") or at[1])
    colour = COLOURS[row["runner"]]
    axis.plot([at[0], there[0]], [at[1], there[1]], color=colour, linewidth=0.7, alpha=0.45)
    axis.plot(*there, MARKERS[row["runner"]], color=colour, markerfacecolor="white", markersize=5, alpha=0.8)


def _listing(group: Sequence[tuple[int, Row]], best: Sequence[int]) -> str:
    """The best cells by name, since the points carry only numbers; what all of the panel share is left out."""
    texts = differing([row["settings"] for _, row in group])
    return "\n".join(f"{group[i][0]}: {texts[i]}" for i in best[-LISTED:])


def _errors(axis: Any, rows: Sequence[Row]) -> None:
    """Error of the predicted memory over the measured, in per cent."""
    axis.set_title("prediction error of memory (predicted / measured - 1)")
    found = False
    for name, colour in zip(SPELLED, ("#2563a8", "#d9822b", "#3b8a5a")):
        told = [(number, row.get("prediction_error") or {}) for number, row in enumerate(rows, 1)]
        points = [(number, 100 * errors[name]) for number, errors in told if name in errors]
        if points:
            found = True
            axis.plot(*zip(*points), "o", color=colour, markersize=5, label=SPELLED[name])
    if not found:
        axis.text(0.5, 0.5, "no cell with both", transform=axis.transAxes, ha="center", color=MUTED)
        return
    axis.axhline(0, color=MUTED, linewidth=0.9)
    axis.axhspan(-2, 2, color="#3b8a5a", alpha=0.08, label="within 2 %")
    top = max(6.0, 1.15 * max(abs(y) for line in axis.lines for y in line.get_ydata()))
    axis.set_ylim(-top, top)
    axis.margins(x=0.08)
    axis.set_xlabel("number of the cell")
    axis.set_ylabel("%")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False, fontsize=8, loc="best")
