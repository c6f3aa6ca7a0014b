"""Checkpoint folders under one root: which exist, which are whole, how one comes to be and is retired. Torch-free."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from bigtrain import standins
from bigtrain.checkpoint import files, manifest, reshard
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.manifest import Commit, RankManifest
from bigtrain.checkpoint.reshard import Index
from bigtrain.errors import CheckpointError, UnreadableError
from bigtrain.weights import lock

log = logging.getLogger(__name__)
MODEL = "model"  # subfolder for config and tokenizer
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
Stamp: TypeAlias = tuple[tuple[str, int, int], ...]
_RANK_FILE = re.compile(r"rank-\d{5,}-of-\d{5,}\.(json|safetensors)")


@dataclass(frozen=True)
class Opened:
    """A committed checkpoint whose manifests have been read and whose hashes of small files match."""

    folder: Path
    commit: Commit
    run: dict[str, Any]
    ranks: tuple[RankManifest, ...]

    @cached_property
    def index(self) -> Index:
        """All slices by logical tensor; see `reshard.index_slices`, also for errors."""
        return reshard.index_slices((m.rank, s) for m in self.ranks for s in m.slices)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.commit.step

    def data_path(self, rank: int) -> Path:
        """Data file that `rank` wrote."""
        return self.folder / self.ranks[rank].data_name


def folder_for(root: Path, step: int) -> Path:
    """Where step `step` lives under `root`."""
    return root / f"checkpoint-{step}"


def named(root: Path, tag: str | int) -> Path:
    """What `tag` means under `root`: a step, or a folder's name."""
    return root / (f"checkpoint-{tag}" if str(tag).isdecimal() else str(tag))


def steps(root: Path) -> list[int]:
    """Steps that have a COMMIT under `root`, ascending; says nothing about their content."""
    return files.persistently(lambda: _steps(root), f"look into {root}", root)


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    found = [m for entry in root.iterdir() if (m := _NAME.fullmatch(entry.name)) and (entry / "COMMIT").is_file()]
    return sorted(int(m.group(1)) for m in found)


def open_checkpoint(folder: Path) -> Opened:
    """Read COMMIT, run.json and all manifests, and check that every data file has its length.

    Raises:
        CheckpointError: names the file and what is wrong with it.
    """
    if not files.persistently((folder / "COMMIT").is_file, f"look into {folder}", folder):
        known = ", ".join(map(str, steps(folder.parent))) or "none"
        raise CheckpointError(
            f"{folder} is not a complete checkpoint (it has no COMMIT). Complete steps beside it: {known}.", str(folder)
        )
    commit = manifest.parse_commit(files.read_small(folder / "COMMIT"), str(folder / "COMMIT"))
    raw = {name: files.read_checked(folder / name, size, digest) for name, (size, digest) in commit.files.items()}
    run = manifest.parse_run(raw["run.json"], str(folder / "run.json"))
    _check_step(folder, commit.step, run.get("step"))
    ranks = []
    for r in range(commit.world_size):
        name = manifest.stem(r, commit.world_size) + ".json"
        ranks.append(manifest.parse_manifest(raw[name], str(folder / name)))
        _check_rank(folder / name, ranks[-1], r, commit.world_size)
        _check_data_file(folder, ranks[-1])
    return Opened(folder, commit, run, tuple(ranks))


def _check_step(folder: Path, step: int, run_step: Any) -> None:
    name = _NAME.fullmatch(folder.name)
    if run_step != step or (name and int(name.group(1)) != step):
        raise CheckpointError(
            f"{folder} is damaged: COMMIT says step {step}, run.json {run_step}, the folder's name {folder.name}.", str(folder)
        )


def _check_rank(path: Path, rank: RankManifest, number: int, world_size: int) -> None:
    if (rank.rank, rank.world_size) != (number, world_size):
        raise CheckpointError(
            f"{path} is damaged: it says rank {rank.rank} of {rank.world_size} where {number} of {world_size} belongs.",
            str(path),
        )


def _check_data_file(folder: Path, rank: RankManifest) -> None:
    path, expected = folder / rank.data_name, rank.data_bytes
    if not files.persistently(path.is_file, f"look at {path}", path):
        raise CheckpointError(f"{path} is missing. The checkpoint is damaged.", str(path))
    size = files.persistently(path.stat, f"look at {path}", path).st_size
    if size != expected:
        why = standins.instead(path) or f"damaged: it has {size} bytes, {expected} were written"
        raise CheckpointError(f"{path} is {why}.", str(path))
    header = memoryview(bytearray(rank.header_bytes))
    with files.reading(path) as handle:
        files.read_exactly(handle, header, 0, path)
    if rank.header_bytes and files.digest(header) != rank.header_xxh3:
        raise CheckpointError(f"{path} is damaged: its header does not have the hash it was written with.", str(path))


def newest(root: Path, before: float = math.inf) -> tuple[Opened | None, list[str]]:
    """The newest whole checkpoint under `root`, and a line for each newer one that had to be skipped; of those before step `before`.

    Raises:
        UnreadableError: the newest that may be whole cannot be read; an older one would lose steps for what may pass.
    """
    skipped: list[str] = []
    for step in (s for s in reversed(steps(root)) if s < before):
        try:
            return open_checkpoint(folder_for(root, step)), skipped
        except UnreadableError as problem:
            raise UnreadableError(f"{problem}\n{not_skipped(folder_for(root, step))}", problem.path) from problem.__cause__
        except CheckpointError as problem:
            skipped.append(f"checkpoint-{step} is skipped: {problem}")
    return None, skipped


def not_skipped(folder: Path) -> str:
    """What to do about a checkpoint that cannot be read, where it was not named."""
    return (
        f"{folder.name} is not known to be damaged, so no older one is taken in its place: that would lose steps. Start again once it can be "
        f"read, or move {folder.name} away to go on from the one before all the same."
    )


def is_one(path: Path) -> bool:
    """Whether the folder itself is a checkpoint in bigtrain's own format, whole or not."""
    return path.is_dir() and any(entry.name == "COMMIT" or _RANK_FILE.fullmatch(entry.name) for entry in path.iterdir())


def unfinished(root: Path) -> list[str]:
    """Names of checkpoints under `root` that have no COMMIT: their writing, or copying, did not end."""
    found = sorted(entry.name for entry in root.iterdir() if _NAME.fullmatch(entry.name) and is_one(entry))
    return [name for name in found if not (root / name / "COMMIT").is_file()]


def holds_any(path: Path) -> bool:
    """Whether `path` is, or holds, anything that is or was a checkpoint in bigtrain's own format, whole or not."""
    if not path.is_dir() or _NAME.fullmatch(path.resolve().name):
        return path.is_dir()
    names = [entry.name for entry in path.iterdir()]
    own = any(name == "COMMIT" or _RANK_FILE.fullmatch(name) or _NAME.fullmatch(name) for name in names)
    return own or any(path.glob("[!.]*/COMMIT"))


def find(path: Path) -> Opened:
    """The checkpoint at `path`: a checkpoint folder, or a root whose newest whole one is meant; newer ones are warned of.

    Raises:
        CheckpointError: nothing there; the text lists the steps that are.
    """
    if is_one(path) or _NAME.fullmatch(path.name):
        return open_checkpoint(path)
    if not path.is_dir():
        known = ", ".join(map(str, steps(path.parent))) or "none"
        raise CheckpointError(f"{path} does not exist. Complete steps beside it: {known}.", str(path))
    opened, skipped = newest(path)
    for line in skipped if opened is not None else ():
        log.warning("%s", line)
    if opened is None:
        names = sorted(commit.parent.name for commit in path.glob("[!.]*/COMMIT"))
        if named := [name for name in names if not _NAME.fullmatch(name)]:
            skipped.append(f"a checkpoint with a name of its own is loaded by that only (tag, or path): {', '.join(named)}")
        skipped += [f"{name} has no COMMIT: its writing, or copying, did not end" for name in unfinished(path)]
        story = "".join(f"\n  {line}" for line in skipped)
        raise CheckpointError(f"there is no complete checkpoint in {path}.{story}", str(path))
    return opened


def check_name(root: Path, final: Path, step: int) -> None:
    """Refuse names that a reader would not look at, that would leave the root, or that speak of another step."""
    numbered = _NAME.fullmatch(final.name)
    if numbered and int(numbered.group(1)) != step:
        raise CheckpointError(
            f"{final.name!r} cannot name a checkpoint of step {step}: leave the tag out (then it is checkpoint-{step}), or choose "
            "a name without a number",
            str(final),
        )
    if final.parent != root or final.name.startswith(".") or final.name == "latest":
        raise CheckpointError(f"{final} cannot be a checkpoint in {root}: use letters, digits, '-' and '_'", str(final))
    if final.name.isdecimal():
        raise CheckpointError(f"tag {final.name!r} would be taken for a step when it is loaded: add a letter", str(final))


def refuse_foreign(final: Path) -> None:
    """A save replaces an earlier checkpoint of its name, and nothing else.

    Raises:
        CheckpointError: something else has that name.
    """
    if os.path.lexists(final) and not _is_own(final):
        held = ", ".join(sorted(p.name for p in final.iterdir())[:5]) if final.is_dir() else "no folder"
        raise CheckpointError(
            f"{final} exists and is no checkpoint of bigtrain's ({held}): saving would replace it. Move it away, or choose "
            "another tag or folder.",
            str(final),
        )


def in_the_way(root: Path) -> list[str]:
    """Names of folders under `root` that look like a step and that no save will replace, such as another trainer's."""
    names = sorted(p.name for p in root.iterdir() if _NAME.fullmatch(p.name)) if root.is_dir() else []
    return [name for name in names if not _is_own(root / name) and not (root / name / "COMPLETE").is_file()]


def _is_own(folder: Path) -> bool:
    """True for a checkpoint, whole or not, and for an empty folder."""
    if not folder.is_dir():
        return False
    names = [entry.name for entry in folder.iterdir()]
    return not names or "COMMIT" in names or any(_RANK_FILE.fullmatch(name) for name in names)


def scratch_folder(final: Path, token: str) -> Path:
    """Where a checkpoint is written before it exists."""
    return final.with_name(f".{final.name}.{token}.writing")


def write_model_files(disk: Disk, scratch: Path, model_files: Mapping[str, bytes]) -> None:
    """Config and tokenizer, in a folder of their own, as Hugging Face has them."""
    if not model_files:
        return
    for folder in sorted({(scratch / MODEL / name).parent for name in model_files} | {scratch / MODEL}):
        disk.make_folder(folder)
    for name, content in model_files.items():
        disk.write_file(scratch / MODEL / name, content)
    for folder in {(scratch / MODEL / name).parent for name in model_files} | {scratch / MODEL}:
        disk.sync_folder(folder)


def check_model_files(opened: Opened) -> None:
    """Compare config and tokenizer with their hashes.

    Raises:
        CheckpointError: names the file that is missing or damaged.
    """
    for name, file in opened.run.get("model_files", {}).items():
        files.read_checked(opened.folder / MODEL / name, file["bytes"], file["xxh3"])


def commit(
    disk: Disk, scratch: Path, final: Path, step: int, run: bytes, manifests: dict[str, tuple[int, str]], world_size: int
) -> None:
    """Make a written scratch folder a checkpoint: run.json, COMMIT, fsync, rename. One rank calls it, after all wrote."""
    listed = {**manifests, "run.json": disk.write_file(scratch / "run.json", run)}
    disk.sync_folder(scratch)
    disk.write_file(scratch / "COMMIT", Commit(step=step, world_size=world_size, files=listed).to_json())
    disk.sync_folder(scratch)
    publish(disk, scratch, final)


def publish(disk: Disk, scratch: Path, final: Path) -> None:
    """Give a whole checkpoint its name, in the place of an earlier one."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        disk.remove_tree(old)
        disk.rename(final, old)
    disk.rename(scratch, final)
    if old.exists():
        disk.remove_tree(old)


def recover(root: Path) -> None:
    """Before a load: undo an interrupted replacement, so that the step it was to replace is not lost. What cannot be, is left."""
    with contextlib.suppress(CheckpointError, OSError):  # another run is writing; or the disk is read-only
        claim = files.claim(root)
        try:
            if claim >= 0:  # else a writer may be between the two renames right now
                restore_moved_aside(Disk(), root, delete=False)
        finally:
            lock.release(claim)


def restore_moved_aside(disk: Disk, root: Path, delete: bool = True) -> None:
    """Undo a replacement that was interrupted between its two renames, and delete scratch folders of dead writers."""
    if not root.is_dir():
        return
    for entry in sorted(root.iterdir()):
        match = re.fullmatch(r"\.(.+?)\.(old|retired|[0-9a-f]{8}\.writing)", entry.name)
        if not match or not (_NAME.fullmatch(match.group(1)) or _is_own(entry)):
            continue  # somebody else's, such as .config.old
        final = root / match.group(1)
        if match.group(2) == "old" and not final.exists() and (entry / "COMMIT").is_file():
            disk.rename(entry, final)
        elif delete:
            disk.remove_tree(entry)


def retire(
    disk: Disk,
    root: Path,
    *,
    keep_last: int | None,
    keep_every: int | None,
    protect: frozenset[int],
    damaged: Collection[Path] = (),
    whole: dict[Path, Stamp] | None = None,
) -> list[int]:
    """Delete old checkpoints: all before the newest `keep_last` whole ones but multiples of `keep_every` and the protected steps.

    A damaged one is none of those to keep, or it would push out the one that a run could go on from; it goes when it is older than they are.
    A folder gets a dot name first, so that a half-deleted one is never seen.

    Args:
        damaged: folders whose data turned out to be so.
        whole: what `stamp` said of those that were whole, which need not be opened again; what is found here is added.
    """
    if keep_last is None:
        return []
    known, found = steps(root), 0
    while known and found < max(1, keep_last):
        folder = folder_for(root, known.pop())
        why = "its data is damaged" if folder in damaged else _why_not_whole(folder, {} if whole is None else whole)
        if why:
            log.warning("%s is none of the %d to keep: %s", folder.name, keep_last, why)
        found += not why
    gone = [s for s in known if s not in protect and not (keep_every and s % keep_every == 0)]
    for step in gone:
        if whole is not None:
            whole.pop(folder_for(root, step), None)
        aside = root / f".checkpoint-{step}.retired"
        disk.remove_tree(aside)
        disk.rename(folder_for(root, step), aside)
        disk.remove_tree(aside)
    return gone


def _why_not_whole(folder: Path, whole: dict[Path, Stamp]) -> str:
    try:
        now = stamp(folder)
        if whole.get(folder) != now:  # manifests of many ranks take a second of the interpreter, beside training
            open_checkpoint(folder)
            whole[folder] = now
    except CheckpointError as problem:
        return str(problem)
    return ""


def stamp(folder: Path) -> Stamp:
    """What tells that a file in a checkpoint has changed since: (name, bytes, time of its last change)."""
    return files.persistently(lambda: _stamp(folder), f"look into {folder}", folder)


def _stamp(folder: Path) -> Stamp:
    status = {path.name: path.stat() for path in folder.iterdir()}
    return tuple(sorted((name, s.st_size, s.st_mtime_ns) for name, s in status.items()))
