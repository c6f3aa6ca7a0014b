"""What both peers share: reading their instructions and rows, and one line of numbers a step."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch


def instructions() -> dict[str, Any]:
    """The file that the sweep wrote, named on the command line."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(
            f"{sys.argv[0]} INSTRUCTIONS.json: a peer of launch/benchmark.py (--help), which writes that file and starts it"
        )
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def end() -> None:
    """The work is done: gloo's threads can abort the interpreter's own end ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def refuse(why: str) -> None:
    """End with exit code 2 before anything is built."""
    print(f"UsageError: {why}", flush=True)
    raise SystemExit(2)


def take_card(cap_gib: float | None) -> torch.device:
    """This rank's card, of which it may take `cap_gib` GiB; the CPU where there is none."""
    if not torch.cuda.is_available():
        import deepspeed.ops

        # A minute of compiling for an all-reduce that DeepSpeed uses in inference only (`comm.torch.inference_all_reduce`).
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    if cap_gib:
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / total), index)
    return torch.device("cuda", index)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The sweep's rows of exactly seq_len random tokens, as a map-style data set."""

    def __init__(self, path: str):
        self._ids = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self._ids[at % len(self._ids)].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}

    def batch(self, number: int, micro_batch: int) -> torch.Tensor:
        """Micro batch `number` (counted over all ranks) as int64 [micro_batch, seq_len]."""
        first = number * micro_batch
        return torch.stack([self[row]["input_ids"] for row in range(first, first + micro_batch)])


class Recorder:
    """Step times and memory peaks of this rank, as launch/train.py writes them; one synchronisation a step, at its end."""

    def __init__(self, out: str, tokens_per_step: int):
        name = "metrics.jsonl" if rank() == 0 else f"metrics-rank{rank()}.jsonl"
        self._file = open(Path(out) / name, "a", encoding="utf-8")  # noqa: SIM115  (held open for the run)
        self._tokens, self._step, self._last = tokens_per_step, 0, time.perf_counter()

    def start(self) -> None:
        """The first step begins."""
        self._last = time.perf_counter()

    def step(self, loss: float) -> None:
        """A step has ended; `loss` was read from the device."""
        memory = [0, 0, 0]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            memory = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free]
        now = time.perf_counter()
        self._step += 1
        names = ("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_used_bytes")
        row = {
            "step": self._step,
            "loss": loss,
            "tokens": self._tokens,
            "step_time_s": now - self._last,
            **dict(zip(names, memory)),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        self._last = now
