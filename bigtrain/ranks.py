"""What ranks say to each other outside the training step: agree, fail together, wait with a limit.

Every call here is collective: all ranks call it, in the same order. It runs on a gloo group of its own, so that nothing
waits behind GPU work and a rank that is missing is noticed within `CONTROL_TIMEOUT_S`, not after NCCL's half hour. An exchange (but
`barrier` and `max_each`, which each step has) begins with a `header` that says which call it is of, so that ranks that came from different calls are told both.
In a single process without a process group every call is local.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import struct
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bigtrain.errors import BigtrainError, RanksDisagreeError
from bigtrain.whereabouts import HERE, called_from

CONTROL_TIMEOUT_S = float(os.environ.get("BIGTRAIN_CONTROL_TIMEOUT_S", "600"))
SLOTS = 6  # integers of a header
WORDS_BYTES = 1024  # of a call and where it stands, once the ranks have found that theirs differ
FAILED = "raising an error"  # the call of a rank that tells the others so

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


def pack(value: float) -> int:
    """A float's bits as an integer, so that it travels exactly."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def unpack(bits: int) -> float:
    """The float behind `pack`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


def header(
    call: str, step: int = 0, count: int = 0, values: Sequence[int] = (), words: str = "", limit_s: float | None = None
) -> list[list[int]]:
    """The message with which every exchange begins: one of a fixed size, whatever the call. Returns each rank's `values`, in rank order.

    Args:
        call, step, count: where this rank is; the same on all ranks.
        values: up to SLOTS - 3 integers of 64 bits for the others.
        words: what people are told of the call; by default `call`.
        limit_s: longest wait; `CONTROL_TIMEOUT_S` by default.

    Raises:
        RanksDisagreeError: on every rank alike, if call, step or count differ: with each rank's words, and the line of its script.
        RuntimeError: gloo's; some rank did not come, or has ended.
    """
    group = control_group()
    if group is None or world_size() == 1:
        return [list(values)]
    mine = torch.zeros(SLOTS, dtype=torch.int64, device="cpu")  # whatever default device a script has set
    mine[:3] = torch.tensor([zlib.crc32(call.encode()), step, count])
    for i, value in enumerate(values):
        mine[3 + i] = value
    limit = datetime.timedelta(seconds=CONTROL_TIMEOUT_S if limit_s is None else limit_s)
    rows = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(rows, mine, group=group, async_op=True).wait(limit)
    told = [row.tolist() for row in rows]
    if any(row[:3] != told[0][:3] for row in told[1:]):
        raise _apart(words or call, [row[0] == zlib.crc32(FAILED.encode()) for row in told], group)
    return [row[3 : 3 + len(values)] for row in told]


def _apart(words: str, failed: Sequence[bool], group: dist.ProcessGroup) -> RanksDisagreeError:
    """All ranks have come, from different calls: what each of them is at."""
    line = called_from()[1]
    text = f"{words}, called at {line}" if line else words
    mine = torch.tensor(list(text.encode()[:WORDS_BYTES].ljust(WORDS_BYTES)), dtype=torch.uint8, device="cpu")
    rows = [torch.empty_like(mine) for _ in failed]
    dist.all_gather(rows, mine, group=group)
    by_rank = {r: bytes(row.tolist()).decode(errors="replace").rstrip() for r, row in enumerate(rows)}
    listing = "\n".join(f"  rank {r}: {text}" for r, text in by_rank.items())
    hint = (
        f"Rank {', '.join(str(r) for r, yes in enumerate(failed) if yes)} failed first: its own message says why."
        if any(failed)
        else "All ranks must make the same calls in the same order, and the same number of forwards, backwards, steps and evaluations: give "
        "each rank the same number of batches, and call what is of bigtrain outside of any 'if rank == 0'."
    )
    return RanksDisagreeError(f"the ranks are at different places:\n{listing}\n{hint}", by_rank)


def _enter(kind: str, what: str, values: Sequence[int] = ()) -> list[list[int]]:
    """The header of an exchange of this module: it is of one call if the function that the script called is one."""
    door, _ = called_from()
    return header(f"{kind} in {door}", values=values, words=f"{door}() ({what})")


def all_gather_object(value: T, what: str = "an exchange of values") -> list[T]:
    """Every rank's `value`, in rank order, on every rank; `what` it is for, where a rank waits in vain."""
    group = control_group()
    if group is None:
        return [value]
    mine = pickle.dumps(value)
    with HERE.together(what):
        sizes = [size for (size,) in _enter("objects", what, (len(mine),))]
        box = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        box[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        boxes = [torch.empty_like(box) for _ in sizes]
        dist.all_gather(boxes, box, group=group)
    return [pickle.loads(box.numpy().data[:size]) for box, size in zip(boxes, sizes)]


def broadcast_object(value: T, what: str = "an exchange of values") -> T:
    """Rank 0's value on every rank; `what` it is for, where a rank waits in vain."""
    group = control_group()
    if group is None:
        return value
    mine = pickle.dumps(value) if is_main() else b""
    with HERE.together(what):
        sizes = _enter("an object", what, (len(mine),))
        box = (
            torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            if is_main()
            else torch.empty(sizes[0][0], dtype=torch.uint8, device="cpu")
        )
        dist.broadcast(box, src=0, group=group)
    return value if is_main() else pickle.loads(box.numpy().data)


def _everyones(value: float | int) -> list[float] | list[int]:
    """Each rank's number, in the header itself: one exchange."""
    whole = isinstance(value, int)
    with HERE.together("an exchange of values"):
        kind = "whole numbers" if whole else "numbers"
        told = [bits for (bits,) in _enter(kind, kind, (int(value) if whole else pack(value),))]
    return told if whole else [unpack(bits) for bits in told]


def sum_across(value: float | int) -> float | int:
    """Sum over ranks: exact for int, fp64 for float."""
    return sum(_everyones(value))


def max_across(value: float | int) -> float | int:
    """Largest over ranks."""
    return max(_everyones(value))


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
