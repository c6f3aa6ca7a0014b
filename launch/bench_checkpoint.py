"""Saving and loading training state: bigtrain beside DeepSpeed, in the same processes, on CPU ranks.

    torchrun --standalone --nproc_per_node 2 launch/bench_checkpoint.py --stage 2 3 --table docs/results/checkpoint.md

A Llama of 0.32e9 parameters with fp32 AdamW (3.9 GB of state). For each stage, after some training steps, in turn and repeated:
bigtrain's save with one training step before the next update (as in training), its save with the next update at once (the worst
case: what is not on disk must be copied), its whole write with training waiting, DeepSpeed's save (it returns when the data is in
the page cache), `dd conv=fsync` of the same bytes from the page cache by as many processes, also with oflag=direct; then both loads
into the running engine, with the files in the page cache and without. Medians over the repeats, of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
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
from measuring import drop_from_cache, resident, restart_peak

from bigtrain import ranks
from bigtrain.diagnostics.pages import put_table
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


def grown(action: Callable[[], Any]) -> int:
    """Bytes by which the resident memory of all ranks peaked above its start."""
    restart_peak()
    before = resident()
    action()
    return int(ranks.sum_across(resident("VmHWM") - before))


def own_file(folder: Path) -> Path:
    """The data file that this rank wrote."""
    return next(folder.glob(f"rank-{ranks.rank():05d}-*.safetensors"))


def dd(source: Path, target: Path, *options: str) -> None:
    """A copy of this rank's data file by dd; it comes from the page cache, as state comes from memory."""
    command = ["dd", f"if={source}", f"of={target}", "bs=16M", "conv=fsync", *options]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def cache(folder: Path, warm: bool) -> None:
    """Bring all files of a folder into the page cache, or out of it; ranks share the work."""
    ranks.barrier("written")
    for i, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        if i % ranks.world_size() != ranks.rank():
            continue
        if not warm:
            drop_from_cache(path)
            continue
        with open(path, "rb") as file:
            while file.read(16 << 20):
                pass
    ranks.barrier("cached")


def clean(*folders: Path) -> None:
    """Rank 0 deletes; the file system settles before the next measurement."""
    ranks.barrier("used")
    if ranks.is_main():
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    ranks.barrier("clean")


def save_beside(engine: Engine, root: Path, step_between: bool) -> tuple[float, float, int]:
    """(seconds that training waits, seconds of the step beside the writing, bytes of memory) of a save beside training."""
    waited, step = [], [0.0]

    def act() -> None:
        begin = time.perf_counter()
        engine.save_checkpoint(root, wait=False)
        waited.append(time.perf_counter() - begin)
        before, begin = engine.checkpoints.blocked_s, time.perf_counter()
        if step_between:
            train_step(engine)
            step[0] = time.perf_counter() - begin
        else:
            engine.checkpoints.before_update()
        waited[0] += engine.checkpoints.blocked_s - before
        engine.checkpoints.wait()

    memory = grown(act)
    return float(ranks.max_across(waited[0])), float(ranks.max_across(step[0])), memory


def measure(engine: Engine, root: Path) -> dict[str, float]:
    """One repeat of everything."""
    row: dict[str, float] = {}
    ours, deepspeed, copy = root / "ours", root / "deepspeed", root / f"dd-{ranks.rank()}"
    seconds: list[float] = []
    row["grown_alone"] = grown(lambda: seconds.append(timed(lambda: train_step(engine))))
    row["step"] = seconds[0]
    row["blocked_step"], row["step_beside"], row["grown_step"] = save_beside(engine, ours, step_between=True)
    clean(ours)
    row["blocked_worst"], _, row["grown_worst"] = save_beside(engine, ours, step_between=False)
    clean(ours)
    row["deepspeed_save"] = timed(lambda: engine.deepspeed.save_checkpoint(str(deepspeed), tag="x"))
    row["deepspeed_warm"] = timed(lambda: engine.deepspeed.load_checkpoint(str(deepspeed), tag="x"))
    cache(deepspeed, warm=False)
    row["deepspeed_cold"] = timed(lambda: engine.deepspeed.load_checkpoint(str(deepspeed), tag="x"))
    clean(deepspeed)
    row["write"] = timed(lambda: engine.save_checkpoint(ours))
    folder = ours / f"checkpoint-{engine.global_step}"
    row["bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    cache(folder, warm=False)
    row["cold"] = timed(lambda: engine.load_checkpoint(ours))
    cache(folder, warm=True)
    row["warm"] = timed(lambda: engine.load_checkpoint(ours))
    source = own_file(folder)
    row["dd"] = timed(lambda: dd(source, copy))
    clean(copy)
    cache(folder, warm=True)
    row["dd_direct"] = timed(lambda: dd(source, copy, "oflag=direct"))
    clean(ours, copy)
    return row


def lines(stage: int, rows: list[dict[str, float]]) -> list[str]:
    """Markdown table rows of one stage."""
    m = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    gib, first, ds = m["bytes"] / 2**30, rows[0], m["deepspeed_save"]

    def row(what: str, ours: str, theirs: str, ratio: str) -> str:
        return f"| {stage} | {what} | {ours} | {theirs} | {ratio} |"

    return [
        row("training waits, one step before the next update (as in training)", f"{m['blocked_step']:.2f} s", f"{ds:.2f} s", f"{m['blocked_step'] / ds:.1%}"),
        row("the same and what that step took longer", f"{m['blocked_step'] + m['step_beside'] - m['step']:.2f} s ({m['step']:.2f} s alone)", f"{ds:.2f} s", f"{(m['blocked_step'] + m['step_beside'] - m['step']) / ds:.1%}"),
        row("training waits, next update at once", f"{m['blocked_worst']:.2f} s ({first['blocked_worst']:.2f} s the first time)", f"{ds:.2f} s", f"{m['blocked_worst'] / ds:.1%}"),
        row(f"whole write to disk ({gib:.2f} GiB, fsync)", f"{m['write']:.2f} s", f"dd: {m['dd']:.2f} s", f"{m['dd'] / m['write']:.0%} of dd's speed"),
        row("the same against dd with oflag=direct", f"{m['write']:.2f} s", f"dd: {m['dd_direct']:.2f} s", f"{m['dd_direct'] / m['write']:.0%} of dd's speed"),
        row("load, files in the page cache", f"{m['warm']:.2f} s", f"{m['deepspeed_warm']:.2f} s", f"{m['deepspeed_warm'] / m['warm']:.1f} x faster"),
        row("load, files on disk only", f"{m['cold']:.2f} s", f"{m['deepspeed_cold']:.2f} s", f"{m['deepspeed_cold'] / m['cold']:.1f} x faster"),
        row("resident memory above before, both ranks, one step between", f"{m['grown_step'] / 2**30:.2f} GiB ({m['grown_alone'] / 2**30:.2f} by such a step without a save)", "", ""),
        row("the same, next update at once", f"{first['grown_worst'] / 2**30:.2f} GiB the first time, {m['grown_worst'] / 2**30:.2f} later", "", f"{first['grown_worst'] / m['bytes']:.2f} snapshots"),
    ]  # fmt: skip


def show(text: list[str], table: Path | None) -> None:
    """Print the table, and write it if asked for."""
    print("\n".join(text), flush=True)
    if table:
        put_table(table, "\n".join(text))


def _folder(above: str | None) -> str:
    """A new folder in `above`, which is made if it is not there."""
    if above is not None:
        Path(above).mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(dir=above)


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
        root = Path(ranks.main_decides(lambda: _folder(args.dir), "making a folder"))
        train_step(engine)
        rows = []
        for _ in range(args.repeats):
            rows.append(measure(engine, root))
            if ranks.is_main():  # after each repeat: a run that is stopped has shown something
                print(rows[-1], flush=True)
                show([*text, *lines(stage, rows), f"\n{len(rows)} repeats at stage {stage}."], args.table)
        text += lines(stage, rows)
        clean(root)
        engine.close()
        del engine
        gc.collect()
    if ranks.is_main():
        show([*text, f"\nMedians of {args.repeats} repeats."], args.table)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
