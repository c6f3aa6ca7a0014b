"""What a process can say about itself without its training thread: stacks, last module, last collectives."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import traceback
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SHOWN_LINES = 12  # a tensor from a data worker that answers no more is waited for eight frames below the loader


def signature(ident: int) -> int:
    """Changes when the thread `ident` moves on; the same while it is inside one call that is not Python's."""
    frame, parts = sys._current_frames().get(ident), []
    while frame is not None:
        parts.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(parts))


def lines(ident: int) -> tuple[str, ...]:
    """The innermost frames of a thread, outermost first: "file:line function"."""
    out: list[str] = []
    frame = sys._current_frames().get(ident)
    while frame is not None and len(out) < SHOWN_LINES:
        out.append(f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(out))


def _short(path: str) -> str:
    for mark in ("site-packages/", "dist-packages/"):
        if mark in path:
            return path.split(mark)[-1]
    return "/".join(path.split("/")[-3:])


def module_in(ident: int, names: dict[int, str]) -> str:
    """The innermost of the modules `names` (by id) whose forward the thread is in; "" if it is in none."""
    frame: FrameType | None = sys._current_frames().get(ident)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            owner: Any = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module) and id(owner) in names:
                return names[id(owner)]
        frame = frame.f_back
    return ""


def all_threads() -> str:
    """The stacks of every thread of this process."""
    known = {t.ident: t.name for t in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        text = "".join(traceback.format_stack(frame))
        parts.append(f"--- thread {known.get(ident, ident)}\n{text}")
    return "\n".join(parts)


def flight_record() -> list[dict[str, Any]]:
    """The last collectives of every process group, oldest first, from torch's flight recorder; [] where it is off."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            with contextlib.suppress(Exception):
                return list(json.loads(dump()).get("entries", []))
    return []


def last_collective(entries: list[dict[str, Any]] | None = None) -> str:
    """The collective entered last and its sequence number, "" if unknown."""
    if not dist.is_available() or not dist.is_initialized():
        return ""
    entries = flight_record() if entries is None else entries
    if entries:
        return spelled(entries[-1])
    with contextlib.suppress(Exception):
        return f"number {dist.group.WORLD._get_sequence_number_for_group()} of the world"  # type: ignore[union-attr]
    return ""


def spelled(entry: dict[str, Any]) -> str:
    """One entry of the flight recorder in words."""
    group = entry.get("process_group") or ["?"]
    sizes = entry.get("input_sizes", "")
    return f"{entry.get('profiling_name', '?')} number {entry.get('collective_seq_id', '?')} of group {group[0]}, sizes {sizes}"
