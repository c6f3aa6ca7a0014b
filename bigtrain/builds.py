"""Native ops compiled at run time: builds that died, and what a failed one is about.

Internal symbol of torch used: utils.cpp_extension._get_build_directory. Of DeepSpeed's builders: name, cxx_args.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import _get_build_directory

log = logging.getLogger(__name__)


def clear_stale_lock(op: str, idle_s: float = 300.0) -> bool:
    """Remove the lock that a killed build of native op `op` left behind: every later run would wait for it without end.

    A build is taken for dead when nothing in its folder changed for `idle_s` seconds (it takes about a minute).
    """
    base = _get_build_directory(op, verbose=False)
    lock = os.path.join(base, "lock")
    if not os.path.exists(lock):
        return False
    idle = time.time() - max(entry.stat().st_mtime for entry in os.scandir(base))
    if idle < idle_s:
        log.info("waiting for another process that builds %s (%s)", op, lock)
        return False
    log.warning("removing %s: the build it belongs to has done nothing for %.0f s", lock, idle)
    with contextlib.suppress(FileNotFoundError):
        os.remove(lock)
    return True


def load_op(builder: Any) -> Any:
    """The native op of DeepSpeed's `builder`, compiled if it is not there; whoever loads one by other flags compiles it anew for all."""
    clear_stale_lock(builder.name)
    return without_symbols(builder).load(verbose=False)


def without_symbols(builder: Any) -> Any:
    """DeepSpeed's `builder` of a native op, told to compile without debug information (-g), which is half of the time.

    What another program compiled with it stays: other flags would compile it anew, and again when that program comes back.
    """
    with contextlib.suppress(FileNotFoundError):
        if " -g " in Path(_get_build_directory(builder.name, verbose=False), "build.ninja").read_text(encoding="utf-8"):
            return builder
    flags = builder.cxx_args
    builder.cxx_args = lambda: [flag for flag in flags() if flag != "-g"]
    return builder


def first_cause(error: BaseException) -> str:
    """The compiler's first `error:` line if there is one anywhere in the chain, else the error at its bottom.

    torch puts the compiler's output one link above the bottom, which is only "ninja returned 1".
    """
    link: BaseException | None = error
    bottom = error
    while link is not None:
        lines = [line.strip() for line in str(link).splitlines() if "error:" in line]
        if lines:
            return f"{type(link).__name__}: {lines[0]}"
        bottom, link = link, link.__cause__
    text = str(bottom).strip() or type(bottom).__name__
    return f"{type(bottom).__name__}: {text.splitlines()[0]}"
