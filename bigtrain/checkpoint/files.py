"""The only module that touches the disk for checkpoints. Torch-free.

Every operation that changes the disk goes through a `Disk`, announced by `Disk.step(operation, path)` before it happens, so
that tests can kill the process, or let the disk fail, at each single point.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from bigtrain.checkpoint.manifest import ALIGN_BYTES, SavedSlice
from bigtrain.errors import CheckpointError

WRITE_BYTES = 16 << 20  # large requests: enough to keep a disk busy, small beside any state
WRITEBACK_BYTES = 1 << 20  # pieces below this are not worth a request to the disk
HEADER_LIMIT_BYTES = 1 << 30


def digest(data: bytes | memoryview) -> str:
    """xxh3_64 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


class Disk:
    """Writes that last: each returns after fsync, errors name the path."""

    def step(self, operation: str, path: Path) -> None:
        """Called before each operation; a place for tests to fail."""

    @contextlib.contextmanager
    def _doing(self, operation: str, path: Path) -> Iterator[None]:
        try:
            self.step(operation, path)
            yield
        except OSError as error:
            free = _free_bytes_or_none(path.parent)
            hint = "" if free is None else f"; {free / 2**30:.2f} GiB are free there"
            raise CheckpointError(f"cannot {operation} {path}: {error.strerror or error}{hint}", str(path)) from error

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; it may exist."""
        with self._doing("create", path):
            path.mkdir(parents=True, exist_ok=True)

    def write_file(self, path: Path, data: bytes) -> tuple[int, str]:
        """Write a whole small file and fsync it; returns (bytes, xxh3)."""
        with self._doing("write", path):
            with open(path, "wb") as file:
                file.write(data)
                file.flush()
                self.step("fsync", path)
                os.fsync(file.fileno())
        return len(data), digest(data)

    def sync_folder(self, path: Path) -> None:
        """fsync a folder, so that the names in it last."""
        with self._doing("fsync", path):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one file system and fsync the parent."""
        with self._doing("rename", target):
            os.rename(source, target)
        self.sync_folder(target.parent)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder; what is already gone is no error."""
        with self._doing("remove", path):
            shutil.rmtree(path, ignore_errors=True)


class DataFile:
    """A file written piece by piece at known offsets, in large requests; `close` makes it last."""

    def __init__(self, disk: Disk, path: Path):
        self._disk, self.path = disk, path
        with disk._doing("create", path):
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`."""
        for begin in range(0, len(data), WRITE_BYTES):
            part = data[begin : begin + WRITE_BYTES]
            with self._disk._doing("write", self.path):
                start = offset
                while len(part):
                    done = os.pwrite(self._handle, part, offset)
                    part, offset = part[done:], offset + done
                self._begin_writeback(start, offset - start)

    def _begin_writeback(self, offset: int, size: int) -> None:
        """Let the disk work while the next piece is hashed; else it would idle until the fsync, or until memory is short.

        On Linux this advice starts writing the dirty pages and waits for nothing (mm/fadvise.c).
        """
        if size >= WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """fsync and close."""
        try:
            with self._disk._doing("fsync", self.path):
                os.fsync(self._handle)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without a promise; safe to call twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def aligned(offset: int) -> int:
    """The next multiple of the format's alignment."""
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
    """An open file's descriptor.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"cannot open {path}: {error.strerror}", str(path)) from error
    try:
        yield handle
    finally:
        os.close(handle)


def read_exactly(handle: int, into: memoryview, offset: int, path: Path) -> None:
    """Fill `into` from byte `offset`.

    Raises:
        CheckpointError: the file ends too early or the disk fails.
    """
    filled = 0
    while filled < len(into):
        try:
            count = os.preadv(handle, [into[filled:]], offset + filled)
        except OSError as error:
            raise CheckpointError(f"cannot read {path} at byte {offset + filled}: {error.strerror}", str(path)) from error
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
        raise CheckpointError(f"{path} has {len(raw)} bytes, {size} were written. The checkpoint is damaged.", str(path))
    if digest(raw) != expected:
        raise CheckpointError(f"{path} does not have the hash it was written with. The checkpoint is damaged.", str(path))
    return raw


def read_small(path: Path) -> bytes:
    """A whole small file; a `CheckpointError` names it when it cannot be read."""
    try:
        if path.stat().st_size > HEADER_LIMIT_BYTES:
            raise CheckpointError(f"{path} is larger than any manifest can be", str(path))
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", str(path)) from error


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


def hash_chunks(data: memoryview, chunk_bytes: int) -> tuple[str, ...]:
    """One hash for each `chunk_bytes` of `data`."""
    return tuple(digest(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes))


def check_chunk(saved: SavedSlice, chunk: int, begin: int, content: memoryview, path: Path) -> None:
    """Compare chunk number `chunk` of a slice, which starts at byte `begin` of it, with its hash.

    Raises:
        CheckpointError: names file, tensor and element range.
    """
    if digest(content) != saved.xxh3[chunk]:
        low = saved.start + begin // saved.item_bytes
        high = low + len(content) // saved.item_bytes
        raise CheckpointError(
            f"{path} is damaged: {saved.kind} of {saved.param}, elements [{low}, {high}), do not have the hash they were "
            "written with. Take another checkpoint.",
            str(path),
        )
