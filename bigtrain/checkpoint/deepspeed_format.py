"""Checkpoints in DeepSpeed's own file format, with what it lacks: agreement before, confirmation after, no code in files.

A checkpoint is DIR/TAG/ with DeepSpeed's files, `bigtrain.json` (what the run is), `rank_R.json` (random state of rank R) and,
written last, `COMPLETE` (every file with its size). It is written under DIR/.writing-TAG and renamed when all ranks have
confirmed; only then does DIR/latest move. Reading looks at `COMPLETE` first: all files must be there, with their sizes, for
every rank, before anything is loaded on any rank. DeepSpeed's pickles are read with restricted unpickling.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bigtrain import __version__, meeting, ranks, zero
from bigtrain.checkpoint import deepspeed_import, live
from bigtrain.checkpoint.rng import random_state, set_random_state
from bigtrain.checkpoint.userstate import agreed
from bigtrain.errors import CheckpointError
from bigtrain.meeting import Point, meet
from bigtrain.weights.write import fsync

if TYPE_CHECKING:
    from bigtrain.engine import Engine

log = logging.getLogger(__name__)
COMPLETE, RUN, LATEST = "COMPLETE", deepspeed_import.RUN, "latest"


# ---------------------------------------------------------------- saving


def save(engine: Engine, directory: str | Path, tag: str | None, state: dict[str, Any]) -> Path:
    """Write a checkpoint of all ranks; every rank calls it.

    Args:
        engine: between steps.
        directory: where checkpoints are kept, on storage that all ranks share.
        tag: name of this one; "checkpoint-<step>" by default.
        state: the caller's own values, as JSON.

    Returns:
        The checkpoint's folder.

    Raises:
        RanksDisagreeError: if not all ranks come, or they differ in path or tag, or one cannot write.
        CheckpointError: if the tag exists already, or in the middle of an accumulation.
    """
    meet(Point.SAVE, engine.global_step, 0, limit_s=meeting.MEET_S)
    engine.checkpoints.refuse_torn()
    tag = str(tag) if tag is not None else f"checkpoint-{engine.global_step}"
    root = Path(directory).absolute()
    ranks.agree((str(root), tag), "the checkpoint's folder and tag")
    if not engine.between_steps:
        raise CheckpointError(
            "save_checkpoint() in the middle of an accumulation would lose its gradients: call it after engine.step()."
        )
    final, work = root / tag, root / f".writing-{tag}"
    state = agreed(state, engine.data_position)
    with ranks.together(f"preparing {final}"):
        if "/" in tag or tag in (LATEST, ".", ".."):
            raise CheckpointError(f"{tag!r} cannot be a tag: it is the name of a folder inside {root}")
    ranks.main_decides(lambda: _prepare(final, work), f"preparing {final}")
    with ranks.together(f"writing {final}"):
        _write_json(work / f"rank_{engine.rank}.json", random_state())
    with _failures_kept(engine.deepspeed) as failures:
        engine.deepspeed.save_checkpoint(str(work), tag=tag, save_latest=False)
    with ranks.together(f"writing {final}"):
        if failures:
            raise CheckpointError(f"cannot write {work}: {failures[0]}", str(work)) from failures[0]
    ranks.main_decides(lambda: _publish(engine, root, tag, work, state), f"completing {final}")
    return final


@contextlib.contextmanager
def _failures_kept(ds_engine: Any) -> Iterator[list[Exception]]:
    """DeepSpeed's save has collectives after its writes: a rank that cannot write (disk full) must still reach them."""
    writer, failures = ds_engine.checkpoint_engine, []
    original = writer.save

    def write(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            failures.append(error)

    writer.save = write
    try:
        yield failures
    finally:
        del writer.save


def _prepare(final: Path, work: Path) -> None:
    if final.exists() and not (final.is_dir() and not any(final.iterdir())):  # a save gives it its name when it is complete
        raise CheckpointError(f"{final} exists already: give another tag, or remove it.", str(final))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)


def _publish(engine: Engine, root: Path, tag: str, work: Path, state: dict[str, Any]) -> None:
    """Rank 0, after all have written: describe, mark complete, rename, move `latest`."""
    inner, final = work / tag, root / tag
    for file in work.glob("rank_*.json"):
        file.rename(inner / file.name)
    missing = [f"rank_{r}.json" for r in range(engine.world_size) if not (inner / f"rank_{r}.json").exists()]
    missing += _missing_partitions(inner, engine.stage, engine.world_size)
    if missing:
        raise CheckpointError(f"{inner} lacks {', '.join(missing)}: is {root} on storage that all ranks share?", str(inner))
    _write_json(inner / RUN, {**live.run_state(engine), "state": state, "tag": tag, "version": __version__})
    files = sorted(p for p in inner.rglob("*") if p.is_file())
    for file in files:
        fsync(file)
    _write_json(inner / COMPLETE, {str(p.relative_to(inner)): p.stat().st_size for p in files})
    fsync(inner / COMPLETE)
    os.replace(inner, final)
    shutil.rmtree(work, ignore_errors=True)
    fsync(root)
    (root / f".{LATEST}").write_text(tag)
    os.replace(root / f".{LATEST}", root / LATEST)
    fsync(root)


def _missing_partitions(folder: Path, stage: int, world: int) -> list[str]:
    if stage == 0:
        return [] if list(folder.glob("mp_rank_00_model_states.pt")) else ["mp_rank_00_model_states.pt"]
    wanted = [f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(world)]
    return [name for name in wanted if not list(folder.glob(f"*{name}"))]


# ---------------------------------------------------------------- loading


def load(engine: Engine, directory: str | Path, tag: str | None, trust: bool) -> dict[str, Any]:
    """Go on exactly where a checkpoint stopped; every rank calls it, on a freshly built engine.

    A folder of another number of ranks or stage, or one that DeepSpeed wrote without bigtrain, is read by `deepspeed_import`:
    all that it holds comes back, random state and checks of sizes are not in it.

    Args:
        engine: built with the same model.
        directory: as given to `save`.
        tag: which one; the one `latest` names by default.
        trust: allow files whose pickles name classes outside of the allow-list; such a file can run any code.

    Returns:
        The `state` given to `save`.

    Raises:
        CheckpointError: if there is none, it is incomplete, or it does not fit the model or the optimizer.
    """
    meet(Point.LOAD, engine.global_step, 0, limit_s=meeting.MEET_S)
    root = Path(directory).absolute()
    ranks.agree((str(root), tag), "the checkpoint's folder and tag")
    folder = Path(ranks.main_decides(lambda: str(_folder(root, tag)), f"choosing a checkpoint in {root}"))
    with ranks.together(f"checking {folder}"):
        run = check(folder, engine.world_size, engine.stage) if (folder / COMPLETE).is_file() else None
    now = engine.world_size, engine.stage, _dealt_round(engine.settings.config)
    if run is None or (run["world_size"], run["stage"], _dealt_round(run["config"])) != now:
        return deepspeed_import.load(engine, folder)
    with ranks.together(f"checking {folder}"):
        own = json.loads((folder / f"rank_{engine.rank}.json").read_text())
        if not trust:
            scan(folder, engine.rank)
    engine.checkpoints.change_to(folder)
    with _restricted(engine.deepspeed, trust):
        loaded, _ = engine.deepspeed.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
    if loaded is None or engine.deepspeed.global_steps != run["deepspeed_steps"]:
        raise CheckpointError(
            f"DeepSpeed loaded step {engine.deepspeed.global_steps} from {loaded}, but {folder} was saved at "
            f"{run['deepspeed_steps']}: not the checkpoint asked for.",
            str(folder),
        )
    zero.replay_cpu_adam(getattr(engine.deepspeed.optimizer, "optimizer", None))
    live.set_run_state(engine, run)
    set_random_state(own)
    return run["state"]


def _dealt_round(config: Mapping[str, Any]) -> bool:
    """Whether parameters lie in the flat partitions in another order than the model's; DeepSpeed's own load does not look."""
    return bool((config.get("zero_optimization") or {}).get("round_robin_gradients"))


def _folder(root: Path, tag: str | None) -> Path:
    """The folder to load: one that bigtrain completed, else one that DeepSpeed wrote by itself."""
    complete = tag in _complete(root) if tag is not None else bool(_complete(root))
    foreign = None if complete else deepspeed_import.foreign_in(root, tag)
    return foreign or root / choose(root, tag)


def _complete(root: Path) -> list[str]:
    return sorted((p.parent.name for p in root.glob(f"*/{COMPLETE}")), key=_age(root))


def choose(root: Path, tag: str | None) -> str:
    """The tag to load.

    Raises:
        CheckpointError: if the folder or the tag does not exist; lists those that do.
    """
    if not root.is_dir():
        raise CheckpointError(f"{root} does not exist: nothing to resume from.", str(root))
    tags = _complete(root)
    partial = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name not in tags and list(p.glob("*.pt")))
    known = f"Complete checkpoints here: {', '.join(tags) or 'none'}." + (
        f" Incomplete: {', '.join(partial)}." if partial else ""
    )
    if tag is not None:
        if str(tag) in tags:
            return str(tag)
        raise CheckpointError(f"{root} has no complete checkpoint {tag!r}. {known}", str(root))
    latest = root / LATEST
    named = latest.read_text().strip() if latest.exists() else None
    if named in tags:
        return str(named)
    if not tags:
        raise CheckpointError(f"{root} holds no complete checkpoint. {known}", str(root))
    log.warning("%s names %r, which is not complete; taking %s. %s", latest, named, tags[-1], known)
    return tags[-1]


def _age(root: Path) -> Any:
    return lambda tag: (root / tag / COMPLETE).stat().st_mtime


def check(folder: Path, world: int, stage: int) -> dict[str, Any]:
    """The checkpoint's `bigtrain.json`, after every file listed in COMPLETE was found with its size.

    Raises:
        CheckpointError: naming the first files that are missing or have another size, or what does not fit this run.
    """
    try:
        listed = json.loads((folder / COMPLETE).read_text())
        run = json.loads((folder / RUN).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {error}", str(folder)) from error
    wrong = []
    for name, size in listed.items():
        file = folder / name
        actual = file.stat().st_size if file.exists() else None
        if actual != size:
            wrong.append(f"{name} ({'missing' if actual is None else f'{actual} bytes'}, expected {size})")
    if wrong:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(wrong[:4])}. Use an earlier checkpoint.", str(folder))
    if run["stage"] == 0 and (run["world_size"], run["stage"]) != (world, stage):
        raise CheckpointError(
            f"{folder} was saved with {run['world_size']} ranks at ZeRO stage 0, this run has {world} at stage {stage}. DeepSpeed's "
            "layout of stage 0 fits the same run only: start it so, or save with save_checkpoint, which fits any.",
            str(folder),
        )
    return run


def scan(folder: Path, rank: int) -> None:
    """Look into the pickles that this rank will read, without running them.

    Raises:
        CheckpointError: naming the file and the classes or functions that are not on the allow-list.
    """
    with torch.serialization.safe_globals(zero.checkpoint_classes()):
        for file in sorted(folder.glob("*.pt")):
            mine = f"zero_pp_rank_{rank}_" in file.name or "zero_pp_rank_" not in file.name
            if not mine and rank != 0:
                continue  # another rank looks at it
            try:
                unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
            except Exception as error:
                raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}", str(file)) from error
            if unsafe:
                raise CheckpointError(
                    f"{file} names {', '.join(unsafe)}, which no DeepSpeed checkpoint needs: loading it could run any code. If "
                    "you know where it comes from, load with trust=True.",
                    str(file),
                )


@contextlib.contextmanager
def _restricted(ds_engine: Any, trust: bool) -> Iterator[None]:
    """DeepSpeed reads all its files through its checkpoint engine: let that one unpickle only what is on the allow-list."""
    reader = ds_engine.checkpoint_engine
    if trust:
        yield
        return

    def read(path: str, map_location: Any = None) -> Any:
        with torch.serialization.safe_globals(zero.checkpoint_classes()):
            return torch.load(path, map_location=map_location, weights_only=True)

    reader.load = read
    try:
        yield
    finally:
        del reader.load


# ---------------------------------------------------------------- small files


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))
