"""Trains a tiny model on two ranks, saves every step, and dies where it is told to: `python -m tests.ranks.crash`.

One process imports everything and forks two ranks for each trial, so that a trial costs seconds. In a trial the ranks train and
save beside training; one of them, or both, are killed with SIGKILL at a numbered disk operation or at a random moment. What is
left must be a whole checkpoint (or none), and going on from it must end bit for bit where the unbroken run ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
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
from bigtrain.checkpoint import live, store
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.verify import verify
from bigtrain.engine import Engine
from bigtrain.models import build_model
from tests.ranks.tiny import TinyLM, config, rows

WORLD, STEPS, KEEP, SAMPLES = 2, 5, 2, 4
SURVIVOR_S = 30.0  # a rank whose peer died must have ended by then


@dataclass
class Kill:
    """Where to die: before disk operation `operation` of rank `rank` (counted from 0), or `delay_s` after the start."""

    rank: int
    both: bool = False
    operation: int | None = None
    delay_s: float | None = None
    where: str = "random moment"


class DeadlyDisk(Disk):
    """Counts and logs the disk operations, and kills at one of them."""

    def __init__(self, folder: Path, kill: Kill | None):
        self.kill, self.folder, self.count = kill, folder, 0
        self.log = open(folder / f"operations.{ranks.rank()}", "w")  # noqa: SIM115

    def step(self, operation: str, path: Path) -> None:
        kill = self.kill
        if kill and kill.rank == ranks.rank() and kill.operation == self.count:
            if kill.both:
                os.kill(int((self.folder / f"pid.{1 - kill.rank}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        self.log.write(f"{operation} {path.name.split('.')[-1] if path.name.startswith('.') else path.name}\n")
        self.log.flush()


def state_hash(engine: Engine) -> str:
    """Of everything that a checkpoint holds, on this rank."""
    h = xxhash.xxh3_64()
    for s in live.slices_of(engine):
        h.update(f"{s.kind}/{s.param}/{s.start}".encode())
        h.update(s.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def train(folder: Path, root: Path, stage: int, kill: Kill | None, save: bool) -> None:
    """From the newest checkpoint in `root`, or from the start, to step STEPS; writes losses and the final state's hash."""
    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    model = build_model(lambda: TinyLM(width=34, blocks=1, dropout=0.1), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, total_steps=20, hang_s=None)
    engine.checkpoints.disk = DeadlyDisk(folder, kill)
    if store.steps(root):
        engine.load_checkpoint(root)
    first = engine.global_step
    (folder / f"ready.{ranks.rank()}").touch()
    losses = {}
    while engine.global_step < STEPS:
        result = engine.train_step(rows(engine.global_step, SAMPLES)[engine.rank :: WORLD])
        losses[result.step] = result.loss
        if save:
            engine.save_checkpoint(root, keep_last=KEEP, wait=False)
    engine.checkpoints.wait()
    done = {"first": first, "losses": losses, "state": state_hash(engine), "rng": torch.get_rng_state().tolist()[:64]}
    (folder / f"done.{ranks.rank()}").write_text(json.dumps(done))
    (folder / "modules").write_text("\n".join(sorted(sys.modules)))
    engine.close()


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
    import threading

    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def start(folder: Path, root: Path, stage: int, kill: Kill | None, save: bool) -> dict[int, int]:
    """Fork the ranks; rank -> process id."""
    folder.mkdir(parents=True)
    pids = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            rank_process(rank, folder, root, stage, kill, save)
        pids[rank] = pid
    return pids


def import_all(names: list[str]) -> None:
    """What a rank imported on the way, so that the next ones are forked with it: halves the time of a trial."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


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


def trial(base: Path, stage: int, kill: Kill, reference: list[dict]) -> dict:
    """Run, kill, look, go on; what was seen, with `wrong` listing what should not be."""
    root, folder, wrong = base / "saved", base / "killed", []
    pids = start(folder, root, stage, kill, True)
    began = time.monotonic()
    if kill.delay_s is not None:
        while not all((folder / f"ready.{r}").exists() for r in range(WORLD)):
            time.sleep(0.002)
        time.sleep(kill.delay_s)
        for rank in range(WORLD) if kill.both else (kill.rank,):
            os.kill(pids[rank], signal.SIGKILL)
    ended = wait(pids, SURVIVOR_S)
    times = [at for _, at in ended.values()]
    survivor_s = max(times) - min(times)
    other = 1 - kill.rank
    status, said = ended[other][0], (folder / f"said.{other}").read_text()
    killed = ended[kill.rank][0] == -signal.SIGKILL
    if not kill.both and killed:
        if status is None:
            wrong.append(f"the survivor did not end within {SURVIVOR_S:.0f} s")
        elif status == 1 and f"rank {kill.rank}" not in said:
            wrong.append(f"the survivor does not name rank {kill.rank}: {said[-300:]}")
        elif status == 0 and STEPS not in store.steps(root):  # else the kill came when all was done
            wrong.append("the survivor ended as if all were well")
    if kill.operation is not None and not killed:
        wrong.append("never reached")
    known = store.steps(root)
    for step in known:
        wrong += verify(store.folder_for(root, step))[1]
    again = run_whole(base / "resumed", root, stage, True)
    for mine, whole in zip(again, reference):
        if mine["first"] != max(known, default=0):
            wrong.append(f"went on from step {mine['first']}, the newest is {known}")
        if any(loss != whole["losses"][step] for step, loss in mine["losses"].items()) or mine["state"] != whole["state"]:
            wrong.append("the resumed run differs from the unbroken one")
        if mine["losses"] and mine["rng"] != whole["rng"]:
            wrong.append("random state differs")
    names = sorted(p.name for p in root.iterdir())
    if names != sorted(f"checkpoint-{s}" for s in (STEPS - 1, STEPS)):
        wrong.append(f"left over: {names}")
    return {
        **asdict(kill), "stage": stage, "newest": max(known, default=None), "survivor_s": survivor_s,
        "seconds": time.monotonic() - began, "wrong": wrong,
    }  # fmt: skip


def points(operations: list[list[str]], full: bool, seed: int, moments: int, duration_s: float) -> list[Kill]:
    """The disk operations to die at, and random moments. Of the many writes of tensors only some, unless `full`."""
    picked = []
    for rank, names in enumerate(operations):
        seen: Counter[str] = Counter()
        starts = [i for i, n in enumerate(names) if n.startswith("create") and n.endswith("writing")]
        for i, name in enumerate(names):
            seen[name] += 1
            number = sum(s <= i for s in starts)
            data_write = name.startswith("write") and name.endswith("safetensors")
            if data_write and seen[name] % (16 if full else 29) != 1:
                continue
            if (full and number in (1, 3)) or (
                number == 3 and (i % 4 == rank or name.startswith(("rename", "remove")) or "COMMIT" in name)
            ):
                where = f"save {number}, {name}"
                picked += [Kill(rank, both, i, where=where) for both in ((False, True) if full else (bool(i % 2),))]
    chance = random.Random(seed)
    for i in range(moments):
        picked.append(Kill(i % 2, i % 3 == 2, delay_s=chance.uniform(0, duration_s)))
    return picked


def table(answers: list[dict], planned: int) -> str:
    """Markdown: one row for each kind of point; `planned` says how many trials there are."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for a in answers:
        who = "both ranks" if a["both"] else f"rank {a['rank']}"
        where = a["where"].split(", ", 1)[-1].replace("writing", "the unfinished folder").replace("saved", "the root")
        groups.setdefault(
            (where.replace("checkpoint-3", "checkpoint-N").replace("checkpoint-1", "checkpoint-N"), who), []
        ).append(a)
    whole = sum(not a["wrong"] for a in answers)
    slowest = max((a["survivor_s"] for a in answers if not a["both"]), default=0.0)
    lines = [
        f"SIGKILL on {WORLD} ranks that save every step beside training (`python -m tests.ranks.crash DIR --full --moments 60`):",
        f"{len(answers)} kills, drawn from {planned}; in {whole} of them the newest visible checkpoint was whole and the resumed run ended bit for bit where",
        f"the unbroken one did (losses, state, random numbers). The surviving rank ended after {slowest:.1f} s at most and named the other.",
        "",
        "| killed before | who | kills | whole and bit-exact | survivor ended after (s, most) |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for (where, who), rows_ in sorted(groups.items()):
        good = sum(not a["wrong"] for a in rows_)
        longest = "" if who == "both ranks" else f"{max(a['survivor_s'] for a in rows_):.2f}"
        lines.append(f"| {where} | {who} | {len(rows_)} | {good} of {len(rows_)} | {longest} |")
    return "\n".join(lines)


def main(base: Path, full: bool, moments: int, seed: int, limit_s: float) -> tuple[list[dict], int]:
    """All trials in a random order, as many as fit into `limit_s`; their answers, and how many trials there are."""
    end = time.monotonic() + limit_s
    answers = []
    references, operations, duration = {}, {}, {}
    stages = (3, 2) if full else (3,)
    for stage in stages:
        references[stage] = run_whole(base / f"unbroken-{stage}", base / f"unused-{stage}", stage, False)
        import_all((base / f"unbroken-{stage}" / "modules").read_text().splitlines())
        whole = base / f"counted-{stage}"
        run_whole(whole, base / "counted" / str(stage) / "saved", stage, True)
        operations[stage] = [(whole / f"operations.{r}").read_text().splitlines() for r in range(WORLD)]
        duration[stage] = (whole / "done.0").stat().st_mtime - (whole / "ready.0").stat().st_mtime
    trials = []
    for stage in stages:
        kills = points(operations[stage], full, seed + stage, moments // len(stages), duration[stage])
        trials += [(stage, kill) for kill in kills if stage == 3 or kill.operation is None]
    random.Random(seed).shuffle(trials)
    for number, (stage, kill) in enumerate(trials):
        if time.monotonic() > end:
            print(f"{len(trials) - number} of {len(trials)} trials were not run: out of time", file=sys.stderr)
            break
        answers.append(trial(base / str(number), stage, kill, references[stage]))
        shutil.rmtree(base / str(number))
        print(json.dumps(answers[-1]), flush=True)
    return answers, len(trials)


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path, help="an empty folder to work in")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--moments", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit_s", type=float, default=7200.0, help="begin no trial after so long")
    parser.add_argument("--table", type=Path, help="write the table here")
    args = parser.parse_args()
    results, planned = main(args.base, args.full, args.moments, args.seed, args.limit_s)
    if args.table:
        args.table.write_text(table(results, planned) + "\n")
    sys.exit(any(a["wrong"] for a in results))
