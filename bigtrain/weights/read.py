"""Moving bytes from files into memory: large reads, several threads, conversion in chunks, one pass over each file."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks
from bigtrain.errors import WeightsError
from bigtrain.memory import heap
from bigtrain.plan.machine import meminfo_bytes

BLOCK_BYTES = 16 << 20  # one request; larger ones are no faster on page cache or NVMe
ADVISE_GAP_BYTES = 64 << 10  # reads this close are asked for in one: the disk is as fast, and it saves system calls
FRESH_BYTES = 1 << 20  # made and filled at a time: the kernel clears new pages, and fills them while the cache still holds them
CONVERT_BYTES = 4 << 20  # staging of a dtype conversion: stays in the CPU's cache
# Staging on the way to a GPU. Page-locking takes about 0.6 s a GB, which is as long as reading ten times as much: no more of it than
# the bus needs to run at its full rate.
PINNED_BYTES = 4 << 20
CPU_THREADS, GPU_THREADS = 8, 12  # one thread copies 5 to 6 GB/s out of the page cache, and PCIe gen 5 takes 54


@dataclass(slots=True)
class ReadOp:
    """Fill `dest` (flat, contiguous) with the elements of type `dtype` that start at byte `begin` of `file`.

    `mapped` is the flat memory-mapped source of a .bin file, already cut to the right elements; `begin` then only sorts.
    """

    file: str
    begin: int
    dtype: torch.dtype
    dest: torch.Tensor
    mapped: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        return self.dest.numel() * self.dtype.itemsize


@dataclass(slots=True)
class _Lane:
    """One thread's way to a GPU: a stream, and buffers that take turns, each with the event that says it was copied."""

    stream: torch.cuda.Stream
    buffers: list[tuple[torch.Tensor, memoryview, torch.cuda.Event]]


class Reader:
    """Runs reads on a few threads; keeps one descriptor per file.

    Args:
        threads: number of threads; by default the host's CPUs shared among its ranks, CPU_THREADS or GPU_THREADS at most.
        progress: called with the bytes of each finished batch.
    """

    def __init__(self, threads: int | None = None, progress: Callable[[int], object] | None = None):
        self._threads = threads
        self._progress = progress or (lambda nbytes: None)
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._lanes: list[_Lane] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def run(self, ops: Sequence[ReadOp]) -> int:
        """Execute all reads, in the order of the files; returns the bytes read.

        Raises:
            WeightsError: a file ended early or could not be read.
        """
        batches = list(_batches(sorted(ops, key=lambda op: (op.file, op.begin))))
        device = next((op.dest.device for op in ops if op.dest.is_cuda), None)
        threads = self._threads or min(ranks.cores(), CPU_THREADS if device is None else GPU_THREADS)
        forget = sum(op.nbytes for op in ops) * ranks.local_world_size() > available_bytes() // 2

        def run(index: int) -> int:
            if index < threads:  # nobody has asked for it: small reads one by one would each wait for the disk
                self._advise(batches[index], os.POSIX_FADV_WILLNEED, ADVISE_GAP_BYTES)
            if index + threads < len(batches):  # the disk works on the next block while this one is copied
                self._advise(batches[index + threads], os.POSIX_FADV_WILLNEED, ADVISE_GAP_BYTES)
            count = self._batch(batches[index])
            if forget:  # a file as large as the memory would push everything else out
                self._advise(batches[index], os.POSIX_FADV_DONTNEED, 0)
            return count

        try:
            if threads == 1 or len(batches) < 2:
                return sum(map(run, range(len(batches))))
            with ThreadPoolExecutor(threads, "read", on_device, (device,)) as pool:
                return sum(pool.map(run, range(len(batches))))
        finally:
            self._settle()

    def _batch(self, ops: Sequence[ReadOp]) -> int:
        with torch.no_grad():
            for op in ops:
                self._read(op)
        nbytes = sum(op.nbytes for op in ops)
        self._progress(nbytes)
        return nbytes

    def _advise(self, ops: Sequence[ReadOp], advice: int, gap_bytes: int) -> None:
        for file, begin, end in _spans(ops, gap_bytes):
            os.posix_fadvise(self._open(file), begin, end - begin, advice)

    def _read(self, op: ReadOp) -> None:
        if op.mapped is not None:
            op.dest.copy_(op.mapped)
        elif op.dest.is_cuda:
            self._through_pinned(op)
        elif op.dtype == op.dest.dtype:
            self._fill_fresh(op)
        else:
            self._converting(op)

    def _fill_fresh(self, op: ReadOp) -> None:
        """Into memory that may have no pages yet, up to a page's end at a time."""
        view, address, at = as_bytes(op.dest), op.dest.data_ptr(), 0
        while at < len(view):
            end = min(len(view), at + FRESH_BYTES - (address + at) % mmap.PAGESIZE)
            heap.populate(address + at, end - at)
            self._fill(op.file, op.begin + at, view[at:end])
            at = end

    def _converting(self, op: ReadOp) -> None:
        step = CONVERT_BYTES // op.dtype.itemsize
        stage = self._stage("convert", CONVERT_BYTES, pinned=False)
        for first in range(0, op.dest.numel(), step):
            count = min(step, op.dest.numel() - first)
            raw = stage[: count * op.dtype.itemsize]
            self._fill(op.file, op.begin + first * op.dtype.itemsize, as_bytes(raw))
            op.dest[first : first + count].copy_(raw.view(op.dtype))

    def _through_pinned(self, op: ReadOp) -> None:
        """Disk -> pinned memory -> GPU: two buffers per thread, so that reading goes on while the last one is copied.

        A dozen threads share one interpreter: what can be made once is not made again for each buffer.
        """
        lane = self._lane(op.dest.device)
        step = PINNED_BYTES // op.dtype.itemsize
        with torch.cuda.stream(lane.stream):
            for first in range(0, op.dest.numel(), step):
                stage, view, copied = lane.buffers[0]
                copied.synchronize()  # at once where nothing was recorded yet
                target = op.dest[first : first + step]
                nbytes = target.numel() * op.dtype.itemsize
                self._fill(op.file, op.begin + first * op.dtype.itemsize, view[:nbytes])
                raw = stage[:nbytes].view(op.dtype)
                if op.dtype != op.dest.dtype:
                    raw = raw.to(op.dest.device, non_blocking=True)
                target.copy_(raw, non_blocking=True)
                copied.record(lane.stream)
                lane.buffers.reverse()

    def _lane(self, device: torch.device) -> _Lane:
        """This thread's way to the GPU."""
        lane: _Lane | None = self._local.__dict__.get("lane")
        if lane is None:
            stages = [self._stage(f"pinned{i}", PINNED_BYTES, pinned=True) for i in range(2)]
            lane = _Lane(torch.cuda.Stream(device), [(stage, as_bytes(stage), torch.cuda.Event()) for stage in stages])
            # memory that the allocator has just handed out may still be in use by earlier work of the default stream
            lane.stream.wait_stream(torch.cuda.default_stream(device))
            self._local.lane = lane
            self._lanes.append(lane)  # list.append is atomic
        return lane

    def _settle(self) -> None:
        """Wait for the copies that are still on their way to the GPU, of all threads, and let go of the staging memory."""
        for lane in self._lanes:
            lane.stream.synchronize()
        if self._lanes:
            self._lanes, self._local = [], threading.local()

    def _stage(self, key: str, nbytes: int, pinned: bool) -> torch.Tensor:
        stages = self._local.__dict__
        if key not in stages:
            stages[key] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return stages[key]

    def _fill(self, file: str, begin: int, view: memoryview) -> None:
        descriptor = self._open(file)
        while len(view):
            try:
                count = os.preadv(descriptor, [view[: 1 << 30]], begin)
            except OSError as error:
                raise WeightsError(f"{file}: reading at byte {begin} failed: {error.strerror}.", file=file) from error
            if count == 0:
                raise WeightsError(
                    f"{file}: ended at byte {begin}, {len(view)} more were expected: cut off while it was read.", file=file
                )
            view, begin = view[count:], begin + count

    def _open(self, file: str) -> int:
        descriptor = self._descriptors.get(file)
        if descriptor is not None:
            return descriptor
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                    # no reading ahead into the next rank's bytes; a large request is then fetched whole
                    os.posix_fadvise(self._descriptors[file], 0, 0, os.POSIX_FADV_RANDOM)
                except OSError as error:
                    raise WeightsError(f"{file}: cannot be opened: {error.strerror}.", file=file) from error
            return self._descriptors[file]


def available_bytes() -> int:
    """Memory of this host that can be had without swapping (MemAvailable); 0 if unknown."""
    return meminfo_bytes(Path("/"), "MemAvailable") or 0


def on_device(device: torch.device | None) -> None:
    """Threads start on GPU 0; without this, pinning memory there would cost every rank a context on it."""
    if device is not None:
        torch.cuda.set_device(device)


@contextlib.contextmanager
def staging_ahead(device: torch.device, nbytes: int) -> Iterator[None]:
    """Page-lock the staging memory of a load of `nbytes` onto `device` by a thread while the block does something else.

    torch keeps page-locked memory that is let go and hands it out again, so that the `Reader` of that load finds it made. What is not
    made when the block ends, the Reader makes itself; on a CPU there is nothing to make.
    """
    enough = threading.Event()
    count = min(2 * min(ranks.cores(), GPU_THREADS), nbytes // PINNED_BYTES)
    thread = threading.Thread(target=_make_stages, args=(device, count, enough), name="staging", daemon=True)
    if device.type == "cuda":
        thread.start()
    try:
        yield
    finally:
        enough.set()
        if device.type == "cuda":
            thread.join()


def _make_stages(device: torch.device, count: int, enough: threading.Event) -> None:
    on_device(device)
    made: list[torch.Tensor] = []
    with contextlib.suppress(RuntimeError):  # the Reader will say why there is no such memory, on all ranks together
        while len(made) < count and not enough.is_set():
            made.append(torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True))


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor."""
    return memoryview(flat.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _batches(ops: Sequence[ReadOp]) -> Iterator[list[ReadOp]]:
    """Groups of about one block each: small tensors together, large ones cut."""
    batch: list[ReadOp] = []
    size = 0
    for op in ops:
        for part in _cut(op):
            batch.append(part)
            size += part.nbytes
            if size >= BLOCK_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _spans(ops: Sequence[ReadOp], gap_bytes: int) -> Iterator[tuple[str, int, int]]:
    """`(file, begin, end)` of what `ops`, in the order of their bytes, read; those at most `gap_bytes` apart as one."""
    file, begin, end = "", 0, 0
    for op in ops:
        if op.mapped is not None:
            continue
        if op.file != file or not end <= op.begin <= end + gap_bytes:
            if file:
                yield file, begin, end
            file, begin = op.file, op.begin
        end = op.begin + op.nbytes
    if file:
        yield file, begin, end


def _cut(op: ReadOp) -> Iterator[ReadOp]:
    if op.nbytes <= BLOCK_BYTES:
        yield op
        return
    step = BLOCK_BYTES // op.dtype.itemsize
    for first in range(0, op.dest.numel(), step):
        dest = op.dest[first : first + step]
        mapped = None if op.mapped is None else op.mapped[first : first + step]
        yield ReadOp(op.file, op.begin + first * op.dtype.itemsize, op.dtype, dest, mapped)


def progress_bar(total: int, show: bool) -> tuple[Callable[[int], Any], Callable[[], Any]]:
    """`(advance, close)` of a bar in bytes on standard error, silent where that is not a terminal."""
    if not show:
        return (lambda nbytes: None), (lambda: None)
    import tqdm

    bar = tqdm.tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="Loading weights", disable=None)
    return bar.update, bar.close
