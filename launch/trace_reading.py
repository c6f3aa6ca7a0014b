"""What a profiler's trace says about one training step: pure arithmetic on the events of torch.profiler's Chrome trace.

The window is one whole period: from the first forward kernel of a step to the first forward kernel of the next. What a streamed
optimizer still does while the next forward runs lies in it once, as in every later step.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Spans = list[tuple[float, float]]
PHASES = ("forward", "backward", "step")
MARK = "bigtrain:"  # of the annotations that launch/bench_trace.py sets
COLUMNS = 160  # of a timeline
UP, DOWN, ON_DEVICE = "copies up", "copies down", "copies on the device"

# First hit wins. Attention before matrix products: flash kernels have cutlass types in their names.
CLASSES = (
    ("communication", re.compile(r"nccl", re.I)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa|varlen", re.I)),
    ("optimizer", re.compile(r"^_elementwise_kernel|^_8bit_kernel|adam|optimizer|multi_tensor_apply", re.I)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|xmma|cublas|split_?k|gemv|matmul", re.I)),
)
COPIES = {"HtoD": UP, "DtoH": DOWN, "DtoD": ON_DEVICE}


@dataclass(frozen=True)
class Work:
    """One thing that the device did; times in seconds on the trace's clock.

    Attributes:
        kind: class of the kernel, or which copy. stream: CUDA stream. launched: when the CPU asked for it, None if unknown.
        phase: forward, backward or step by the time of launch, "" outside. number: of the step, from 0.
    """

    name: str
    kind: str
    start: float
    end: float
    stream: int
    launched: float | None
    phase: str
    number: int
    nbytes: int = 0

    @property
    def copies(self) -> bool:
        """Not a kernel."""
        return self.kind in (UP, DOWN, ON_DEVICE)


@dataclass
class Trace:
    """Events of one rank, sorted: `calls` are CUDA calls as (name, start, end), `marks` phases as (start, end, phase, step)."""

    work: list[Work] = field(default_factory=list)
    calls: list[tuple[str, float, float]] = field(default_factory=list)
    marks: list[tuple[float, float, str, int]] = field(default_factory=list)


def read(trace: Mapping[str, Any]) -> Trace:
    """The trace's own events, without those of operators.

    Args:
        trace: the parsed JSON file of `profiler.export_chrome_trace`.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    found = Trace(marks=_marks(events))
    launched = {}
    for e in events:
        if e.get("cat") in ("cuda_runtime", "cuda_driver"):
            begin = e["ts"] * 1e-6
            found.calls.append((e["name"], begin, begin + e["dur"] * 1e-6))
            launched[e["args"].get("correlation")] = begin
    starts = [mark[0] for mark in found.marks]
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found.work.append(_work(e, launched.get(e["args"].get("correlation")), found.marks, starts))
    found.work.sort(key=lambda w: w.start)
    found.calls.sort(key=lambda c: c[1])
    return found


def _marks(events: Iterable[Mapping[str, Any]]) -> list[tuple[float, float, str, int]]:
    """Phases in order; a step begins with the first forward after a "step" phase."""
    spans = sorted(
        (e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6, e["name"].removeprefix(MARK))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(MARK)
    )
    marks, number, ended = [], 0, False
    for begin, end, phase in spans:
        number += ended and phase == "forward"
        ended = phase == "step" or (ended and phase != "forward")
        marks.append((begin, end, phase, number))
    return marks


def _work(
    event: Mapping[str, Any], launched: float | None, marks: Sequence[tuple[float, float, str, int]], starts: Sequence[float]
) -> Work:
    begin, phase, number = event["ts"] * 1e-6, "", -1
    at = bisect.bisect_right(starts, launched if launched is not None else begin) - 1
    if launched is not None and at >= 0:
        number = marks[at][3]
        phase = marks[at][2] if launched <= marks[at][1] else ""
    args = event["args"]
    return Work(
        event["name"],
        kind_of(event["cat"], event["name"]),
        begin,
        begin + event["dur"] * 1e-6,
        int(args.get("stream", -1)),
        launched,
        phase,
        number,
        int(args.get("bytes", 0)),
    )


def kind_of(category: str, name: str) -> str:
    """Class of a kernel or copy by its name."""
    if category != "kernel":
        return next((kind for word, kind in COPIES.items() if word in name), ON_DEVICE)
    return next((kind for kind, pattern in CLASSES if pattern.search(name)), "other kernels")


# ---------------------------------------------------------------- spans of time


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Sorted, joined where they touch."""
    out: Spans = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > begin:
            out.append((begin, end))
    return out


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds."""
    return sum(end - begin for begin, end in spans)


def common(a: Spans, b: Spans) -> Spans:
    """Where both of two unions are."""
    out, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            out.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out


def clipped(work: Iterable[Work], begin: float, end: float) -> Spans:
    """The spans of work within a window, each as it is."""
    return [(max(w.start, begin), min(w.end, end)) for w in work if w.start < end and w.end > begin]


# ---------------------------------------------------------------- the report


def report(trace: Trace, number: int, gaps: int = 10) -> dict[str, Any]:
    """Where one period's time went.

    Args:
        number: the period from step `number`'s first forward kernel to the next step's. gaps: how many to list.

    Returns:
        Seconds and shares; only the CPU's seconds a phase if the trace holds no kernels of both steps.
    """
    cpu = {"cpu_phases_s": {p: length(m[:2] for m in trace.marks if m[2:] == (p, number)) for p in PHASES}}
    stream = _compute_stream(trace)
    first, following = _first(trace, number, stream), _first(trace, number + 1, stream)
    if first is None or following is None:
        return cpu
    begin, end = first.start, following.start
    inside = [w for w in trace.work if w.start < end and w.end > begin]
    kernels = [w for w in inside if not w.copies]
    main = union(clipped((w for w in inside if w.stream == stream), begin, end))
    everything = union(clipped(kernels, begin, end))
    period = end - begin
    return {
        **cpu,
        "period_s": period,
        "compute_stream": stream,
        "compute_stream_idle_s": period - length(main),
        "no_kernel_s": period - length(everything),
        "classes": _classes(inside, begin, end),
        "phases_s": _phases(kernels, begin, end),
        "streams": _streams(inside, begin, end),
        "timeline": _timeline(inside, begin, end),
        "bus": _bus(inside, everything, main, begin, end),
        "cpu": _cpu(trace.calls, begin, end),
        "backward_to_next_forward": _between(trace, number, stream),
        "gaps": _gaps(inside, stream, begin, end, gaps),
        "top_kernels": _top(kernels, begin, end),
    }


def _compute_stream(trace: Trace) -> int:
    """The stream with the most seconds of kernels: forward also starts kernels of an update that goes on beside it."""
    busy: Counter[int] = Counter()
    for w in trace.work:
        if not w.copies:
            busy[w.stream] += w.end - w.start  # type: ignore[assignment]
    return busy.most_common(1)[0][0] if busy else -1


def _first(trace: Trace, number: int, stream: int, kind: str | None = None) -> Work | None:
    """The first kernel of a step's forward on the compute stream, optionally of one class."""
    for w in trace.work:
        if w.number == number and w.phase == "forward" and w.stream == stream and not w.copies and kind in (None, w.kind):
            return w
    return None


def _timeline(work: Sequence[Work], begin: float, end: float) -> dict[str, str]:
    """For each stream a line of COLUMNS characters, one for each part of the period: space, `.`, `+`, `#` by how busy it was."""
    part = (end - begin) / COLUMNS
    streams = defaultdict(list)
    for w in work:
        streams[w.stream].append(w)
    columns = [(begin + i * part, begin + (i + 1) * part) for i in range(COLUMNS)]
    lines = {}
    for stream, ones in sorted(streams.items()):
        spans = union(clipped(ones, begin, end))
        shares = [length(common(spans, [column])) / part for column in columns]
        lines[str(stream)] = "".join(" " if share < 0.01 else ".+#"[min(2, int(3.001 * share))] for share in shares)
    return lines


def _classes(work: Sequence[Work], begin: float, end: float) -> dict[str, dict[str, float]]:
    """Per class: seconds busy (kernels of one class that run together count once), share of the period, number."""
    kinds = defaultdict(list)
    for w in work:
        kinds[w.kind].append(w)
    found = {}
    for kind, ones in sorted(kinds.items()):
        busy = length(union(clipped(ones, begin, end)))
        found[kind] = {"s": busy, "share": busy / (end - begin), "number": len(ones)}
    return found


def _phases(kernels: Sequence[Work], begin: float, end: float) -> dict[str, float]:
    """Seconds of kernels by the phase that launched them."""
    return {p or "between": length(clipped((w for w in kernels if w.phase == p), begin, end)) for p in (*PHASES, "")}


def _streams(work: Sequence[Work], begin: float, end: float) -> dict[str, dict[str, float]]:
    """Per stream: seconds busy, and of that with kernels."""
    streams = defaultdict(list)
    for w in work:
        streams[w.stream].append(w)
    return {
        str(stream): {
            "busy_s": length(union(clipped(ones, begin, end))),
            "kernels_s": length(union(clipped((w for w in ones if not w.copies), begin, end))),
        }
        for stream, ones in sorted(streams.items())
    }


def _bus(work: Sequence[Work], kernels: Spans, main: Spans, begin: float, end: float) -> dict[str, Any]:
    """Each direction: seconds, bytes, rate, and the shares of its time beside any kernel and beside the compute stream."""
    found: dict[str, Any] = {}
    spans = {}
    for kind in (UP, DOWN):
        ones = [w for w in work if w.kind == kind]
        spans[kind] = union(clipped(ones, begin, end))
        busy, total = length(spans[kind]), sum(w.nbytes for w in ones)
        found[kind] = {
            "s": busy,
            "bytes": total,
            "gb_per_s": total / length((w.start, w.end) for w in ones) / 1e9 if ones else 0.0,
            "beside_kernels": length(common(spans[kind], kernels)) / busy if busy else 0.0,
            "beside_compute_stream": length(common(spans[kind], main)) / busy if busy else 0.0,
        }
    found["both_directions_s"] = length(common(spans[UP], spans[DOWN]))
    return found


def _cpu(calls: Iterable[tuple[str, float, float]], begin: float, end: float) -> dict[str, float]:
    """Seconds that the CPU spent inside CUDA calls."""
    found = {"launches_s": 0.0, "launches": 0, "copies_s": 0.0, "waiting_s": 0.0, "memory_s": 0.0, "other_calls_s": 0.0}
    for name, start, stop in calls:
        if not begin <= start < end:
            continue
        low = name.lower()
        found["launches"] += "launch" in low
        kind = next(
            (
                kind
                for word, kind in (("launch", "launches_s"), ("synchronize", "waiting_s"), ("memcpy", "copies_s"),
                                   ("memset", "copies_s"), ("alloc", "memory_s"), ("free", "memory_s"), ("mem", "memory_s"))
                if word in low
            ),
            "other_calls_s",
        )  # fmt: skip
        found[kind] += stop - start
    return found


def _between(trace: Trace, number: int, stream: int) -> dict[str, float]:
    """Seconds from the last kernel of backward to the next step's first forward kernel and first matrix product."""
    ends = [w.end for w in trace.work if w.number == number and w.phase == "backward" and w.stream == stream]
    if not ends:
        return {}
    updates = [w.end for w in trace.work if w.kind == "optimizer" and w.number == number]
    marks = {
        "to_first_kernel_s": _first(trace, number + 1, stream),
        "to_first_matrix_product_s": _first(trace, number + 1, stream, "matrix products"),
    }
    found = {name: w.start - max(ends) for name, w in marks.items() if w is not None}
    if updates:
        found["to_end_of_update_s"] = max(updates) - max(ends)
    return found


def _gaps(work: Sequence[Work], stream: int, begin: float, end: float, most: int) -> list[dict[str, Any]]:
    """The longest pauses of the compute stream, with what lay around and beside them, and whether the CPU was late."""
    ones = [w for w in work if w.stream == stream and w.start >= begin]
    beside = union(clipped((w for w in work if w.stream != stream), begin, end))
    found: list[dict[str, Any]] = []
    before = None
    for after in ones:
        if before is not None and after.start > before.end:
            late = after.launched is not None and after.launched > before.end
            found.append(
                {
                    "s": after.start - before.end,
                    "at_s": before.end - begin,
                    "before": short(before.name),
                    "after": short(after.name),
                    "phase": after.phase or "between",
                    "why": "launched late" if late else "waited on the device",
                    "other_streams_busy": length(common([(before.end, after.start)], beside)) / (after.start - before.end),
                }
            )
        if before is None or after.end > before.end:
            before = after
    return sorted(found, key=lambda gap: -gap["s"])[:most]


def _top(kernels: Sequence[Work], begin: float, end: float) -> list[dict[str, Any]]:
    times: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    kinds = {}
    for w in kernels:
        times[short(w.name)] += length(clipped([w], begin, end))  # type: ignore[assignment]
        numbers[short(w.name)] += 1
        kinds[short(w.name)] = w.kind
    return [{"name": n, "class": kinds[n], "s": s, "number": numbers[n]} for n, s in times.most_common(15)]


def short(name: str) -> str:
    """A kernel's name without return type and arguments, cut to 70 characters."""
    name = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return name if len(name) <= 70 else name[:69] + "…"


# ---------------------------------------------------------------- as a page


def markdown(title: str, found: Mapping[str, Any]) -> str:
    """The report as Markdown tables."""
    phases = ", ".join(f"{phase} {1000 * s:.1f} ms" for phase, s in found["cpu_phases_s"].items())
    if "period_s" not in found:
        return f"### {title}\n\nThe trace holds no kernels of a device. The CPU was in {phases}.\n"
    period, bus, cpu = found["period_s"], found["bus"], found["cpu"]
    rows = [(kind, c["s"], c["share"]) for kind, c in sorted(found["classes"].items(), key=lambda item: -item[1]["s"])]
    rows += [
        ("compute stream idle", found["compute_stream_idle_s"], found["compute_stream_idle_s"] / period),
        ("no kernel anywhere", found["no_kernel_s"], found["no_kernel_s"] / period),
        ("CPU in launches", cpu["launches_s"], cpu["launches_s"] / period),
        ("CPU waiting for the device", cpu["waiting_s"], cpu["waiting_s"] / period),
    ]
    lines = [
        f"### {title}",
        "",
        f"One step: {1000 * period:.1f} ms. The CPU was in {phases}.",
        "",
        "| what | ms | share |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {1000 * s:.1f} | {100 * share:.1f} % |" for what, s, share in rows]
    lines += ["", "| bus | ms | GB | GB/s | beside any kernel | beside the compute stream |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {kind} | {1000 * b['s']:.1f} | {b['bytes'] / 1e9:.2f} | {b['gb_per_s']:.1f} | {100 * b['beside_kernels']:.0f} % | "
        f"{100 * b['beside_compute_stream']:.0f} % |"
        for kind, b in ((UP, bus[UP]), (DOWN, bus[DOWN]))
    ]
    lines += ["", f"Each stream, {1000 * period / COLUMNS:.1f} ms a character:", "", "```"]
    lines += [*(f"{stream:>4} |{line}|" for stream, line in found["timeline"].items()), "```"]
    lines += ["", *(f"- {name.removesuffix('_s').replace('_', ' ')}: {1000 * s:.1f} ms after the end of backward"
                    for name, s in found["backward_to_next_forward"].items())]  # fmt: skip
    lines += ["", "| gap ms | at ms | after | before | phase | why | other streams busy |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {1000 * g['s']:.2f} | {1000 * g['at_s']:.1f} | `{g['before']}` | `{g['after']}` | {g['phase']} | {g['why']} | "
        f"{100 * g['other_streams_busy']:.0f} % |"
        for g in found["gaps"]
    ]
    lines += ["", "| kernel | class | ms | number |", "|---|---|---|---|"]
    lines += [f"| `{k['name']}` | {k['class']} | {1000 * k['s']:.1f} | {k['number']} |" for k in found["top_kernels"]]
    return "\n".join(lines) + "\n"
