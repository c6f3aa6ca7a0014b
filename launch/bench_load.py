"""Time and memory of getting a pretrained checkpoint into a ZeRO-3 model: bigtrain beside transformers' from_pretrained.

    python launch/bench_load.py --ranks 1 2 3 4 --repeats 5 --caches warm cold --export

Every cell is a fresh set of processes. The clock runs for one call, the same on every rank: `build_model(folder,
ds_config=...)` against `AutoModelForCausalLM.from_pretrained(folder, dtype=bfloat16)` with a live `HfDeepSpeedConfig`, from the
call to a ZeRO-3 model that is ready for `deepspeed.initialize`: config.json, the skeleton, the conversion rules, headers, checks,
every byte. Not in it, for both ways: starting Python, importing torch, deepspeed, transformers and everything that either
imports on first use, and joining the process group. The peak of resident memory (VmHWM), the bytes asked from the kernel
(/proc/self/io: rchar) and from the disk (read_bytes) are each rank's own. Collectives during reading are counted by the process
groups' own sequence numbers, from the first read to the last. CPU seconds are those of one
rank's process, which another load on the machine changes less than the clock. The two ways take turns. Both must end with the same
values: a hash of every rank's partitions is compared. from_pretrained maps the files into memory, which `rchar` does not count.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import load_phases
import random_weights
from measuring import card, drop_from_cache, partitions, requests, resident, restart_peak, run_ranks, settled, write_rank

PREIMPORTED = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.generation",
    "transformers.integrations.deepspeed",
    "transformers.conversion_mapping",
    "deepspeed.module_inject.auto_ep_config",
    "bigtrain.models.build",
    "bigtrain.weights.load",
    "tqdm",
    "datasets",
)
WAYS = ("bigtrain", "from_pretrained")
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000},
}


def _cool(folder: Path, cache: str) -> None:
    for file in folder.glob("*.safetensors") if cache == "cold" else ():
        drop_from_cache(file)


def _collectives() -> int:
    """How many collectives all process groups of this rank have run so far, by their own count."""
    from torch.distributed import distributed_c10d

    groups: Any = distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _counting_collectives(counts: list[int]) -> None:
    """Let every batch of reads add the collectives that ran meanwhile to `counts`."""
    from bigtrain.weights.read import Reader

    run = Reader.run

    def counted(reader: Any, ops: Any) -> int:
        before = _collectives()
        try:
            return run(reader, ops)
        finally:
            counts.append(_collectives() - before)

    Reader.run = counted  # type: ignore[method-assign, assignment]


def measure_export(model: Any, out: str) -> dict[str, Any]:
    """Seconds and extra memory of writing the model again, and the predicted beside the real size."""
    from bigtrain import ranks
    from bigtrain.weights import export_model

    ranks.barrier("before the export")
    restart_peak()
    before, begin = resident(), time.perf_counter()
    report = export_model(model, out, dtype="bfloat16")
    seconds, grown = time.perf_counter() - begin, resident("VmHWM") - before
    actual = sum(os.path.getsize(f"{out}/{name}") for name in report.files)
    return {"export_s": seconds, "export_grown": grown, "predicted": report.bytes, "actual": actual}


def worker(way: str, folder: str, out: str, export: bool, phases: bool) -> None:
    """One rank of one cell; writes what it measured as JSON."""
    import torch
    import torch.distributed as dist
    import transformers

    if way == "from_pretrained":  # malloc as it is without bigtrain (startup.map_blocks): read at import, long after glibc did
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "as glibc has it"
    from bigtrain import zero
    from bigtrain.models import build_model

    # both ways: everything that they import on first use is imported before the clock starts
    for name in PREIMPORTED:
        importlib.import_module(name)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    zero.init_distributed()
    if way == "from_pretrained":
        from transformers.integrations import HfDeepSpeedConfig

        keep = HfDeepSpeedConfig(CONFIG)
    counts: list[int] = []
    _counting_collectives(counts)
    gc.collect()
    dist.barrier()
    base, before, cpu, begin = resident(), requests(), time.process_time(), time.perf_counter()
    with load_phases.clocked(phases) as spans:
        if way == "bigtrain":
            model = build_model(folder, ds_config=CONFIG)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            del keep
        seconds, cpu, after, peak = settled() - begin, time.process_time() - cpu, requests(), resident("VmHWM")
    share, digest = partitions(model)
    measured = {
        "seconds": seconds, "cpu": cpu, "base": base, "peak": peak, "share": share, "hash": digest,
        "asked": after["rchar"] - before["rchar"], "disk": after["read_bytes"] - before["read_bytes"],
        "collectives": sum(counts) if counts else None, "device": card(),
    }  # fmt: skip
    if phases:
        measured["phases"] = load_phases.table(spans, seconds)
    if export:
        measured |= measure_export(model, f"{out}.model")
    write_rank(out, measured)


def run_cell(way: str, folder: Path, world: int, export: bool = False, phases: bool = False) -> list[dict[str, Any]]:
    """What each of `world` ranks measured."""
    words = ["--worker", way, "--folder", str(folder), *["--export"] * export, *["--phases"] * phases, "--out"]
    return run_ranks(__file__, world, words)


def _make_checkpoint(folder: Path, layers: int, hidden: int, shards: int) -> None:
    """A Llama (22 layers of 2048: 1.26e9 parameters, 2.5 GB), unless it is there."""
    import transformers

    if not (folder / "model.safetensors.index.json").exists():
        config = transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64, vocab_size=32000, architectures=["LlamaForCausalLM"], dtype="bfloat16",
        )  # fmt: skip
        random_weights.write(config, folder, shards)


def floor_s(folder: Path, world: int, cache: str) -> float:
    """Seconds for `world` processes to read their share of the files into fresh memory and do nothing else.

    In the fastest way found: private pages made a megabyte at a time.
    """
    _cool(folder, cache)
    code = (
        "import ctypes,os,sys,time,mmap\n"
        "rank, world, files = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]\n"
        "populate = ctypes.CDLL(None).madvise; populate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)\n"
        "t, keep = time.perf_counter(), []\n"
        "for f in files:\n"
        "    n = os.path.getsize(f) // world; fd = os.open(f, os.O_RDONLY); o = 0\n"
        "    os.posix_fadvise(fd, rank * n, n, os.POSIX_FADV_WILLNEED)\n"
        "    m = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS); v = memoryview(m); keep.append(v)\n"
        "    at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "    while o < n:\n"
        "        populate(at + o // 4096 * 4096, min(1 << 20, n - o), 23)  # MADV_POPULATE_WRITE\n"
        "        o += os.preadv(fd, [v[o:o + (1 << 20)]], rank * n + o)\n"
        "print(time.perf_counter() - t)"
    )
    files = [str(file) for file in sorted(folder.glob("*.safetensors"))]
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(r), str(world), *files], stdout=subprocess.PIPE, text=True)
        for r in range(world)
    ]
    return max(float(process.communicate()[0]) for process in processes)


def row(way: str, cache: str, world: int, cells: list[list[dict[str, Any]]]) -> str:
    """One line of the table: medians over the repeats of the slowest rank, peaks of the worst repeat."""
    seconds = [max(rank["seconds"] for rank in cell) for cell in cells]
    peaks = [max(cell[r]["peak"] for cell in cells) for r in range(world)]
    bound = [cells[0][r]["base"] + cells[0][r]["share"] for r in range(world)]
    asked = [statistics.median(cell[r]["asked"] for cell in cells) / cells[0][r]["share"] for r in range(world)]
    disk = sum(statistics.median(cell[r]["disk"] for cell in cells) for r in range(world))
    collectives = {rank["collectives"] for cell in cells for rank in cell} - {None}
    return (
        f"| {way} | {cache} | {world} | {statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) | "
        f"{statistics.median(max(rank['cpu'] for rank in cell) for cell in cells):.2f} | "
        f"{' / '.join(f'{peak / 2**20:.0f}' for peak in peaks)} | "
        f"{' / '.join(f'{peak / limit:.2f}' for peak, limit in zip(peaks, bound))} | "
        f"{' / '.join(f'{value:.3f}' for value in asked)} | {disk / 1e9:.2f} | {max(collectives, default='')} |"
    )


def measure(folder: Path, world: int, cache: str, repeats: int, ways: tuple[str, ...]) -> dict[str, list[list[dict[str, Any]]]]:
    """Every way `repeats` times, in turns, so that what else the machine does meets them alike."""
    cells: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            _cool(folder, cache)
            cells[way].append(run_cell(way, folder, world))
    return cells


def ratio(cells: dict[str, list[list[dict[str, Any]]]], cache: str, world: int) -> str:
    """One line of the table: how many times faster, by the medians and by the fastest runs."""
    ours, theirs = ([max(rank["seconds"] for rank in cell) for cell in cells[way]] for way in WAYS)
    text = f"**{statistics.median(theirs) / statistics.median(ours):.1f}x** (fastest {min(theirs) / min(ours):.1f}x)"
    return f"| **from_pretrained / bigtrain** | {cache} | {world} | {text} | | | | | | |"


def phases_table(folder: Path, world: int, repeats: int) -> str:
    """A Markdown table of where the seconds of the slowest rank went, of the median of `repeats` loads with clocks in them."""
    slowest = [max(run_cell(WAYS[0], folder, world, phases=True), key=lambda rank: rank["seconds"]) for _ in range(repeats)]
    return str(sorted(slowest, key=lambda rank: rank["seconds"])[(repeats - 1) // 2]["phases"]) + "\n"


def export_table(folder: Path, worlds: list[int]) -> str:
    """A Markdown table of writing the model again."""
    lines = ["| export, ranks | s | memory above the state per rank, MiB | predicted / written bytes |", "|---|---|---|---|"]
    for world in worlds:
        cell = run_cell(WAYS[0], folder, world, export=True)
        grown = " / ".join(f"{rank['export_grown'] / 2**20:.0f}" for rank in cell)
        lines.append(f"| {world} | {cell[0]['export_s']:.2f} | {grown} | {cell[0]['predicted']} / {cell[0]['actual']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the checkpoint, run every cell, print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bench_load")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", type=int, nargs="*", default=[2], help="numbers of ranks for from_pretrained too")
    parser.add_argument(
        "--caches", choices=("warm", "cold"), nargs="+", default=["warm"], help="cold: files dropped from the page cache"
    )
    parser.add_argument("--export", type=int, nargs="*", help="also measure writing the model again, on so many ranks (2)")
    parser.add_argument("--phases", action="store_true", help="only show where bigtrain's seconds go, warm, at each --ranks")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, str(arguments.folder), arguments.out, arguments.export is not None, arguments.phases)
        return
    _make_checkpoint(arguments.folder, arguments.layers, arguments.hidden, arguments.shards)
    total = sum(file.stat().st_size for file in arguments.folder.glob("*.safetensors"))
    for file in arguments.folder.glob("*.safetensors"):
        file.read_bytes()  # warm
    print(f"{total / 1e9:.3f} GB of bf16 weights in {arguments.shards} files, ZeRO-3, {os.cpu_count()} CPU cores\n")
    if arguments.phases:
        print("\n".join(phases_table(arguments.folder, world, arguments.repeats) for world in arguments.ranks))
        return
    if arguments.export is not None:
        print(export_table(arguments.folder, arguments.export or [2]), flush=True)
    print("| way | page cache | ranks | s, median (range) | CPU s of a rank | peak RSS per rank, MiB | peak / (imports + share) | "
          "bytes read / share | from disk, GB | collectives while reading |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for world in arguments.ranks:
        hashes: set[str] = set()
        for cache in arguments.caches:
            cells = measure(arguments.folder, world, cache, arguments.repeats, WAYS if world in arguments.beside else WAYS[:1])
            hashes.update(" ".join(rank["hash"] for rank in cell) for runs in cells.values() for cell in runs)
            for way, runs in cells.items():
                print(row(way, cache, world, runs), flush=True)
            if len(hashes) != 1:
                raise SystemExit(f"the ways do not end with the same values: {hashes}")
            if len(cells) == 2:
                print(ratio(cells, cache, world), flush=True)
            floors = [floor_s(arguments.folder, world, cache) for _ in range(arguments.repeats)]
            text = f"{statistics.median(floors):.2f} ({min(floors):.2f}-{max(floors):.2f})"
            print(f"| floor: processes that only read | {cache} | {world} | {text} | | | | | | |", flush=True)


if __name__ == "__main__":
    main()
