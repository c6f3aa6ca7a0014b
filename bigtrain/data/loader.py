"""Micro batches in step order: one list of `accumulation` of them a step, resumable at any step."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from bigtrain.data.chat import IGNORE
from bigtrain.data.order import EvalPlan, SampleOrder, StepPlan
from bigtrain.errors import BigtrainError, DataError
from bigtrain.kernels.documents import cumulative_lengths
from bigtrain.stopping import STOPS

Batch = dict[str, Any]
PREFETCH = 4  # micro batches that each worker holds ready
PARENT_S = 1.0  # how often a worker looks whether its rank is still there


class RowSource(Protocol):
    """What a loader needs of rows; `bigtrain.data.pack.Rows` is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]: ...


def fetch(rows: RowSource, row: int) -> dict[str, torch.Tensor]:
    """rows[row]; any error names the row and the samples in it, also across a worker's process boundary."""
    try:
        return rows[row]
    except Exception as error:
        samples = rows.documents_of(row)[:20] if hasattr(rows, "documents_of") else "unknown"
        raise DataError(f"row {row} (samples {samples}) cannot be read: {type(error).__name__}: {error}") from error


def stack(rows: Sequence[dict[str, torch.Tensor]], *, document_bounds: bool = False) -> Batch:
    """One micro batch: [micro_batch, seq_len] tensors.

    Args:
        rows: dictionaries of equally long 1-D tensors.
        document_bounds: also give `cu_seq_lens_q/k` (int32 [documents + 1], over the flattened micro batch) and
            `max_length_q/k`, which flash attention needs to keep documents apart (see `isolation`).
    """
    batch: Batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if document_bounds:
        bounds = cumulative_lengths(batch["position_ids"])
        longest = int(torch.diff(bounds).max())
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    return batch


class _TrainingBatches(Dataset):
    """Micro batch m of this rank: step m // accumulation, micro step m % accumulation. Runs inside the workers."""

    def __init__(self, rows: RowSource, order: SampleOrder, plan: StepPlan, rank: int, document_bounds: bool):
        self.rows, self.order, self.plan, self.rank, self.bounds = rows, order, plan, rank, document_bounds

    def __getitem__(self, micro: int) -> Batch:
        step, micro_step = divmod(micro, self.plan.accumulation)
        positions = self.plan.positions(step, self.rank, micro_step)
        return stack([fetch(self.rows, self.order.row(p)) for p in positions], document_bounds=self.bounds)


class _EvaluationBatches(Dataset):
    """Batch b of this rank; where the rows have run out, a filler: the last row with every label -100."""

    def __init__(self, rows: RowSource, plan: EvalPlan, rank: int, document_bounds: bool):
        self.rows, self.plan, self.rank, self.bounds = rows, plan, rank, document_bounds

    def _row(self, row: int | None) -> dict[str, torch.Tensor]:
        if row is not None:
            return fetch(self.rows, row)
        filler = dict(fetch(self.rows, len(self.rows) - 1))
        filler["labels"] = torch.full_like(filler["labels"], IGNORE)
        return filler

    def __getitem__(self, batch: int) -> Batch:
        return stack([self._row(row) for row in self.plan.rows(batch, self.rank)], document_bounds=self.bounds)


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise DataError(f"rank={rank} is outside 0 ... {world_size - 1} (world_size={world_size})")


class _Stream:
    """A DataLoader over micro-batch numbers, with an end that leaves no worker behind."""

    def __init__(self, batches: Dataset, num_workers: int):
        if num_workers < 0:
            raise DataError(f"num_workers={num_workers} must be at least 0")
        self._batches, self._num_workers = batches, num_workers
        self._running: Any = None

    def over(self, numbers: range) -> Iterator[Batch]:
        """Micro batches in exactly the order of `numbers`; workers end when the iterator does or is closed."""
        self.close()
        loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,  # an item is a whole micro batch already
            sampler=numbers,
            num_workers=self._num_workers,
            prefetch_factor=PREFETCH if self._num_workers else None,
            pin_memory=torch.cuda.is_available(),
            # Its own generator: the default one draws the workers' base seed from torch's global RNG, and the number of
            # loaders made would change the model's dropout.
            generator=torch.Generator(),
            worker_init_fn=_heed_the_rank_alone if self._num_workers else None,
        )
        with _stops_held_back():  # the workers are forked here
            mine = self._running = iter(loader)
        if self._num_workers:
            _name_the_dead()
        try:
            while (batch := _next(mine)) is not None:
                yield batch
        finally:
            if self._running is mine:
                self.close()

    def close(self) -> None:
        """Stops the workers; safe at any time and more than once."""
        running, self._running = self._running, None
        if running is not None and hasattr(running, "_shutdown_workers"):
            running._shutdown_workers()


@contextlib.contextmanager
def _stops_held_back() -> Iterator[None]:
    """Inside, a stop waits for the end of the block; a process that is forked here begins with stops held back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_the_rank_alone(worker: int) -> None:
    """In a worker: it ends when its rank says so or is gone, whoever else gets a signal that goes to the whole process group.

    `timeout`, `scancel --full`, terminals and DeepSpeed's launcher signal workers too, and the rank still needs batches to finish its
    step. Torch itself ends workers by SIGTERM, so who sent one matters: only a thread that takes it from the queue learns that.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    heard = set(STOPS) - {signal.SIGTERM}
    for number in heard:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which a program that the worker starts would inherit
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
    rank = multiprocessing.parent_process()
    parents = {os.getppid(), rank.pid if rank is not None else None}
    threading.Thread(target=_end_with, args=(os.getppid(), parents), daemon=True, name="bigtrain-worker-end").start()


def _end_with(parent: int, parents: set[int | None]) -> None:
    while os.getppid() == parent:
        told = signal.sigtimedwait([signal.SIGTERM], PARENT_S)
        if told is not None and told.si_pid in parents:
            break
    os._exit(0)


def _next(batches: Iterator[Batch]) -> Batch | None:
    """The next one; None after the last.

    Raises:
        BigtrainError: a worker process has died.
    """
    try:
        return next(batches, None)
    except RuntimeError as error:
        if (named := _named(error)) is None:
            raise
        raise named from error


def _name_the_dead() -> None:
    """A worker that dies interrupts its rank wherever that is: torch raises from a signal handler, a bare RuntimeError."""
    torchs = signal.getsignal(signal.SIGCHLD)
    if not callable(torchs) or hasattr(torchs, "names_workers") or threading.current_thread() is not threading.main_thread():
        return

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            torchs(number, frame)
        except RuntimeError as error:
            if (named := _named(error)) is None:
                raise
            raise named from error

    handler.names_workers = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, handler)


def _named(error: BaseException | None) -> BigtrainError | None:
    """What torch says of a dead worker, with what to do; None if the error is another."""
    told = []
    while error is not None:
        if isinstance(error, BigtrainError) or "DataLoader worker" in str(error):
            told.append(error)
        error = error.__cause__ or error.__context__
    if not told or isinstance(told[-1], BigtrainError):
        return told[-1] if told else None  # type: ignore[return-value]
    first = " ".join(str(told[-1]).split())
    why = (
        "usually the kernel's out-of-memory killer (`dmesg` names it): fewer workers (dataloader_num_workers; of a loader num_workers) hold "
        "less memory, and 0 reads in the rank itself"
        if "Killed" in first
        else "with 0 workers (dataloader_num_workers; of a loader num_workers) the rank itself reads, and shows what fails"
    )
    return BigtrainError(
        f"{first.rstrip('. ')}: {why}. Go on from the newest checkpoint (--resume_from_checkpoint auto, engine.load_checkpoint)."
    )


class StepLoader:
    """Iterates over the steps of a run; every item is a list of `accumulation` micro batches of this rank.

    Every iteration starts at `start_step`.

    Args:
        rows: packed rows (`build_rows`), equal on all ranks.
        order: which row is at which position.
        plan: from `plan_steps`, equal on all ranks.
        rank: this rank.
        world_size: must be the plan's.
        start_step: first step to give (0 = from the beginning).
        num_workers: processes that read ahead; 0 reads in the calling process. Any number gives the same batches.
        document_bounds: see `stack`.

    Raises:
        DataError: plan, order, rank and rows do not belong together; while iterating: a row that cannot be read.
    """

    def __init__(
        self,
        rows: RowSource,
        order: SampleOrder,
        plan: StepPlan,
        rank: int = 0,
        world_size: int = 1,
        start_step: int = 0,
        num_workers: int = 0,
        *,
        document_bounds: bool = False,
    ):
        _check_rank(rank, world_size)
        if plan.world_size != world_size:
            raise DataError(f"the step plan is for {plan.world_size} ranks, the loader is on {world_size}")
        if not len(rows) == order.n_rows == plan.n_rows:
            raise DataError(f"{len(rows)} rows, an order of {order.n_rows} and a plan of {plan.n_rows} rows do not match")
        self.order, self.plan, self.rank = order, plan, rank
        if not 0 <= start_step <= plan.steps:
            raise DataError(f"start_step={start_step} is outside this run of {plan.steps} steps; raise max_steps or epochs")
        self.start_step = start_step
        self._stream = _Stream(_TrainingBatches(rows, order, plan, rank, document_bounds), num_workers)

    def position(self, step: int) -> int:
        """Rows used by all ranks before `step`; the data position that ranks compare and checkpoints keep."""
        return self.plan.position(step)

    def __len__(self) -> int:
        return self.plan.steps - self.start_step

    def __iter__(self) -> Iterator[list[Batch]]:
        accumulation = self.plan.accumulation
        stream = self._stream.over(range(self.start_step * accumulation, self.plan.steps * accumulation))
        micro_batches: list[Batch] = []
        try:
            for batch in stream:
                micro_batches.append(batch)
                if len(micro_batches) == accumulation:
                    yield micro_batches
                    micro_batches = []
        finally:
            stream.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stops the workers; iterating again starts them anew."""
        self._stream.close()


class EvalLoader:
    """The evaluation set on this rank: every row once over all ranks, the same number of batches on each.

    Places without a row hold a filler whose labels are all -100: the forward runs (collectives stay in step), the counts
    of targets stay exact.
    """

    def __init__(
        self,
        rows: RowSource,
        plan: EvalPlan,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        *,
        document_bounds: bool = False,
    ):
        _check_rank(rank, world_size)
        if plan.world_size != world_size or plan.n_rows != len(rows):
            raise DataError(
                f"the evaluation plan is for {plan.n_rows} rows on {plan.world_size} ranks, not {len(rows)} on {world_size}"
            )
        self.plan = plan
        self._stream = _Stream(_EvaluationBatches(rows, plan, rank, document_bounds), num_workers)

    def __len__(self) -> int:
        return self.plan.batches

    def __iter__(self) -> Iterator[Batch]:
        return self._stream.over(range(self.plan.batches))

    def close(self) -> None:
        """Stops the workers."""
        self._stream.close()
