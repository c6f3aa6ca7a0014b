"""Saving beside training: state that does not change before the next optimizer update is written straight from where it lies.

`Saver.start` returns at once. A thread then writes the state in units of at most `UNIT_BYTES`; what it has not reached when the
next update is due is copied to host memory by `before_update`, while the thread goes on writing, so that the update never waits
for the disk and the extra memory is at most one snapshot: none where the disk is done before the update.

Where a GPU computes, all state is copied to host memory at once, beside forward and backward of the next step (copying.py).
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bigtrain import ranks
from bigtrain.checkpoint import files, hashing, manifest, second, store
from bigtrain.checkpoint.confirm import Confirmation, LostRankError
from bigtrain.checkpoint.copying import Copier
from bigtrain.checkpoint.datafile import BLOCK_BYTES, READY_BYTES, DataFile, DiskThread, buffers
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.manifest import CHUNK_BYTES
from bigtrain.checkpoint.pieces import Job, data_bytes, plan
from bigtrain.checkpoint.slices import LocalSlice, raw, share_of
from bigtrain.errors import CheckpointError
from bigtrain.plan.disk import SPARE_BYTES
from bigtrain.weights import lock
from bigtrain.whereabouts import HERE

log = logging.getLogger(__name__)

CONFIRM_TIMEOUT_S = 3600.0  # how long a rank waits for the slowest writer


class Saver:
    """Writes checkpoints under `root` in the background, one at a time. All ranks make one and call it alike.

    Args:
        root: folder that holds the checkpoints; the same for all ranks.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: checkpoints whose step is a multiple of this are never deleted.
        disk: the file layer; tests pass one that fails.
        after: a saver that saves no more. Its process group, which is never given back, and its host memory go on here.

    Attributes:
        always_imaged: also what lies in host memory is copied to an image of the file when a save starts; for tests without a GPU.
        protect: steps that are not deleted.
        damaged: folders of checkpoints whose data turned out to be damaged: none of those to keep.
        copy_to: folder that gets a copy of each checkpoint; None for none.
        blocked_s: seconds that the last save kept training waiting, so far.
        confirmation, copier: what the next saver of the same engine takes over.
    """

    always_imaged = False

    def __init__(
        self, root: Path, *, keep_last: int | None = None, keep_every: int | None = None, disk: Disk | None = None,
        after: Saver | None = None,
    ):  # fmt: skip
        self.root, self.keep_last, self.keep_every = Path(root), keep_last, keep_every
        self.protect: set[int] = set()
        self.damaged: set[Path] = set()
        self._whole: dict[Path, store.Stamp] = {}
        self.copy_to: Path | None = None
        self.blocked_s = 0.0
        self._disk = disk or Disk()
        self.confirmation: Confirmation = Confirmation(CONFIRM_TIMEOUT_S) if after is None else after.confirmation
        self.copier: Copier = Copier() if after is None else after.copier
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        self._error: Exception | None = None
        self._disk_thread = DiskThread()
        self._disk_thread.submit(hashing.native)  # compiled, if it was never here, before an update waits for copies
        with ranks.together(f"preparing {self.root}"):
            if ranks.is_main() and self.root.is_dir():
                claim = files.claim(self.root)
                try:
                    store.restore_moved_aside(self._disk, self.root)
                finally:
                    lock.release(claim)

    # ------------------------------------------------------------ the training thread

    def prepare(self, slices: list[LocalSlice]) -> None:
        """Make the host memory that a save of these slices will copy to, beside training; nothing, where no GPU computes."""
        if self.writing:  # which makes what it needs
            return
        mine = share_of(slices, ranks.rank(), ranks.world_size())
        on_gpu = [s.tensor for s in mine if s.tensor.is_cuda]
        if self._imaged(mine):
            self.copier.prepare(data_bytes(mine), on_gpu[0].device if on_gpu else None)
        elif on_gpu:
            self.copier.prepare(sum(tensor.nbytes for tensor in on_gpu), on_gpu[0].device)

    def _imaged(self, mine: list[LocalSlice]) -> bool:
        return self.always_imaged or (bool(mine) and all(s.tensor.is_cuda for s in mine))

    def start(
        self,
        step: int,
        slices: list[LocalSlice],
        *,
        run: dict[str, Any],
        rank_state: dict[str, Any],
        layout: dict[str, Any],
        name: str | None = None,
        model_files: Mapping[str, bytes] | None = None,
    ) -> Path:
        """Begin to save step `step`; waits for the save before it, and raises what that one failed with.

        Args:
            step: optimizer steps done.
            slices: this rank's state.
            run: state of the run, the same on all ranks, as JSON.
            rank_state: state of this rank alone, as JSON.
            layout: facts about the writer, as JSON.
            name: of the folder; "checkpoint-<step>" by default.
            model_files: config and tokenizer that belong to the model, name -> content; written to `model/` by rank 0.

        Returns:
            The folder that will exist once the save is complete (`wait` returns when it is).

        Raises:
            RanksDisagreeError: ranks ask for different steps or folders.
            CheckpointError: too little disk space, or the previous save failed.
        """
        began = time.perf_counter()
        self.wait()
        final = store.folder_for(self.root, step) if name is None else self.root / name
        ranks.agree((str(final), step), "the checkpoint to save")
        with ranks.together(f"naming {final}"):
            store.check_name(self.root, final, step)
            if ranks.is_main():
                store.refuse_foreign(final)
        mine = share_of(slices, ranks.rank(), ranks.world_size())
        self._check_space(sum(s.tensor.nbytes for s in mine))
        token = ranks.broadcast_object(uuid.uuid4().hex[:8])
        scratch = store.scratch_folder(final, token)
        body = {"format": manifest.RUN_FORMAT, "version": manifest.VERSION, "step": step, "state": run, "layout": layout}
        small = model_files or {}
        body["model_files"] = {n: {"bytes": len(raw), "xxh3": files.digest(raw)} for n, raw in small.items()}
        with ranks.together(f"laying out {final}"):
            text = json.dumps(body, indent=1).encode()
            job = plan(mine, step, scratch, final, rank_state, text, small, self._imaged(mine))
        agreed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        try:
            with ranks.together(f"creating {scratch}"):
                self._disk.make_folder(scratch)
                if ranks.is_main():
                    job.claim = files.claim(self.root)
                for unit in job.units:
                    if mine[unit.slice_index].volatile:
                        self.copier.copy_now(unit)
                thread = self._thread_of(job, agreed)  # here, where a rank that can start none may still tell the others
            self._job, self._thread = job, thread
            agreed.put(True)
        except BaseException:
            agreed.put(False)
            self.copier.release(job)
            lock.release(job.claim)
            if ranks.is_main():
                Disk().remove_tree(scratch)
            raise
        self.blocked_s = time.perf_counter() - began
        return job.final

    def _thread_of(self, job: Job, agreed: queue.SimpleQueue[bool]) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(job, agreed), name=f"save-{job.step}", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            raise CheckpointError(
                f"step {job.step} cannot be saved: {error}. The system starts no more threads for this process: look at `ulimit -u` and the "
                "container's limit (pids.max); fewer workers that read data and a smaller OMP_NUM_THREADS need fewer.",
                str(job.final),
            ) from error
        return thread

    def before_update(self) -> None:
        """Call before the optimizer changes its state: copies what the writer has not reached. Cheap when nothing is saved."""
        job = self._job
        if job is None:
            return
        began = time.perf_counter()
        self.copier.copy_live(job)
        self.copier.wait_for_copies(job)
        self._job = None
        self.blocked_s += time.perf_counter() - began

    @property
    def writing(self) -> bool:
        """True while the save in flight is not on disk yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save in flight is on disk on every rank; raise what it failed with."""
        if self._thread is not None:
            with HERE.together("waiting for the checkpoint to be on disk"):
                self._thread.join()
            self._thread = self._job = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _check_space(self, need: int) -> None:
        total = ranks.sum_across(need) + SPARE_BYTES  # of all hosts: they write into one folder
        with ranks.together("checking the free space"):
            free = files.free_bytes(self.root)
            if total > free:
                raise CheckpointError(
                    f"the checkpoint needs {total / 2**30:.2f} GiB and {self.root} has {free / 2**30:.2f} GiB free. "
                    "Free some space, keep fewer checkpoints (save_total_limit of a run), or save into a folder on another disk.",
                    str(self.root),
                )

    # ------------------------------------------------------------ the writing thread

    def _run(self, job: Job, agreed: queue.SimpleQueue[bool]) -> None:
        """Write, let all ranks confirm, let rank 0 commit. A failure is told to every rank and leaves no checkpoint."""
        if not agreed.get():  # some rank cannot begin
            return
        try:
            self._finish(job)
        finally:
            lock.release(job.claim)

    def _finish(self, job: Job) -> None:
        failure: Exception | None = None
        entry: tuple[str, int, str] | None = None
        try:
            self.copier.fetch(job)
            entry = self._write(job)
        except Exception as error:
            failure = error
        self.copier.release(job)
        try:
            bad, known = self._conclude(job, entry, failure), True
        except LostRankError as error:  # rank 0 alone knows whether it is complete
            bad, known = {str(ranks.rank()): str(error)}, False
        if bad:
            listing = "\n".join(f"  rank {r}: {text}" for r, text in bad.items())
            outcome = "was not saved" if known else f"may not have been saved (if {job.final} exists, it was)"
            self._error = CheckpointError(
                f"step {job.step} {outcome}; earlier checkpoints are untouched and training state is unharmed:\n{listing}",
                str(job.final),
            )
            self._error.__cause__ = failure
            log.error("%s", self._error)  # now, since the training thread may be dying of the same cause
            if ranks.is_main():
                Disk().remove_tree(job.scratch)

    def _conclude(self, job: Job, entry: tuple[str, int, str] | None, failure: Exception | None) -> dict[str, str]:
        """What failed, by rank, the same on all ranks; {} if the checkpoint exists now."""
        told = self.confirmation.report([entry, None if failure is None else ranks.describe(failure)])
        bad, entries = {}, {}
        for rank, said in told.items():
            wrote, problem = (None, str(said)) if isinstance(said, LostRankError) else said
            if wrote is None:
                bad[str(rank)] = problem
            else:
                entries[wrote[0]] = (wrote[1], wrote[2])
        if ranks.is_main() and not bad:
            uncommitted = self._commit(job, entries)
            bad = {} if uncommitted is None else {"0": ranks.describe(uncommitted)}
        return self.confirmation.conclude(bad)

    def _write(self, job: Job) -> tuple[str, int, str]:
        name = manifest.stem(ranks.rank(), ranks.world_size())
        # A thread that launches kernels needs the interpreter all the time: each block handed over takes it a few times.
        blocks = () if job.imaged else buffers(BLOCK_BYTES if job.device is None else 4 * BLOCK_BYTES)
        data = DataFile(self._disk, job.scratch / f"{name}.safetensors", self._disk_thread, blocks)
        try:
            if job.imaged:
                self._write_image(job, data)
            else:
                self._write_units(job, data)
            data.close()
        finally:
            data.abandon()
        size, digest = self._disk.write_file(job.scratch / f"{name}.json", job.manifest(data.path.name).to_json())
        self._disk.sync_folder(job.scratch)
        return f"{name}.json", size, digest

    def _write_image(self, job: Job, data: DataFile) -> None:
        """All of it lies in memory as it will lie in the file: the disk takes it from there, and the hashes are taken meanwhile."""
        job.complete_image()
        data.write_ready([raw(copy.tensor) for copy in job.image], job.data_bytes)
        for slices in job.batches(READY_BYTES):
            found = hashing.hash_runs([[raw(unit.content) for unit in units] for _, units in slices], CHUNK_BYTES)
            for (index, _), hashes in zip(slices, found):
                job.hashes[index] = hashes
            HERE.touch()
        for _ in data.settled():
            HERE.touch()

    def _write_units(self, job: Job, data: DataFile) -> None:
        """Piece by piece, each from wherever it lies when its turn comes."""
        data.write(memoryview(job.header), 0, hashing.ChunkHashes(len(job.header)))
        for index, units in job.by_slice():
            hashes = hashing.ChunkHashes(CHUNK_BYTES)
            for unit in units:
                self.copier.hold(job, unit)
                data.write(raw(unit.content), unit.offset, hashes)  # when this returns, its memory may change
                self.copier.done(unit)
                HERE.touch()
            job.hashes[index] = hashes.end()

    def _commit(self, job: Job, entries: dict[str, tuple[int, str]]) -> Exception | None:
        """Rank 0 makes it a checkpoint; returns what went wrong."""
        try:
            store.write_model_files(self._disk, job.scratch, job.model_files)
            store.commit(self._disk, job.scratch, job.final, job.step, job.run, entries, ranks.world_size())
            self._retire(job.final, job.step)
            if self.copy_to is not None:
                self._retire(second.copy(self._disk, job.final, self.copy_to), job.step)
        except Exception as error:
            if job.scratch.exists() or not job.final.exists():
                return error
            # It has its final name, so it is whole and can be loaded; only what comes after failed.
            log.warning("step %d is saved, but afterwards: %s", job.step, error)
        return None

    def _retire(self, written: Path, step: int) -> None:
        """Delete the old ones beside the checkpoint that was `written` just now."""
        self.damaged.discard(written)
        self._whole[written] = store.stamp(written)
        keep: dict[str, Any] = {
            "keep_last": self.keep_last,
            "keep_every": self.keep_every,
            "protect": frozenset(self.protect | {step}),
        }
        store.retire(self._disk, written.parent, damaged=self.damaged, whole=self._whole, **keep)
