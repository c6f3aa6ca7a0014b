"""The optimizer step on a CPU host and the memory of training with it: DeepSpeed's CPU Adam beside the split optimizers.

    python launch/bench_optimizer.py --table docs/results/cpu_optimizer.md

Two processes of one thread each, as two ranks on a two-core host have it.

- *update*: `optimizer.step()` alone on `--elems` elements in all, in turn with DeepSpeedCPUAdam in the same processes: that on fp32
  weights and gradients (its layout under offload), the split optimizers on bf16 ones. DeepSpeed's own clipping, and its copies between fp32 and bf16, are not in it;
  the split update includes clipping and writes the bf16 weights.
- *training*: a Llama of the widths of a 1B model and `--layers` layers, ZeRO-2 with offload_optimizer on two gloo ranks; seconds of
  `engine.step()` (norm, clipping, update, gathering weights) and the peak resident memory of a rank, over whole training steps; every line in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from measuring import run_ranks, write_rank

KINDS = ("deepspeed", "adamw_split", "adamw_split_bf16", "adamw_split_8bit")
RANKS = 2
LIMIT_S = 3600.0  # of one line


def main() -> None:
    """Run every line, print the tables, write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elems", type=float, default=4e8, help="parameters of the update")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model that trains")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--parts", nargs="+", default=["update", "training"], choices=["update", "training"])
    parser.add_argument("--table", type=Path, help="write the tables here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        part, kind = args.worker.split(":")
        write_rank(args.out, (update if part == "update" else training)(kind, args))
        return
    rows: dict[str, Any] = {"update": run("update", "all", args)} if "update" in args.parts else {}
    if "training" in args.parts:
        rows["training"] = {kind: run("training", kind, args) for kind in args.kinds}
    text = report(rows, args)
    print(text)
    if args.table:
        from bigtrain.diagnostics.pages import put_table

        put_table(args.table, text)


def run(part: str, kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What both ranks say of one line."""
    words = ["--worker", f"{part}:{kind}", "--elems", str(args.elems), "--layers", str(args.layers), "--steps", str(args.steps)]
    os.environ["DS_ACCELERATOR"] = "cpu"
    found = run_ranks(__file__, RANKS, [*words, "--kinds", *args.kinds, "--out"], limit_s=LIMIT_S)
    print(part, kind, found, file=sys.stderr, flush=True)
    return found


def update(_kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each update of this rank's share, for each optimizer in turn beside DeepSpeed's: a busy host slows both alike."""
    from bigtrain import ranks, zero

    zero.init_distributed()
    peer = _optimizer("deepspeed", int(args.elems) // RANKS)
    found: dict[str, Any] = {}
    for kind in (k for k in args.kinds if k != "deepspeed"):
        ours = _optimizer(kind, int(args.elems) // RANKS)
        seconds: dict[str, list[float]] = {"ours": [], "deepspeed": []}
        for _ in range(args.steps + 1):
            for name, optimizer in (("deepspeed", peer), ("ours", ours)):
                ranks.barrier("update")
                begin = time.perf_counter()
                optimizer.step()
                seconds[name].append(time.perf_counter() - begin)
        found[kind] = {name: times[1:] for name, times in seconds.items()}
    return found


def _optimizer(kind: str, n: int) -> Any:
    """On one parameter of `n` elements with its gradient: fp32 for DeepSpeed's, bf16 for the split ones."""
    import torch

    from bigtrain.optim import cpu_kernel
    from bigtrain.optim.build import build_optimizer
    from bigtrain.optim.options import Offload, Options

    dtype = torch.float32 if kind == "deepspeed" else torch.bfloat16
    param = torch.nn.Parameter(torch.empty(n, dtype=dtype))
    param.grad = torch.empty(n, dtype=dtype)
    for tensor in (param.data, param.grad):  # a piece at a time: no fp32 copy of the whole
        for piece in tensor.split(1 << 24):
            piece.copy_(torch.randn(piece.numel()) * 0.02)
    name = "adamw" if kind == "deepspeed" else kind
    optimizer = build_optimizer(
        name, [{"params": [param]}], Options(lr=1e-4, weight_decay=0.1, offload=Offload(), device="cpu")
    )
    if kind != "deepspeed":
        assert cpu_kernel.why_not() is None
        optimizer.grad_factor = 0.5  # type: ignore[attr-defined]
    assert kind != "deepspeed" or type(optimizer).__name__ == "DeepSpeedCPUAdam"
    return optimizer


def training(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each `engine.step()`, and this rank's peak memory after all of them."""
    import torch
    import transformers

    from bigtrain.engine import Engine
    from bigtrain.models import build_model

    config = transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=args.layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=16384, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e7, "offload_optimizer": {"device": "cpu"}},
    }
    model = build_model(config, ds_config=ds_config)
    elems = sum(p.numel() for p in model.parameters())
    name = "adamw" if kind == "deepspeed" else kind
    engine = Engine(model, ds_config=ds_config, optimizer=name, learning_rate=1e-4, weight_decay=0.1, hang_s=None)
    seconds, losses = [], []
    ids = torch.randint(0, 16384, (1, 32), generator=torch.Generator().manual_seed(engine.rank))
    for _ in range(args.steps + 1):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        begin = time.perf_counter()
        result = engine.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(result.loss if result else None)
    return {"seconds": seconds[1:], "rss": peak_rss(), "elems": elems, "losses": losses}


def peak_rss() -> int:
    """Bytes; the largest this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def slowest(found: list[dict[str, Any]]) -> float:
    """Median over the steps of the slower rank's time."""
    return statistics.median(max(pair) for pair in zip(*(rank["seconds"] for rank in found)))


def report(rows: dict[str, Any], args: argparse.Namespace) -> str:
    """Both tables as a page."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x),
        platform.machine(),
    )
    lines = [
        "# The optimizer step on a CPU host",
        "",
        f"{RANKS} processes of one thread each, {cpu}; medians of {args.steps} steps,",
    ]
    lines += ["the slower process of each step. `python launch/bench_optimizer.py` says what is measured.", ""]
    if "update" in rows:
        lines += [
            f"## The update alone, {args.elems / 1e9:g}e9 parameters in all",
            "",
            "Each beside DeepSpeedCPUAdam, in turn.",
            "",
        ]
        lines += ["| optimizer | s for 1e9 parameters | DeepSpeedCPUAdam, same run | as fast |", "|---|---|---|---|"]
        for kind in rows["update"][0]:
            ours, theirs = (
                statistics.median(max(pair) for pair in zip(*(rank[kind][who] for rank in rows["update"]))) * 1e9 / args.elems
                for who in ("ours", "deepspeed")
            )
            lines += [f"| {kind} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f}x |"]
        lines += [""]
    if "training" in rows:
        elems = next(iter(rows["training"].values()))[0]["elems"]
        lines += [f"## Training, {elems / 1e9:.2f}e9 parameters, ZeRO-2 with offload_optimizer, 2 ranks", ""]
        lines += [
            "| optimizer | seconds of `engine.step()` | against DeepSpeedCPUAdam | peak memory of both, GB |",
            "|---|---|---|---|",
        ]
        lines += [_row(kind, rows["training"]) for kind in rows["training"]] + [""]
    return "\n".join(lines)


def _row(kind: str, found: dict[str, Any]) -> str:
    name = "adamw (DeepSpeedCPUAdam)" if kind == "deepspeed" else kind
    seconds, memory = slowest(found[kind]), sum(rank["rss"] for rank in found[kind])
    speed = less = ""
    if kind != "deepspeed" and "deepspeed" in found:
        speed = f"{slowest(found['deepspeed']) / seconds:.2f}x as fast"
        less = f" ({100 * (memory / sum(r['rss'] for r in found['deepspeed']) - 1):+.0f} %)"
    return f"| {name} | {seconds:.2f} | {speed} | {memory / 1e9:.1f}{less} |"


if __name__ == "__main__":
    main()
