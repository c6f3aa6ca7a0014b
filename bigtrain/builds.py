"""Native ops compiled at run time: builds that died, and what a failed one is about.

Internal symbol of torch used: utils.cpp_extension._get_build_directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

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


def first_cause(error: BaseException) -> str:
    """The error at the bottom of a chain, with the compiler's first `error:` line if it holds one."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if "error:" in line]
    return f"{type(error).__name__}: {(lines or text.splitlines())[0]}"
