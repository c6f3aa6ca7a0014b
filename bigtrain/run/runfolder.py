"""The output folder of a run: what may be written over, which checkpoints there are, what run.json says.

OUT/run.json  metrics.jsonl  eval.jsonl  ds_config.resolved.json  checkpoint-<step>/  model/  model-<step>/  runs/  report.html  report.png
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigtrain.checkpoint import store
from bigtrain.errors import BigtrainError, UnreadableError, UsageError, WeightsError
from bigtrain.weights.folder import open_folder

OWN_FILES = ("run.json", "metrics.jsonl", "eval.jsonl", "ds_config.resolved.json", "report.html", "report.png")
OWN_FOLDERS = ("hang", "model", "runs")
ASIDE = ".overwritten"  # where the run before waits until the one that replaces it has made a step
logger = logging.getLogger(__name__)


class RunFolder:
    """One output folder. Reading is safe on every rank, writing is rank 0's.

    Args:
        root: the folder.
        second: where copies of its checkpoints go; `auto` looks there if the folder has none.
    """

    def __init__(self, root: str | Path, second: str | None = None):
        self.root, self.second = Path(root).expanduser().resolve(), Path(second).resolve() if second else None
        self._aside, self._replaces = self.root / ASIDE, False
        self._checked: dict[str, Any] | None = None

    def check(self, *, resume: str | None, overwrite: bool, reads: Sequence[str | None] = ()) -> None:
        """Look whether a run may write here; changes nothing, but brings back what a run that never made a step was to replace.

        Args:
            resume, overwrite: what the user said. reads: paths that the run reads, which starting over must not remove.

        Raises:
            UsageError: it holds a run and the user said neither to resume nor to overwrite it, or one that goes on right now, it
                cannot be written to, or what would be removed is read.
        """
        self._checked = {"resume": resume, "overwrite": overwrite, "reads": reads}
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"--output_dir {self.root} is a file")
        self._refuse_living()
        self._bring_back()
        there = self._own()
        if there and resume is None and not overwrite:
            names = ", ".join(sorted(p.name for p in there)[:6])
            raise UsageError(
                f"--output_dir {self.root} already holds a run ({names}). Continue it with --resume_from_checkpoint auto, "
                "start over with --overwrite_output_dir, or name another folder."
            )
        for path in filter(None, reads if resume is None else ()):
            if any(Path(path).expanduser().resolve().is_relative_to(own) for own in there):
                raise UsageError(
                    f"{path} is read by this run, and starting over in --output_dir {self.root} would remove it first: name "
                    "another --output_dir"
                )
        if resume is not None and (others := store.in_the_way(self.root)):
            raise UsageError(
                f"--output_dir {self.root} holds {', '.join(others[:6])}, not bigtrain's: this run could not save those steps. Move "
                "them away, or name another folder."
            )
        above = next(p for p in (self.root, *self.root.parents) if p.exists())
        if not above.is_dir():
            raise UsageError(f"--output_dir {self.root} cannot be made: {above} is a file")
        if not os.access(above, os.W_OK):
            read_only = os.statvfs(above).f_flag & os.ST_RDONLY
            why = "the file system of {} is mounted read-only" if read_only else "no permission in {}"
            raise UsageError(f"--output_dir {self.root} cannot be written to: {why.format(above)}")

    def _refuse_living(self) -> None:
        """Two runs in one folder would replace each other's steps and rows. Known of this host's processes alone."""
        run = self.read_run()
        process = run.get("process") or {}
        here = run.get("outcome") == "running" and process.get("pid") != os.getpid() and not self._is_copy(process)
        if here and is_living(process):
            raise UsageError(
                f"--output_dir {self.root} is in use: process {process['pid']} trains into it since {run.get('started')}. Stop it, or "
                "name another --output_dir."
            )

    def process(self) -> dict[str, Any]:
        """What run.json tells of the process that trains into this folder, which exists."""
        return {**this_process(), "folder": self._identity()}

    def _is_copy(self, process: Mapping[str, Any]) -> bool:
        """Copied with its run.json while the run goes on. By both: a moved folder has another path, and some disks change inodes."""
        told = process.get("folder", self._identity())
        return all(now != then for now, then in zip(self._identity(), told))

    def _identity(self) -> list[str | int]:
        return [str(self.root.resolve()), self.root.stat().st_ino]

    def open(self, *, resume: str | None) -> None:
        """Make the folder this run's; without `resume`, what an earlier run left there is put aside until this one has made a step.

        Raises:
            UsageError: the system refuses it, or another run has begun there since `check`: tokenising may have taken hours.
        """
        if self.second is not None:
            try:
                self.second.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--copy_checkpoints_to {self.second} cannot be made: {error.strerror}. Name another folder."
                ) from error
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _held(self.root):
                if self._checked is not None:
                    self.check(**self._checked)
                for path in self._own() if resume is None else ():
                    self._aside.mkdir(exist_ok=True)
                    os.replace(path, self._aside / path.name)
                    self._replaces = True
                self.update_run(process=self.process(), outcome="running", started=now())
        except OSError as error:
            raise UsageError(f"--output_dir {self.root} cannot be made: {error.strerror}") from error

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """A run in this folder: if it fails before its first step, the one that it was to replace is there again.

        Not where the launcher will start it again: that start would take the old run's checkpoints for its own.
        """
        try:
            yield
        except BaseException:
            if self._replaces and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) == 0:
                self._bring_back()
            raise

    def forget_the_one_before(self, always: bool = False) -> None:
        """This run has made a step: what it replaces may go. `always`: also what an earlier process of this job was to replace."""
        if self._replaces or always:
            self._replaces = False
            shutil.rmtree(self._aside, ignore_errors=True)

    def _bring_back(self) -> None:
        if not self._aside.is_dir():
            return
        for old in sorted(self._aside.iterdir()):
            new = self.root / old.name
            if old.name == "hang" and new.exists():  # why the new one never made a step
                _remove(old)
                continue
            _remove(new)
            os.replace(old, new)
        self._aside.rmdir()
        self._replaces = False
        logger.warning("%s: the run that was to be overwritten is there again; the one after it never made a step", self.root)

    def _own(self) -> list[Path]:
        names = [self.root / n for n in (*OWN_FILES, *OWN_FOLDERS)]
        return [p for p in names if p.exists()] + sorted(
            [*self.root.glob("checkpoint-[0-9]*"), *self.root.glob("model-[0-9]*")]
        )

    def own_bytes(self) -> int:
        """Space that starting over would free."""
        files = (f for own in self._own() for f in (own.rglob("*") if own.is_dir() else [own]))
        return sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of every committed checkpoint, oldest first."""
        return [(step, store.folder_for(self.root, step)) for step in store.steps(self.root)]

    def start_point(self, asked: str | None) -> tuple[Path | None, tuple[int, int]]:
        """(`resume_point`, where it stands: `reached`)."""
        resume = self.resume_point(asked)
        return resume, self.reached(resume)

    def resume_point(self, asked: str | None) -> Path | None:
        """The checkpoint folder to start from; None to start at step 0.

        Raises:
            CheckpointError: the one that was named is no complete checkpoint; lists those that are. None of this folder's is whole.
            UsageError: this folder holds newer ones than the one that was named; the second place those of another run.
        """
        if asked is None:
            if self.second is not None and (steps := store.steps(self.second)):
                raise UsageError(
                    f"--copy_checkpoints_to {self.second} holds checkpoints of another run (step {steps[-1]}): name another folder, or go on "
                    "with --resume_from_checkpoint auto"
                )
            return None
        path = self.root if asked == "auto" else Path(asked).expanduser().resolve()
        if asked == "auto" and self.second is not None and not store.steps(self.root):
            path = self.second
        store.recover(path if path.is_dir() else path.parent)
        if asked == "auto" and not store.steps(path):
            return None
        if (path / "COMMIT").is_file() or store.steps(path):
            found = (self._newer_copy() if path == self.root else None) or store.find(path)
            self._refuse_newer(found.step if path != self.root else None)
            return found.folder
        from bigtrain.checkpoint.deepspeed_import import foreign_in

        if (foreign := foreign_in(path, None)) is None and _is_model(path):
            raise UsageError(
                f"--resume_from_checkpoint {asked} is a model folder, without the optimizer state that a run goes on from: to train on from its "
                f"weights write --model_name_or_path {asked} and leave --resume_from_checkpoint out"
            )
        return foreign or store.find(path).folder

    def _newer_copy(self) -> store.Opened | None:
        """The newest whole checkpoint in the second place, if the one of this folder that it is a copy of is damaged or unreadable.

        It loses no step.

        Raises:
            UnreadableError: the only one that would lose no step cannot be read.
        """
        if self.second is None:
            return None
        store.recover(self.second)
        own: store.Opened | None = None
        unread: UnreadableError | None = None
        try:
            own, skipped = store.newest(self.root)
        except UnreadableError as problem:
            unread, skipped = problem, [str(problem)]
        try:
            copy, _ = store.newest(self.second)
        except UnreadableError:
            if skipped:
                raise
            return None
        if unread is not None and (copy is None or copy.step < store.steps(self.root)[-1]):
            raise unread
        if copy is None or (own is not None and own.step >= copy.step):
            return None
        if not skipped and not store.folder_for(self.root, copy.step).exists():
            return None  # somebody has removed it here, to go back
        for line in skipped:
            logger.warning("%s", line)
        logger.warning("the copy %s is whole: the run goes on from there", copy.folder)
        return copy

    @staticmethod
    def load_from(resume: Path, asked: str | None) -> Path:
        """What the engine is to load: the folder around `resume` where the user named none, and one whose data is damaged may be skipped."""
        named = asked is not None and asked != "auto" and Path(asked).expanduser().resolve() == resume
        return resume if named or not (resume / "COMMIT").is_file() else resume.parent

    def _refuse_newer(self, step: int | None) -> None:
        """Going back in a folder: what comes after `step` there would be taken for this run's by the next `auto`, or by a restart."""
        newer = [] if step is None else [f"checkpoint-{s}" for s in store.steps(self.root) if s > step]
        if newer:
            raise UsageError(
                f"--output_dir {self.root} holds {', '.join(newer[:6])}, newer than step {step} that this run is to start from: the "
                "next --resume_from_checkpoint auto would go on from there, and lose what this run does. Move them away, or name "
                "another folder."
            )

    @staticmethod
    def reached(checkpoint: Path | None) -> tuple[int, int]:
        """(step, rows of training data used before it) of a checkpoint to start from; zeros where it does not tell."""
        if checkpoint is None or not (checkpoint / "COMMIT").is_file():
            return 0, 0
        state = store.open_checkpoint(checkpoint).run["state"]
        return state["global_step"], state["data_position"]

    @staticmethod
    def kept(checkpoint: Path | None) -> dict[str, Any]:
        """What the run that wrote this checkpoint kept there (`saving.Saving.state`); empty where it does not tell."""
        if checkpoint is None or not (checkpoint / "COMMIT").is_file():
            return {}
        found = store.open_checkpoint(checkpoint).run["state"]["user"]
        return found if isinstance(found, dict) else {}

    def has_model(self, step: int, resumed: str | None = "auto") -> bool:
        """Whether `model` has the weights of this step, as run.json says, and all its files are there and whole.

        Args:
            resumed: what the run goes on from, "auto" or a path; of another run's checkpoint the model here is not.
        """
        if resumed not in (None, "auto") and not Path(resumed).expanduser().resolve().is_relative_to(self.root.resolve()):
            return False
        folder = self.root / "model"
        if self.read_run().get("model_step") != step or not (folder / "config.json").is_file():
            return False
        try:
            return not open_folder(folder).pickled
        except WeightsError as error:
            logger.warning("the model is exported again: %s", error)
            return False

    def read_run(self) -> dict[str, Any]:
        """run.json as it is, empty if there is none, or one that a crash of the machine has emptied."""
        path = self.root / "run.json"
        try:
            run = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ValueError:
            run = None
        if not isinstance(run, dict):
            logger.warning("%s is damaged: it is written anew", path)
            return {}
        return run

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file in one piece: readers see the old one or the new one.

        Raises:
            BigtrainError: the system does not take it, with a full disk for instance.
        """
        draft = self.root / f".{name}.new"
        try:
            self.root.mkdir(parents=True, exist_ok=True)  # somebody may have removed it meanwhile, with what was in it
            draft.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
            os.replace(draft, self.root / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise BigtrainError.not_writable(self.root / name, error) from error

    def update_run(self, **values: Any) -> None:
        """Set keys of run.json."""
        self.write_json("run.json", {**self.read_run(), **values})


@contextlib.contextmanager
def _held(root: Path) -> Iterator[None]:
    """Only one process of this host is in here for `root`, which exists."""
    handle = os.open(root, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def this_process() -> dict[str, Any]:
    """What tells this process from every other that this host, or a container of its name, has had or will have."""
    from bigtrain.watch.mesh import start_tick

    return {"host": socket.gethostname(), "pid": os.getpid(), "tick": start_tick(os.getpid())}


def is_living(process: Mapping[str, Any]) -> bool:
    """Whether a process as `this_process` described it runs on this host; False for another host's."""
    from bigtrain.watch.mesh import process_status

    if not process or process.get("host") != socket.gethostname():
        return False
    state, tick = process_status(int(process["pid"])) or ("", "")
    return state not in ("", "Z", "X") and tick == process["tick"]


def now() -> str:
    """Local time with zone, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _is_model(folder: Path) -> bool:
    """A Hugging Face model, or what its Trainer saved without DeepSpeed; no checkpoint of ours, whole or not."""
    there = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return there and not any(folder.glob("rank-*")) and not (folder / "run.json").is_file()
