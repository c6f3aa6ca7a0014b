"""Moving bytes from memory into files: every rank writes its own ranges of files whose sizes are known beforehand."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bigtrain import ranks
from bigtrain.errors import WeightsError
from bigtrain.weights.read import CPU_THREADS, as_bytes, on_device

BLOCK_BYTES = 16 << 20


@dataclass(slots=True)
class WriteOp:
    """Write the elements of `flat`, converted to `dtype`, at byte `begin` of `file`."""

    file: str
    begin: int
    flat: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.flat.numel() * self.dtype.itemsize


class Writer:
    """Runs writes on a few threads. `close` makes them durable (fsync)."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def run(self, ops: Sequence[WriteOp]) -> int:
        """Execute all writes; returns the bytes written.

        Raises:
            WeightsError: the disk is full, or a write failed; names the file.
        """
        blocks = [block for op in sorted(ops, key=lambda op: (op.file, op.begin)) for block in _cut(op)]
        if len(blocks) < 2 and not any(op.flat.is_cuda for op in ops):
            return sum(map(self._write, blocks))
        device = next((op.flat.device for op in ops if op.flat.is_cuda), None)
        with ThreadPoolExecutor(min(ranks.cores(), CPU_THREADS), "write", on_device, (device,)) as pool:
            return sum(pool.map(self._write, blocks))

    def close(self) -> None:
        """Flush every file to the disk and close it."""
        descriptors, self._descriptors = self._descriptors, {}
        for file, descriptor in descriptors.items():
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise WeightsError(f"{file}: could not be made durable: {error.strerror}.", file=file) from error
            finally:
                os.close(descriptor)

    def _write(self, op: WriteOp) -> int:
        with torch.no_grad():
            view = as_bytes(self._on_host(op))
        begin = op.begin
        while len(view):
            try:
                count = os.pwrite(self._open(op.file), view, begin)
            except OSError as error:
                raise WeightsError(f"{op.file}: writing at byte {begin} failed: {error.strerror}.", file=op.file) from error
            view, begin = view[count:], begin + count
        return op.nbytes

    def _on_host(self, op: WriteOp) -> torch.Tensor:
        flat = op.flat.detach()
        if not flat.is_cuda:
            return flat.to(op.dtype).contiguous()
        if not hasattr(self._local, "pinned"):
            self._local.pinned = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
        stage = self._local.pinned[: op.nbytes].view(op.dtype)
        stage.copy_(flat.to(op.dtype), non_blocking=False)
        return stage

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
            return self._descriptors[file]


def _cut(op: WriteOp) -> list[WriteOp]:
    step = BLOCK_BYTES // max(op.dtype.itemsize, op.flat.element_size())
    return [
        WriteOp(op.file, op.begin + first * op.dtype.itemsize, op.flat[first : first + step], op.dtype)
        for first in range(0, op.flat.numel(), step)
    ]


def create(file: str, head: bytes, size: int) -> None:
    """A new file of `size` bytes that begins with `head`; the disk's blocks are reserved, so that a full disk shows here.

    Raises:
        WeightsError: there is not enough space.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(descriptor, head, 0)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise WeightsError(f"{file}: {size} bytes could not be reserved: {error.strerror}.", file=file) from error
    finally:
        os.close(descriptor)


_NO_FALLOCATE = (22, 38, 95)  # EINVAL, ENOSYS, EOPNOTSUPP: file systems that cannot reserve


def fsync(path: str | Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
