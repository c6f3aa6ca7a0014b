"""What one rank writes in one save: the data file's layout, and the pieces in which it is copied and written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks
from bigtrain.checkpoint import files, snapshot
from bigtrain.checkpoint.datafile import PAGE_BYTES
from bigtrain.checkpoint.manifest import CHUNK_BYTES, RankManifest, SavedSlice
from bigtrain.checkpoint.slices import LocalSlice, raw
from bigtrain.checkpoint.snapshot import Copy, HostMemory
from bigtrain.errors import CheckpointError
from bigtrain.weights.dtypes import NAMES

UNIT_BYTES = 4 * CHUNK_BYTES  # 16 MiB: the most that an update waits for the writer to let go of
LIVE, BUSY, COPIED, DONE = range(4)


@dataclass
class Unit:
    """A piece of one slice; `image`: its place in the job's image, once it has been copied there."""

    tensor: torch.Tensor
    offset: int
    slice_index: int
    state: int = LIVE
    copy: Copy | None = None
    image: torch.Tensor | None = None

    @property
    def content(self) -> torch.Tensor:
        """Where to write it from."""
        if self.image is not None:
            return self.image
        return self.tensor if self.copy is None else self.copy.tensor


@dataclass
class Job:
    """One save of this rank; `hashes` fill up while it is written.

    Attributes:
        imaged: all state is copied when the save starts, to where it belongs in an image of the data file, unless there is no room.
        image: the blocks of that, in order.
        device: the GPU that holds some of the state.
        ready: its state is final from here on.
        claim: of the root, see files.claim.
    """

    step: int
    scratch: Path
    final: Path
    units: list[Unit]
    saved: list[SavedSlice]
    data_bytes: int
    header: bytes
    rank_state: dict[str, Any]
    run: bytes
    model_files: Mapping[str, bytes]
    hashes: list[list[str]]
    imaged: bool
    device: torch.device | None = None
    ready: torch.cuda.Event | None = None
    claim: int = -1
    image: list[Copy] = field(default_factory=list)

    def place(self, unit: Unit) -> torch.Tensor:
        """Where in the image a unit belongs."""
        block, begin = divmod(unit.offset, snapshot.BLOCK_BYTES)
        return self.image[block].tensor[begin : begin + unit.tensor.nbytes].view(unit.tensor.dtype)

    def make_image(self, host: HostMemory) -> bool:
        """Take the image's blocks; False: `host` has no room for all of them, and none is taken."""
        block = torch.empty(snapshot.BLOCK_BYTES, dtype=torch.uint8, device="meta")
        for _ in range(0, self.data_bytes, snapshot.BLOCK_BYTES):
            copy = host.take(block)
            if copy is None:
                while self.image:
                    self.image.pop().give_back()
                return False
            self.image.append(copy)
        return True

    def complete_image(self) -> None:
        """Beside the units copied there: the header, units that were copied elsewhere, and zeros in the gaps between them."""
        self._fill(0, self.header)
        position = len(self.header)
        for unit in self.units:
            self._fill(position, bytes(unit.offset - position))
            if unit.image is None:
                self.place(unit).copy_(unit.content)
            position = unit.offset + unit.tensor.nbytes
        self._fill(position, bytes(-(-self.data_bytes // PAGE_BYTES) * PAGE_BYTES - position))

    def _fill(self, begin: int, content: bytes) -> None:
        view = memoryview(content)
        while len(view):
            block, at = divmod(begin, snapshot.BLOCK_BYTES)
            room = raw(self.image[block].tensor)[at : at + len(view)]
            room[:] = view[: len(room)]
            view, begin = view[len(room) :], begin + len(room)

    def by_slice(self) -> Iterator[tuple[int, list[Unit]]]:
        """(number of a slice, its units) in the order of the file; a slice without elements has none and is left out."""
        for index, units in itertools.groupby(self.units, key=lambda unit: unit.slice_index):
            yield index, list(units)

    def batches(self, nbytes: int) -> Iterator[list[tuple[int, list[Unit]]]]:
        """`by_slice`, as many at a time as have `nbytes` together; a larger one alone."""
        batch: list[tuple[int, list[Unit]]] = []
        held = 0
        for index, units in self.by_slice():
            size = sum(unit.tensor.nbytes for unit in units)
            if batch and held + size > nbytes:
                yield batch
                batch, held = [], 0
            batch.append((index, units))
            held += size
        if batch:
            yield batch

    def manifest(self, data_name: str) -> RankManifest:
        """What was written, once it was."""
        slices = tuple(replace(s, xxh3=tuple(h)) for s, h in zip(self.saved, self.hashes))
        return RankManifest(
            rank=ranks.rank(), world_size=ranks.world_size(), data_name=data_name, data_bytes=self.data_bytes, slices=slices,
            header_bytes=len(self.header), header_xxh3=files.digest(self.header), state=self.rank_state,
        )  # fmt: skip


def plan(
    mine: list[LocalSlice],
    step: int,
    scratch: Path,
    final: Path,
    rank_state: dict[str, Any],
    run: bytes,
    model_files: Mapping[str, bytes],
    imaged: bool,
) -> Job:
    """Lay the slices out in one safetensors file and cut them into units."""
    for s in mine:
        if s.tensor.dtype not in NAMES:
            raise CheckpointError(f"{s.kind} {s.param} is {s.tensor.dtype}, which a checkpoint cannot hold")
    header, offsets, total = _lay_out(mine)
    saved, units = [], []
    for index, (s, offset) in enumerate(zip(mine, offsets)):
        saved.append(
            SavedSlice(
                param=s.param,
                kind=s.kind,
                dtype=NAMES[s.tensor.dtype],
                shape=s.shape,
                start=s.start,
                stop=s.stop,
                offset=offset,
                flat=s.flat,
            )
        )
        size = s.tensor.element_size()
        cuts = _cuts(offset, s.tensor.nbytes, imaged)
        units += [Unit(s.tensor[begin // size : end // size], offset + begin, index) for begin, end in cuts]
    device, ready = next((u.tensor.device for u in units if u.tensor.is_cuda), None), None
    if device is not None:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(device))
    hashes: list[list[str]] = [[] for _ in saved]
    return Job(step, scratch, final, units, saved, total, header, rank_state, run, model_files, hashes, imaged, device, ready)


def data_bytes(mine: list[LocalSlice]) -> int:
    """Size of the data file that `plan` lays these out in."""
    return _lay_out(mine)[2]


def _cuts(offset: int, nbytes: int, imaged: bool) -> Iterator[tuple[int, int]]:
    """Bytes [begin, end) of the units of a slice at byte `offset` of the file: each lies in one block of the image, if there is one."""
    begin = 0
    while begin < nbytes:
        room = snapshot.BLOCK_BYTES - (offset + begin) % snapshot.BLOCK_BYTES if imaged else UNIT_BYTES
        end = min(nbytes, begin + room)
        yield begin, end
        begin = end


def _lay_out(mine: list[LocalSlice]) -> tuple[bytes, list[int], int]:
    """The safetensors header, each slice's absolute byte offset, and the file's size.

    safetensors wants no holes between tensors; the gaps that alignment leaves are named as padding tensors of bytes.
    """
    entries: dict[str, Any] = {}
    position, relative = 0, []
    for s in mine:
        begin = files.aligned(position)
        if begin > position:
            entries[f"pad/{position}"] = {"dtype": "U8", "shape": [begin - position], "data_offsets": [position, begin]}
        end = begin + s.tensor.nbytes
        entries[f"{s.kind}/{s.param}/{s.start}"] = {
            "dtype": NAMES[s.tensor.dtype], "shape": [s.tensor.numel()], "data_offsets": [begin, end],
        }  # fmt: skip
        relative.append(begin)
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    base = files.aligned(8 + len(text))
    text += b" " * (base - 8 - len(text))
    return len(text).to_bytes(8, "little") + text, [base + r for r in relative], base + position
