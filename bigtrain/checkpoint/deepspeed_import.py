"""Going on from a folder that DeepSpeed itself wrote (ZeRO 1, 2, 3, any number of ranks), or from a universal checkpoint.

The files are read by `weights.deepspeed_folder`: no code in them is run, tensors stay memory-mapped, and each rank copies the
elements that it owns. What such a folder holds comes back: weights, fp32 masters, moments, counts of updates. What it lacks does
not: random state, and checksums (a flipped bit in it cannot be seen).
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bigtrain import ranks
from bigtrain.checkpoint import live, reshard, rng
from bigtrain.checkpoint.manifest import SavedSlice
from bigtrain.checkpoint.reshard import Index, Read
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.errors import CheckpointError
from bigtrain.optim import OPTIMIZERS
from bigtrain.weights.deepspeed_folder import DeepSpeedFolder, open_deepspeed
from bigtrain.weights.deepspeed_universal import is_universal, open_universal
from bigtrain.weights.dtypes import NAMES
from bigtrain.weights.slots import Piece, without_wrappers
from bigtrain.zero.flat import refresh_weights

if TYPE_CHECKING:
    from bigtrain.engine import Engine

log = logging.getLogger(__name__)
RUN = "bigtrain.json"  # beside DeepSpeed's files where bigtrain wrote the folder (`deepspeed_format`)


def is_foreign(folder: Path) -> bool:
    """True if `folder` is the folder of one of DeepSpeed's tags, or a universal checkpoint."""
    return is_universal(folder) or any(folder.glob("*_model_states.pt"))


def foreign_in(root: Path, tag: str | None) -> Path | None:
    """The folder meant by `root` and `tag`: a tag of DeepSpeed's, what `latest` or `latest_universal` names, or `root` itself."""
    if tag is not None:
        return root / tag if is_foreign(root / tag) else None
    for pointer in ("latest", "latest_universal"):
        if (root / pointer).is_file():
            named = root / Path((root / pointer).read_text().strip()).name
            if is_foreign(named):
                return named
    return root if is_foreign(root) else None


def load(engine: Engine, folder: Path) -> dict[str, Any]:
    """Go on from `folder`; every rank calls it.

    Args:
        engine: of the same model; any number of ranks, ZeRO stage and placement. Its optimizer must keep the moments that the
            folder holds.
        folder: of one tag.

    Returns:
        The `state` given to `save_deepspeed_checkpoint`; {} if bigtrain did not write the folder.

    Raises:
        CheckpointError: another model, or another optimizer; each difference is named. Nothing has been changed then.
        WeightsError: a file is missing, damaged, or names anything but tensors, containers and numbers.
    """
    with live.state_kept(engine), ranks.together(f"opening {folder}"):
        source = _opened(folder)
        run = json.loads((folder / RUN).read_text()) if (folder / RUN).is_file() else None
        _check_optimizer(engine.settings.optimizer, source)
        index, tensors = _index(source, engine)
        _check_names(source, engine.module)
        splitting = _is_split(engine) and "low" not in source.moments
        slices, _ = live.slices_to_fill(engine, _with_remainders(index) if splitting else index)
        wanted = [s for s in slices if not (splitting and ("master", s.param) in index and s.kind in ("weight", "low"))]
        reads = reshard.plan_reads(index, [s.wanted() for s in wanted])
    engine.checkpoints.change_to(folder)
    with ranks.together(f"reading {folder}"):
        _copy(reads, wanted, tensors)
        if splitting:
            _set_split_masters(engine, index, tensors)
    _restore(engine, folder, source, run)
    return run["state"] if run else {}


def refuse_other(folder: Path, optimizer: str, model: torch.nn.Module) -> None:
    """What `load` would refuse, from a model without values (`models.skeleton`).

    Raises:
        CheckpointError, WeightsError: as `load`.
    """
    source = _opened(folder)
    _check_optimizer(optimizer, source)
    _check_names(source, model)
    shapes = {without_wrappers(n): tuple(t.shape) for n, t in model.state_dict(keep_vars=True).items()}
    wrong = [(n, s, shapes[without_wrappers(n)]) for n, s in source.shapes.items() if s != shapes[without_wrappers(n)]]
    if wrong:
        listing = "".join(f"\n  {n}: shape {theirs} in the checkpoint, {mine} in the model" for n, theirs, mine in wrong[:20])
        raise CheckpointError(f"{source.path} is of another model:{listing}", source.path)


def _opened(folder: Path) -> DeepSpeedFolder:
    return open_universal(folder) if is_universal(folder) else open_deepspeed(folder)


def _is_split(engine: Engine) -> bool:
    return OPTIMIZERS[engine.settings.optimizer].master_bytes == 0


def _copy(reads: list[Read], wanted: list[LocalSlice], tensors: list[torch.Tensor]) -> None:
    for read in reads:
        piece = tensors[read.saved.offset][read.source_start : read.source_start + read.count]
        wanted[read.wanted].tensor[read.target_start : read.target_start + read.count].copy_(piece)


def _check_optimizer(optimizer: str, source: DeepSpeedFolder) -> None:
    row, theirs = OPTIMIZERS[optimizer], set(source.moments)
    mine = {t.name for t in (*row.state, *row.other_state)}
    if "low" not in theirs:
        mine -= {"low"}  # made from the fp32 master
    by_blocks = any(
        t.elems_per_value > 1 for t in row.state
    )  # their scales belong to the partitions of the run that wrote them
    if mine != theirs or by_blocks:
        raise CheckpointError(
            f"{source.path} holds the optimizer state {', '.join(sorted(theirs)) or 'of no kind'}; optimizer "
            f"{optimizer!r} keeps {', '.join(sorted(mine))}. Resume with the optimizer that wrote it, or start a new "
            "run from its weights (bigtrain export).",
            source.path,
        )


def _check_names(source: DeepSpeedFolder, module: torch.nn.Module) -> None:
    """What the folder has and the model lacks; the other direction is found by the plan."""
    mine = {without_wrappers(name) for name in module.state_dict(keep_vars=True)}
    extra = sorted(name for name in source.shapes if without_wrappers(name) not in mine)
    if extra:
        raise CheckpointError(
            f"{source.path} is of another model: it holds {len(extra)} tensors that this one lacks ({', '.join(extra[:5])}).",
            source.path,
        )


def _index(source: DeepSpeedFolder, engine: Engine) -> tuple[Index, list[torch.Tensor]]:
    """The folder's tensors as saved slices; `offset` is the place in the list, not in a file, and moments have this run's dtype."""
    module, row = engine.module, OPTIMIZERS[engine.settings.optimizer]
    moments = {t.name: NAMES[getattr(torch, t.dtype)] for t in (*row.state, *row.other_state)}
    names = {without_wrappers(name): name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    trained = {name for held in source.moments.values() for name in held}
    found: list[tuple[int, SavedSlice]] = []
    tensors: list[torch.Tensor] = []

    def add(kind: str, name: str, pieces: list[Piece]) -> None:
        for piece in pieces:
            dtype = moments.get(kind) or NAMES[piece.flat.dtype]
            own = names.get(without_wrappers(name), name)
            stop = piece.start + piece.flat.numel()
            found.append((0, SavedSlice(param=own, kind=kind, dtype=dtype, shape=source.shapes[name], start=piece.start,
                                        stop=stop, offset=len(tensors))))  # fmt: skip
            tensors.append(piece.flat)

    for name, pieces in source.pieces.items():
        for kind in ("master",) if name in trained and "low" not in source.moments else ("weight", "buffer"):
            add(kind, name, pieces)
    for kind, held in source.moments.items():
        for name, pieces in held.items():
            add(kind, name, pieces)
    return reshard.index_slices(found), tensors


# ---------------------------------------------------------------- optimizers without a separate master


def _with_remainders(index: Index) -> Index:
    """For an optimizer that keeps the master as bf16 weight and 16 more bits: let those bits be made."""
    low = {
        ("low", p): [(r, replace(s, kind="low", dtype="I16")) for r, s in held]
        for (kind, p), held in index.items()
        if kind == "master"
    }
    return {**index, **low}


def _set_split_masters(engine: Engine, index: Index, tensors: list[torch.Tensor]) -> None:
    """Split each fp32 master into weight and remainder, after the moments are there (one of their bits belongs to it)."""
    inner = engine.deepspeed.optimizer.optimizer
    for flat in live.flat_tensors(engine):
        master = torch.zeros(flat.key.numel(), device=flat.key.device)
        wanted = [
            LocalSlice(param=name, kind="master", shape=shape, start=start, tensor=master[at : at + count])
            for name, shape, start, at, count in flat.pieces
        ]
        _copy(reshard.plan_reads(index, [s.wanted() for s in wanted]), wanted, tensors)
        inner.set_master(flat.key, master)


# ---------------------------------------------------------------- counters


def _restore(engine: Engine, folder: Path, source: DeepSpeedFolder, run: dict[str, Any] | None) -> None:
    counters = source.counters
    steps = source.steps or max(0, counters["global_steps"] - counters["skipped_steps"])
    live.set_scalars(engine, [{"params": list(_trained(engine)), "values": {"step": ("int", steps)}}])
    refresh_weights(engine.deepspeed.optimizer)
    if run is not None:
        live.set_run_state(engine, run)
        engine.deepspeed.global_steps = run["deepspeed_steps"]
    else:
        engine.global_step = engine.deepspeed.global_steps = counters["global_steps"]
        engine.updates, engine.data_position = steps, counters["global_samples"]
    rng.reseed(engine.seed, engine.global_step, engine.rank)
    log.warning(
        "%s was written by DeepSpeed: weights, masters, moments and %d updates go on exactly; random number generators (dropout) "
        "start anew, the learning rate is that of this run's schedule at step %d, and the folder has no checksums.",
        folder,
        steps,
        engine.global_step,
    )


def _trained(engine: Engine) -> list[str]:
    return [name for name, param in engine.module.named_parameters() if param.requires_grad]
