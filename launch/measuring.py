"""What the benchmarks share: ranks that write down what they measured, memory and requests of a process, the card, the page cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bigtrain.bench.processes import python_path, rank_environment
from bigtrain.hosts.ports import free_port


def run_ranks(script: str, world: int, words: list[str], limit_s: float = 600.0) -> list[dict[str, Any]]:
    """Start `world` ranks of a program, whose last word is where they write (`write_rank`); return what each measured."""
    with tempfile.TemporaryDirectory() as scratch:
        out, port = f"{scratch}/rank", free_port()
        more = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(Path(__file__).parents[1])}
        command = [sys.executable, script, *words, out]
        processes = [
            subprocess.Popen(command, env=rank_environment(r, world, port, scratch, more), stdout=subprocess.DEVNULL)
            for r in range(world)
        ]
        limit = time.monotonic() + limit_s
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) or time.monotonic() > limit:
                for process in processes:
                    process.kill()  # a rank whose peer is gone would wait for it
            time.sleep(0.1)
        codes = [process.returncode for process in processes]
        if any(codes):
            raise SystemExit(f"{world} ranks of {' '.join(command[1:])} ended with exit codes {codes}")
        return [json.loads(Path(f"{out}.{r}").read_text()) for r in range(world)]


def write_rank(out: str, found: dict[str, Any]) -> None:
    """Write what this rank measured, and leave with the others."""
    import torch.distributed as dist

    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def resident(key: str = "VmRSS") -> int:
    """VmRSS, or VmHWM, its peak, of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def restart_peak() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def requests() -> dict[str, int]:
    """Bytes that this process asked the kernel for so far (rchar), and the disk (read_bytes)."""
    with open("/proc/self/io") as file:
        return {key: int(value) for key, value in (line.split(": ") for line in file)}


def drop_from_cache(file: Path) -> None:
    """Write a file back and let the kernel forget its pages."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def card() -> str:
    """Name of this rank's card; "CPU" without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def settled() -> float:
    """The time, when the card, if there is one, has nothing left to do."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def partitions(model: Any, digest: bool = True) -> tuple[int, str]:
    """(bytes of this rank's partitions without padding, a hash of them if wanted)."""
    import torch
    import xxhash

    from bigtrain import zero

    total, hashed = 0, xxhash.xxh3_128()
    for param in model.parameters():
        rank, _, flat = zero.partition_of(param)
        own = flat[: max(0, min(zero.full_numel(param) - rank * flat.numel(), flat.numel()))].detach()
        total += own.nbytes
        if digest:
            hashed.update(own.cpu().contiguous().view(torch.uint8).numpy().data)
    return total, hashed.hexdigest() if digest else ""


def rounded(value: Any) -> Any:
    """Floats with six digits behind the point, for reading."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 6))
