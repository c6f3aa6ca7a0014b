"""The only module that touches the disk for checkpoints. Torch-free.

Every operation that changes the disk goes through a `Disk`, announced by `Disk.step(operation, path)` before it happens, so
that tests can kill the process, or let the disk fail, at each single point.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from bigtrain import standins
from bigtrain.checkpoint.manifest import ALIGN_BYTES, SavedSlice
from bigtrain.errors import CheckpointError
from bigtrain.weights import lock

HEADER_LIMIT_BYTES = 1 << 30


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
            hint = "" if free is None else f"; {free / 2**30:.2f} GiB are free there"
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
            "them, or give this one another --output_dir.",
            str(folder),
        )
    return handle


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
        why = standins.instead(path) or f"damaged: it has {len(raw)} bytes, {size} were written"
        raise CheckpointError(f"{path} is {why}.", str(path))
    if digest(raw) != expected:
        raise CheckpointError(f"{path} does not have the hash it was written with. The checkpoint is damaged.", str(path))
    return raw


def read_small(path: Path) -> bytes:
    """A whole small file; a `CheckpointError` names it when it cannot be read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path} is {standins.instead(path)}.", str(path))
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
