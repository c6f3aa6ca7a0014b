"""What ranks say to each other outside the training step: agree, fail together, wait with a limit.

Every call here is collective: all ranks call it, in the same order. It runs on a gloo group of its own, so that nothing
waits behind GPU work and a rank that is missing is noticed within `CONTROL_TIMEOUT_S`, not after NCCL's half hour.
In a single process without a process group every call is local.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bigtrain.errors import BigtrainError, RanksDisagreeError
from bigtrain.whereabouts import HERE

CONTROL_TIMEOUT_S = float(os.environ.get("BIGTRAIN_CONTROL_TIMEOUT_S", "600"))

T = TypeVar("T")
_control: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # (the world it was made for, the control group)


def is_distributed() -> bool:
    """True once a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's global rank; before the process group exists, what the launcher said, else 0."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks; before the process group exists, what the launcher said, else 1."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def local_rank() -> int:
    """Rank within this host, as the launcher said (torchrun and deepspeed, Slurm, Open MPI), else 0."""
    return next((int(os.environ[name]) for name in _LOCAL_RANK if name in os.environ), 0)


def local_world_size() -> int:
    """Ranks on this host, as the launcher said (torchrun, deepspeed, Open MPI), else this host's part of all (srun says how many hosts)."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    told = (int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal())
    return next(told, -(-world_size() // int(os.environ.get("SLURM_STEP_NUM_NODES") or 1)))


def cores() -> int:
    """This rank's share of the cores that its host lets it use, at least 1."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // max(1, local_world_size()))


def device() -> torch.device:
    """This rank's own device: a CUDA device, or the CPU where there is none.

    Without a launcher's local rank, hosts are taken to be filled in rank order, so that two ranks never share device 0.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = local_rank() if any(name in os.environ for name in _LOCAL_RANK) else rank()
    return torch.device("cuda", number % torch.cuda.device_count())


def is_main() -> bool:
    """True on global rank 0."""
    return rank() == 0


def control_group() -> dist.ProcessGroup | None:
    """The gloo group that control messages use; None in a single process. The first call is collective."""
    global _control
    if not is_distributed():
        return None
    world = dist.group.WORLD
    if _control is None or _control[0] is not world:
        limit = datetime.timedelta(seconds=CONTROL_TIMEOUT_S)
        _control = (world, dist.new_group(backend="gloo", timeout=limit))  # type: ignore[assignment]
    return _control[1]  # type: ignore[index]


def all_gather_object(value: T, what: str = "an exchange of values") -> list[T]:
    """Every rank's `value`, in rank order, on every rank; `what` it is for, where a rank waits in vain."""
    group = control_group()
    if group is None:
        return [value]
    out: list[Any] = [None] * world_size()
    with HERE.together(what):
        dist.all_gather_object(out, value, group=group)
    return out


def broadcast_object(value: T, what: str = "an exchange of values") -> T:
    """Rank 0's value on every rank; `what` it is for, where a rank waits in vain."""
    group = control_group()
    if group is None:
        return value
    box = [value]
    with HERE.together(what):
        dist.broadcast_object_list(box, src=0, group=group, device=torch.device("cpu"))
    return box[0]


def _reduce(value: float | int, op: Any) -> float | int:
    group = control_group()
    if group is None:
        return value
    box = torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float64)
    with HERE.together("an exchange of values"):
        dist.all_reduce(box, op=op, group=group)
    return box.item()


def sum_across(value: float | int) -> float | int:
    """Sum over ranks: exact for int, fp64 for float."""
    return _reduce(value, dist.ReduceOp.SUM)


def max_across(value: float | int) -> float | int:
    """Largest over ranks."""
    return _reduce(value, dist.ReduceOp.MAX)


def max_each(values: Sequence[float]) -> list[float]:
    """Largest over ranks of each number, in one exchange: fit for every step."""
    group = control_group()
    if group is None:
        return list(values)
    box = torch.tensor(values, dtype=torch.float64)
    with HERE.together("an exchange of values"):
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    return box.tolist()


def agree(value: T, what: str) -> T:
    """Check that every rank holds the same `value` (compared with ==) and return it.

    Raises:
        RanksDisagreeError: on every rank alike, with the value of each rank.
    """
    values = all_gather_object(value, f"comparing {what}")
    if any(v != values[0] for v in values[1:]):
        listing = "\n".join(f"  rank {r}: {v!r}" for r, v in enumerate(_only_differences(values)))
        raise RanksDisagreeError(
            f"{what} differs between ranks:\n{listing}\nStart every rank with the same arguments, files and versions.",
            dict(enumerate(values)),
        )
    return value


def _only_differences(values: list[Any]) -> list[Any]:
    """Of dicts, the keys whose values differ; other values as they are."""
    if not all(isinstance(v, dict) for v in values):
        return values
    keys = dict.fromkeys(k for v in values for k in v)
    apart = [k for k in keys if any(k not in v or v[k] != values[0].get(k) for v in values)]
    return [{k: v[k] for k in apart if k in v} for v in values]


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block whose failure on one rank must stop all: the block itself may not contain collectives.

    The failing rank raises its own error; the others raise `RanksDisagreeError` that names it. If every rank failed
    with a `BigtrainError`, each raises its own.
    """
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    known = failure is None or isinstance(failure, BigtrainError)
    told = all_gather_object((text, getattr(failure, "exit_code", BigtrainError.exit_code), known), what)
    if failure is not None:
        raise failure
    failed = {r: t for r, (t, *_) in enumerate(told) if t is not None}
    if failed:
        listing = "\n".join(f"  rank {r}: {t}" for r, t in failed.items())
        elsewhere = RanksDisagreeError(f"{what} failed on {len(failed)} of {len(told)} ranks:\n{listing}", dict(failed))
        elsewhere.exit_code = told[min(failed)][1]  # every rank leaves with the same code
        elsewhere.unforeseen = not all(known for *_, known in told)
        raise elsewhere


def main_decides(decide: Callable[[], T], what: str) -> T:
    """Run `decide` on rank 0 and give its value to every rank; its error is raised on every rank."""
    value: T | None = None
    error: tuple[str, str, int, bool] | None = None
    caught: Exception | None = None
    if is_main():
        try:
            value = decide()
        except Exception as problem:
            caught = problem
            known = isinstance(problem, BigtrainError)
            error = (type(problem).__name__, str(problem), getattr(problem, "exit_code", 1), known)
    value, error = broadcast_object((value, error), what=what)
    if caught is not None:
        raise caught
    if error is not None:
        failed = RanksDisagreeError(f"{what} failed on rank 0: {error[0]}: {error[1]}", {0: error[1]})
        failed.exit_code = error[2]  # every rank leaves with the same code
        failed.unforeseen = not error[3]
        raise failed
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def main_first(what: str, timeout_s: float = 6 * 3600.0) -> Iterator[None]:
    """Each host's local rank 0 runs the block first, then the others: for caches on a host's disk. May take `timeout_s`."""
    first = local_rank() == 0
    if not first:
        barrier(f"{what} (waiting for local rank 0)", timeout_s)
    try:
        yield
    finally:
        if first:
            barrier(what, timeout_s)


def barrier(what: str, timeout_s: float | None = None) -> None:
    """Wait for every rank, `timeout_s` seconds at most.

    Raises:
        RanksDisagreeError: names the ranks that did not come.
    """
    group = control_group()
    if group is None:
        return
    limit = datetime.timedelta(seconds=CONTROL_TIMEOUT_S if timeout_s is None else timeout_s)
    try:
        with HERE.together(what, timeout_s):
            dist.monitored_barrier(group=group, timeout=limit, wait_all_ranks=True)
    except RuntimeError as error:
        raise RanksDisagreeError(
            f"waited {limit.total_seconds():.0f} s at '{what}' and some rank did not come: every rank must call it.\n{error}"
        ) from error


def describe(error: BaseException) -> str:
    """The error as it should reach a person: our own errors as text, others with their traceback."""
    if isinstance(error, BigtrainError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))
