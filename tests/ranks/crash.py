"""Trains a tiny model on two ranks, saves every step, and fails where it is told to: `python -m tests.ranks.crash`.

One process imports everything and forks two ranks for each trial, so that a trial costs a second of computing; several trials run
side by side, since most of their time is waiting. In a trial the ranks train and save beside training; one of them, or both, are
killed with SIGKILL at a numbered disk operation or at a random moment, or the disk of one fails there (full, I/O error, read-only).
What is left must be a whole checkpoint (or none), going on from it must end bit for bit where the unbroken run ended, and a failed
disk must not disturb training: the run goes on to the same end, and says on every rank what failed.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import xxhash

from bigtrain import ranks, zero
from bigtrain.checkpoint import confirm, live, load, store
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.save import Saver
from bigtrain.checkpoint.verify import verify
from bigtrain.diagnostics.pages import put_table
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from tests.ranks.tiny import TinyLM, config, rows

WORLD, STEPS, KEEP, SAMPLES = 2, 5, 2, 4
SURVIVOR_S = float(os.environ.get("BIGTRAIN_CRASH_SURVIVOR_S", "30"))  # a rank whose peer died must have ended by then


LOADING = "SIGKILL while loading"
DISK_FAULTS = {
    "full disk": (errno.ENOSPC, True),
    "I/O error": (errno.EIO, False),
    "read-only disk": (errno.EROFS, True),
}  # name -> (code, whether the operations after it fail too)


@dataclass
class Fault:
    """What goes wrong, before disk operation `operation` of rank `rank` (counted from 0), or `delay_s` after the start.

    `kind` is "SIGKILL" (of `both` ranks or one), `LOADING` (killed while it reads a checkpoint) or a key of `DISK_FAULTS`.
    """

    rank: int
    both: bool = False
    operation: int | None = None
    delay_s: float | None = None
    where: str = "random moment"
    kind: str = "SIGKILL"


class FaultyDisk(Disk):
    """Counts and logs the disk operations; kills or fails at one of them."""

    def __init__(self, folder: Path, fault: Fault | None):
        self.fault, self.folder, self.count = fault, folder, 0
        self.log = open(folder / f"operations.{ranks.rank()}", "w")  # noqa: SIM115

    def step(self, operation: str, path: Path) -> None:
        fault, number = self.fault, self.count
        self.count += 1
        self.log.write(f"{operation} {path.name.split('.')[-1] if path.name.startswith('.') else path.name}\n")
        self.log.flush()
        if fault is None or fault.rank != ranks.rank() or fault.operation is None:
            return
        if fault.kind in DISK_FAULTS:
            code, stays = DISK_FAULTS[fault.kind]
            if number == fault.operation or (stays and number > fault.operation and operation != "remove"):
                raise OSError(code, os.strerror(code))
        elif number == fault.operation:
            if fault.both:
                os.kill(int((self.folder / f"pid.{1 - fault.rank}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def state_hash(engine: Engine) -> str:
    """Of everything that a checkpoint holds, on this rank."""
    h = xxhash.xxh3_64()
    for s in live.slices_of(engine):
        h.update(f"{s.kind}/{s.param}/{s.start}".encode())
        h.update(s.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def train(folder: Path, root: Path, stage: int, fault: Fault | None, save: bool) -> None:
    """From the newest checkpoint in `root`, or from the start, to step STEPS; writes losses, errors and the final state's hash."""
    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    model = build_model(lambda: TinyLM(width=34, blocks=1, dropout=0.1), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, total_steps=20, hang_s=None)
    engine.checkpoints.disk = FaultyDisk(folder, fault)
    Saver.always_imaged = ranks.rank() == 1  # as ranks whose state lies on a GPU do
    if fault is not None and fault.kind == LOADING and fault.rank == ranks.rank():
        die_while_reading()
    if store.steps(root):
        engine.load_checkpoint(root)
    first = engine.global_step
    (folder / f"ready.{ranks.rank()}").touch()
    losses, errors = {}, []
    fails = fault is not None and fault.kind in DISK_FAULTS
    while engine.global_step < STEPS:
        result = engine.train_step(rows(engine.global_step, SAMPLES)[engine.rank :: WORLD])
        losses[result.step] = result.loss
        if save:
            with told(errors, fails):
                engine.save_checkpoint(root, keep_last=KEEP, wait=False)
    with told(errors, fails):
        engine.checkpoints.wait()
    done = {"first": first, "losses": losses, "state": state_hash(engine), "errors": errors}
    done["rng"] = torch.get_rng_state().tolist()[:64]
    (folder / f"done.{ranks.rank()}").write_text(json.dumps(done))
    (folder / "modules").write_text("\n".join(sorted(sys.modules)))
    engine.close()


def die_while_reading() -> None:
    """Be killed in the first thread that reads."""

    def read(*_args):
        os.kill(os.getpid(), signal.SIGKILL)

    load._read = read


@contextlib.contextmanager
def told(errors: list[str], fails: bool):
    """Where the disk is to fail, note what is said and go on."""
    try:
        yield
    except BigtrainError as error:
        if not fails:
            raise
        errors.append(str(error))


def rank_process(rank: int, folder: Path, *args) -> None:
    """Body of a forked rank; never returns."""
    code = 1
    try:
        (folder / f"pid.{rank}").write_text(str(os.getpid()))
        said = os.open(folder / f"said.{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD), LOCAL_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
        )  # fmt: skip
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
        zero.init_distributed()
        ranks.control_group()
        confirm.CONNECT_TIMEOUT_S = 5.0  # gloo tries five times for a rank that is killed while it connects
        train(folder, *args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        wait_for_writer()
        sys.stderr.flush()
        os._exit(code)


def wait_for_writer() -> None:
    """As a real interpreter does at its end: threads that are not daemons are joined."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def start(folder: Path, root: Path, stage: int, fault: Fault | None, save: bool) -> dict[int, int]:
    """Fork the ranks; rank -> process id."""
    folder.mkdir(parents=True)
    pids = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            rank_process(rank, folder, root, stage, fault, save)
        pids[rank] = pid
    return pids


def import_all(names: list[str]) -> None:
    """What a rank imported on the way, so that the next ones are forked with it: halves the time of a trial."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collecting in a forked rank would touch, and so copy, everything that was imported: two thirds of its time


def wait(pids: dict[int, int], limit_s: float) -> dict[int, tuple[int, float]]:
    """rank -> (exit status, when); what still runs `limit_s` after the first end, or at all, is killed and has status None."""
    ended: dict[int, tuple[int | None, float]] = {}
    end = time.monotonic() + 120
    while len(ended) < len(pids) and time.monotonic() < end:
        for rank, pid in pids.items():
            if rank not in ended and (got := os.waitpid(pid, os.WNOHANG))[0]:
                ended[rank] = (os.waitstatus_to_exitcode(got[1]), time.monotonic())
                if len(ended) == 1:
                    end = min(end, time.monotonic() + limit_s)
        time.sleep(0.005)
    for rank, pid in pids.items():
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            ended[rank] = (None, time.monotonic())
    return ended


def run_whole(folder: Path, root: Path, stage: int, save: bool) -> list[dict]:
    """A run that is not disturbed; what each rank wrote at the end."""
    ended = wait(start(folder, root, stage, None, save), 60)
    if any(status != 0 for status, _ in ended.values()):
        raise AssertionError("".join((folder / f"said.{r}").read_text() for r in range(WORLD)))
    return [json.loads((folder / f"done.{r}").read_text()) for r in range(WORLD)]


def trial(base: Path, stage: int, fault: Fault, reference: list[dict]) -> dict:
    """Run, fail, look, go on; what was seen, with `wrong` listing what should not be."""
    root, folder, wrong = base / "saved", base / "failed", []
    if fault.kind == LOADING:
        shutil.copytree(base.parent / "counted" / f"{stage}-0" / "saved", root)
    pids = start(folder, root, stage, fault, True)
    began = time.monotonic()
    if fault.delay_s is not None:
        while not all((folder / f"ready.{r}").exists() for r in range(WORLD)):
            time.sleep(0.002)
        time.sleep(fault.delay_s)
        for rank in range(WORLD) if fault.both else (fault.rank,):
            os.kill(pids[rank], signal.SIGKILL)
    ended = wait(pids, SURVIVOR_S)
    times = [at for _, at in ended.values()]
    survivor_s = max(times) - min(times)
    if fault.kind in DISK_FAULTS:
        wrong += after_error(folder, fault, ended, reference)
    else:
        wrong += after_kill(folder, root, fault, ended)
    known = store.steps(root)
    if not known and fault.kind in DISK_FAULTS:
        wrong.append("no checkpoint is left")
    for step in known:
        wrong += verify(store.folder_for(root, step))[1]
    again = run_whole(base / "resumed", root, stage, True)
    for mine, whole in zip(again, reference):
        if mine["first"] != max(known, default=0):
            wrong.append(f"went on from step {mine['first']}, the newest is {known}")
        wrong += different(mine, whole, "the resumed run")
    names = sorted(p.name for p in root.iterdir())
    if any(mine["losses"] for mine in again):  # it saved: the next saver clears what a dead one left half deleted
        expected = sorted(f"checkpoint-{s}" for s in (STEPS - 1, STEPS))
        hidden = any(name.startswith(".") for name in names)
        if hidden or (names != expected and fault.kind not in DISK_FAULTS):
            wrong.append(f"left over: {names}")
    return {
        **asdict(fault), "stage": stage, "newest": max(known, default=None), "survivor_s": survivor_s,
        "seconds": time.monotonic() - began, "wrong": wrong,
    }  # fmt: skip


def different(mine: dict, whole: dict, what: str) -> list[str]:
    """How a run differs from the unbroken one."""
    wrong = []
    if any(loss != whole["losses"][step] for step, loss in mine["losses"].items()) or mine["state"] != whole["state"]:
        wrong.append(f"{what} differs from the unbroken one")
    if mine["losses"] and mine["rng"] != whole["rng"]:
        wrong.append(f"{what}: random state differs")
    return wrong


def after_kill(folder: Path, root: Path, fault: Fault, ended: dict) -> list[str]:
    """What is wrong with the end of the rank that was not killed."""
    other, wrong = 1 - fault.rank, []
    status, said = ended[other][0], (folder / f"said.{other}").read_text()
    killed = ended[fault.rank][0] == -signal.SIGKILL
    if not fault.both and killed:
        if status is None:
            wrong.append(f"the survivor did not end within {SURVIVOR_S:.0f} s")
        elif status == 1 and f"rank {fault.rank}" not in said:
            wrong.append(f"the survivor does not name rank {fault.rank}: {said[-300:]}")
        elif status == 0 and (STEPS not in store.steps(root) or fault.kind == LOADING):  # else it came when all was done
            wrong.append("the survivor ended as if all were well")
    if (fault.operation is not None or fault.kind == LOADING) and not killed:
        wrong.append("never reached")
    return wrong


def after_error(folder: Path, fault: Fault, ended: dict, reference: list[dict]) -> list[str]:
    """What is wrong with a run whose disk failed: it must go on to the end, undisturbed, and say on every rank what failed."""
    if any(status != 0 for status, _ in ended.values()):
        return [
            f"rank {r} ended with {s}: {(folder / f'said.{r}').read_text()[-400:]}" for r, (s, _) in ended.items() if s != 0
        ]
    wrong, text = [], os.strerror(DISK_FAULTS[fault.kind][0])
    whole_already = "is saved, but afterwards" in (folder / "said.0").read_text()  # it failed after the rename
    for rank, whole in enumerate(reference):
        mine = json.loads((folder / f"done.{rank}").read_text())
        wrong += different(mine, whole, "the run with the failed disk")
        named = [e for e in mine["errors"] if text in e and (rank == fault.rank or f"rank {fault.rank}" in e)]
        if not whole_already and not named:
            wrong.append(f"rank {rank} does not say that rank {fault.rank} met {text!r}: {mine['errors']}")
    return wrong


def points(operations: list[list[str]], full: bool, seed: int, moments: int, duration_s: float) -> list[Fault]:
    """Every disk operation of one save (the third) and of the first, on either rank, and random moments."""
    picked = []
    for rank, names in enumerate(operations):
        seen: Counter[tuple[int, str]] = Counter()
        starts = [i for i, n in enumerate(names) if n.startswith("create") and n.endswith("writing")]
        for i, name in enumerate(names):
            number = sum(s <= i for s in starts)
            seen[number, name] += 1
            where = f"save {number}, {name}" + (f" ({seen[number, name]})" if seen[number, name] > 1 else "")
            if full and number in (1, 3):
                picked += [Fault(rank, both, i, where=where) for both in (False, True)]
            if full and number == 3:
                picked += [Fault(rank, operation=i, where=where, kind=kind) for kind in DISK_FAULTS]
            if not full and number == 3 and (i % 4 == rank or name.startswith(("rename", "remove")) or "COMMIT" in name):
                kinds = ["SIGKILL", "SIGKILL", *DISK_FAULTS]
                picked.append(Fault(rank, i % 5 == 1, i, where=where, kind=kinds[i % 5]))
    picked += [Fault(rank, where="load, the first read", kind=LOADING) for rank in range(WORLD)]
    chance = random.Random(seed)
    for i in range(moments):
        picked.append(Fault(i % 2, i % 3 == 2, delay_s=chance.uniform(0, duration_s)))
    return picked


def table(answers: list[dict], planned: int) -> str:
    """Markdown: one row for each kind of point; `planned` says how many trials there are."""
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for a in answers:
        who = "both ranks" if a["both"] else f"rank {a['rank']}"
        where = a["where"].split(", ", 1)[-1].replace("writing", "the unfinished folder").replace("saved", "the root")
        for step in (1, 3):
            where = where.replace(f"checkpoint-{step}", "checkpoint-N")
        groups.setdefault((a["kind"], where, who), []).append(a)
    kills = [a for a in answers if a["kind"] not in DISK_FAULTS]
    slowest = max((a["survivor_s"] for a in kills if not a["both"]), default=0.0)
    lines = [
        f"Two ranks save every step beside training (`python -m tests.ranks.crash DIR --full --moments 200`): {len(answers)} trials of",
        f"{planned}, {len(kills)} of them kills, {sum(a['delay_s'] is not None for a in kills)} at random moments. In",
        f"{sum(not a['wrong'] for a in answers)} the newest visible checkpoint was whole and the resumed run ended bit for bit where the unbroken one did (losses,",
        f"state, random numbers). A surviving rank ended after {slowest:.1f} s at most and named the other. Where a disk failed, training",
        "went on undisturbed to the same end, and every rank said what failed.",
        "",
        "| what | before | on | trials | whole and bit-exact | survivor ended after (s, most) |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (kind, where, who), rows_ in sorted(groups.items()):
        good = sum(not a["wrong"] for a in rows_)
        alone = kind not in DISK_FAULTS and who != "both ranks"
        longest = f"{max(a['survivor_s'] for a in rows_):.2f}" if alone else ""
        lines.append(f"| {kind} | {where} | {who} | {len(rows_)} | {good} of {len(rows_)} | {longest} |")
    return "\n".join(lines)


def side_by_side(base: Path, jobs: list, answer, workers: int, end: float) -> list:
    """`answer(job)` of every job, by forked workers that take turns; those that did not begin before `end` are left out."""
    pids = []
    for worker in range(workers):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with open(base / f"answers.{worker}", "w") as file:
                    for job in jobs[worker::workers]:
                        if time.monotonic() < end:
                            file.write(json.dumps(answer(job)) + "\n")
                            file.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise AssertionError(f"workers ended with {codes}")
    return [json.loads(line) for w in range(workers) for line in (base / f"answers.{w}").read_text().splitlines()]


def main(base: Path, full: bool, moments: int, seed: int, limit_s: float, workers: int) -> tuple[list[dict], int]:
    """All trials in a random order, as many as fit into `limit_s`; their answers, and how many trials there are."""
    end = time.monotonic() + limit_s
    references, trials = {}, []
    import_all([])
    stages = (3, 2) if full else (3,)
    for stage in stages:
        references[stage] = run_whole(base / f"unbroken-{stage}", base / f"unused-{stage}", stage, False)
        import_all((base / f"unbroken-{stage}" / "modules").read_text().splitlines())

        def counted(
            worker: int, stage: int = stage
        ) -> float:  # as crowded as the trials will be, so that moments fall into the run
            whole = base / f"counted-{stage}-{worker}"
            run_whole(whole, base / "counted" / f"{stage}-{worker}" / "saved", stage, True)
            return (whole / "done.0").stat().st_mtime - (whole / "ready.0").stat().st_mtime

        duration_s = min(side_by_side(base, list(range(workers)), counted, workers, end))
        operations = [(base / f"counted-{stage}-0" / f"operations.{r}").read_text().splitlines() for r in range(WORLD)]
        faults = points(operations, full, seed + stage, moments // len(stages), duration_s)
        trials += [(i, stage, f) for i, f in enumerate(faults) if stage == 3 or f.operation is None]
    random.Random(seed).shuffle(trials)

    def one(job: tuple[int, int, Fault]) -> dict:
        number, stage, fault = job
        folder = base / f"{stage}-{number}"
        answered = trial(folder, stage, fault, references[stage])
        shutil.rmtree(folder)
        print(json.dumps(answered), flush=True)
        return answered

    answers = side_by_side(base, trials, one, workers, end)
    if len(answers) < len(trials):
        print(f"{len(trials) - len(answers)} of {len(trials)} trials were not run: out of time", file=sys.stderr)
    return answers, len(trials)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path, help="an empty folder to work in")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--moments", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit_s", type=float, default=7200.0, help="begin no trial after so long")
    parser.add_argument("--workers", type=int, default=4, help="trials side by side")
    parser.add_argument("--table", type=Path, help="write the table here")
    args = parser.parse_args()
    results, planned = main(args.base, args.full, args.moments, args.seed, args.limit_s, args.workers)
    if args.table:
        put_table(args.table, table(results, planned))
    sys.exit(any(a["wrong"] for a in results))
