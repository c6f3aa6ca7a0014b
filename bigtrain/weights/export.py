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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks, zero
from bigtrain.errors import UsageError, WeightsError
from bigtrain.meeting import naming_the_lost
from bigtrain.weights import partial
from bigtrain.weights.companions import exported_config, refuse_unloadable, write_companions
from bigtrain.weights.dtypes import as_dtype
from bigtrain.weights.layout import Layout, plan_layout
from bigtrain.weights.mapping import Part
from bigtrain.weights.masters import Masters, masters_for
from bigtrain.weights.replace import refuse_foreign
from bigtrain.weights.slots import Piece, Slot, owned_piece, slots_of
from bigtrain.weights.write import WriteOp, Writer, create
from bigtrain.zero.flat import MasterOf

logger = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
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
        source: the checkpoint's folder; empty of a model in memory.
    """

    path: str
    files: list[str]
    tensors: int
    bytes: int
    bytes_written: int
    seconds: float
    source: str = ""


@naming_the_lost()
def export_model(
    model: torch.nn.Module,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | str,
    tokenizer: Any = None,
    max_shard_bytes: int = 5_000_000_000,
    ranges: bool | None = None,
    master_of: MasterOf | None = None,
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
        max_shard_bytes: most tensor bytes in one file.
        ranges: several ranks write into one file. Not safe on network file systems without coherent caches when the ranks
            are on several hosts, so by default only done on one host; otherwise each file is written by one rank.
        master_of: from `zero.flat.master_of`: where the files hold another float type than the model (`dtype`, or what its class wants
            in fp32), values come from the fp32 masters, as in an export of a checkpoint. None: from the weights.

    Raises:
        WeightsError: before anything is written if the export could not be loaded again or does not fit the disk.
        UsageError: `out_dir` holds other things, or a model that bigtrain did not write, or `model` is a base model with adapters around it.
        RanksDisagreeError: another rank failed.
    """
    begin = time.monotonic()
    with ranks.together(f"planning the export to {out_dir}"):
        wanted = as_dtype(dtype)
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            raise UsageError(
                f"tokenizer={tokenizer!r}: give the tokenizer (or processor) itself, such as transformers.AutoTokenizer.from_pretrained(...)."
            )
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            raise UsageError(
                f"{type(model).__name__}: from_pretrained would find none of its weights under these names. Write its adapters with "
                "bigtrain.weights.export_adapter, or export what merge_and_unload() returns."
            )
        slots = slots_of(model)
        layout = plan_layout(model, slots, wanted, max_shard_bytes)
    ranks.agree([(s.name, s.size, len(s.parts)) for s in layout.shards], "what the export will write")
    masters = masters_for(layout, master_of)
    temporary = ranks.main_decides(lambda: prepare(model, slots, layout, str(out_dir), wanted, tokenizer), "export")
    with partial.dropped_on_failure(temporary):
        # A folder on the disk of the first host alone is written by that host's ranks.
        writers = [r for r, sees in enumerate(ranks.all_gather_object(os.path.isdir(temporary))) if sees]
        together = len(writers) == ranks.world_size() and (_one_host() if ranges is None else ranges)
        written = _write_weights(layout, masters, temporary, together, writers)
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
    model: torch.nn.Module, slots: Sequence[Slot], layout: Layout, out_dir: str, dtype: torch.dtype, tokenizer: Any
) -> str:
    """On rank 0: every check, then the small files and the empty weight files; returns the temporary folder."""
    refuse_foreign(out_dir)
    config = exported_config(model, dtype)
    refuse_unloadable(model, config, {name: slot.shape for slot in slots for name in slot.names})
    temporary = partial.begin(out_dir)
    try:
        _refuse_full_disk(layout, temporary, out_dir)
        write_companions(model, config, tokenizer, temporary)
        for shard in layout.shards:
            create(os.path.join(temporary, shard.name), shard.head, shard.size)
    except BaseException:
        partial.drop(temporary)
        raise
    return temporary


def _refuse_full_disk(layout: Layout, temporary: str, out_dir: str) -> None:
    free = shutil.disk_usage(temporary).free
    if free < layout.total_bytes + SMALL_FILES_BYTES:
        raise WeightsError(
            f"{out_dir}: the export takes {layout.total_bytes / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB left. "
            "Free some space or choose another folder.",
            file=out_dir,
        )


def _write_weights(layout: Layout, masters: Masters, temporary: str, ranges: bool, writers: Sequence[int]) -> int:
    """The ranks `writers` write; returns the bytes of this rank. Writing goes on behind the gathering."""
    problem: Exception | None = None
    writer = Writer()
    with ThreadPoolExecutor(1, "write") as behind:
        writes = [behind.submit(writer.run, range_ops(layout, temporary, own_pieces(layout, masters)) if ranges else [])]
        for job in _gathered_jobs(layout, ranges, writers):
            # collective: gathering goes on after a failure, because the other ranks take part
            with _whole(job, layout, masters) as sources:
                mine = [place for place in job if place.writer == ranks.rank()]
                if mine and problem is None:
                    try:
                        ops = _gathered_ops(layout, mine, sources, temporary)
                        writes[-1].result()  # one gathering at a time is held
                        writes.append(behind.submit(writer.run, ops))
                    except Exception as error:
                        problem = error
        closed = behind.submit(writer.close)
        wait_for_all(closed, problem, writes)
    return sum(write.result() for write in writes)


def wait_for_all(last: Future[Any], problem: Exception | None = None, writes: Sequence[Future[int]] = ()) -> None:
    """Wait for the slowest writer, however long it takes; then every rank raises if one had a problem.

    The ranks ask each other again and again instead of waiting in one collective: that one would end with the timeout of
    its group, while a dead rank ends this at once.
    """
    pause_s = 0.01
    while ranks.sum_across(int(last.done())) < ranks.world_size():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    with ranks.together("writing the export"):
        if problem is not None:
            raise problem
        for write in (*writes, last):
            write.result()


def finish(layout: Layout, temporary: str, out_dir: str) -> None:
    """Give the complete folder its name; rank 0 acts, all ranks learn of a failure."""
    ranks.main_decides(lambda: _publish(layout, temporary, out_dir), "finishing the export")


def own_pieces(layout: Layout, masters: Masters) -> Callable[[str], list[Piece]]:
    """A function that gives what this rank owns of a tensor of the model, by name."""

    def pieces(name: str) -> list[Piece]:
        slot = layout.slots[name]
        held = name in masters.own
        piece = masters.owned_piece(slot, name) if held else owned_piece(slot, ranks.rank(), ranks.world_size())
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


@dataclass(frozen=True)
class _Place:
    """A tensor of the export that is made from gathered tensors, where it goes, and the rank that writes it."""

    part: Part
    file: str
    begin: int
    writer: int


def _gathered_jobs(layout: Layout, ranges: bool, writers: Sequence[int]) -> list[list[_Place]]:
    """What has to be gathered, one list per gathering; the same order on every rank.

    With ranges these are the conversions alone; without, everything, taking turns between the files, because each file is
    written by one rank and all shall write at the same time.
    """
    jobs: dict[tuple[str, int], list[_Place]] = {}
    longest = max(len(shard.parts) for shard in layout.shards)
    for number in range(longest):
        for index, shard in enumerate(layout.shards):
            if number >= len(shard.parts) or (ranges and shard.parts[number].runs is not None):
                continue
            part = shard.parts[number]
            key = ("part", id(part)) if part.runs is not None else ("conversion", id(part.conversion))
            job = jobs.setdefault(key, [])
            writer = (job[0].writer if job else len(jobs) - 1) if ranges else index
            job.append(_Place(part, shard.name, shard.begins[number], writers[writer % len(writers)]))
    return list(jobs.values())


@contextlib.contextmanager
def _whole(job: list[_Place], layout: Layout, masters: Masters) -> Iterator[dict[str, torch.Tensor]]:
    slots = {name: layout.slots[name] for place in job for name in place.part.sources}
    made = {name: masters.gather(slot, name) for name, slot in slots.items() if name in masters.own}
    with zero.gathered([slot.tensor for name, slot in slots.items() if slot.partitioned and name not in made]):  # type: ignore[misc]
        yield {name: slot.tensor.detach() for name, slot in slots.items() if name not in made} | made


def _gathered_ops(layout: Layout, job: list[_Place], sources: dict[str, torch.Tensor], folder: str) -> list[WriteOp]:
    """The writes of one gathering, from copies that outlive it."""
    conversion = job[0].part.conversion if job[0].part.runs is None else None
    made: dict[str, torch.Tensor] = {}
    if conversion is not None:
        dtype = layout.dtypes[job[0].part.name]
        made = conversion.run({name: tensor.to(dtype) for name, tensor in sources.items()})
    ops = []
    for place in job:
        dtype, at = layout.dtypes[place.part.name], place.begin
        if place.part.runs is None:
            flats = [made[place.part.made].reshape(-1)]
        else:
            runs = place.part.runs.runs
            flats = [sources[run.source].reshape(-1)[run.start : run.start + run.length] for run in runs]
        for flat in flats:
            ops.append(WriteOp(os.path.join(folder, place.file), at, flat.to("cpu", dtype, copy=True), dtype))
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
    refuse_foreign(out_dir)  # what came there while the export was written
    partial.publish(temporary, out_dir)
