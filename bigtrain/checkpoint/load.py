"""Loading: each rank reads the chunks that hold its own elements, checks their hashes, and copies them into the live state."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bigtrain import ranks
from bigtrain.checkpoint import files, reshard
from bigtrain.checkpoint.datafile import BLOCK_BYTES, PAGE_BYTES, DataSource, aligned_buffer, take_hashed
from bigtrain.checkpoint.manifest import SavedSlice
from bigtrain.checkpoint.reshard import Read
from bigtrain.checkpoint.slices import LocalSlice, raw
from bigtrain.checkpoint.snapshot import page_locked, threads_on
from bigtrain.checkpoint.store import Opened
from bigtrain.errors import CheckpointError
from bigtrain.weights.dtypes import TORCH

log = logging.getLogger(__name__)
GAP_BYTES = 4096  # chunks no farther apart than this are read in one request


@dataclass(frozen=True, slots=True)
class _Part:
    """Whole chunk `[begin, end)` bytes of a saved slice, of which some elements from byte `skip_bytes` on go to a tensor."""

    saved: SavedSlice
    begin: int
    end: int
    chunk: int
    target: torch.Tensor
    skip_bytes: int

    @property
    def position(self) -> int:
        """Of its first byte in the data file."""
        return self.saved.offset + self.begin

    @property
    def size(self) -> int:
        """Bytes to read."""
        return self.end - self.begin

    @property
    def direct(self) -> bool:
        """True if its bytes are those of the target, all of them."""
        same = self.target.dtype == TORCH[self.saved.dtype] and self.target.nbytes == self.size
        return same and not self.target.is_cuda

    def check(self, found: str, path: Path) -> None:
        """Compare with the hash that was written."""
        files.check_hash(self.saved, self.chunk, self.begin, self.size, found, path)


@dataclass(slots=True)
class _Stretch:
    """Chunks that lie side by side in one file: one request to the disk."""

    path: Path
    file_bytes: int
    begin: int
    end: int
    parts: list[_Part] = field(default_factory=list)


def load_slices(opened: Opened, slices: Sequence[LocalSlice], *, begin: Callable[[], object] = lambda: None) -> int:
    """Fill `slices` from a checkpoint of any number of ranks; bytes read by this rank. All ranks call it.

    Args:
        opened: the checkpoint.
        slices: this rank's state.
        begin: called when nothing is left that could be refused, right before the first slice changes.

    Raises:
        CheckpointError: a tensor is missing or of another shape (found before anything is read, on all ranks), or bytes on
            disk are not those that were written (the failing file, tensor and range are named; other ranks raise
            `RanksDisagreeError` with the same text).
    """
    with ranks.together(f"planning the load of {opened.folder}"):
        reads = reshard.plan_reads(opened.index, [s.wanted() for s in slices])
        _check_dtypes(reads, slices)
        stretches = list(_stretches(opened, reads, slices))
    device = next((s.tensor.device for s in slices if s.tensor.is_cuda), None)
    begin()
    with ranks.together(f"reading {opened.folder}"), _Sources(pinned=device is not None) as sources:
        waits = any(sources.open(stretch.path, stretch.file_bytes).direct for stretch in stretches)
        with threads_on(device, readers(waits)) as threads:
            return sum(threads.map(lambda stretch: _read(stretch, sources), stretches))


def readers(waits: bool) -> int:
    """Threads of a rank that read, hash and copy: its share of the cores.

    Args:
        waits: for a disk, so that there are two at the least: one hashes while the other waits. Two on one core with nothing to wait
            for only take the interpreter from each other (0.69 s of processor time for 2 GB against 0.50).
    """
    return max(1 + waits, min(8, ranks.cores()))


def _check_dtypes(reads: Sequence[Read], slices: Sequence[LocalSlice]) -> None:
    """Element types must be equal, but for buffers that are wider in the checkpoint: before they followed the model's own dtype
    (`models.buffers`), tables of sines were in fp32 beside weights in bf16."""
    rounded = {}
    for read in reads:
        have, want = TORCH[read.saved.dtype], slices[read.wanted].tensor.dtype
        if have == want or slices[read.wanted].rounded:
            continue
        buffer = read.saved.kind == "buffer"
        if not (buffer and have.is_floating_point and want.is_floating_point and have.itemsize > want.itemsize):
            raise CheckpointError(
                f"{read.saved.kind} of {read.saved.param} is {have} in the checkpoint and {want} in this run. "
                + ("Resume with the model as it was." if buffer else "Resume with the same optimizer and precision settings.")
            )
        rounded[read.saved.param] = (have, want)
    if rounded and ranks.is_main():
        first, (have, want) = next(iter(rounded.items()))
        more = f" (and {len(rounded) - 1} more buffers)" if len(rounded) > 1 else ""
        log.warning(
            "%s%s is %s in the checkpoint and rounded to %s, which this run's model has, as with transformers' from_pretrained",
            first, more, have, want,
        )  # fmt: skip


def _stretches(opened: Opened, reads: Sequence[Read], slices: Sequence[LocalSlice]) -> Iterator[_Stretch]:
    """The chunks to read, joined where they are neighbours in a file, `BLOCK_BYTES` at the most."""
    last: _Stretch | None = None
    for read in reads:
        path, rank = opened.data_path(read.rank), opened.ranks[read.rank]
        for part in _parts(rank.chunk_bytes, read, slices[read.wanted].tensor):
            begin, end = part.position, part.position + part.size
            near = last is not None and last.path == path and 0 <= begin - last.end <= GAP_BYTES
            if last is None or not near or end - last.begin > BLOCK_BYTES:
                if last is not None:
                    yield last
                last = _Stretch(path, rank.data_bytes, begin, end)
            last.parts.append(part)
            last.end = end
    if last is not None:
        yield last


def _parts(chunk: int, read: Read, tensor: torch.Tensor) -> Iterator[_Part]:
    """One part for each hash chunk that the read touches."""
    item = read.saved.item_bytes
    first, last = read.source_start * item, (read.source_start + read.count) * item
    for begin in range(first // chunk * chunk, last, chunk):
        end = min(begin + chunk, read.saved.nbytes)
        low, high = max(begin, first), min(end, last)
        start = read.target_start + (low - first) // item
        yield _Part(read.saved, begin, end, begin // chunk, tensor[start : start + (high - low) // item], low - begin)


def _read(stretch: _Stretch, sources: _Sources) -> int:
    source = sources.open(stretch.path, stretch.file_bytes)
    if not source.direct:
        for part in stretch.parts:
            _read_cached(part, source, sources)
    else:
        block = source.read_block(sources.buffer(stretch.end - stretch.begin + 2 * PAGE_BYTES), stretch.begin, stretch.end)
        for part in stretch.parts:
            _take(part, block[part.position - stretch.begin :][: part.size], stretch.path)
    return sum(part.size for part in stretch.parts)


def _read_cached(part: _Part, source: DataSource, sources: _Sources) -> None:
    whole = part.direct
    buffer = raw(part.target) if whole else sources.buffer(part.size)[: part.size]
    part.check(source.read_hashed(buffer, part.position), source.path)
    if not whole:
        _copy_elements(part, buffer)


def _take(part: _Part, content: memoryview, path: Path) -> None:
    whole = part.direct
    part.check(take_hashed(content, raw(part.target) if whole else None), path)
    if not whole:
        _copy_elements(part, content)


def _copy_elements(part: _Part, content: memoryview) -> None:
    end = part.skip_bytes + part.target.numel() * part.saved.item_bytes
    wanted = torch.frombuffer(content, dtype=torch.uint8)[part.skip_bytes : end]
    aligned = wanted if wanted.data_ptr() % part.saved.item_bytes == 0 else wanted.clone()
    part.target.copy_(aligned.view(TORCH[part.saved.dtype]))


class _Sources(contextlib.AbstractContextManager["_Sources"]):
    """Open files, each opened once, and a buffer for each reading thread: pinned, if state on a GPU is to be filled."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._open: dict[Path, DataSource] = {}
        self._lock = threading.Lock()
        self._own = threading.local()

    def open(self, path: Path, size: int) -> DataSource:
        with self._lock:
            if path not in self._open:
                self._open[path] = DataSource(path, size)
            return self._open[path]

    def buffer(self, size: int) -> memoryview:
        """At least `size` bytes, page-aligned, the thread's own until it asks again."""
        held = getattr(self._own, "buffer", None)
        if held is None or len(held) < size:  # a chunk may be longer than a block
            room = max(BLOCK_BYTES + 2 * PAGE_BYTES, size)
            if self._pinned:
                self._own.locked = page_locked(room)
                held = raw(self._own.locked.tensors["bytes"])
            else:
                held = memoryview(aligned_buffer(room))  # type: ignore[arg-type]
            self._own.buffer = held
        return held

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()
