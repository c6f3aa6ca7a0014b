"""Checkpoints beside training on one GPU: what training waits, what GPU memory does, what steps lose. One JSON line.

    python launch/bench_checkpoint_gpu.py --model preset:llama-3b --optim adamw_split_8bit --dir /tmp/saves
    python launch/bench_checkpoint_gpu.py --model preset:llama-8b --optim adamw_split_8bit --micro_batch 2 --saves training at_once

Random tokens, activation checkpointing, liger-kernel where it is installed. After `--warmup` steps and `--steps` timed ones, one
save after the other, each as `save_checkpoint(wait=False)` with training going on until it is on disk:

    training   the next update comes after a forward and backward, as in training. The host buffers of the first save are made
               beside the steps before it, as launch/train.py has it done; with `--unprepared`, by the first save.
    at_once    the next update is due at once: training waits for the whole copy. The worst case, which no training loop has.

Of each: `stall_s`, seconds that the training thread stood still (the call, and its wait before the update), against `floor_s`,
the bytes on the GPU over the speed of a pinned copy measured in this process (`floor_54_s`: over 54 GB/s); `stall_of_steps_s`,
that and what the first step beside the save took longer, in which the GPU's update waits for the copy; what `memory_allocated`
was before, in every step during, and after; its peak against that of steps without a save; the median step beside the writer
against those before and after (`lost`), the same of means (`lost_of_mean`), both without the first step, which has the wait for
the copy in it; and with all in it (`lost_with_stall`). `slowest_beside`: seconds of the slowest steps and their number in the
save. Then the load, from disk, and a comparison of samples of the state with what they were when it was saved. On a machine
without a GPU everything runs as well, on the host.

`processor` tells of each busy thread its seconds in user and system mode a step and how often it waited and was taken off its
processor. A thread that waits for the GPU computes all the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from measuring import card, resident, rounded, settled

from bigtrain import ranks
from bigtrain.checkpoint import hashing, live
from bigtrain.checkpoint.snapshot import page_locked
from bigtrain.engine import Engine
from bigtrain.kernels.attach import use_liger
from bigtrain.models import build_model, enable_activation_checkpointing

Batch = dict[str, torch.Tensor]
SAMPLE_ELEMS = 1 << 16
SAMPLES = 64
D2H_BYTES_S = 54e9  # an H100's pinned copies, issue and docs/results


def make_engine(args: argparse.Namespace) -> tuple[Engine, list[Batch]]:
    """The engine, and the one micro batch that every step trains on."""
    overrides: dict[str, Any] = {key: int(value) for key, value in (pair.split("=") for pair in args.override)}
    model = build_model(args.model, ds_config=args.ds_config, **overrides)
    use_liger(model)
    enable_activation_checkpointing(model)
    engine = Engine(
        model, ds_config=args.ds_config, optimizer=args.optim, learning_rate=1e-5, micro_batch=args.micro_batch, accumulation=1,
        hang_s=None,
    )  # fmt: skip
    config: Any = model.config
    ids = torch.randint(config.vocab_size, (args.micro_batch, args.seq_len))
    return engine, [{"input_ids": ids, "labels": ids.clone()}]


def on_gpu() -> bool:
    """Whether there is one."""
    return torch.cuda.is_available()


def allocated() -> int:
    """Bytes of GPU memory in use by tensors; 0 without a GPU."""
    return torch.cuda.memory_allocated() if on_gpu() else 0


def peak(restart: bool = False) -> int:
    """The most that `allocated` was since the last restart."""
    if not on_gpu():
        return 0
    found = torch.cuda.max_memory_allocated()
    if restart:
        torch.cuda.reset_peak_memory_stats()
    return found


def pinned_copy_bytes_s(nbytes: int = 1 << 30, repeats: int = 5) -> float | None:
    """Speed of copies from the GPU to page-locked memory in requests of 16 MiB; the GPU memory is given back. None without a GPU."""
    if not on_gpu():
        return None
    source, locked = torch.empty(nbytes, dtype=torch.uint8, device="cuda"), page_locked(nbytes)
    pairs = list(zip(locked.tensors["bytes"].split(16 << 20), source.split(16 << 20)))
    best = 0.0
    for _ in range(repeats):
        begin = settled()
        for there, here in pairs:
            there.copy_(here, non_blocking=True)
        best = max(best, nbytes / (settled() - begin))
    return best


class Threads:
    """Processor time of this process's threads between two moments: whether training computes longer beside the writer, or waits."""

    def __init__(self) -> None:
        self._before, self._all = self._now(), self._process()
        self._machine, self._begin = self._taken(), time.perf_counter()

    @staticmethod
    def _now() -> dict[str, tuple[float, ...]]:
        """Thread -> (user seconds, system seconds, times it waited, times it was taken off its processor)."""
        found = {}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # one that has just ended
                words = (task / "stat").read_text().rpartition(")")[2].split()
                lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                switches = [int(lines[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary")]
                user_s, system_s = (int(word) / os.sysconf("SC_CLK_TCK") for word in words[11:13])
                found[task.name] = (user_s, system_s, *switches)
        return found

    @staticmethod
    def _process() -> tuple[float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime, used.ru_stime

    @staticmethod
    def _taken() -> list[float]:
        """Seconds of all processors in interrupts, in what follows on them, and taken by the host."""
        return [int(word) / os.sysconf("SC_CLK_TCK") for word in Path("/proc/stat").read_text().split()[6:9]]

    @staticmethod
    def _names() -> dict[str, str]:
        named = {str(thread.native_id): thread.name for thread in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                named.setdefault(task.name, (task / "comm").read_text().strip())
        return named

    def since(self) -> dict[str, Any]:
        """Of the busiest threads, and of those that have ended meanwhile together: seconds and switches; and what the machine took."""
        wall, names = time.perf_counter() - self._begin, self._names()
        rows: list[tuple[str, float, float, int, int]] = []
        alive = [0.0, 0.0]
        for task, now in self._now().items():
            user, system, waits, switches = (a - b for a, b in zip(now, self._before.get(task, (0.0, 0.0, 0, 0))))
            rows.append((names.get(task, task), round(user, 2), round(system, 2), int(waits), int(switches)))
            alive = [alive[0] + user, alive[1] + system]
        rows.sort(key=lambda row: -(row[1] + row[2]))
        ended = [round(a - b - c, 2) for a, b, c in zip(self._process(), self._all, alive)]
        machine = dict(zip(("irq_s", "softirq_s", "stolen_s"), (a - b for a, b in zip(self._taken(), self._machine))))
        return {"wall_s": wall, "threads": rows[:6], "ended_threads": ended, **machine}


class Training:
    """Steps of one engine on one batch, with what each took and left allocated."""

    def __init__(self, engine: Engine, batch: list[Batch]):
        self._engine, self._batch = engine, batch
        self.seconds: list[float] = []
        self.allocated: list[int] = []

    def step(self) -> None:
        """One; a step ends with a wait for the GPU's gradient norm, so that its seconds are those of the GPU in the long run."""
        begin = time.perf_counter()
        self._engine.train_step(self._batch)
        self.allocated.append(allocated())
        self.seconds.append(time.perf_counter() - begin)

    def steps(self, count: int) -> tuple[float, int]:
        """(median seconds, peak of GPU memory) of `count` steps."""
        settled()
        peak(restart=True)
        first = len(self.seconds)
        for _ in range(count):
            self.step()
        settled()
        return statistics.median(self.seconds[first:]), peak()


def samples(engine: Engine) -> list[torch.Tensor]:
    """Pieces of the state, on the host: of slices spread over all of it, the last among them."""
    slices = [s for s in live.slices_of(engine) if s.tensor.numel()]
    chosen = slices[:: max(1, len(slices) // SAMPLES)] + slices[-1:]
    return [s.tensor[-SAMPLE_ELEMS:].cpu().clone() for s in chosen]


def state_bytes(engine: Engine) -> tuple[int, int]:
    """(bytes on the GPU, bytes on the host) of what a checkpoint holds."""
    slices = live.slices_of(engine)
    gpu = sum(s.tensor.nbytes for s in slices if s.tensor.is_cuda)
    return gpu, sum(s.tensor.nbytes for s in slices) - gpu


def save(training: Training, engine: Engine, root: Path, mode: str, around: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """One save with training going on until it is on disk, `around` steps before and after: what it cost, and samples of what was saved."""
    for old in root.glob("checkpoint-*"):  # the disk may have room for one only
        shutil.rmtree(old)
    before_s, _ = training.steps(around)
    kept = samples(engine)
    first = len(training.seconds)
    begin, threads = settled(), Threads()
    before = allocated()
    peak(restart=True)
    engine.save_checkpoint(root, wait=False)
    call_s, counted_s = time.perf_counter() - begin, engine.checkpoints.blocked_s
    if mode == "at_once":
        engine.checkpoints.before_update()
    while engine.checkpoints.writing or len(training.seconds) == first:
        training.step()
    wait_s = engine.checkpoints.blocked_s - counted_s
    beside, during = training.seconds[first:], training.allocated[first:]
    total_s = settled() - begin
    row: dict[str, Any] = {
        "mode": mode, "call_s": call_s, "wait_s": wait_s, "stall_s": call_s + wait_s, "written_s": total_s,
        "steps_beside": len(beside), "first_step_s": beside[0], "step_beside_s": statistics.median(beside[1:] or beside),
        "allocated_before": before, "allocated_during": sorted(set(during)), "peak": peak(), "host_rss": resident(), "processor": threads.since(), **engine.checkpoints.copied(),
    }  # fmt: skip
    engine.checkpoints.wait()  # raises what the writer failed with
    row["allocated_after"] = allocated()
    after_s, _ = training.steps(around)
    alone = training.seconds[first - around : first] + training.seconds[-around:]
    alone_s = statistics.median(alone)
    row |= {"step_before_s": before_s, "step_after_s": after_s, "lost": row["step_beside_s"] / alone_s - 1}
    row["stall_of_steps_s"] = row["stall_s"] + max(0.0, beside[0] - row["wait_s"] - alone_s)
    row["lost_of_mean"] = statistics.mean(beside[1:] or beside) / statistics.mean(alone) - 1
    row["lost_with_stall"] = total_s / (len(beside) * alone_s) - 1
    row["slowest_beside"] = sorted(((s, number) for number, s in enumerate(beside)), reverse=True)[:8]
    row["slowest_alone"] = sorted(alone, reverse=True)[:8]
    row["allocated_equal"] = {before, *during, row["allocated_after"]} == {before}
    return row, kept


def against_floor(row: dict[str, Any], gpu_bytes: int, copy_bytes_s: float | None) -> dict[str, Any]:
    """`row` with its stall and its copying compared with the bus."""
    if copy_bytes_s is None:
        return row
    floor, nominal = gpu_bytes / copy_bytes_s, gpu_bytes / D2H_BYTES_S
    ratios = {"stall_over_floor": row["stall_s"] / floor, "stall_over_floor_54": row["stall_s"] / nominal}
    ratios["stall_of_steps_over_floor"] = row["stall_of_steps_s"] / floor
    return {**row, **ratios, "copy_over_floor": row["fetch_s"] / floor}


def load(engine: Engine, root: Path, kept: list[torch.Tensor]) -> dict[str, Any]:
    """Read it back, past the page cache as it was written, and compare."""
    before, begin = allocated(), settled()
    engine.load_checkpoint(root)
    seconds = settled() - begin
    equal = all(torch.equal(a, b) for a, b in zip(kept, samples(engine), strict=True))
    return {"load_s": seconds, "loaded_equal": equal, "load_allocated_equal": allocated() == before}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, on one engine."""
    began = time.perf_counter()
    Path(args.dir).mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(dir=args.dir))
    engine, batch = make_engine(args)
    copy_bytes_s = pinned_copy_bytes_s()
    training = Training(engine, batch)
    training.steps(args.warmup)
    begin = settled()
    if not args.unprepared:
        engine.checkpoints.prepare(root)
    prepare_call_s = time.perf_counter() - begin
    training.steps(args.warmup)
    threads = Threads()
    alone_s, alone_peak = training.steps(args.steps)
    processor = threads.since()
    gpu_bytes, host_bytes = state_bytes(engine)
    result: dict[str, Any] = {
        "card": card(), "model": args.model, "optim": args.optim,
        "micro_batch": args.micro_batch, "seq_len": args.seq_len, "ready_s": time.perf_counter() - began, "prepare_call_s": prepare_call_s, "step_alone_s": alone_s,
        "peak_alone": alone_peak, "gpu_bytes": gpu_bytes, "host_bytes": host_bytes, "pinned_copy_gb_s": (copy_bytes_s or 0) / 1e9,
        "floor_s": gpu_bytes / (copy_bytes_s or D2H_BYTES_S), "floor_54_s": gpu_bytes / D2H_BYTES_S, "hashed_in_c": hashing.native() is not None, "processor_alone": processor, "saves": [],
    }  # fmt: skip
    try:
        for mode in args.saves:
            row, kept = save(training, engine, root, mode, args.steps)
            row = against_floor(row, gpu_bytes, copy_bytes_s)
            row["peak_over_alone"] = row["peak"] - alone_peak
            row["write_gb_s"] = (gpu_bytes + host_bytes) / row["written_s"] / 1e9
            result["saves"].append(row)
            print(json.dumps(rounded(row)), flush=True)  # a run that is stopped has shown something
        result |= load(engine, root, kept)
        result["load_gb_s"] = (gpu_bytes + host_bytes) / result["load_s"] / 1e9
        result["step_after_s"], _ = training.steps(3)
        engine.close()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {**result, "seconds": time.perf_counter() - began}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3b")
    parser.add_argument("--override", nargs="*", default=[], help="KEY=INTEGER of the model's config")
    parser.add_argument("--ds_config", default="ds_configs/zero2.json")
    parser.add_argument("--optim", default="adamw_split_8bit")
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--saves", nargs="+", choices=["training", "at_once"], default=["training", "training", "at_once"])
    parser.add_argument("--unprepared", action="store_true", help="the first save makes the host buffers")
    parser.add_argument("--dir", help="where to write; its disk is what is measured")
    parser.add_argument("--out", type=Path, help="the line also goes here")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print one line."""
    args = arguments()
    line = json.dumps(rounded(measure(args)))
    print(line, flush=True)
    if args.out:
        args.out.write_text(line + "\n")
    if ranks.is_distributed():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
