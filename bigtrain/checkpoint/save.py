"""Saving beside training: state that does not change before the next optimizer update is written straight from where it lies.

`Saver.start` returns at once. A thread then writes the state in units of at most `UNIT_BYTES`; what it has not reached when the
next update is due is copied to host memory by `before_update`, while the thread goes on writing, so that the update never waits
for the disk and the extra memory is at most one snapshot: none where the disk is done before the update.

Where a GPU computes, all state is copied to host memory at once, beside forward and backward of the next step: what lies on the GPU
to pinned memory, on a stream of its own; no GPU memory is allocated. Host memory is kept for the next save (`snapshot.HostMemory`).
Where all of it lies on the GPU, the copy is an image of the data file, which goes to the disk as it is, without another copy. What
the host has no room for stays on the GPU until the writer comes to it, and the update waits for that.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks
from bigtrain.checkpoint import files, hashing, manifest, second, store
from bigtrain.checkpoint.confirm import Confirmation, LostRankError
from bigtrain.checkpoint.datafile import BLOCK_BYTES, READY_BYTES, DataFile, DiskThread, buffers
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.manifest import CHUNK_BYTES
from bigtrain.checkpoint.pieces import BUSY, COPIED, DONE, LIVE, Job, Unit, plan
from bigtrain.checkpoint.slices import LocalSlice, raw, share_of
from bigtrain.checkpoint.snapshot import Copy, HostMemory, copy_host
from bigtrain.errors import CheckpointError
from bigtrain.plan.disk import SPARE_BYTES
from bigtrain.whereabouts import HERE

log = logging.getLogger(__name__)

CONFIRM_TIMEOUT_S = 3600.0  # how long a rank waits for the slowest writer


def _copiers() -> int:
    """Threads that copy: this rank's share of the cores, up to 8, which saturate the memory of any machine seen."""
    return min(8, ranks.cores())


@contextlib.contextmanager
def _beside(job: Job) -> Iterator[None]:
    """What is copied inside from the GPU, is so beside its kernels; done at the end, also after an error: blocks are given back then."""
    if job.device is None or job.ready is None:
        yield
        return
    with torch.cuda.device(job.device):  # a new thread begins on the first GPU
        stream = torch.cuda.Stream(job.device)
        stream.wait_event(job.ready)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


class Saver:
    """Writes checkpoints under `root` in the background, one at a time. All ranks make one and call it alike.

    Args:
        root: folder that holds the checkpoints; the same for all ranks.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: checkpoints whose step is a multiple of this are never deleted.
        disk: the file layer; tests pass one that fails.
        confirmation: that of a saver which saves no more; a process group is never given back, so there is one for each engine.

    Attributes:
        always_imaged: also what lies in host memory is copied to an image of the file when a save starts; for tests without a GPU.
        protect: steps that are not deleted.
        copy_to: folder that gets a copy of each checkpoint; None for none.
        blocked_s: seconds that the last save kept training waiting, so far.
        fetched_bytes, fetch_s: copied from the GPU by the last save, and the seconds from the first copy to the end of the last.
    """

    always_imaged = False

    def __init__(
        self, root: Path, *, keep_last: int | None = None, keep_every: int | None = None, disk: Disk | None = None,
        confirmation: Confirmation | None = None,
    ):  # fmt: skip
        self.root, self.keep_last, self.keep_every = Path(root), keep_last, keep_every
        self.protect: set[int] = set()
        self.copy_to: Path | None = None
        self.blocked_s = 0.0
        self.fetched_bytes, self.fetch_s = 0, 0.0
        self._disk = disk or Disk()
        self.confirmation = confirmation or Confirmation(CONFIRM_TIMEOUT_S)
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        self._error: Exception | None = None
        self._disk_thread = DiskThread()
        self._disk_thread.submit(hashing.native)  # compiled, if it was never here, before an update waits for copies
        self._host, self._pinned = HostMemory(pinned=False), HostMemory(pinned=True)
        with ranks.together(f"preparing {self.root}"):
            if ranks.is_main() and self.root.is_dir():
                claim = files.claim(self.root)
                try:
                    store.restore_moved_aside(self._disk, self.root)
                finally:
                    files.release(claim)

    # ------------------------------------------------------------ the training thread

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
            imaged = self.always_imaged or (bool(mine) and all(s.tensor.is_cuda for s in mine))
            job = plan(mine, step, scratch, final, rank_state, json.dumps(body, indent=1).encode(), small, imaged)
        try:
            with ranks.together(f"creating {scratch}"):
                self._disk.make_folder(scratch)
                if ranks.is_main():
                    job.claim = files.claim(self.root)
                for unit in job.units:
                    if mine[unit.slice_index].volatile:
                        unit.state = BUSY
                        self._copy(unit, even_if_short=True)
        except BaseException:
            self._release(job)
            files.release(job.claim)
            if ranks.is_main():
                Disk().remove_tree(scratch)
            raise
        self._job = job
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"save-{step}", daemon=False)
        self._thread.start()
        self.blocked_s = time.perf_counter() - began
        return job.final

    def before_update(self) -> None:
        """Call before the optimizer changes its state: copies what the writer has not reached. Cheap when nothing is saved."""
        job = self._job
        if job is None:
            return
        began = time.perf_counter()
        self._copy_host_units(job)
        with self._lock:
            while any(u.state in (LIVE, BUSY) for u in job.units) and self._error is None:
                self._lock.wait(0.5)
        self._job = None
        self.blocked_s += time.perf_counter() - began

    @property
    def writing(self) -> bool:
        """True while the save in flight is not on disk yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def held_bytes(self) -> int:
        """Host memory kept for copies."""
        return self._host.nbytes + self._pinned.nbytes

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
                    "Free some space, keep fewer checkpoints (--save_total_limit), or choose another --output_dir.",
                    str(self.root),
                )

    def _copy_host_units(self, job: Job) -> None:
        """Copy what is live in host memory; from the back, so that writer and copiers do not wait for each other."""
        live = [unit for unit in reversed(job.units) if unit.state == LIVE and not unit.tensor.is_cuda]
        if live and not job.imaged:
            with ThreadPoolExecutor(_copiers()) as threads:
                list(threads.map(self._copy_if_live, live))

    def _copy_if_live(self, unit: Unit) -> None:
        with self._lock:
            if unit.state != LIVE:
                return
            unit.state = BUSY
        self._copy(unit)

    def _copy(self, unit: Unit, even_if_short: bool = False) -> None:
        """Copy a unit that is BUSY. Short of memory, it is LIVE again: the update waits for the writer, which takes it from there."""
        copy: Copy | None = None
        try:
            copy = self._host.take(unit.tensor, even_if_short)
            if copy is None:
                self._leave(unit)
                return
            if unit.tensor.is_cuda:
                copy.tensor.copy_(unit.tensor)
            else:
                copy_host(unit.tensor, copy.tensor)
        except BaseException:  # out of memory: the update is not done, so the writer can take the live state after all
            self._leave(unit)
            if copy is not None:
                copy.give_back()
            raise
        with self._lock:
            wanted = unit.state == BUSY  # else the writer has failed meanwhile, and let go of everything
            if wanted:
                unit.copy, unit.state = copy, COPIED
            self._lock.notify_all()
        if not wanted:
            copy.give_back()

    def _leave(self, unit: Unit) -> None:
        with self._lock:
            unit.state = LIVE if unit.state == BUSY else unit.state
            self._lock.notify_all()

    # ------------------------------------------------------------ the writing thread

    def _run(self, job: Job) -> None:
        """Write, let all ranks confirm, let rank 0 commit. A failure is told to every rank and leaves no checkpoint."""
        try:
            self._finish(job)
        finally:
            files.release(job.claim)

    def _finish(self, job: Job) -> None:
        failure: Exception | None = None
        entry: tuple[str, int, str] | None = None
        try:
            self._fetch(job)
            entry = self._write(job)
        except Exception as error:
            failure = error
        self._release(job)
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

    def _fetch(self, job: Job) -> None:
        """Where a GPU computes: copy all state to host memory now. Else the processor is better left to training and writing.

        Returns when it is done; what is in host memory is copied by other threads while the GPU copies.
        """
        if job.device is None and not job.imaged:
            return
        units = [unit for unit in job.units if unit.state == LIVE and (job.imaged or unit.tensor.is_cuda)]
        need = sum(unit.tensor.nbytes for unit in units)
        self._pinned.reserve(job.data_bytes if job.imaged else need, _copiers(), job.device)
        if job.imaged and not job.make_image(self._pinned):
            job.imaged, units = False, [unit for unit in units if unit.tensor.is_cuda]
        with _beside(job):
            began = time.perf_counter()
            fetched = list(itertools.takewhile(lambda unit: self._fetch_unit(job, unit), units))
            with contextlib.suppress(RuntimeError):  # the interpreter's end, where no thread can be started: no update comes
                self._copy_host_units(job)
        self.fetched_bytes, self.fetch_s = sum(unit.tensor.nbytes for unit in fetched), time.perf_counter() - began
        if len(fetched) < len(units):
            log.warning(
                "step %d: the host has room for %.1f of the %.1f GiB that lie on the GPU; the next update waits until the rest is on disk",
                job.step, self.fetched_bytes / 2**30, need / 2**30,
            )  # fmt: skip
        with self._lock:
            for unit in fetched:
                unit.state = COPIED
            self._lock.notify_all()

    def _fetch_unit(self, job: Job, unit: Unit) -> bool:
        """Begin to copy it to the host; False: there is no room, and it stays where it lies until the writer comes to it."""
        if job.imaged:
            unit.image = target = job.place(unit)
        else:
            unit.copy = self._pinned.take(unit.tensor)
            if unit.copy is None:
                return False
            target = unit.copy.tensor
        unit.state = BUSY
        target.copy_(unit.tensor, non_blocking=True)
        return True

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
                self._write_unit(job, unit, data, hashes)
            job.hashes[index] = hashes.end()

    def _write_unit(self, job: Job, unit: Unit, data: DataFile, hashes: hashing.ChunkHashes) -> None:
        """Hash a unit and hand it to the disk; when this returns, its memory may change."""
        with self._lock:
            while unit.state == BUSY:
                self._lock.wait(0.5)
            if unit.state == LIVE:
                unit.state = BUSY
        if unit.copy is None and unit.tensor.is_cuda:  # there was no room for it; by now there is that of units before it
            unit.copy = self._pinned.take(unit.tensor, even_if_short=True)
            assert unit.copy is not None
            with _beside(job):
                unit.copy.tensor.copy_(unit.tensor, non_blocking=True)
        data.write(raw(unit.content), unit.offset, hashes)
        HERE.touch()
        self._done(unit)

    def _done(self, unit: Unit) -> None:
        with self._lock:
            copy, unit.copy, unit.image, unit.state = unit.copy, None, None, DONE
            self._lock.notify_all()
        if copy is not None:
            copy.give_back()

    def _release(self, job: Job) -> None:
        """Let go of all live state, whatever happened, so that no update waits for a writer that has failed."""
        for unit in job.units:
            self._done(unit)
        while job.image:
            job.image.pop().give_back()
        self._host.settle()
        self._pinned.settle()

    def _commit(self, job: Job, entries: dict[str, tuple[int, str]]) -> Exception | None:
        """Rank 0 makes it a checkpoint; returns what went wrong."""
        try:
            store.write_model_files(self._disk, job.scratch, job.model_files)
            store.commit(self._disk, job.scratch, job.final, job.step, job.run, entries, ranks.world_size())
            self._retire(self.root, job.step)
            if self.copy_to is not None:
                second.copy(self._disk, job.final, self.copy_to)
                self._retire(self.copy_to, job.step)
        except Exception as error:
            if job.scratch.exists() or not job.final.exists():
                return error
            # It has its final name, so it is whole and can be loaded; only what comes after failed.
            log.warning("step %d is saved, but afterwards: %s", job.step, error)
        return None

    def _retire(self, root: Path, step: int) -> None:
        kept = frozenset(self.protect | {step})
        store.retire(self._disk, root, keep_last=self.keep_last, keep_every=self.keep_every, protect=kept)
