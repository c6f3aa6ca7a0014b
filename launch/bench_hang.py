"""What ends a run in which one rank goes wrong, and how soon: two CPU ranks, each fault for real.

    python launch/bench_hang.py --table docs/results/hang.md            all of it, about five minutes
    python launch/bench_hang.py --cases killed stopped --stages 3

One process imports everything and forks the two ranks of each trial, so that start-up is not measured; no launcher is there to
end the other rank. The clock runs from the fault to the end of each rank.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hang_table import kept_rows, line, write_table
from torch import nn

from bigtrain import ranks, zero
from bigtrain.data import SampleOrder, StepLoader, plan_steps
from bigtrain.engine import Engine
from bigtrain.hosts.ports import free_port
from bigtrain.models import build_model

HANG_S = 8.0
LIMIT_S = 30.0
STEPS = 6
AT = 3  # the step at which things go wrong


class Tiny(nn.Module):
    """A few layers, with a branch that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.fail = False

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        """Mean square."""
        h = self.first(x)
        h = h + self.branch(h) if branch else h
        loss = self.last(h).float().pow(2).mean()
        if self.fail:
            fault()
            raise ValueError("the loss of this rank cannot be computed")
        return loss


# ---------------------------------------------------------------- one rank


def fault() -> None:
    """The clock starts."""
    path = Path(os.environ["TRIAL"], "fault")
    if not path.exists():
        path.write_text(str(time.time()))


def make_engine(stage: int, **more: Any) -> Engine:
    """Of the small model; hang_s as in the table."""
    section = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": False}, "zero_optimization": section}
    torch.manual_seed(0)
    return Engine(Tiny(), ds_config=config, optimizer="adamw_torch", learning_rate=1e-3, hang_s=HANG_S, **more)


def step(engine: Engine, **more: Any) -> None:
    """One training step."""
    engine.backward(engine(torch.randn(4, 32), **more))
    engine.step()
    Path(os.environ["TRIAL"], f"step.{engine.rank}").write_text(str(engine.global_step))


def uneven_steps(stage: int) -> None:
    """Rank 1 has fewer batches and comes to the end of the script."""
    engine = make_engine(stage)
    for _ in range(STEPS if engine.rank == 0 else AT):
        step(engine)
    fault()
    engine.close()


def uneven_then_waits(stage: int) -> None:
    """Rank 1 has fewer batches and waits for the others in a barrier of the script's own."""
    engine = make_engine(stage)
    group = torch.distributed.new_group(backend="gloo")
    for _ in range(STEPS if engine.rank == 0 else AT):
        step(engine)
    fault()
    torch.distributed.barrier(group=group)


def save_on_rank_0(stage: int) -> None:
    """`if rank == 0: engine.save_checkpoint()` in the middle of training."""
    engine = make_engine(stage)
    for i in range(STEPS):
        step(engine)
        if i == AT and engine.rank == 0:
            fault()
            engine.save_checkpoint(Path(os.environ["TRIAL"], "out"))


def save_on_rank_0_at_the_end(stage: int) -> None:
    """The same after the last step, with the other rank waiting in a barrier of the script's own."""
    engine = make_engine(stage)
    step(engine)
    group = torch.distributed.new_group(backend="gloo")
    if engine.rank == 0:
        fault()
        engine.save_checkpoint(Path(os.environ["TRIAL"], "out"))
    torch.distributed.barrier(group=group)


def evaluate_on_rank_0(stage: int) -> None:
    """`if rank == 0: engine.evaluate()` in the middle of training."""
    engine = make_engine(stage)
    for i in range(STEPS):
        step(engine)
        if i == AT and engine.rank == 0:
            fault()
            engine.evaluate([{"x": torch.randn(4, 32)}])


def branch_on_rank_0(stage: int) -> None:
    """A part of the model that rank 1 does not run."""
    engine = make_engine(stage)
    for i in range(STEPS):
        if i == AT:
            fault()
        step(engine, branch=engine.rank == 0 or i != AT)


def killed(stage: int) -> None:
    """Trains until the parent does something."""
    engine = make_engine(stage)
    while engine.global_step < 100_000:
        step(engine)


def raise_in_loss(stage: int) -> None:
    """An error in the model's forward on rank 1."""
    engine = make_engine(stage)
    for i in range(STEPS):
        engine.module.fail = engine.rank == 1 and i == AT  # type: ignore[assignment]
        step(engine)


class _Rows:
    """Rows of numbers; one cannot be read on rank 1, or kills its reader."""

    def __init__(self, kills: bool):
        self.kills = kills

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if ranks.rank() == 1 and row == SampleOrder(64, 1).row(AT * 2 + 1):
            fault()
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the file ends in the middle of this row")
        return {"x": torch.randn(32)}


def raise_in_loader(stage: int, kills: bool = False) -> None:
    """A row that rank 1 cannot read, in a worker process; or the process is killed there, as by the kernel when memory is full."""
    engine = make_engine(stage)
    plan = plan_steps(64, 1, 1, 2, max_steps=STEPS)
    for batches in StepLoader(_Rows(kills), SampleOrder(64, 1), plan, engine.rank, 2, num_workers=1):
        engine.backward(engine(batches[0]["x"]))
        engine.step()


def missing_file(stage: int) -> None:
    """A model's folder from which a file is missing on rank 1."""
    zero.init_distributed()
    source = Path(os.environ["TRIAL"], f"model.{ranks.rank()}")
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    fault()
    build_model(str(source), ds_config=config)


def _folders(trial: Path) -> None:
    """A tiny Llama in shards, twice; the second copy lacks one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256)).save_pretrained(trial / "model.0", max_shard_size="100KB")
    shutil.copytree(trial / "model.0", trial / "model.1")
    sorted((trial / "model.1").glob("*.safetensors"))[1].unlink()


def full_disk(stage: int) -> None:
    """The checkpoint folder of rank 1 is on a disk that is full: a mount that it alone sees."""
    out = Path(os.environ["TRIAL"], "out")
    if os.environ["RANK"] == "1":
        mount_small_disk(out)
    engine = make_engine(stage)
    for i in range(STEPS):
        step(engine)
        if i == AT:
            fault()
            engine.save_checkpoint(out)


def disk_fills_up(stage: int) -> None:
    """The same, found while writing: the check of the free space is told of space that is not there."""
    from bigtrain.checkpoint import save

    save.files.free_bytes = lambda path: 1 << 40
    full_disk(stage)


def mount_small_disk(folder: Path) -> None:
    """A file system of 8 KiB at `folder`, for this process alone (Linux, root)."""
    folder.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x00020000)  # CLONE_NEWNS; os.unshare came with Python 3.12
    libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None)  # MS_REC | MS_PRIVATE: not seen outside
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", ctypes.c_ulong(0), b"size=8k"):
        raise OSError(ctypes.get_errno(), "mount")


def can_mount() -> bool:
    """True where a process may mount."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory() as folder:
            mount_small_disk(Path(folder))
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


# ---------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        title: for the table. body: what each rank runs. signal: sent by the parent to rank `to` at step AT.
        says: what some message must hold, by stage; None: there the run is right, and all ranks end with 0. finished: ranks whose script came to its regular end before, with 0.
    """

    title: str
    body: Callable[[int], None]
    says: dict[int, str | None]
    signal: int | None = None
    to: int = 1
    prepare: Callable[[Path], None] | None = None
    needs_mount: bool = False
    finished: tuple[int, ...] = ()


def _same(text: str) -> dict[int, str | None]:
    return dict.fromkeys(range(4), text)


CASES = {
    "uneven": Case("uneven steps; the shorter rank ends", uneven_steps, _same(r"rank 1.*(end of the|ended while)"), finished=(1,)),
    "uneven_waits": Case(
        "uneven steps; the shorter rank waits elsewhere", uneven_then_waits, _same(r"rank 1.*different numbers of steps")
    ),
    "save": Case("save on rank 0 only", save_on_rank_0, _same(r"rank 0: engine.save_checkpoint\(\)")),
    "save_at_end": Case(
        "save on rank 0 only, the other waits elsewhere", save_on_rank_0_at_the_end, _same(r"rank 1.*waits in engine.save_ch")
    ),
    "evaluate": Case("evaluation on rank 0 only", evaluate_on_rank_0, _same(r"rank 0: engine.evaluate\(\)")),
    "branch": Case(
        "a branch unused on rank 1", branch_on_rank_0,
        {0: None, 1: None, 2: None, 3: r"rank 0 enters module branch.*rank 1 enters module last"},
    ),
    "killed": Case("kill -9 of rank 1", killed, _same(r"rank 1.*ended"), signal=signal.SIGKILL),
    "killed_0": Case("kill -9 of rank 0", killed, _same(r"rank 0.*ended"), signal=signal.SIGKILL, to=0),
    "stopped": Case("SIGSTOP of rank 1", killed, _same(r"rank 1: the process is stopped"), signal=signal.SIGSTOP),
    "stopped_0": Case("SIGSTOP of rank 0", killed, _same(r"rank 0: the process is stopped"), signal=signal.SIGSTOP, to=0),
    "loss": Case("an error in the loss on rank 1", raise_in_loss, _same(r"rank 1.*failed: ValueError: the loss of this rank")),
    "worker": Case(
        "a data worker of rank 1 is killed",
        lambda stage: raise_in_loader(stage, kills=True),
        _same(r"rank 1.*failed: BigtrainError: DataLoader worker .*killed by signal: Killed: usually the kernel's out-of-memory killer"),
    ),
    "loader": Case("an error in the data loader on rank 1", raise_in_loader, _same(r"rank 1.*failed: DataError: .*row")),
    "file": Case(
        "a file missing on rank 1 at load", missing_file, _same(r"rank 1: .*model-0000"), prepare=_folders
    ),
    "disk": Case("a full disk on rank 1", full_disk, _same(r"rank 1: CheckpointError: .*GiB free"), needs_mount=True),
    "disk_fills": Case(
        "a disk that fills up while rank 1 writes", disk_fills_up, _same(r"rank 1: .*No space left"), needs_mount=True
    ),
}  # fmt: skip


# ---------------------------------------------------------------- trials


@dataclass
class Outcome:
    """How a trial went: seconds from the fault to each rank's end (None: never), exit codes, outputs."""

    case: Case
    stage: int
    seconds: list[float | None] = field(default_factory=lambda: [None, None])
    codes: list[int | None] = field(default_factory=lambda: [None, None])
    said: list[str] = field(default_factory=list)
    summary: str = ""

    @property
    def named(self) -> bool:
        """Some rank says which one it was and why."""
        wanted = self.case.says[self.stage]
        return wanted is None or any(re.search(wanted, text, re.DOTALL) for text in self.said)

    @property
    def good(self) -> bool:
        """As promised: all ended in time, with the right kind of code, and the message names rank and cause."""
        right = self.case.says[self.stage] is None
        ended = all(s is not None and s < LIMIT_S for s in self.seconds)
        codes = all((code == 0) is (right or rank in self.case.finished) for rank, code in enumerate(self.codes))
        return ended and self.named and codes


def run(case: Case, stage: int, limit_s: float = 90.0) -> Outcome:
    """One trial."""
    outcome = Outcome(case, stage)
    # Not a TemporaryDirectory: a forked rank that runs its exit functions would remove it.
    trial = Path(tempfile.mkdtemp(prefix="hang-"))
    try:
        if case.prepare:
            case.prepare(trial)
        port = free_port()
        pids = [_fork(case, stage, rank, trial, port) for rank in range(2)]
        try:
            ended = dict(_watch(case, pids, trial, time.time() + limit_s))
        finally:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        fault_at = float((trial / "fault").read_text()) if (trial / "fault").exists() else time.time()
        for rank, (at, code) in ended.items():
            outcome.seconds[rank], outcome.codes[rank] = max(0.0, at - fault_at), code
        outcome.said = [(trial / f"log.{r}").read_text(errors="replace") for r in range(2)]
        found = [p for p in trial.rglob("summary.txt")]
        outcome.summary = found[0].read_text() if found else ""
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    return outcome


def _watch(case: Case, pids: list[int], trial: Path, end: float) -> Iterator[tuple[int, tuple[float, int]]]:
    """(rank, (when, exit code)) as ranks end; sends the case's signal once training runs."""
    left, sent = dict(enumerate(pids)), case.signal is None
    while left and time.time() < end:
        steps = [trial / f"step.{r}" for r in range(2)]
        if not sent and all(p.exists() and int(p.read_text() or 0) >= AT for p in steps):
            sent = True
            (trial / "fault").write_text(str(time.time()))
            os.kill(pids[case.to], case.signal)  # type: ignore[arg-type]
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[rank]
                yield rank, (time.time(), os.waitstatus_to_exitcode(status))
        time.sleep(0.02)


def _fork(case: Case, stage: int, rank: int, trial: Path, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(trial / f"log.{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(trial)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), TRIAL=str(trial),
        )  # fmt: skip
        case.body(stage)
        code = 0
    except BaseException:
        with contextlib.suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    # As an interpreter ends: threads, exit functions. What a fork has from its parent is not cleaned up.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---------------------------------------------------------------- the table


def row_of(outcome: Outcome) -> str:
    """The outcome as a row of the table."""
    right = outcome.case.says[outcome.stage] is None
    named = "not needed: the run goes on and is right" if right else "yes" if outcome.named else "NO"
    return line(outcome.case.title, outcome.stage, outcome.seconds, outcome.codes, named)


def main(argv: list[str] | None = None) -> int:
    """Run the cases asked for; 0 if all went as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--stages", nargs="*", type=int, default=[2, 3])
    parser.add_argument("--table", help="file for the table")
    parser.add_argument("--verbose", action="store_true", help="print what ranks said")
    args = parser.parse_args(argv)
    rows, fine = kept_rows(args.table), True
    for name in args.cases:
        for stage in args.stages if not CASES[name].needs_mount or can_mount() else ():
            outcome = run(CASES[name], stage)
            rows[CASES[name].title, str(stage)] = row_of(outcome)
            fine &= outcome.good
            if args.table:
                write_table(Path(args.table), rows, [case.title for case in CASES.values()], HANG_S)
            print(row_of(outcome), "" if outcome.good else "   <-- not as promised", flush=True)
            if args.verbose or not outcome.good:
                print("\n".join(f"--- rank {r}:\n{text}" for r, text in enumerate(outcome.said)), outcome.summary, flush=True)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
