"""The planner against measured rows of sweeps: errors of its predictions, and whether its choice is the fastest that fits.

Rows are those of OUT/rows.jsonl: what was predicted before the cell ran, and what it took. Only cells of launch/train.py count.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# (what, predicted name, measured name, whether a constant is part of it: process or context)
NUMBERS = (
    ("allocated", "gpu_allocated_bytes", "gpu_allocated_bytes", False),
    ("device-used", "gpu_used_bytes", "gpu_used_bytes", True),
    ("host", "host_bytes", "host_pss_bytes", True),
)
GIB = 2**30


@dataclass(frozen=True)
class Accuracy:
    """Of one predicted number over some rows.

    Attributes:
        what: allocated, device-used or host. rows: how many have both numbers.
        mean, worst: of the absolute relative errors. offset_bytes: constant that was fitted on other rows and added.
    """

    what: str
    rows: int
    mean: float
    worst: float
    offset_bytes: int


def usable(rows: Iterable[Row]) -> list[Row]:
    """Rows of this project's cells that ran and were predicted."""
    return [r for r in rows if r["runner"] == "bigtrain" and r["status"] == "ok" and "none" not in r["predicted"]]


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """(to fit constants on, to report): every other row in the order of a hash of the settings, so nobody picks."""

    def order(row: Row) -> str:
        return hashlib.sha256(repr(sorted(row["settings"].items(), key=lambda kv: kv[0])).encode()).hexdigest()

    ordered = sorted(rows, key=order)
    return ordered[::2], ordered[1::2]


def pairs(rows: Iterable[Row], predicted: str, measured: str) -> list[tuple[int, int]]:
    """(said, seen) where both are known."""
    return [(r["predicted"][predicted], r[measured]) for r in rows if r["predicted"].get(predicted) and r.get(measured)]


def accuracy(fit: Sequence[Row], report: Sequence[Row]) -> list[Accuracy]:
    """Errors on `report`. Numbers with a constant part (context, process) get the median difference seen on `fit`."""
    found = []
    for what, predicted, measured, constant in NUMBERS:
        known = pairs(report, predicted, measured)
        if not known:
            continue
        offsets = [seen - said for said, seen in pairs(fit, predicted, measured)] if constant else []
        offset = int(statistics.median(offsets)) if offsets else 0
        errors = [abs((said + offset) / seen - 1) for said, seen in known]
        found.append(Accuracy(what, len(errors), statistics.mean(errors), max(errors), offset))
    return found


def broken_promises(rows: Iterable[Row]) -> list[Row]:
    """Cells that were said to fit and ran out of memory."""
    return [r for r in rows if r["status"] in ("oom", "killed") and r["predicted"].get("fits")]


# ---------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Chosen:
    """One group of rows at one cap.

    Attributes:
        group: model, ranks, tokens of a row, rows of a step. cap_bytes: of a card.
        fitting: how many of the group's rows fit by measurement. fastest, chosen: their labels, None if there is none.
        share: speed of the chosen one over that of the fastest, 0 if the choice does not fit; None if nothing fits.
    """

    group: str
    cap_bytes: int
    fitting: int
    fastest: str | None
    chosen: str | None
    share: float | None


def group_of(row: Row) -> str:
    """What a choice is free in: everything but model, ranks, sequence length and global batch."""
    s = row["settings"]
    batch = int(row["num_gpus"]) * (s.get("per_device_train_batch_size") or 1) * (s.get("gradient_accumulation_steps") or 1)
    model = Path(row["model"].removeprefix("preset:")).name  # a preset, or a folder that was written for it
    return f"{model}, {row['num_gpus']} card(s), {batch} rows of {s['seq_len']:,} tokens a step"


def newest(rows: Iterable[Row]) -> list[Row]:
    """Of rows that ran one configuration, the last: the code that the others measured is gone.

    One configuration: model, cards, batch, and in words what was planned, but for a number of blocks that the plan chose. Caps, numbers of
    steps and where the weights came from count as far as they are among these words.
    """
    found = {(group_of(r), r["settings"].get("ds_config"), _words(r)): r for r in sorted(rows, key=lambda r: r["ended"])}
    return list(found.values())


def _words(row: Row) -> str:
    words = str(row["predicted"]["config"])
    return re.sub(r" \d+ of \d+ blocks", "", words) if row["settings"].get("checkpoint_blocks") == "auto" else words


def measured_need(row: Row) -> int:
    """Bytes that a card must have for this row: its allocated peak, and what lies outside of the allocator."""
    outside = max(0, row["gpu_used_bytes"] - row["gpu_reserved_bytes"])
    return int(row["gpu_allocated_bytes"]) + outside


def choices(rows: Sequence[Row], caps: Sequence[int]) -> list[Chosen]:
    """For every group and cap: what the planner would take among the newest measured rows, against the fastest that fits."""
    groups: dict[str, list[Row]] = {}
    for row in newest(r for r in usable(rows) if r.get("gpu_used_bytes") and r.get("gpu_reserved_bytes")):
        groups.setdefault(group_of(row), []).append(row)
    return [_choice(name, members, cap) for name, members in groups.items() if len(members) > 1 for cap in caps]


def _choice(name: str, rows: Sequence[Row], cap: int) -> Chosen:
    fitting = [r for r in rows if measured_need(r) <= cap]
    fastest = max(fitting, key=_speed, default=None)
    said = [r for r in rows if r["predicted"]["gpu_need_bytes"] <= cap]
    chosen = min(said, key=lambda r: r["predicted"]["step_time_s"], default=None)
    share = None
    if fastest is not None:
        share = 0.0 if chosen is None or chosen not in fitting else _speed(chosen) / _speed(fastest)
    return Chosen(name, cap, len(fitting), _label(fastest), _label(chosen), share)


def _label(row: Row | None) -> str | None:
    return None if row is None else str(row["label"])


def _speed(row: Row) -> float:
    return float(row["tokens_per_s_per_gpu"])


# ---------------------------------------------------------------- as text


def accuracy_text(rows: Sequence[Row]) -> str:
    """Markdown: what was fitted on one half, errors on the other, every row, broken promises."""
    known = usable(rows)
    fit, report = halves(known)
    cards = ", ".join(sorted({r["card"] for r in known}))
    first, last = min(r["predicted_at"] for r in known), max(r["ended"] for r in known)
    lines = [
        f"{len(known)} cells of launch/train.py on {cards}, code {', '.join(sorted({r['code'] for r in known}))}, {first} to "
        f"{last} UTC. Each was predicted before it started (`predicted_at` of its row). Constants (bytes of a process, of CUDA and "
        f"NCCL) are fitted on {len(fit)} cells; the errors are those of the other {len(report)}.",
        "",
        "| number | cells | mean error | worst error | fitted constant |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {a.what} | {a.rows} | {a.mean:.1%} | {a.worst:.1%} | {a.offset_bytes / 2**20:+,.0f} MiB |"
              for a in accuracy(fit, report)]  # fmt: skip
    lines += [
        "",
        "As predicted, nothing fitted, all cells:",
        "",
        "| number | cells | mean error | worst error |",
        "|---|---|---|---|",
    ]
    lines += [f"| {a.what} | {a.rows} | {a.mean:.1%} | {a.worst:.1%} |" for a in accuracy([], known)]
    broken = broken_promises(r for r in rows if r["runner"] == "bigtrain")
    lines += ["", f"Cells said to fit that ran out of memory: {len(broken)}." + "".join(f" {r['label']};" for r in broken)]
    return "\n".join([*lines, "", *row_table(known, {id(r) for r in report})])


def row_table(rows: Iterable[Row], reported: set[int]) -> list[str]:
    """Every row: predicted, measured and error of each number, GiB."""
    names = [n for n in NUMBERS if any(r.get(n[2]) and r["predicted"].get(n[1]) for r in rows)]
    titles = "".join(f" {what} predicted | measured | error |" for what, *_ in names)
    lines = [f"| cell | half |{titles}", "|---|---|" + "---|---|---|" * len(names)]
    for row in rows:
        cells = ""
        for _, predicted, measured, _ in names:
            said, seen = row["predicted"].get(predicted), row.get(measured)
            cells += f" {said / GIB:.2f} | {seen / GIB:.2f} | {said / seen - 1:+.1%} |" if said and seen else " - | - | - |"
        lines.append(f"| {row['label']} | {'reported' if id(row) in reported else 'fitted'} |{cells}")
    return lines


def choices_text(found: Sequence[Chosen]) -> str:
    """Markdown: a line for each group and cap."""
    lines = ["| group | cap GiB | rows that fit | fastest that fits | the planner's choice | its speed of the fastest's |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for c in found:
        share = "nothing fits" if c.share is None else "does not fit" if c.share == 0 else f"{c.share:.1%}"
        lines.append(
            f"| {c.group} | {c.cap_bytes / GIB:g} | {c.fitting} | {c.fastest or '-'} | {c.chosen or 'nothing'} | {share} |"
        )
    return "\n".join(lines)
