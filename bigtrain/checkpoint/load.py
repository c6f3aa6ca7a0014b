"""Loading: each rank reads the chunks that hold its own elements, checks their hashes, and copies them into the live state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bigtrain import ranks
from bigtrain.checkpoint import files, reshard
from bigtrain.checkpoint.files import check_chunk
from bigtrain.checkpoint.manifest import SavedSlice
from bigtrain.checkpoint.reshard import Read
from bigtrain.checkpoint.slices import DTYPES, LocalSlice, raw
from bigtrain.checkpoint.store import Opened
from bigtrain.errors import CheckpointError

READERS = 2  # threads a rank; hashing and copying release the interpreter lock


@dataclass(frozen=True)
class _Part:
    """Whole chunks `[begin, end)` bytes of a saved slice, of which elements `[first, first + count)` go to a tensor."""

    path: Path
    saved: SavedSlice
    begin: int
    end: int
    chunk: int
    target: torch.Tensor
    skip_bytes: int


def load_slices(opened: Opened, slices: Sequence[LocalSlice], *, readers: int = READERS) -> int:
    """Fill `slices` from a checkpoint of any number of ranks; bytes read by this rank. All ranks call it.

    Raises:
        CheckpointError: a tensor is missing or of another shape (found before anything is read, on all ranks), or bytes on
            disk are not those that were written (the failing file, tensor and range are named; other ranks raise
            `RanksDisagreeError` with the same text).
    """
    with ranks.together(f"planning the load of {opened.folder}"):
        index = reshard.index_slices((m.rank, s) for m in opened.ranks for s in m.slices)
        reads = reshard.plan_reads(index, [s.wanted() for s in slices])
        _check_dtypes(reads, slices)
        parts = [part for read in reads for part in _parts(opened, read, slices[read.wanted].tensor)]
    with ranks.together(f"reading {opened.folder}"), _Handles() as handles:
        with ThreadPoolExecutor(readers) as threads:
            return sum(threads.map(lambda part: _read_part(part, handles), parts))


def _check_dtypes(reads: Sequence[Read], slices: Sequence[LocalSlice]) -> None:
    for read in reads:
        have, want = DTYPES[read.saved.dtype], slices[read.wanted].tensor.dtype
        if have != want:
            raise CheckpointError(
                f"{read.saved.kind} of {read.saved.param} is {have} in the checkpoint and {want} in this run. "
                "Resume with the same optimizer and precision settings."
            )


def _parts(opened: Opened, read: Read, tensor: torch.Tensor) -> Iterator[_Part]:
    """One part for each hash chunk that the read touches."""
    chunk, item = opened.ranks[read.rank].chunk_bytes, read.saved.item_bytes
    first, last = read.source_start * item, (read.source_start + read.count) * item
    for begin in range(first // chunk * chunk, last, chunk):
        end = min(begin + chunk, read.saved.nbytes)
        low, high = max(begin, first), min(end, last)
        start = read.target_start + (low - first) // item
        target = tensor[start : start + (high - low) // item]
        yield _Part(opened.data_path(read.rank), read.saved, begin, end, begin // chunk, target, low - begin)


def _read_part(part: _Part, handles: _Handles) -> int:
    size = part.end - part.begin
    direct = not part.target.is_cuda and part.target.nbytes == size
    buffer = raw(part.target) if direct else memoryview(bytearray(size))
    files.read_exactly(handles.open(part.path), buffer, part.saved.offset + part.begin, part.path)
    check_chunk(part.saved, part.chunk, part.begin, buffer, part.path)
    if not direct:
        wanted = torch.frombuffer(buffer, dtype=torch.uint8)[part.skip_bytes : part.skip_bytes + part.target.nbytes]
        part.target.copy_(wanted.clone().view(part.target.dtype))
    return size


class _Handles(contextlib.AbstractContextManager["_Handles"]):
    """Open files, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def open(self, path: Path) -> int:
        if path not in self._open:
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"cannot open {path}: {error.strerror}", str(path)) from error
            if self._open.setdefault(path, handle) != handle:  # another thread was faster
                os.close(handle)
        return self._open[path]

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)
