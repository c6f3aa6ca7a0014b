"""The folder that an export is written to before it has its name: `.NAME.partial-PID-HOST` beside it.

The process that writes it holds a lock on it, which ends with the process: what a killed export has left behind can be told from
what is being written now, and the next export to the same place removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator

from bigtrain import ranks
from bigtrain.errors import UsageError
from bigtrain.weights import lock
from bigtrain.weights.write import fsync

LONGEST_BYTES = 120  # of NAME in the folder's own name: file systems allow 255 in all
_locks: dict[str, int | None] = {}


def begin(out_dir: str) -> str:
    """Make the folder for an export to `out_dir`; what dead writers have left of earlier ones goes.

    Returns:
        Its path, for `publish` or `drop`.

    Raises:
        UsageError: there can be no folder of that name.
    """
    if not out_dir:  # nothing exists under it, yet it resolves to the working directory, which would be replaced
        raise UsageError("the name of the folder to make is empty (a variable that is not set?). Give a folder.")
    if os.path.ismount(out_dir):
        raise UsageError(f"{out_dir} is a mount point, which no finished folder can take the place of. Give a folder in it.")
    parent, stem = _beside(out_dir)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(out_dir)  # a name that is too long would be noticed when everything has been written
        os.makedirs(parent, exist_ok=True)
        temporary = _make(parent, stem, out_dir)
    except OSError as error:
        raise UsageError(f"{out_dir} cannot be made: {error.strerror}. Give another folder.") from error
    _locks[temporary] = lock.acquire(f"{temporary}.new")  # nobody else knows it
    os.rename(f"{temporary}.new", temporary)  # under a name that is looked for, it is locked
    return temporary


def _make(parent: str, stem: str, out_dir: str) -> str:
    _clear_dead(os.path.realpath(out_dir))
    temporary = os.path.join(parent, f"{stem}{os.getpid()}-{socket.gethostname()}")
    for path in (temporary, f"{temporary}.new"):
        shutil.rmtree(path, ignore_errors=True)
    os.mkdir(f"{temporary}.new")
    return temporary


def publish(temporary: str, out_dir: str) -> None:
    """Make a complete folder last, and give it its name; an earlier export of that name goes."""
    out_dir, old = os.path.realpath(out_dir), f"{temporary}.old"
    for folder, _, files in os.walk(temporary):
        for path in (*(os.path.join(folder, name) for name in files), folder):
            fsync(path)
    if os.path.exists(out_dir):
        os.rename(out_dir, old)
    os.rename(temporary, out_dir)
    fsync(os.path.dirname(out_dir))
    shutil.rmtree(old, ignore_errors=True)
    lock.release(_locks.pop(temporary, None))


def drop(temporary: str) -> None:
    """Remove a folder that is not to be."""
    shutil.rmtree(temporary, ignore_errors=True)
    lock.release(_locks.pop(temporary, None))


@contextlib.contextmanager
def dropped_on_failure(temporary: str) -> Iterator[None]:
    """Inside, an error on any rank means that rank 0 removes the folder."""
    try:
        yield
    except BaseException:
        if ranks.is_main():
            drop(temporary)
        raise


def _beside(out_dir: str) -> tuple[str, str]:
    """The parent folder (of what a link points to), and what the names of partial exports begin with."""
    parent, name = os.path.split(os.path.realpath(out_dir))
    return parent, f".{os.fsencode(name)[:LONGEST_BYTES].decode(errors='ignore')}.partial-"


def _clear_dead(out_dir: str) -> None:
    parent, stem = _beside(out_dir)
    pattern = re.compile(re.escape(stem) + r"(\d+)-" + re.escape(socket.gethostname()) + r"(\.old)?")
    for name in sorted(os.listdir(parent)):
        match, path = pattern.fullmatch(name), os.path.join(parent, name)
        if not match or not _is_dead(path, int(match.group(1)), whole=bool(match.group(2))):
            continue
        if match.group(2) and not os.path.exists(out_dir):  # killed between its two renames
            os.rename(path, out_dir)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_dead(path: str, pid: int, whole: bool) -> bool:
    """Nobody has its lock; where there are none (here, or of an earlier export, which is `whole`), the process is gone."""
    handle = -1 if whole else lock.acquire(path)
    if handle is None or handle >= 0:
        lock.release(handle)
        return handle is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
