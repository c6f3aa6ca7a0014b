"""A large bf16 checkpoint onto cards at ZeRO stage 3: bigtrain's loader, from_pretrained, and what disk cache and bus can do.

    python launch/bench_load_cards.py [--model preset:llama-8b] [--ranks 2] [--repeats 3] [--work DIR] [--out FILE] [--phases]
        [--threads N] [--staging_mib N]

Writes the checkpoint into --work (random values; needs the model's size in free space, and as much in the page cache), starts one
process a rank, and measures in the same processes, each between two barriers: `build_model(folder, ds_config=...)` --repeats
times, `AutoModelForCausalLM.from_pretrained` with a live HfDeepSpeedConfig once, and the floors. Both ways must end with the same
values (a hash of every partition). One JSON line; seconds are those of the slowest rank, the rest is listed per rank.

Floors, all ranks at once: `pread_fresh_s` one thread a rank reads the rank's share of the files into fresh memory;
`pread_s` as many threads as the loader uses read it into memory that they use again; `h2d_s` copies of as many bytes from
page-locked memory to the card. A loader that overlaps both cannot be faster than `floor_s`, the longer of the last two.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import load_phases
import random_weights
from bench_load import CONFIG, PREIMPORTED, WAYS
from measuring import card, partitions, requests, resident, restart_peak, rounded, run_ranks, settled, write_rank

REQUEST_BYTES = 16 << 20
LIMIT_S = 240.0  # for all that the ranks do


# ---------------------------------------------------------------- one rank


def measured(load: Callable[[], Any], digest: bool, phases: bool = False) -> dict[str, Any]:
    """One load between two barriers: seconds, resident memory before and at its peak, bytes asked from the kernel."""
    import torch
    import torch.distributed as dist

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    settled()
    restart_peak()
    base, asked, begin = resident(), requests()["rchar"], time.perf_counter()
    with load_phases.clocked(phases) as spans:
        model = load()
        waiting = time.perf_counter()
        found: dict[str, Any] = {"s": (end := settled()) - begin}
    if phases:
        found["phases"] = load_phases.table(spans | {"waiting for the card at the end": [end - waiting]}, found["s"])
    found |= {"rss_before": base, "rss_peak": resident("VmHWM"), "bytes_read": requests()["rchar"] - asked}
    found["gpu_peak"] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found["share"], found["hash"] = partitions(model, digest)
    del model
    gc.collect()
    dist.barrier()
    return found


def read_share(folder: Path, rank: int, world: int, threads: int, fresh: bool) -> float:
    """Seconds to read this rank's share of every file with `threads` threads; into fresh memory, or into a block a thread."""
    import torch.distributed as dist

    requests = []
    for file in sorted(folder.glob("*.safetensors")):
        share = file.stat().st_size // world
        descriptor = os.open(file, os.O_RDONLY)
        requests += [(descriptor, rank * share + at, min(REQUEST_BYTES, share - at)) for at in range(0, share, REQUEST_BYTES)]
    room = memoryview(mmap.mmap(-1, sum(n for *_, n in requests) if fresh else threads * REQUEST_BYTES))
    lanes = [requests[i::threads] for i in range(threads)]

    def lane(number: int) -> None:
        at = number * REQUEST_BYTES
        for descriptor, begin, n in lanes[number]:
            assert os.preadv(descriptor, [room[at : at + n]], begin) == n
            at += n if fresh else 0

    if not fresh:
        room[:] = bytes(len(room))
    dist.barrier()
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lane, range(threads)))
    seconds = time.perf_counter() - begin
    for descriptor in {d for d, *_ in requests}:
        os.close(descriptor)
    return seconds


def h2d(share: int) -> float | None:
    """Seconds to copy `share` bytes from page-locked memory to the card in large copies; None without one."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return None
    host = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    target.copy_(host, non_blocking=True)
    settled()
    dist.barrier()
    begin = settled()
    for at in range(0, share, host.nbytes):
        n = min(host.nbytes, share - at)
        target[:n].copy_(host[:n], non_blocking=True)
    return settled() - begin


def worker(folder: Path, out: str, repeats: int, phases: bool, threads: int | None, staging_mib: int | None) -> None:
    """Everything one rank measures, as JSON into a file."""
    import torch
    import torch.distributed as dist
    import transformers

    from bigtrain import ranks, zero
    from bigtrain.models import build_model
    from bigtrain.weights import read

    for name in PREIMPORTED:
        with contextlib.suppress(ImportError):  # not every version has every one
            importlib.import_module(name)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    zero.init_distributed()
    torch.zeros(1, device=ranks.device())
    dist.barrier()
    read.GPU_THREADS, read.PINNED_BYTES = threads or read.GPU_THREADS, (staging_mib << 20 if staging_mib else read.PINNED_BYTES)
    most = read.GPU_THREADS if torch.cuda.is_available() else read.CPU_THREADS
    threads = min(ranks.cores(), most)
    ours = [measured(lambda: build_model(str(folder), ds_config=CONFIG), at == repeats - 1, phases) for at in range(repeats)]
    floors = {
        "pread_s": read_share(folder, ranks.rank(), ranks.world_size(), threads, fresh=False),
        "h2d_s": h2d(ours[0]["share"]),
        "pread_fresh_s": read_share(folder, ranks.rank(), ranks.world_size(), 1, fresh=True),
    }
    from transformers.integrations import HfDeepSpeedConfig

    keep = HfDeepSpeedConfig(CONFIG)
    theirs = [measured(lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), True)]
    del keep
    write_rank(out, {WAYS[0]: ours, WAYS[1]: theirs, "floors": floors, "threads": threads, "card": card()})


# ---------------------------------------------------------------- all of them


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One line out of all ranks' measurements.

    Raises:
        SystemExit: the two ways ended with different values.
    """
    if any(rank[WAYS[0]][-1]["hash"] != rank[WAYS[1]][-1]["hash"] for rank in found):
        raise SystemExit("the two ways do not end with the same values")
    line: dict[str, Any] = {"card": found[0]["card"], "ranks": len(found), "threads": found[0]["threads"]}
    for way in WAYS:
        loads = list(zip(*(rank[way] for rank in found)))
        last = loads[-1]
        line[way] = {
            "s": [max(rank["s"] for rank in load) for load in loads],
            "median_s": statistics.median(max(rank["s"] for rank in load) for load in loads),
            "rss_peak_gb": [max(load[r]["rss_peak"] for load in loads) / 1e9 for r in range(len(found))],
            "rss_before_gb": [rank["rss_before"] / 1e9 for rank in loads[0]],
            "bytes_read_share": [rank["bytes_read"] / rank["share"] for rank in last],
            "gpu_peak_share": [rank["gpu_peak"] / rank["share"] for rank in last],
        }
    floors = [rank["floors"] for rank in found]
    line |= {name: max(f[name] for f in floors) for name in floors[0] if floors[0][name] is not None}
    line["share_gb"] = found[0][WAYS[0]][0]["share"] / 1e9
    bus, disk = line.get("h2d_s", 0.0), line["pread_s"]
    line |= {"floor_s": max(bus, disk), "floor": "bus" if bus > disk else "page cache"}
    line["times_faster"] = line[WAYS[1]]["median_s"] / line[WAYS[0]]["median_s"]
    line["share_of_floor"] = line["floor_s"] / line[WAYS[0]]["median_s"]
    return line


def config_of(model: str) -> Any:
    """The transformers config of a preset or a folder."""
    import transformers

    from bigtrain import shapes

    values = shapes.config_dict(model)
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def main() -> None:
    """Write, measure, print, and remove the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bench_load_cards")
    parser.add_argument("--phases", action="store_true", help="print where the seconds of each of bigtrain's loads go")
    parser.add_argument("--threads", type=int, help="try so many reading threads a rank, in the floors too")
    parser.add_argument("--staging_mib", type=int, help="try buffers of so many MiB on the way to the card, two a thread")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint in --work")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.work, args.worker, args.repeats, args.phases, args.threads, args.staging_mib)
        return
    begin = time.perf_counter()
    try:
        total = random_weights.write(config_of(args.model), args.work, args.shards)
        written = time.perf_counter() - begin
        line = {"model": args.model, "checkpoint_gb": total / 1e9, "write_s": written}
        print(f"{total / 1e9:.2f} GB written in {written:.1f} s", file=sys.stderr, flush=True)
        options = ["--phases"] * args.phases
        options += [f"--{n}={v}" for n, v in (("threads", args.threads), ("staging_mib", args.staging_mib)) if v]
        words = ["--work", str(args.work), "--repeats", str(args.repeats), *options, "--worker"]
        found = run_ranks(__file__, args.ranks, words, LIMIT_S)
        if args.phases:
            for number in range(args.repeats):
                slowest = max((rank[WAYS[0]][number] for rank in found), key=lambda load: load["s"])
                print(f"load {number + 1}, its slowest rank\n\n{slowest['phases']}\n", file=sys.stderr, flush=True)
        line |= summary(found) | {"all_s": time.perf_counter() - begin}
    finally:
        if not args.keep:
            shutil.rmtree(args.work, ignore_errors=True)
    text = json.dumps(rounded(line))
    print(text)
    if args.out:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
