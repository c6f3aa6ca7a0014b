"""Copies of a save's state in host memory, made by the training thread and by the writer's, for whichever comes first to a piece.

Where a GPU computes, all state is copied to host memory at once, beside forward and backward of the next step: what lies on the GPU
to pinned memory, on a stream of its own; no GPU memory is allocated. Where all of it lies on the GPU, the copy is an image of the data
file, which goes to the disk as it is, without another copy. What the host has no room for stays on the GPU until the writer comes to
it, and the update waits for that. Elsewhere only what the writer has not reached when the next update is due is copied.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from bigtrain import ranks
from bigtrain.checkpoint.pieces import BUSY, COPIED, DONE, LIVE, Job, Unit
from bigtrain.checkpoint.snapshot import KEEP_SHARE, Copy, HostMemory, copy_host

log = logging.getLogger(__name__)


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


class Copier:
    """Host memory for copies, kept from one save to the next, and who copies which unit of the save in flight.

    Attributes:
        fetched_bytes, fetch_s: copied from the GPU by the last save, and the seconds from the first copy to the end of the last.
    """

    def __init__(self) -> None:
        self.fetched_bytes, self.fetch_s = 0, 0.0
        self._lock = threading.Condition()
        self._host, self._pinned = HostMemory(pinned=False), HostMemory(pinned=True)
        self._preparing: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        """Host memory kept for copies."""
        return self._host.nbytes + self._pinned.nbytes

    def prepare(self, nbytes: int, device: torch.device | None) -> None:
        """Make pinned memory for copies of `nbytes` beside training, as far as the host stays as free as it must be to keep it."""
        self._prepared()
        work = (nbytes, _copiers(), device, KEEP_SHARE)
        self._preparing = threading.Thread(target=self._pinned.reserve, args=work, name="save-prepare")
        self._preparing.start()

    def copy_live(self, job: Job) -> None:
        """Copy what is live in host memory; from the back, so that writer and copiers do not wait for each other."""
        live = [unit for unit in reversed(job.units) if unit.state == LIVE and not unit.tensor.is_cuda]
        if live and not job.imaged:
            with ThreadPoolExecutor(_copiers()) as threads:
                list(threads.map(self._copy_if_live, live))

    def wait_for_copies(self, job: Job) -> None:
        """Return when nothing of the save is needed where it lies any more."""
        with self._lock:
            while any(u.state in (LIVE, BUSY) for u in job.units):
                self._lock.wait(0.5)

    def copy_now(self, unit: Unit) -> None:
        """Copy a unit before anybody else may come to it."""
        unit.state = BUSY
        self._copy(unit, even_if_short=True)

    def fetch(self, job: Job) -> None:
        """Where a GPU computes: copy all state to host memory now. Else the processor is better left to training and writing.

        Returns when it is done; what is in host memory is copied by other threads while the GPU copies.
        """
        if job.device is None and not job.imaged:
            return
        self._prepared()
        units = [unit for unit in job.units if unit.state == LIVE and (job.imaged or unit.tensor.is_cuda)]
        need = sum(unit.tensor.nbytes for unit in units)
        self._pinned.reserve(job.data_bytes if job.imaged else need, _copiers(), job.device)
        if job.imaged and not job.make_image(self._pinned):
            job.imaged, units = False, [unit for unit in units if unit.tensor.is_cuda]
        with _beside(job):
            began = time.perf_counter()
            fetched = list(itertools.takewhile(lambda unit: self._fetch_unit(job, unit), units))
            with contextlib.suppress(RuntimeError):  # the interpreter's end, where no thread can be started: no update comes
                self.copy_live(job)
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

    def hold(self, job: Job, unit: Unit) -> None:
        """Before a unit is written: when this returns, its content stays as it is until `done`."""
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

    def done(self, unit: Unit) -> None:
        """A unit's memory may change, and its copy's be used again."""
        with self._lock:
            copy, unit.copy, unit.image, unit.state = unit.copy, None, None, DONE
            self._lock.notify_all()
        if copy is not None:
            copy.give_back()

    def release(self, job: Job) -> None:
        """Let go of all live state, whatever happened, so that no update waits for a writer that has failed."""
        for unit in job.units:
            self.done(unit)
        while job.image:
            job.image.pop().give_back()
        self._host.settle()
        self._pinned.settle()

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

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
