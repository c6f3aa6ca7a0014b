"""A folder that one process holds, which ends with the process; where a file system cannot lock folders nobody is told apart."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os


def acquire(folder: str | os.PathLike[str]) -> int | None:
    """A handle for `release`; -1 on a file system that cannot lock a folder, None if another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        return None if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else -1
    return handle


def release(handle: int | None) -> None:
    """Give up what `acquire` returned."""
    if handle is not None and handle >= 0:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone leaves it to data workers that were forked while it was held
        os.close(handle)
