"""`bigtrain inspect MODEL_DIR` and `bigtrain export DEEPSPEED_CKPT OUT`, for bigtrain/checkpoint/cli.py. Torch-free until export runs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bigtrain.errors import UsageError

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `inspect`."""
    parser.add_argument(
        "path", metavar="DIR", help="a checkpoint, or a folder with model.safetensors or shards and their index"
    )
    parser.add_argument("--world_size", type=int, metavar="N", help="show which bytes each of N ranks would read at ZeRO-3")
    parser.add_argument("--all", action="store_true", help="list every tensor, not the first 10")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what is in a folder of weights."""
    from bigtrain.weights.inspect import inspect_folder, report

    if arguments.world_size is not None and arguments.world_size < 1:
        raise UsageError(f"--world_size {arguments.world_size}: at least 1 rank.")
    table = inspect_folder(arguments.path, arguments.world_size)
    text = json.dumps(table, indent=2) if arguments.json else report(table, None if arguments.all else 10)
    sys.stdout.write(text + "\n")
    return 0


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `export`."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of checkpoints (the newest is meant)")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        type=lambda word: _SHORT.get(word, word),
        choices=["bfloat16", "float16", "float32"],
        help="type of the weights (default: bfloat16)",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="folder with the model's config.json and tokenizer, where the checkpoint has none"
    )
    parser.add_argument("--tag", help="which checkpoint of the folder")
    parser.add_argument("--max_shard_gb", type=_positive, default=5.0, metavar="GB", help="largest file, in 1e9 bytes")


def _positive(word: str) -> float:
    if not 1e-9 <= float(word) < float("inf"):
        raise argparse.ArgumentTypeError(f"{word}: write a positive number")
    return float(word)


def run_export(arguments: argparse.Namespace) -> int:
    """Convert a DeepSpeed checkpoint; alone, or on several ranks under torchrun."""
    from bigtrain.weights.deepspeed_export import export_deepspeed

    report = export_deepspeed(
        arguments.checkpoint, arguments.out, dtype=arguments.dtype, model_dir=arguments.model, tag=arguments.tag,
        max_shard_bytes=int(arguments.max_shard_gb * 1e9),
    )  # fmt: skip
    tell(report)
    return 0


def tell(report: Any) -> None:
    """Print what an export wrote (an `ExportReport`)."""
    sys.stdout.write(
        f"{report.path}: {report.tensors} tensors, {report.bytes / 1e9:.3f} GB in {len(report.files)} file{'s' * (len(report.files) != 1)}, "
        f"{report.seconds:.1f} s\n"
    )
