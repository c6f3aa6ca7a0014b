"""A second place for checkpoints: each is copied there once it is whole, from the fast disk that training waits for."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from bigtrain.checkpoint import files, store
from bigtrain.checkpoint.files import Disk
from bigtrain.errors import CheckpointError
from bigtrain.weights import lock
from bigtrain.whereabouts import HERE

BLOCK_BYTES = 16 << 20


def prepare(disk: Disk, root: Path) -> None:
    """Make the folder, and remove what an interrupted copy left there.

    Raises:
        CheckpointError: it cannot be made, or another run copies into it.
    """
    disk.make_folder(root)
    claim = files.claim(root)
    try:
        store.restore_moved_aside(disk, root)
    finally:
        lock.release(claim)


def copy(disk: Disk, checkpoint: Path, root: Path) -> Path:
    """Copy a whole checkpoint to `root`; it appears there under its name when all of it is on that disk.

    Raises:
        CheckpointError: it does not fit, or cannot be written; there is nothing new in `root` then.
    """
    found = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    need, free = sum(p.stat().st_size for p in found), files.free_bytes(root)
    if need > free:
        raise CheckpointError(
            f"{checkpoint.name} needs {need / 2**30:.2f} GiB and {root} has {free / 2**30:.2f} GiB free: there is no copy of it.",
            str(root),
        )
    final = root / checkpoint.name
    store.refuse_foreign(final)
    scratch = store.scratch_folder(final, uuid.uuid4().hex[:8])
    try:
        for folder in {checkpoint, *(p.parent for p in found)}:
            disk.make_folder(scratch / folder.relative_to(checkpoint))
        for path in sorted(found, key=lambda p: p.name == "COMMIT"):  # last, as when it was written
            _copy_file(disk, path, scratch / path.relative_to(checkpoint))
        for folder in {scratch, *((scratch / p.relative_to(checkpoint)).parent for p in found)}:
            disk.sync_folder(folder)
        store.publish(disk, scratch, final)
    except BaseException:
        Disk().remove_tree(scratch)
        raise
    return final


def _copy_file(disk: Disk, source: Path, target: Path) -> None:
    """Large pages pass through the page cache and do not stay there: they are not read again."""
    with disk.doing("copy to", target), open(source, "rb") as read, open(target, "wb") as write:
        while block := read.read(BLOCK_BYTES):
            write.write(block)
            HERE.touch()
        write.flush()
        disk.step("fsync", target)
        os.fsync(write.fileno())
        for handle in (read, write):
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
