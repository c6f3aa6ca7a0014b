"""`load_into`: fill a model, partitioned or plain, from a folder of weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bigtrain import ranks
from bigtrain.errors import WeightsError
from bigtrain.meeting import naming_the_lost
from bigtrain.weights import share
from bigtrain.weights.dtypes import TORCH, loses_bits
from bigtrain.weights.folder import Folder, open_folder
from bigtrain.weights.guard import guard_state_dict
from bigtrain.weights.mapping import Conversion, Part
from bigtrain.weights.plan import LoadPlan, fingerprint, plan_load
from bigtrain.weights.read import Reader, ReadOp, progress_bar
from bigtrain.weights.slots import Piece, Slot, pieces_of, slots_of
from bigtrain.zero.flat import MasterOf

logger = logging.getLogger(__name__)

_COMPARED_ELEMS = 1 << 24  # bounds the temporaries of a comparison


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        missing: names of the model that the folder does not hold and that were allowed to be missing: they keep their values.
        unexpected: names of the folder that the model does not have and that were allowed.
        bytes_read: bytes of tensors that this rank read.
        seconds: wall time.
        tensors: number of the model's tensors that were filled.
        ignored: names of the folder that the model's class declares harmless.
        verified: number of tensors whose hash was compared with the file.
        rounded: the folder's values have bits that the model's element type cannot hold.
    """

    missing: list[str]
    unexpected: list[str]
    bytes_read: int
    seconds: float
    tensors: int = 0
    ignored: list[str] = field(default_factory=list)
    verified: int = 0
    rounded: bool = False


@naming_the_lost()
def load_into(
    model: torch.nn.Module,
    directory: str | Path,
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    allow_mixed_half: bool = False,
    verify: bool = False,
    progress: bool = True,
    threads: int | None = None,
) -> LoadReport:
    """Fill `model` with the weights of a Hugging Face folder; all ranks call it.

    At ZeRO-3 each rank reads exactly the byte ranges of its own partitions, straight into them: no collective, no full
    tensor. Whole parameters on GPUs are read once per job, each rank a share, and exchanged. Element types are converted on
    the way (fp32, fp16, bf16, fp64 into the parameter's own type). Call it before the engine is made: an fp32 master copy
    made earlier is not changed.

    Args:
        model: any module; with transformers models the same renaming and fusing as in `from_pretrained` applies.
        directory: folder with model.safetensors, or shards and their index, or pytorch_model.bin (restricted unpickling).
        allow_missing: patterns (fnmatch) of names that the folder may lack; they keep the values they have.
        allow_unexpected: patterns of names that the model may lack.
        allow_mixed_half: accept a folder that holds both float16 and bfloat16 tensors.
        verify: afterwards compare a hash of every gathered tensor with the file (reads everything once more).
        progress: show a bar on rank 0.
        threads: reading threads of this rank.

    Raises:
        WeightsError: the folder is damaged, incomplete or of another model; before any tensor is read.
        RanksDisagreeError: another rank failed, or sees other files.
        ModelError: a tensor of the model has no memory.
    """
    begin = time.monotonic()
    with ranks.together(f"checking the weights in {directory}"):
        folder = open_folder(directory)
        slots = slots_of(model)
        plan = plan_load(model, slots, folder, allow_missing, allow_unexpected, allow_mixed_half)
    ranks.agree(fingerprint(folder), f"the weight files in {directory}")
    bytes_read = _read_all(plan, folder, progress and ranks.is_main(), threads)
    report = LoadReport(plan.missing, plan.unexpected, bytes_read, 0.0, len(plan.filled), plan.ignored)
    report.rounded = any(
        loses_bits(folder.tensors[name].dtype, slot.dtype) for slot, part in plan.filled for name in part.sources
    )
    if any(slot.partitioned for slot in slots):
        guard_state_dict(model)
    if verify:
        from bigtrain.weights.verify import verify_plan

        report.verified = verify_plan(plan, folder)
    report.seconds = time.monotonic() - begin
    logger.info(
        "loaded %d tensors from %s: %.1f MB on this rank in %.2f s", report.tensors, directory, bytes_read / 1e6, report.seconds
    )
    if plan.missing:
        logger.warning("not in %s, left as they were: %s", directory, ", ".join(plan.missing))
    return report


def load_masters(model: torch.nn.Module, directory: str | Path, *, master_of: MasterOf) -> int:
    """Fill the fp32 master copies of an engine's parameters straight from a folder; all ranks call it.

    DeepSpeed makes the masters by widening the 16-bit weights, so an fp32 checkpoint would lose the lower bits on the way.
    Each rank reads the byte ranges of its own masters, without rounding. Call it after `load_into` and after the engine is
    made, before the first step. An element of which the file's value does not round to the model's was changed since it was
    loaded (a resized embedding, a merged adapter): its master stays what the model says.

    Args:
        model: the engine's module.
        directory: the folder that `load_into` read.
        master_of: of the engine's optimizer, from `zero.flat.master_of`.

    Returns:
        The number of parameters whose master this rank filled (in part).

    Raises:
        WeightsError, RanksDisagreeError: as `load_into`.
    """
    with ranks.together(f"checking the weights in {directory}"):
        folder = open_folder(directory)
        plan = plan_load(model, slots_of(model), folder, ("*",), ("*",), allow_mixed_half=True, skip_mismatched=True)
    ranks.agree(fingerprint(folder), f"the weight files in {directory}")
    masters = {id(slot): pieces for slot, _ in plan.filled if (pieces := _master_pieces(slot, master_of))}
    plan.filled = [(slot, part) for slot, part in plan.filled if id(slot) in masters]
    plan.twins = []
    _read_all(plan, folder, ranks.is_main(), None, lambda slot: masters[id(slot)])
    return len(plan.filled)


def _master_pieces(slot: Slot, master_of: MasterOf) -> list[Piece]:
    found = master_of(slot.tensor)
    if found is None:
        return []
    start, flat = found
    count = max(0, min(flat.numel(), slot.numel - start))
    flat = flat[:count]
    return [Piece(start, flat, lambda: _keep_changed(slot, start, flat))] if count else []


def _keep_changed(slot: Slot, start: int, master: torch.Tensor) -> None:
    """Where the file's value, now in `master`, is not what the model's element was rounded from, take the model's."""
    for own in pieces_of(slot)[:1]:
        begin, end = max(start, own.start), min(start + master.numel(), own.start + own.flat.numel())
        for at in range(begin, end, _COMPARED_ELEMS):
            stop = min(at + _COMPARED_ELEMS, end)
            here = master[at - start : stop - start]
            model = own.flat[at - own.start : stop - own.start].to(here.device)
            torch.where(here.to(model.dtype) == model, here, model.float(), out=here)


def _read_all(
    plan: LoadPlan,
    folder: Folder,
    show: bool,
    threads: int | None,
    destinations: Callable[[Slot], list[Piece]] | None = None,
) -> int:
    shared = share.assign([slot for slot, _ in plan.filled] if destinations is None else [])
    destinations = destinations or pieces_of
    ops: list[ReadOp] = []
    finishers = []
    conversions: dict[int, tuple[Conversion, list[tuple[Slot, Part, list[Piece]]]]] = {}
    tied: dict[int, list[Piece]] = {id(slot): [] for slot, _ in plan.twins}
    for slot, part in plan.filled:
        pieces = shared.pieces(slot) if shared.covers(slot) else destinations(slot)
        if part.runs is None:
            assert part.conversion is not None
            conversions.setdefault(id(part.conversion), (part.conversion, []))[1].append((slot, part, pieces))
        else:
            for piece in pieces:
                ops += read_ops(part, piece, folder)
        finishers += [piece.finish for piece in pieces if piece.finish is not None]
        if id(slot) in tied:  # of a persistent parameter the partition is enough: its whole copy came from the same bytes
            tied[id(slot)] = pieces if shared.covers(slot) else pieces[:1]
    advance, close = progress_bar(sum(op.nbytes for op in ops), show)
    with ranks.together("reading the weights"), torch.no_grad(), Reader(threads, advance) as reader:
        count = reader.run(ops)
        for conversion, wanted in conversions.values():
            count += _convert(conversion, wanted, folder, reader)
        for finish in finishers:
            finish()
        count += _compare_twins(plan, tied, folder, reader)
    close()
    shared.exchange()
    return count


def read_ops(part: Part, piece: Piece, folder: Folder) -> list[ReadOp]:
    """The reads that fill `piece` of a part made of runs."""
    assert part.runs is not None
    ops, at = [], 0
    for run in part.runs.cut(piece.start, piece.start + piece.flat.numel()):
        info = folder.tensors[run.source]
        dtype = TORCH[info.dtype]
        dest = piece.flat[at : at + run.length]
        if folder.pickled:
            source = folder.loaded[info.file][run.source].reshape(-1)[run.start : run.start + run.length]
            ops.append(ReadOp(info.file, 0, dtype, dest, source))
        else:
            ops.append(ReadOp(info.file, info.begin + run.start * dtype.itemsize, dtype, dest))
        at += run.length
    return ops


def read_whole(names: Sequence[str], folder: Folder, reader: Reader, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Full tensors of the file on the CPU, in `dtype` (None: as stored)."""
    from bigtrain.weights.runs import Runs

    out, ops = {}, []
    for name in names:
        info = folder.tensors[name]
        flat = torch.empty(info.numel, dtype=dtype or TORCH[info.dtype])
        ops += read_ops(Part(name, info.shape, [name], Runs.whole(name, info.numel)), Piece(0, flat), folder)
        out[name] = flat.view(info.shape)
    reader.run(ops)
    return out


def _convert(conversion: Conversion, wanted: Sequence[tuple[Slot, Part, list[Piece]]], folder: Folder, reader: Reader) -> int:
    """Make the targets of one shuffling conversion from whole tensors and take this rank's elements of them."""
    wanted = [item for item in wanted if item[2]]
    if not wanted:
        return 0
    names = wanted[0][1].sources
    made = conversion.run(read_whole(names, folder, reader, wanted[0][2][0].flat.dtype))
    for _slot, part, pieces in wanted:
        flat = made[part.made].reshape(-1)
        for piece in pieces:
            piece.flat.copy_(flat[piece.start : piece.start + piece.flat.numel()])
    return sum(folder.tensors[name].nbytes for name in names)


def _compare_twins(plan: LoadPlan, filled: Mapping[int, list[Piece]], folder: Folder, reader: Reader) -> int:
    """Weights that are tied in the model but stored twice must be equal in the file.

    Each is compared with what was just read into the slot, `filled`, a bounded stretch at a time.

    Raises:
        WeightsError: they differ, so tying them would drop one.
    """
    parts: Mapping[int, Part] = {id(slot): part for slot, part in plan.filled}
    count = 0
    for slot, twin in plan.twins:
        for own, other in ((own, other) for piece in filled[id(slot)] for own, other in _stretches(piece, twin)):
            if twin.runs is not None:
                count += reader.run(read_ops(twin, other, folder))
            else:
                assert twin.conversion is not None
                count += _convert(twin.conversion, [(slot, twin, [other])], folder, reader)
            if not torch.equal(own.view(torch.uint8), other.flat.view(torch.uint8)):
                raise WeightsError(
                    f"{folder.path}: {twin.sources[0]} and {parts[id(slot)].sources[0]} are tied in the model but differ in "
                    "the file. Set tie_word_embeddings=False in config.json to keep both.",
                    file=folder.tensors[twin.sources[0]].file,
                    tensor=twin.sources[0],
                )
    return count


def _stretches(piece: Piece, twin: Part) -> Iterator[tuple[torch.Tensor, Piece]]:
    """`(elements of piece, unset memory for the same elements of twin)`; all at once where a conversion makes the whole anyway."""
    step = _COMPARED_ELEMS if twin.runs is not None else piece.flat.numel()
    for first in range(0, piece.flat.numel(), step):
        own = piece.flat.detach()[first : first + step]
        yield own, Piece(piece.start + first, torch.empty_like(own))
