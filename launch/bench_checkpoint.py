"""Saving and loading training state: bigtrain beside DeepSpeed, in the same processes, on CPU ranks.

    torchrun --standalone --nproc_per_node 2 launch/bench_checkpoint.py --stage 2 3 --table docs/results/checkpoint.md

A Llama of 0.32e9 parameters with fp32 AdamW (3.9 GB of state). For each stage, after some training steps, in turn and repeated:
bigtrain's save with the next update at once (the worst case: all that is not on disk must be copied), its save with one training
step before the next update, its whole write with training waiting, DeepSpeed's save, `dd conv=fsync` of the same bytes by as many
processes; then both loads into the running engine. Medians over the repeats, of the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks
from bigtrain.engine import Engine
from bigtrain.models import build_model


def make_engine(stage: int, layers: int, hidden: int) -> Engine:
    """A Llama; 20 layers of 1024 have 0.32e9 parameters."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 15 // 4, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=4096, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10_000},
    }
    model = build_model(config, ds_config=ds_config)
    return Engine(model, ds_config=ds_config, optimizer="adamw_torch", learning_rate=1e-5, hang_s=None)


def train_step(engine: Engine) -> None:
    """A short one: the time of a step is not what is measured."""
    ids = torch.arange(16)[None] + engine.rank
    engine.train_step([{"input_ids": ids, "labels": ids.clone()}])


def timed(action: Callable[[], Any]) -> float:
    """Seconds of `action` on the slowest rank."""
    ranks.barrier("before")
    begin = time.perf_counter()
    action()
    return float(ranks.max_across(time.perf_counter() - begin))


def rss(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def grown(action: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of all ranks peaked above its start."""
    Path("/proc/self/clear_refs").write_text("5")
    before = rss("VmRSS")
    action()
    return int(ranks.sum_across(rss("VmHWM") - before))


def dd(source: Path, target: Path) -> None:
    """This rank's data file, copied by dd; it comes from the page cache, as state comes from memory."""
    if ranks.is_main():
        target.mkdir()
    ranks.barrier("folder")
    name = next(source.glob(f"rank-{ranks.rank():05d}-*.safetensors")).name
    subprocess.run(
        ["dd", f"if={source / name}", f"of={target / name}", "bs=16M", "conv=fsync"], check=True, stderr=subprocess.DEVNULL
    )


def clean(*folders: Path) -> None:
    """Rank 0 deletes; the file system settles before the next measurement."""
    ranks.barrier("used")
    if ranks.is_main():
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    ranks.barrier("clean")


def blocked(engine: Engine, root: Path, step_between: bool) -> tuple[float, int]:
    """(seconds that training waits, bytes of memory) of a save beside training."""

    def act() -> None:
        engine.save_checkpoint(root, wait=False)
        if step_between:
            train_step(engine)
        else:
            engine.checkpoints.before_update()

    seconds: list[float] = []

    def whole() -> None:
        act()
        seconds.append(engine.checkpoints.blocked_s)
        engine.checkpoints.wait()

    memory = grown(whole)
    return float(ranks.max_across(seconds[0])), memory


def measure(engine: Engine, root: Path) -> dict[str, float]:
    """One repeat of everything."""
    row: dict[str, float] = {}
    ours, deepspeed, copy = root / "ours", root / "deepspeed", root / "dd"
    row["blocked_worst"], row["grown_worst"] = blocked(engine, ours, step_between=False)
    clean(ours)
    row["blocked_step"], row["grown_step"] = blocked(engine, ours, step_between=True)
    clean(ours)
    row["deepspeed_save"] = timed(lambda: engine.deepspeed.save_checkpoint(str(deepspeed), tag="x"))
    row["deepspeed_load"] = timed(lambda: engine.deepspeed.load_checkpoint(str(deepspeed), tag="x"))
    clean(deepspeed)
    row["write"] = timed(lambda: engine.save_checkpoint(ours))
    folder = ours / f"checkpoint-{engine.global_step}"
    row["bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    os.sync()
    row["dd"] = timed(lambda: dd(folder, copy))
    clean(copy)
    row["load"] = timed(lambda: engine.load_checkpoint(ours))
    clean(ours)
    return row


def lines(stage: int, rows: list[dict[str, float]]) -> list[str]:
    """Markdown table rows of one stage."""
    m = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    gib = m["bytes"] / 2**30
    return [
        f"| {stage} | training waits, next update at once | {m['blocked_worst']:.2f} s | {m['deepspeed_save']:.2f} s | "
        f"{m['blocked_worst'] / m['deepspeed_save']:.1%} |",
        f"| {stage} | training waits, one step before the next update | {m['blocked_step']:.2f} s | {m['deepspeed_save']:.2f} s | "
        f"{m['blocked_step'] / m['deepspeed_save']:.1%} |",
        f"| {stage} | whole write to disk ({gib:.2f} GiB, fsync) | {m['write']:.2f} s | dd: {m['dd']:.2f} s | "
        f"{m['dd'] / m['write']:.0%} of dd's speed |",
        f"| {stage} | load | {m['load']:.2f} s | {m['deepspeed_load']:.2f} s | {m['deepspeed_load'] / m['load']:.1f} x faster |",
        f"| {stage} | resident memory above before, both ranks, next update at once | {m['grown_worst'] / 2**30:.2f} GiB | | "
        f"{m['grown_worst'] / m['bytes']:.2f} snapshots |",
        f"| {stage} | the same, one step between | {m['grown_step'] / 2**30:.2f} GiB | | |",
    ]


def main() -> None:
    """Measure and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", help="where to write; its disk is what is measured")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    text = ["| stage | what | bigtrain | DeepSpeed | ratio |", "|---|---|---|---|---|"]
    for stage in args.stage:
        engine = make_engine(stage, args.layers, args.hidden)
        root = Path(ranks.main_decides(lambda: tempfile.mkdtemp(dir=args.dir), "making a folder"))
        train_step(engine)
        rows = []
        for _ in range(args.repeats):
            rows.append(measure(engine, root))
            train_step(engine)
        clean(root)
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        text += lines(stage, rows)
        engine.close()
        del engine
        if ranks.is_main():
            print(f"{numel / 1e9:.2f}e9 parameters", rows, flush=True)
    if ranks.is_main():
        print("\n".join(text))
        if args.table:
            args.table.write_text("\n".join(text) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
