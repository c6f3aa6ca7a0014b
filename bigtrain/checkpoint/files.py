"""The only module that touches the disk for checkpoints. Torch-free.

Every operation that changes the disk goes through a `Disk`, announced by `Disk.step(operation, path)` before it happens, so
that tests can kill the process, or let the disk fail, at each single point.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import xxhash

from bigtrain import standins
from bigtrain.checkpoint.manifest import ALIGN_BYTES, SavedSlice
from bigtrain.errors import CheckpointError, UnreadableError
from bigtrain.weights import lock
from bigtrain.whereabouts import HERE

HEADER_LIMIT_BYTES = 1 << 30
AGAIN_S = (1.0, 3.0, 6.0)  # waits before a read that failed is tried again: what a network disk takes to come back
_PASSING = {errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN}
_LIMITS = {
    errno.EMFILE: "; the limit on this process's open files: raise `ulimit -n`",
    errno.EFBIG: "; the limit on the size of a file: raise `ulimit -f`, or take a file system without one",
}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
T = TypeVar("T")
log = logging.getLogger(__name__)


def digest(data: bytes | memoryview) -> str:
    """xxh3_64 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


class Disk:
    """Writes that last: each returns after fsync, errors name the path."""

    def step(self, operation: str, path: Path) -> None:
        """Called before each operation; a place for tests to fail."""

    @contextlib.contextmanager
    def doing(self, operation: str, path: Path) -> Iterator[None]:
        """Announce an operation, and name it in the error if it fails."""
        try:
            self.step(operation, path)
            yield
        except OSError as error:
            free = _free_bytes_or_none(path.parent)
            hint = _LIMITS.get(error.errno or 0) or ("" if free is None else f"; {free / 2**30:.2f} GiB are free there")
            raise CheckpointError(f"cannot {operation} {path}: {error.strerror or error}{hint}", str(path)) from error

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; it may exist."""
        with self.doing("create", path):
            path.mkdir(parents=True, exist_ok=True)

    def write_file(self, path: Path, data: bytes) -> tuple[int, str]:
        """Write a whole small file and fsync it; returns (bytes, xxh3)."""
        with self.doing("write", path):
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                self.step("fsync", path)
                os.fsync(file.fileno())
        return len(data), digest(data)

    def sync_folder(self, path: Path) -> None:
        """fsync a folder, so that the names in it last."""
        with self.doing("fsync", path):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one file system and fsync the parent."""
        with self.doing("rename", target):
            os.rename(source, target)
        self.sync_folder(target.parent)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder; what is already gone is no error."""
        with self.doing("remove", path), contextlib.suppress(OSError):
            if path.is_symlink():  # a checkpoint that was moved elsewhere: what it points to is not ours to delete
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def claim(folder: Path) -> int:
    """Keep other processes from writing checkpoints into `folder`, until `lock.release`, or until this process ends.

    Returns:
        For `lock.release`; -1 on a file system that cannot lock a folder.

    Raises:
        CheckpointError: another process has it.
    """
    handle = lock.acquire(folder)
    if handle is None:
        raise CheckpointError(
            f"another run is writing a checkpoint into {folder}: two runs in one folder would delete each other's. Stop one of "
            "them, or let this one save into another.",
            str(folder),
        )
    return handle


def aligned(offset: int) -> int:
    """The next multiple of the format's alignment."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def persistently(action: Callable[[], T], doing: str, path: Path) -> T:
    """What `action` gives, which reads from the disk; tried again after `AGAIN_S` where the disk fails in a way that may pass.

    Raises:
        UnreadableError: it fails still, or in another way. CheckpointError: what it reads is not there.
    """
    for wait_s in (*AGAIN_S, None):
        try:
            return action()
        except OSError as error:
            why = f"cannot {doing}: {error.strerror or error}"
            if wait_s is None or error.errno not in _PASSING:
                kind = CheckpointError if error.errno in _ABSENT else UnreadableError
                raise kind(why, str(path)) from error
            log.warning("%s; it is tried again in %.0f s", why, wait_s)
            HERE.touch()
            time.sleep(wait_s)
    raise AssertionError("unreachable")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """An open file's descriptor; for errors see `persistently`."""
    handle = persistently(lambda: os.open(path, os.O_RDONLY), f"open {path}", path)
    try:
        yield handle
    finally:
        os.close(handle)


def read_exactly(handle: int, into: memoryview, offset: int, path: Path) -> None:
    """Fill `into` from byte `offset`.

    Raises:
        CheckpointError: the file ends too early. UnreadableError: the disk fails.
    """
    filled = 0
    while filled < len(into):
        rest, at = into[filled:], offset + filled
        count = persistently(functools.partial(os.preadv, handle, [rest], at), f"read {path} at byte {at}", path)
        if count <= 0:
            raise CheckpointError(f"{path} ends at byte {offset + filled}, {len(into) - filled} bytes too early", str(path))
        filled += count


def read_checked(path: Path, size: int, expected: str) -> bytes:
    """A whole small file whose length and hash are known.

    Raises:
        CheckpointError: missing, of another length, or another content.
    """
    raw = read_small(path)
    if len(raw) != size:
        why = standins.instead(path) or f"damaged: it has {len(raw)} bytes, {size} were written"
        raise CheckpointError(f"{path} is {why}.", str(path))
    if digest(raw) != expected:
        raise CheckpointError(f"{path} does not have the hash it was written with. The checkpoint is damaged.", str(path))
    return raw


def read_small(path: Path) -> bytes:
    """A whole small file; a `CheckpointError` names it when it cannot be read."""
    status = persistently(path.stat, f"read {path}", path)
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise CheckpointError(f"{path} is {standins.instead(path)}.", str(path))
    if status.st_size > HEADER_LIMIT_BYTES:
        raise CheckpointError(f"{path} is larger than any manifest can be", str(path))
    return persistently(path.read_bytes, f"read {path}", path)


def free_bytes(path: Path) -> int:
    """Bytes a user may still write on the file system of the nearest existing parent of `path`."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _free_bytes_or_none(path: Path) -> int | None:
    try:
        return free_bytes(path)
    except OSError:
        return None


def check_chunk(saved: SavedSlice, chunk: int, begin: int, content: memoryview, path: Path) -> None:
    """Compare chunk number `chunk` of a slice, which starts at byte `begin` of it, with its hash.

    Raises:
        CheckpointError: names file, tensor and element range.
    """
    check_hash(saved, chunk, begin, len(content), digest(content), path)


def check_hash(saved: SavedSlice, chunk: int, begin: int, size: int, found: str, path: Path) -> None:
    """As `check_chunk`, for `size` bytes whose hash is known."""
    if found != saved.xxh3[chunk]:
        low = saved.start + begin // saved.item_bytes
        high = low + size // saved.item_bytes
        raise CheckpointError(
            f"{path} is damaged: {saved.kind} of {saved.param}, elements [{low}, {high}), do not have the hash they were "
            "written with. Take another checkpoint.",
            str(path),
        )
