"""The large files of a checkpoint, written and read past the page cache. Torch-free.

Pieces are hashed and copied to an aligned buffer while they are in the processor's cache, and the buffer goes to the disk by
direct I/O while the next one fills. What lies in memory as it will lie in the file is hashed and written from there. Measured on the
two-core machine of docs/results/checkpoint.md, for each of two ranks: buffered writing 0.2 to 0.5 GB/s, direct 1.1 to 1.4; reading
cold 0.4 against 1.3. State that lies in memory also stays there: written pages do not push other files out of the cache. Where a file
system knows no direct I/O, the same path goes through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import xxhash

from bigtrain.checkpoint import files
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.hashing import PIECE_BYTES, ChunkHashes
from bigtrain.errors import CheckpointError
from bigtrain.memory import pastcache

BLOCK_BYTES = 16 << 20  # one request: enough to keep a disk busy, small beside any state
PAGE_BYTES = 4096  # alignment that direct I/O needs on every disk in use
BLOCKS = 3  # one fills, one is on its way to the disk, one waits
READY_BYTES = 1 << 30  # of what lies ready, in one call: see hashing.py
SAMPLES = 16  # places at which a file is asked whether it is in the page cache
_DIRECT = getattr(os, "O_DIRECT", 0)
_Work: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]"


class DiskThread:
    """A thread that does one thing after the other. Started once, by the training thread: at the interpreter's end, when a save
    may still be in flight, no new thread can be started."""

    def __init__(self) -> None:
        self._work: _Work = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._work,), name="checkpoint-disk", daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def submit(self, action: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do `action(*args)` when what came before is done."""
        future: Future[Any] = Future()
        self._work.put((future, action, args))
        return future


def _serve(work: _Work) -> None:
    while (job := work.get()) is not None:
        future, action, args = job
        try:
            future.set_result(action(*args))
        except BaseException as error:
            future.set_exception(error)
        del job, future, action, args


class DataFile:
    """A file written front to back; `close` makes it last. Bytes between the pieces are zero.

    Args:
        disk: told of every operation before it happens.
        path: the file; made anew.
        thread: does the requests to the disk.
        blocks: three pieces of page-aligned memory of one length, that of a request; used in turn.
    """

    def __init__(self, disk: Disk, path: Path, thread: DiskThread, blocks: Sequence[memoryview] = ()):
        self._disk, self.path, self._thread = disk, path, thread
        self._pending: deque[Future[None]] = deque()
        self._blocks = blocks or buffers()
        self._size = len(self._blocks[0])
        self._number = self._filled = self._begin = 0
        with disk.doing("create", path):
            self._handle = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, content: memoryview, offset: int, hashes: ChunkHashes) -> None:
        """Take `content` for byte `offset`, at or behind what was written so far: hashed and copied."""
        for room in self._next(offset - self._begin - self._filled):
            room[:] = bytes(len(room))
        for room in self._next(len(content)):
            hashes.take(content[: len(room)], room)
            content = content[len(room) :]

    def _next(self, nbytes: int) -> Iterator[memoryview]:
        """Where the file's next bytes belong, in parts; a block goes to the disk once the part that fills it was filled."""
        while nbytes:
            room = self._blocks[self._number % len(self._blocks)][self._filled : self._filled + nbytes]
            yield room
            self._filled, nbytes = self._filled + len(room), nbytes - len(room)
            if self._filled == self._size:
                self._hand_over(self._size)

    def _hand_over(self, size: int) -> None:
        if len(self._pending) == BLOCKS - 1:
            self._pending.popleft().result()
        block = self._blocks[self._number % len(self._blocks)][:size]
        self._pending.append(self._thread.submit(self._put, [block], self._begin))
        self._begin += self._filled
        self._number, self._filled = self._number + 1, 0

    def write_ready(self, blocks: Sequence[memoryview], size: int) -> None:
        """Hand `size` bytes to the disk that lie in memory as the file will have them; they must stay so until `close`.

        Args:
            blocks: page-aligned memory of one length, that of several pages; zero behind `size` up to the end of the page.
            size: of the whole file, into which nothing else is written.
        """
        each, end = max(1, READY_BYTES // len(blocks[0])), -(-size // PAGE_BYTES) * PAGE_BYTES
        for first in range(0, len(blocks), each):
            begin = first * len(blocks[0])
            group = [block[: max(0, end - begin - i * len(block))] for i, block in enumerate(blocks[first : first + each])]
            self._pending.append(self._thread.submit(self._put, [block for block in group if len(block)], begin))
        self._begin = size

    def settled(self) -> Iterator[None]:
        """Once for each request to the disk, as they are done; raises what one failed with."""
        while self._pending:
            self._pending.popleft().result()
            yield

    def _put(self, blocks: list[memoryview], offset: int) -> None:
        with self._disk.doing("write", self.path):
            while blocks:
                try:
                    done = os.pwritev(self._handle, blocks, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not leave_direct(self._handle):
                        raise
                    continue
                offset += done
                while blocks and done >= len(blocks[0]):
                    done -= len(blocks.pop(0))
                if done:
                    blocks[0] = blocks[0][done:]

    def close(self) -> None:
        """Write the rest, fsync and close."""
        size = self._begin + self._filled
        try:
            if self._filled:
                whole = -(-self._filled // PAGE_BYTES) * PAGE_BYTES
                self._blocks[self._number % len(self._blocks)][self._filled : whole] = bytes(whole - self._filled)
                self._hand_over(whole)
            for _ in self.settled():
                pass
            with self._disk.doing("fsync", self.path):
                os.ftruncate(self._handle, size)
                os.fsync(self._handle)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close without a promise; safe to call twice."""
        while self._pending:  # the number of a closed file may become another file's
            with contextlib.suppress(Exception):
                self._pending.popleft().result()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class DataSource:
    """A data file to read from, by several threads: from the page cache if it is there, else past it."""

    def __init__(self, path: Path, size: int):
        self.path = path
        self._handle = files.persistently(lambda: os.open(path, os.O_RDONLY), f"open {path}", path)
        self.direct = _DIRECT != 0 and not _is_cached(self._handle, size)
        if self.direct:
            self.close()
            self._handle = files.persistently(lambda: open_direct(path, os.O_RDONLY), f"open {path}", path)
            self.direct = _is_direct(self._handle)

    def read_hashed(self, into: memoryview, offset: int) -> str:
        """Fill `into` from byte `offset` through the page cache; the hash of what came."""
        state = xxhash.xxh3_64()
        for i in range(0, len(into), PIECE_BYTES):
            piece = into[i : i + PIECE_BYTES]
            files.read_exactly(self._handle, piece, offset + i, self.path)
            state.update(piece)
        return state.hexdigest()

    def read_block(self, buffer: memoryview, begin: int, end: int) -> memoryview:
        """Bytes `[begin, end)` in the page-aligned `buffer`, which holds two pages more than they are."""
        low = begin // PAGE_BYTES * PAGE_BYTES
        want, filled = end - low, 0
        while filled < want:
            size, at = -(-(want - filled) // PAGE_BYTES) * PAGE_BYTES, low + filled
            part = buffer[filled : filled + size]
            count = files.persistently(partial(self._read, part, at), f"read {self.path} at byte {at}", self.path)
            if count <= 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {low + filled}, {want - filled} bytes too early", str(self.path)
                )
            filled += count
            if filled < want and filled % PAGE_BYTES:  # a short answer before the end: only the page cache goes on from there
                leave_direct(self._handle)
        return buffer[begin - low : want]

    def _read(self, into: memoryview, at: int) -> int:
        try:
            return os.preadv(self._handle, [into], at)
        except OSError as error:
            if error.errno != errno.EINVAL or not leave_direct(self._handle):
                raise
            return os.preadv(self._handle, [into], at)

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def take_hashed(source: memoryview, into: memoryview | None) -> str:
    """The hash of `source`, copied to `into` on the way."""
    state = xxhash.xxh3_64()
    for i in range(0, len(source), PIECE_BYTES):
        piece = source[i : i + PIECE_BYTES]
        state.update(piece)
        if into is not None:
            pastcache.copy(into[i : i + PIECE_BYTES], piece)
    return state.hexdigest()


def buffers(size: int = BLOCK_BYTES) -> list[memoryview]:
    """Blocks of `size` bytes for a file of any length."""
    return [memoryview(aligned_buffer(size)) for _ in range(BLOCKS)]  # type: ignore[arg-type]


def aligned_buffer(size: int = BLOCK_BYTES) -> np.ndarray:
    """Page-aligned memory, in huge pages where there are any: the kernel holds each page that a request names."""
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, dtype=np.uint8)


def open_direct(path: Path, flags: int) -> int:
    """Open for direct I/O, or, on a file system without it (tmpfs), as usual."""
    try:
        return os.open(path, flags | _DIRECT, 0o644)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, flags, 0o644)


def leave_direct(handle: int) -> bool:
    """Go on through the page cache; False if it was so already."""
    if not _is_direct(handle):
        return False
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~_DIRECT)
    return True


def _is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & _DIRECT)


def _is_cached(handle: int, size: int) -> bool:
    """True if most of `SAMPLES` pages can be had without a request to the disk (preadv2 with RWF_NOWAIT)."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    found, page = 0, memoryview(bytearray(PAGE_BYTES))
    for i in range(SAMPLES):
        with contextlib.suppress(OSError):  # EAGAIN: not there; EOPNOTSUPP: cannot say
            found += os.preadv(handle, [page], size * i // SAMPLES // PAGE_BYTES * PAGE_BYTES, os.RWF_NOWAIT) > 0
    return found > SAMPLES // 2
