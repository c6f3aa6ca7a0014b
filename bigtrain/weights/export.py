"""`export_model`: write a Hugging Face folder from a model, partitioned or plain, without ever gathering it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks, zero
from bigtrain.errors import UsageError, WeightsError
from bigtrain.weights.companions import exported_config, refuse_unloadable, write_companions
from bigtrain.weights.dtypes import as_dtype
from bigtrain.weights.layout import Layout, Shard, plan_layout
from bigtrain.weights.mapping import Part
from bigtrain.weights.slots import Piece, Slot, owned_piece, slots_of
from bigtrain.weights.write import WriteOp, Writer, create, fsync_folder

logger = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
WAIT_S = 24 * 3600.0  # the other ranks wait this long for the slowest writer; a rank that died is noticed by its launcher
SMALL_FILES_BYTES = 64 << 20  # allowance for config and tokenizer when the free space is checked


@dataclass
class ExportReport:
    """What an export wrote.

    Attributes:
        path: the folder.
        files: names of the weight files.
        tensors: number of tensors in them.
        bytes: size of the weight files, known before the first byte was written.
        bytes_written: what this rank wrote of them.
        seconds: wall time.
    """

    path: str
    files: list[str]
    tensors: int
    bytes: int
    bytes_written: int
    seconds: float


def export_model(
    model: torch.nn.Module,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | str,
    tokenizer: Any = None,
    config: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    ranges: bool | None = None,
) -> ExportReport:
    """Write `model` as a folder that plain `from_pretrained` loads; all ranks call it.

    Each rank writes the byte ranges of the elements that it owns, straight from its partition: nothing is gathered. Only
    tensors that transformers transposes or permutes between model and file are gathered, one conversion at a time.
    The folder appears under its name when it is complete; an earlier export of that name is replaced then.

    Args:
        model: any module; for transformers models the names and layout are those of `save_pretrained`.
        out_dir: folder to make.
        dtype: of every float tensor, also written to config.json: torch.bfloat16 or "bfloat16", ...
        tokenizer: something with `save_pretrained` (tokenizer or processor).
        config: instead of `model.config`.
        max_shard_bytes: most tensor bytes in one file.
        ranges: several ranks write into one file. Not safe on network file systems without coherent caches when the ranks
            are on several hosts, so by default only done on one host; otherwise each file is written by one rank.

    Raises:
        WeightsError: before anything is written if the export could not be loaded again or does not fit the disk.
        UsageError: `out_dir` holds other things.
        RanksDisagreeError: another rank failed.
    """
    begin = time.monotonic()
    with ranks.together(f"planning the export to {out_dir}"):
        wanted = as_dtype(dtype)
        slots = slots_of(model)
        layout = plan_layout(model, slots, wanted, max_shard_bytes)
    ranks.agree([(s.name, s.size, len(s.parts)) for s in layout.shards], "what the export will write")
    temporary = ranks.main_decides(lambda: prepare(model, slots, layout, str(out_dir), wanted, tokenizer, config), "export")
    written, problem = _write_weights(layout, temporary, _one_host() if ranges is None else ranges)
    wait_for_all(problem, temporary)
    finish(layout, temporary, str(out_dir))
    report = ExportReport(
        str(out_dir), [shard.name for shard in layout.shards], len(layout.dtypes), layout.total_bytes, written,
        time.monotonic() - begin,
    )  # fmt: skip
    logger.info("exported %d tensors, %.1f MB, to %s in %.2f s", report.tensors, report.bytes / 1e6, out_dir, report.seconds)
    return report


def _one_host() -> bool:
    return len(set(ranks.all_gather_object(socket.gethostname()))) == 1


def prepare(
    model: torch.nn.Module, slots: Sequence[Slot], layout: Layout, out_dir: str, dtype: torch.dtype, tokenizer: Any, config: Any
) -> str:
    """On rank 0: every check, then the small files and the empty weight files; returns the temporary folder."""
    _refuse_foreign(out_dir)
    config = exported_config(model, dtype, config)
    refuse_unloadable(model, config, {name: slot.shape for slot in slots for name in slot.names})
    parent = os.path.dirname(os.path.abspath(out_dir))
    os.makedirs(parent, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < layout.total_bytes + SMALL_FILES_BYTES:
        raise WeightsError(
            f"{out_dir}: the export takes {layout.total_bytes / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left. "
            "Free some space or choose another folder.",
            file=out_dir,
        )
    temporary = os.path.join(parent, f".{os.path.basename(os.path.abspath(out_dir))}.partial-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        os.makedirs(temporary)
        write_companions(model, config, tokenizer, temporary)
        for shard in layout.shards:
            create(os.path.join(temporary, shard.name), shard.head, shard.size)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return temporary


def _refuse_foreign(out_dir: str) -> None:
    """Only an empty folder or an earlier export may be replaced."""
    if not os.path.exists(out_dir):
        return
    if not os.path.isdir(out_dir):
        raise UsageError(f"{out_dir} is a file; give the name of a folder to make.")
    names = os.listdir(out_dir)
    exported = any(name.endswith(".safetensors") for name in names) and not any(n.startswith("checkpoint-") for n in names)
    if names and not exported:
        raise UsageError(
            f"{out_dir} holds {', '.join(sorted(names)[:5])} and is not an earlier export, which would be replaced. "
            "Give another folder."
        )


def _write_weights(layout: Layout, temporary: str, ranges: bool) -> tuple[int, Exception | None]:
    """All ranks write; returns the bytes of this rank and what went wrong here, if anything."""
    problem: Exception | None = None
    written = 0
    writer = Writer()
    try:
        if ranges:
            written += writer.run(range_ops(layout, temporary, own_pieces(layout)))
    except Exception as error:
        problem = error
    try:
        for index, (shard, number, part) in enumerate(_gathered_parts(layout, ranges)):
            # collective: gathering goes on after a failure, because the other ranks take part
            with _whole(part, layout) as sources:
                if index % ranks.world_size() == ranks.rank() and problem is None:
                    try:
                        written += writer.run(_conversion_ops(layout, shard, number, sources, temporary))
                    except Exception as error:
                        problem = error
        writer.close()
    except Exception as error:
        problem = problem or error
    return written, problem


def wait_for_all(problem: Exception | None, temporary: str) -> None:
    """Wait for the slowest writer, however long it takes; then every rank raises if one had a problem."""
    try:
        ranks.barrier("waiting for every rank to finish writing the export", timeout_s=WAIT_S)
        with ranks.together("writing the export"):
            if problem is not None:
                raise problem
    except BaseException:
        if ranks.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def finish(layout: Layout, temporary: str, out_dir: str) -> None:
    """Give the complete folder its name; rank 0 acts, all ranks learn of a failure."""
    ranks.main_decides(lambda: _publish(layout, temporary, out_dir), "finishing the export")


def own_pieces(layout: Layout) -> Callable[[str], list[Piece]]:
    """A function that gives what this rank owns of a tensor of the model, by name."""

    def pieces(name: str) -> list[Piece]:
        piece = owned_piece(layout.slots[name], ranks.rank(), ranks.world_size())
        return [] if piece is None else [piece]

    return pieces


def range_ops(layout: Layout, folder: str, pieces_of: Callable[[str], list[Piece]]) -> list[WriteOp]:
    """The writes of the given pieces into every file, for all parts made of runs."""
    known: dict[str, list[Piece]] = {}
    ops = []
    for shard in layout.shards:
        for part, begin in zip(shard.parts, shard.begins):
            dtype = layout.dtypes[part.name]
            at = 0
            for run in part.runs.runs if part.runs is not None else ():
                if run.source not in known:
                    known[run.source] = pieces_of(run.source)
                for piece in known[run.source]:
                    low = max(run.start, piece.start)
                    high = min(run.start + run.length, piece.start + piece.flat.numel())
                    if high > low:
                        flat = piece.flat[low - piece.start : high - piece.start]
                        where = begin + (at + low - run.start) * dtype.itemsize
                        ops.append(WriteOp(os.path.join(folder, shard.name), where, flat, dtype))
                at += run.length
    return ops


def _gathered_parts(layout: Layout, ranges: bool) -> Iterator[tuple[Shard, int, Part]]:
    """Parts that have to be made from gathered tensors, with their place; the same order on every rank.

    Without ranges: all, taking turns between the shards, so that the ranks write at the same time.
    """
    longest = max(len(shard.parts) for shard in layout.shards)
    for number in range(longest):
        for shard in layout.shards:
            if number < len(shard.parts) and not (ranges and shard.parts[number].runs is not None):
                yield shard, number, shard.parts[number]


@contextlib.contextmanager
def _whole(part: Part, layout: Layout) -> Iterator[dict[str, torch.Tensor]]:
    slots = {name: layout.slots[name] for name in part.sources}
    with zero.gathered([slot.tensor for slot in slots.values() if slot.partitioned]):  # type: ignore[misc]
        yield {name: slot.tensor.detach() for name, slot in slots.items()}


def _conversion_ops(layout: Layout, shard: Shard, number: int, sources: dict[str, torch.Tensor], folder: str) -> list[WriteOp]:
    part = shard.parts[number]
    dtype = layout.dtypes[part.name]
    if part.runs is not None:
        runs = part.runs.runs
        flats = [sources[run.source].reshape(-1)[run.start : run.start + run.length] for run in runs]
    else:
        assert part.conversion is not None
        made = part.conversion.run({name: tensor.to(dtype) for name, tensor in sources.items()})
        flats = [made[part.made].reshape(-1)]
    ops, at = [], shard.begins[number]
    for flat in flats:
        ops.append(WriteOp(os.path.join(folder, shard.name), at, flat, dtype))
        at += flat.numel() * dtype.itemsize
    return ops


def _publish(layout: Layout, temporary: str, out_dir: str) -> None:
    """On rank 0: check the sizes, write the index, make everything durable, and give the folder its name."""
    for shard in layout.shards:
        size = os.path.getsize(os.path.join(temporary, shard.name))
        if size != shard.size:
            raise WeightsError(f"{shard.name}: {size} bytes were written, {shard.size} planned.", file=shard.name)
    if len(layout.shards) > 1:
        with open(os.path.join(temporary, INDEX), "w", encoding="utf-8") as file:
            file.write(json.dumps(layout.index(), indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
    fsync_folder(temporary)
    out_dir = os.path.abspath(out_dir)
    old = None
    if os.path.exists(out_dir):
        old = f"{temporary}.old"
        os.rename(out_dir, old)
    os.rename(temporary, out_dir)
    fsync_folder(os.path.dirname(out_dir))
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
