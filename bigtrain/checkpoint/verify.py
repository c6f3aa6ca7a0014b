"""Read a whole checkpoint and compare every byte with its hash. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bigtrain.checkpoint import files, reshard, store
from bigtrain.checkpoint.manifest import SavedSlice
from bigtrain.errors import CheckpointError


def verify(path: Path, *, progress: Callable[[int], None] | None = None) -> tuple[store.Opened | None, list[str]]:
    """Everything that is wrong with the checkpoint at `path`; an empty list means that each stored byte is as written.

    Args:
        path: a checkpoint folder, or a root whose newest complete checkpoint is meant.
        progress: called with the number of bytes just checked.
    """
    try:
        opened = store.find(path)
        reshard.index_slices((m.rank, s) for m in opened.ranks for s in m.slices)
    except CheckpointError as problem:
        return None, [str(problem)]
    problems: list[str] = []
    for rank in opened.ranks:
        data = opened.data_path(rank.rank)
        try:
            handle = os.open(data, os.O_RDONLY)
        except OSError as error:
            problems.append(f"cannot open {data}: {error.strerror}")
            continue
        try:
            for saved in rank.slices:
                problems += _verify_slice(handle, saved, rank.chunk_bytes, data, progress)
        finally:
            os.close(handle)
    return opened, problems


def _verify_slice(
    handle: int, saved: SavedSlice, chunk_bytes: int, path: Path, progress: Callable[[int], None] | None
) -> list[str]:
    problems = []
    buffer = memoryview(bytearray(min(chunk_bytes, saved.nbytes)))
    for chunk, begin in enumerate(range(0, saved.nbytes, chunk_bytes)):
        part = buffer[: min(chunk_bytes, saved.nbytes - begin)]
        try:
            files.read_exactly(handle, part, saved.offset + begin, path)
            files.check_chunk(saved, chunk, begin, part, path)
        except CheckpointError as problem:
            problems.append(str(problem))
        if progress:
            progress(len(part))
    return problems
