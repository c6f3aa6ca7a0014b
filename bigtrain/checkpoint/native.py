"""Checkpoints of an engine in bigtrain's own format: what is saved, what a load does with it."""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bigtrain import __version__, meeting, ranks
from bigtrain.checkpoint import deepspeed_format, deepspeed_import, files, live, neighbours, rng, second, store
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.load import load_slices
from bigtrain.checkpoint.save import Saver
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.checkpoint.userstate import agreed
from bigtrain.errors import CheckpointError, UnreadableError
from bigtrain.meeting import Point, meet, naming_the_lost
from bigtrain.weights.companions import companion_files, exported_config
from bigtrain.whereabouts import HERE
from bigtrain.zero.flat import refresh_weights, weight_partitions

if TYPE_CHECKING:
    from bigtrain.engine import Engine

log = logging.getLogger(__name__)
# Which engine saved a folder last, of those that are alive and not closed: the folder's name says a step, and no model.
_owners: weakref.WeakValueDictionary[Path, Checkpoints] = weakref.WeakValueDictionary()


class Checkpoints:
    """Saves and loads one engine. Every rank makes one and calls it alike.

    Attributes:
        tokenizer: kept in each checkpoint beside the model's config, so that `bigtrain export` needs nothing else; may be None.
        disk: the file layer of savers made from now on.
        torn: the checkpoint of which only a part came into the engine, since its load failed on the way; empty if there is none.
        copy_to: a second folder, set before the first save and load: each checkpoint is copied there by rank 0 once it is whole; a
            copy that fails is warned of. A load takes the copy of a checkpoint whose data turns out to be damaged.
        loaded: the folder of the last load in this format.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._saver: Saver | None = None
        self._model_files: dict[str, bytes] | None = None
        self._left_out_told = False
        self._made_s, self._moved_s = time.monotonic(), 0.0
        self.tokenizer: Any = None
        self.copy_to: Path | None = None
        self.disk = Disk()
        self.torn = ""
        self.loaded: Path | None = None
        self._failed: tuple[str, bool] | None = None
        self._damaged: set[Path] = set()

    @property
    def blocked_s(self) -> float:
        """Seconds that the last save kept training waiting, so far."""
        return self._saver.blocked_s if self._saver else 0.0

    @property
    def writing(self) -> bool:
        """True while a save is in flight on this rank."""
        return self._saver is not None and self._saver.writing

    def copied(self) -> dict[str, float]:
        """What saves cost in host memory: bytes that the last one copied from the GPU, the seconds of that, and bytes held now."""
        saver = self._saver
        if saver is None:
            return {"fetched_bytes": 0, "fetch_s": 0.0, "held_bytes": 0}
        copier = saver.copier
        return {"fetched_bytes": copier.fetched_bytes, "fetch_s": copier.fetch_s, "held_bytes": copier.held_bytes}

    @naming_the_lost()
    def prepare(self, directory: str | Path) -> None:
        """Say that checkpoints will be saved in `directory`; call it after a step, when all of the optimizer's state is there.

        A save copies what lies on the GPU to pinned memory of the host, and a first save has to make that memory, which takes
        several times as long as the copies. This makes it now, beside training, where the host has so much to spare. Without it
        saves are as good, and the step after the first takes seconds longer.
        """
        meet(Point.PREPARE, self._engine.global_step, 0, limit_s=meeting.MEET_S)
        self._saver_for(Path(directory).absolute()).prepare(live.slices_of(self._engine))

    @naming_the_lost()
    def save(
        self,
        directory: Path,
        tag: str | None,
        state: dict[str, Any],
        *,
        keep_last: int | None,
        keep_every: int | None,
        keep: Collection[int],
        wait: bool,
    ) -> Path:
        """Save the engine, between steps.

        Args:
            directory: holds the checkpoints; the new one is `directory/checkpoint-<step>`, which `load` finds by itself.
            tag: another name for the folder; such a checkpoint is loaded by its name and never deleted.
            state: the caller's own values, as JSON.
            keep_last: delete all but so many of the newest; None keeps all.
            keep_every: never delete steps that are a multiple of this.
            keep: nor delete these steps, such as the best so far.
            wait: return when the checkpoint is on disk on every rank. Else it is written beside training, and an error is
                raised by the next save or `wait`.

        Returns:
            The checkpoint's folder.

        Raises:
            RanksDisagreeError: if not all ranks come, or they differ, in `state` or the engine's `data_position` too.
            UsageError: JSON cannot say something in `state` or `data_position`.
            CheckpointError: in the middle of an accumulation, it cannot be written, or it would replace another engine's.
        """
        engine = self._engine
        HERE.folder = HERE.folder or str(directory)
        meet(Point.SAVE, engine.global_step, 0, limit_s=meeting.MEET_S)
        self.refuse_torn()
        if not engine.between_steps:
            raise CheckpointError(
                "a checkpoint in the middle of an accumulation would lose its gradients: save after engine.step()"
            )
        with ranks.together(f"looking at {directory}"):
            self._take_name(store.folder_for(directory, engine.global_step) if tag is None else directory / tag)
        self._tell_what_is_left_out()
        user = agreed(state, engine.data_position)
        run = {**live.run_state(engine), "user": user, "scalars": live.scalars_of(engine)}
        saver = self._saver_for(directory)
        saver.keep_last, saver.keep_every, saver.protect, saver.damaged = keep_last, keep_every, set(keep), self._damaged
        final = saver.start(
            engine.global_step,
            live.slices_of(engine),
            name=tag,
            run=run,
            rank_state={"rng": rng.random_state()},
            layout=self._layout(),
            model_files=self._files_of_model(),
        )
        if wait:  # nothing changes the state meanwhile: nothing to copy
            saver.wait()
        return final

    def _tell_what_is_left_out(self) -> None:
        """Once: modules with a state that is neither parameter nor buffer; it may be any object, and has no place in the format."""
        more = [] if self._left_out_told else modules_with_extra_state(self._engine.module)
        self._left_out_told = True
        if more and ranks.is_main():
            log.warning(
                "checkpoints do not hold the extra state (get_extra_state) of %d modules, %s: after a resume it begins anew. What JSON can "
                "say of it may go into save_checkpoint(state=...)",
                len(more),
                ", ".join(more[:3]),
            )

    def _take_name(self, final: Path) -> None:
        owner = _owners.get(final, self)
        if owner is not self and owner._moved_s > self._made_s:  # else a script gave it up, and made this one in its place
            raise CheckpointError(
                f"{final} was saved by another Engine of this process, and would be replaced: give each engine a folder (or a tag) of its "
                "own, or close() the other one.",
                str(final),
            )
        _owners[final] = self

    def before_update(self) -> None:
        """The optimizer is about to change the state."""
        self._moved_s = time.monotonic()
        if self._saver is not None:
            self._saver.before_update()

    def wait(self) -> None:
        """Wait for a save in flight; raises what it failed with."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """As `wait`; what was saved is no longer this engine's alone."""
        try:
            self.wait()
        finally:
            for final in [final for final, owner in _owners.items() if owner is self]:
                del _owners[final]

    def failure(self) -> CheckpointError | None:
        """Wait for a save in flight; what it failed with, on all ranks alike. The next save may be made all the same."""
        try:
            self.wait()
        except CheckpointError as error:
            return error
        return None

    @naming_the_lost()
    def load(self, directory: Path, tag: str | int | None, trust: bool = False) -> dict[str, Any]:
        """Go on from a checkpoint of any number of ranks, ZeRO stage and offload setting.

        Args:
            directory: the folder that holds checkpoints, or one checkpoint.
            tag: which one: a step or a folder name; None for the newest whole one. Where that turns out to be damaged only when its
                data is read, its copy (`copy_to`) or the one before it is taken, with a warning that names the damage. Where
                it cannot be read, which says nothing of its content, its copy is taken, and none before it.
            trust: for a folder in DeepSpeed's own format, see `deepspeed_format.load`.

        Returns:
            The `state` given to `save`.

        Raises:
            CheckpointError: in the middle of an accumulation; not there, damaged, or of another model or optimizer; nothing
                has been changed then, unless the damage is inside a data file: from there on the engine refuses everything but
                the load of a whole checkpoint.
        """
        state = self._load(directory, tag, trust)
        self.torn = ""
        self._engine._parts.writes.settled()
        return state

    def change_to(self, folder: str | Path) -> None:
        """From now on until the load has succeeded, the engine holds a part of this checkpoint beside what it held before."""
        self.torn = str(folder)

    def refuse_torn(self) -> None:
        """Refuse to train, save or export weights of which some are a checkpoint's and some are not.

        Raises:
            CheckpointError: a load failed on the way, and none has succeeded since.
        """
        if self.torn:
            raise CheckpointError(
                f"the load of {self.torn} failed on the way, so that this engine holds a part of that checkpoint beside what it held before: "
                "load another checkpoint, or start over with a new model and Engine.",
                self.torn,
            )

    def _load(self, directory: Path, tag: str | int | None, trust: bool) -> dict[str, Any]:
        engine = self._engine
        meet(Point.LOAD, engine.global_step, 0, limit_s=meeting.MEET_S)
        if not engine.between_steps:
            raise CheckpointError(
                "a checkpoint loaded in the middle of an accumulation would be updated with gradients of the weights before it: "
                "load after engine.step(), or into a new Engine"
            )
        self.wait()
        ranks.agree((str(directory), str(tag)), "the checkpoint to load")
        ranks.main_decides(lambda: store.recover(directory), f"looking into {directory}")
        if not ranks.main_decides(lambda: is_native(directory, tag), f"looking into {directory}"):
            return deepspeed_format.load(engine, directory, None if tag is None else str(tag), trust)
        folder = ranks.main_decides(lambda: str(choose(directory, tag)), f"looking for a checkpoint in {directory}")
        while True:
            self._failed = None
            try:
                return self._load_native(folder)
            except Exception as problem:
                if tag is not None or self._failed is None:  # refused before anything was read, or of one rank alone
                    raise
                damaged = self._failed[1]
                if damaged:
                    self._damaged.add(Path(folder))
                look = partial(instead_of, Path(folder), directory, self.copy_to, damaged)
                other = ranks.main_decides(look, f"looking beside {folder}")
                if other is None:
                    if not damaged and isinstance(problem, UnreadableError) and not store.is_one(directory):
                        raise UnreadableError(f"{problem}\n{store.not_skipped(Path(folder))}", problem.path) from problem
                    raise
                if ranks.is_main():
                    log.warning("%s is skipped: %s\n%s is loaded in its place", folder, problem, other)
                folder = other

    def _load_native(self, folder: str) -> dict[str, Any]:
        engine = self._engine
        copies = live.copies_weights(engine)
        near = copies and neighbours.reachable()
        with live.state_kept(engine):
            with ranks.together(f"opening {folder}"):
                opened = store.open_checkpoint(Path(folder))
                live.check_layout(opened.run["layout"], self._layout(), opened.index)
                live.check_names(opened.index, engine.module)
                changed = live.changed_settings(opened.run["state"], live.run_state(engine))
                slices, again = live.slices_to_fill(engine, opened.index)
                others = live.weights_of_others(engine) if copies and not near else None
            self._read(opened, slices + (others or []))
        for moment in again:
            moment.finish()
        if ranks.is_main():
            changed += changed_config(opened, engine.module, engine.dtype)
        if changed and ranks.is_main():
            lines = "".join(f"\n  {line}" for line in changed)
            log.warning("%s was written with other settings; training goes on with this run's:%s", folder, lines)
        live.set_scalars(engine, opened.run["state"]["scalars"])
        optimizer = engine.deepspeed.optimizer
        refresh_weights(optimizer, own_only=near or others is not None)
        if near and not neighbours.gather(weight_partitions(optimizer)):
            refresh_weights(optimizer)
        self._restore(opened)
        self.loaded = opened.folder
        return opened.run["state"]["user"]

    def _read(self, opened: store.Opened, slices: list[LocalSlice]) -> None:
        """Fill `slices`; if that fails for the data and not for want of memory, `_failed` is (folder, it is damaged) on all ranks."""
        begun = False

        def begin() -> None:
            nonlocal begun
            begun = True
            self.change_to(opened.folder)

        try:
            load_slices(opened, slices, begin=begin)
        except Exception as error:  # on all ranks, or on none
            if begun:
                told = ranks.all_gather_object(
                    (isinstance(error, CheckpointError), isinstance(error, UnreadableError)), "telling damage"
                )
                if any(of_data for of_data, _ in told):
                    self._failed = str(opened.folder), any(of_data and not unread for of_data, unread in told)
            raise

    def _restore(self, opened: store.Opened) -> None:
        """Counters and random generators."""
        engine, run = self._engine, opened.run["state"]
        live.set_run_state(engine, run)
        engine.deepspeed.global_steps = run["deepspeed_steps"]
        if opened.commit.world_size == engine.world_size:
            rng.set_random_state(opened.ranks[engine.rank].state["rng"])
        else:
            rng.reseed(engine.seed, engine.global_step, engine.rank)
            log.warning(
                "%s was written by %d ranks and this run has %d: random number generators (dropout) start anew from (seed, "
                "step, rank); weights, optimizer state and data order go on exactly.",
                opened.folder,
                opened.commit.world_size,
                engine.world_size,
            )

    def _saver_for(self, directory: Path) -> Saver:
        if self._saver is None or self._saver.root != directory:
            self.wait()
            self._saver = Saver(directory, disk=self.disk, after=self._saver)
        place = self.copy_to
        if self._saver.copy_to is None and place is not None:  # which may be said after `prepare`
            ranks.main_decides(lambda: second.prepare(self.disk, place), f"preparing {place}")
            self._saver.copy_to = place
        return self._saver

    def _files_of_model(self) -> dict[str, bytes]:
        """Config, generation config and tokenizer; rank 0 writes them. Made once: they do not change in a run."""
        if self._model_files is None:
            with ranks.together("reading the model's config and tokenizer"):
                module, dtype = self._engine.module, self._engine.dtype
                self._model_files = companion_files(module, dtype, self.tokenizer) if ranks.is_main() else {}
        return self._model_files

    def _layout(self) -> dict[str, Any]:
        s = self._engine.settings
        told = live.layout_of(optimizer=s.optimizer, bf16=s.bf16, stage=s.stage, world_size=self._engine.world_size)
        return {**told, "bigtrain": __version__}


def changed_config(opened: store.Opened, module: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """One line for each value of the model's config that differs from the checkpoint's: no shape shows a rope_theta."""
    config, written = exported_config(module, dtype), opened.run.get("model_files", {}).get("config.json")
    if written is None or not hasattr(config, "to_json_string"):
        return []
    try:
        raw = files.read_checked(opened.folder / store.MODEL / "config.json", written["bytes"], written["xxh3"])
    except CheckpointError as damage:
        return [str(damage)]  # training needs it not
    told, mine = json.loads(raw), json.loads(config.to_json_string())
    names = sorted((told.keys() | mine.keys()) - {"transformers_version"})
    return [
        f"config.{n}: {told.get(n)!r} in the checkpoint, {mine.get(n)!r} in this run"
        for n in names
        if told.get(n) != mine.get(n)
    ]


def choose(directory: Path, tag: str | int | None) -> Path:
    """The folder that is meant; see `Checkpoints.load`."""
    return store.find(directory if tag is None else store.named(directory, tag)).folder


def instead_of(folder: Path, directory: Path, second: Path | None, damaged: bool) -> str | None:
    """What to load in the place of the checkpoint in `folder`, whose data is damaged or cannot be read; None: nothing, or `directory` is one itself.

    That is its own copy in the `second` place, which loses no step; else, of a damaged one, the newest whole checkpoint under
    `directory` before it.

    Raises:
        UnreadableError: what would be taken cannot be read either.
    """
    if store.is_one(directory):
        return None
    opened = store.open_checkpoint(folder)
    if second is not None and second != folder.parent:
        try:
            copy = store.open_checkpoint(second / folder.name)
            if copy.commit == opened.commit:
                return str(copy.folder)
        except UnreadableError:
            raise
        except CheckpointError:  # there is none, or it is damaged too
            pass
    if not damaged:
        return None
    before, skipped = store.newest(directory, before=opened.step)
    for line in skipped:
        log.warning("%s", line)
    return None if before is None else str(before.folder)


def is_native(directory: Path, tag: str | int | None) -> bool:
    """True if the checkpoint meant is in this format; False for DeepSpeed's. Where there is neither, True: its errors are shown."""
    pointers = (directory / "latest", directory / "latest_universal")
    deepspeeds = any(p.is_file() for p in pointers) or any(directory.glob("*/COMPLETE"))
    if tag is None:
        own = (directory / "COMMIT").is_file() or bool(store.steps(directory))
        return own or not (deepspeeds or deepspeed_import.is_foreign(directory))
    folder = store.named(directory, tag)
    return (folder / "COMMIT").is_file() or not (deepspeeds or deepspeed_import.is_foreign(folder))


def modules_with_extra_state(model: torch.nn.Module) -> list[str]:
    """Names of the modules that put more into a state_dict than parameters and buffers."""
    plain = torch.nn.Module.get_extra_state
    return [name or type(m).__name__ for name, m in model.named_modules() if type(m).get_extra_state is not plain]
