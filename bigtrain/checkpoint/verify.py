"""Read a whole checkpoint and compare every byte with its hash. Torch-free."""

from __future__ import annotations

from pathlib import Path

from bigtrain.checkpoint import files, store
from bigtrain.checkpoint.manifest import RankManifest, SavedSlice
from bigtrain.errors import CheckpointError, UnreadableError


def verify(path: Path) -> tuple[store.Opened | None, list[str]]:
    """Everything that is wrong with the checkpoint at `path`; an empty list means that each stored byte is as written.

    Args:
        path: a checkpoint folder, or a root whose newest checkpoint is meant, damaged or not.

    Raises:
        UnreadableError: the disk fails, or this user may not read it.
    """
    try:
        steps = [] if (path / "COMMIT").is_file() else store.steps(path)
        opened = store.open_checkpoint(store.folder_for(path, steps[-1])) if steps else store.find(path)
        store.check_model_files(opened)
        opened.index  # noqa: B018  # every tensor is covered exactly once
    except CheckpointError as problem:
        if isinstance(problem.__cause__, OSError) and isinstance(problem, UnreadableError):
            raise  # not looked at is not damaged; a version that is none of this bigtrain's may be a damaged byte
        return None, [str(problem)]
    problems: list[str] = []
    for rank in opened.ranks:
        data = opened.data_path(rank.rank)
        with files.reading(data) as handle:
            problems += _verify_gaps(handle, rank, data)
            for saved in rank.slices:
                problems += verify_slice(handle, saved, rank.chunk_bytes, data)
    return opened, problems


def _verify_gaps(handle: int, rank: RankManifest, path: Path) -> list[str]:
    """Between the slices there are zeros, in files whose writer hashed the header."""
    if not rank.header_bytes:
        return []
    position = rank.header_bytes
    for begin, end in sorted((s.offset, s.offset + s.nbytes) for s in rank.slices):
        gap = memoryview(bytearray(max(0, begin - position)))
        files.read_exactly(handle, gap, position, path)
        if any(gap):
            return [f"{path} is damaged: bytes [{position}, {begin}) between two tensors are not zero."]
        position = max(position, end)
    return []


def verify_slice(handle: int, saved: SavedSlice, chunk_bytes: int, path: Path) -> list[str]:
    """What is wrong with one slice; reads it whole."""
    problems = []
    buffer = memoryview(bytearray(min(chunk_bytes, saved.nbytes)))
    for chunk, begin in enumerate(range(0, saved.nbytes, chunk_bytes)):
        part = buffer[: min(chunk_bytes, saved.nbytes - begin)]
        try:
            files.read_exactly(handle, part, saved.offset + begin, path)
            files.check_chunk(saved, chunk, begin, part, path)
        except UnreadableError:
            raise
        except CheckpointError as problem:
            problems.append(str(problem))
    return problems
