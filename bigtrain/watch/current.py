"""The one watch of this process: begun, ended, asked, and told of this rank's own end."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from bigtrain import ranks
from bigtrain.watch.mesh import Mesh, listen, network
from bigtrain.watch.watcher import LEARNED, Limit, Watcher
from bigtrain.whereabouts import HERE

_current: tuple[Watcher, Any] | None = None
_hooked = False


def begin(limit: Limit | None, folder: str | Path | None = None) -> None:
    """Watch this rank from now on; again, it changes the limit. Collective the first time; None: do nothing.

    Args:
        limit: seconds without movement on any rank after which the run ends, or LEARNED from its own pauses.
        folder: reports go to `folder`/hang; by default to the folder of the checkpoints, and before there is one, to the current one.
    """
    global _current
    if folder is not None:
        HERE.folder = str(folder)
    if limit is None or ranks.world_size() == 1 or not ranks.is_distributed():
        return
    if _current is not None and _current[1] is dist.group.WORLD and _current[0].watching:
        _current[0].limit = limit
        return
    end()
    networks = ranks.all_gather_object(network())
    listener, address = listen(ranks.rank(), local=len(set(networks)) == 1)
    token = ranks.broadcast_object(uuid.uuid4().hex)
    everyone = ranks.all_gather_object(address)
    mesh = Mesh(listener, everyone, ranks.rank(), token)
    watcher = Watcher(mesh, everyone, ranks.rank(), threading.get_ident(), limit)
    _current = watcher, dist.group.WORLD
    _hook()
    watcher.start()


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Inside, nothing may stand still for longer than `limit_s`; does nothing without a watch."""
    watcher = _current[0] if _current is not None else None
    before = watcher.limit if watcher is not None else LEARNED
    if watcher is not None:
        watcher.limit = limit_s
    try:
        yield
    finally:
        if watcher is not None:
            watcher.limit = before


def end() -> None:
    """Say farewell: this rank needs nobody any more. Safe at any time."""
    global _current
    watching, _current = _current, None
    if watching is not None and watching[0].watching:
        watching[0].stop()


def failed(error: BaseException) -> None:
    """Tell the other ranks that this one is about to end, and why."""
    if _current is not None and _current[0].watching:
        _current[0].over = True
        _current[0].say({"ended": "failed", "why": _why(error), "step": HERE.step})


def _why(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    # A data worker's error holds its whole traceback, with the message last.
    line = lines[-1] if any("Traceback" in text for text in lines) else lines[0]
    return f"{type(error).__name__}: {line[:500]}"


def fails_alike(rank: int, error: BaseException, wait_s: float = 1.0) -> bool:
    """Whether `rank` fails with the same error as this rank; waits up to `wait_s` to hear of its end. False without a watch."""
    end_s = time.monotonic() + wait_s
    while _current is not None and rank not in (found := _current[0].lost()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return _current is not None and found.get(rank) == f"failed: {_why(error)}"


def lost(wait_s: float = 0.0) -> dict[int, str] | None:
    """Ranks that have ended, with what is known of each; waits up to `wait_s` for the first. None without a watch."""
    if _current is None:
        return None
    end_s = time.monotonic() + wait_s
    while not (found := _current[0].lost()) and time.monotonic() < end_s:
        time.sleep(0.05)
    return found


def seen() -> dict[int, str]:
    """What is known of each other rank; of none without a watch."""
    return {} if _current is None else _current[0].seen()


def names_modules(model: torch.nn.Module) -> None:
    """Let reports call the modules of `model` by name."""
    if _current is not None:
        _current[0].names |= {id(m): name or type(model).__name__ for name, m in model.named_modules()}


def _hook() -> None:
    """An error that nobody catches is told to the other ranks before this one ends; so is the end of the program."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed(error)
        before(kind, error, trace)

    sys.excepthook = tell
    atexit.register(end)
