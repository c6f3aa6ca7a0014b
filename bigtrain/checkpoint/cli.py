"""`bigtrain verify`, `inspect` and `export`, of checkpoints and of folders of weights. Torch-free until export runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bigtrain.checkpoint import reshard, store
from bigtrain.checkpoint.verify import verify
from bigtrain.errors import UsageError
from bigtrain.guards import listing
from bigtrain.partition import owned_range
from bigtrain.weights.inspect import inspect_folder, report
from bigtrain.weights.replace import refuse_foreign

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# What is said of the run's state, and under which name: its `tokens` are those that count in the loss (`Engine.tokens`).
_COUNTERS = {
    **{name: name for name in ("global_step", "updates", "data_position", "seed", "schedule", "skipped", "user")},
    "tokens": "target_tokens",
}


def add_parsers(subparsers: Any) -> None:
    """Add the verbs to an argparse subparsers object; each sets `run(arguments)`, which returns an exit code."""
    parser = subparsers.add_parser("verify", help="read a checkpoint whole and check every byte against its hash")
    parser.add_argument(
        "checkpoint", type=os.path.expanduser, help="a checkpoint folder, or a folder of checkpoints (the newest is meant)"
    )
    parser.set_defaults(run=run_verify)
    parser = subparsers.add_parser("inspect", help="what is in a checkpoint or in a folder of weights")
    parser.add_argument(
        "path",
        metavar="DIR",
        type=os.path.expanduser,
        help="a checkpoint, or a folder with model.safetensors or shards and their index",
    )
    parser.add_argument("--world_size", type=int, metavar="N", help="show which bytes each of N ranks would read at ZeRO-3")
    parser.add_argument("--all", action="store_true", help="list every tensor, not the first 10")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run_inspect)
    parser = subparsers.add_parser(
        "export", help="the weights of a checkpoint, bigtrain's or DeepSpeed's, as a Hugging Face folder"
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=os.path.expanduser,
        help="a checkpoint, or a folder of checkpoints (the newest is meant)",
    )
    parser.add_argument("out", metavar="OUT", help="folder to make")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        type=lambda word: _SHORT.get(word, word),
        choices=["bfloat16", "float16", "float32"],
        help="type of the weights (default: bfloat16)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=os.path.expanduser,
        help="folder with the model's config.json and tokenizer, where the checkpoint has none",
    )
    parser.add_argument("--tag", help="which checkpoint of the folder")
    parser.add_argument("--max_shard_gb", type=_positive, default=5.0, metavar="GB", help="largest file, in 1e9 bytes")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is in OUT, if it is an earlier export by bigtrain"
    )
    parser.set_defaults(run=run_export)


def _positive(word: str) -> float:
    if not 1e-9 <= float(word) < float("inf"):
        raise argparse.ArgumentTypeError(f"{word}: write a positive number")
    return float(word)


def run_verify(args: argparse.Namespace) -> int:
    """Exit 0 when whole, 1 when damaged."""
    path = Path(args.checkpoint)
    _refuse_missing(path)
    if not store.holds_any(path):
        raise UsageError(
            f"{args.checkpoint} is no checkpoint of bigtrain and holds none: nothing there has a hash to compare with. "
            "`bigtrain inspect` says what is in a folder of weights"
        )
    opened, problems = verify(path)
    if problems or opened is None:
        print(f"{args.checkpoint}: DAMAGED", *problems, sep="\n  ", file=sys.stderr)
        return 1
    size = sum(r.data_bytes for r in opened.ranks)
    print(f"{opened.folder}: whole. Step {opened.step}, {_ranks(opened.commit.world_size)}, {size / 2**30:.3f} GiB checked.")
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Print what is in a folder, whichever kind it is."""
    path = Path(args.path)
    _refuse_missing(path)
    if args.world_size is not None and args.world_size < 1:
        raise UsageError(f"--world_size {args.world_size}: at least 1 rank.")
    own = is_checkpoint(path)
    found = facts(path, args.world_size) if own else inspect_folder(args.path, args.world_size)
    text = json.dumps(found, indent=2) if args.json else (describe if own else report)(found, None if args.all else 10)
    sys.stdout.write(text + "\n")
    return 0


def run_export(args: argparse.Namespace) -> int:
    """Write a Hugging Face folder from a checkpoint, bigtrain's or DeepSpeed's; alone, or on several ranks under torchrun."""
    path = Path(args.checkpoint)
    _refuse_missing(path)
    out = os.path.expanduser(args.out)
    refuse_foreign(out)
    if not args.overwrite and os.path.isdir(out) and (there := sorted(os.listdir(out))):
        raise UsageError(
            f"{args.out} holds {listing(there)}: name another folder, or add --overwrite to replace the model there by that of {args.checkpoint}"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch

        if not torch.distributed.is_initialized():  # each would wait for the others' files without hearing of them
            torch.distributed.init_process_group("gloo")
    tagged = path if args.tag is None else store.named(path, args.tag)
    how = {"dtype": args.dtype, "model_dir": args.model, "max_shard_bytes": int(args.max_shard_gb * 1e9)}
    if not is_checkpoint(tagged) and (tagged.exists() or not is_checkpoint(path)):
        from bigtrain.weights.deepspeed_export import export_deepspeed

        done = export_deepspeed(args.checkpoint, out, tag=args.tag, **how)
    else:
        from bigtrain.checkpoint.export import export_checkpoint

        done = export_checkpoint(tagged, out, **how)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(
            f"{done.source} -> {done.path}: {done.tensors} tensors, {done.bytes / 1e9:.3f} GB in {len(done.files)} file{'s' * (len(done.files) != 1)}, "
            f"{done.seconds:.1f} s\n"
        )
    return 0


def _ranks(count: int) -> str:
    return f"{count} rank" + "s" * (count != 1)


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def _refuse_missing(path: Path) -> None:
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder" if path.exists() else f"there is no folder {path}")


def is_checkpoint(path: Path) -> bool:
    """True if `path` is a checkpoint in bigtrain's own format, or holds some; also of those that are not whole."""
    return store.is_one(path) or bool(store.steps(path)) or (path.is_dir() and bool(store.unfinished(path)))


def facts(path: Path, world_size: int | None = None) -> dict[str, Any]:
    """What a checkpoint holds: ranks, elements and bytes by kind, tensors, layout and run state; what `world_size` ranks would read.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    opened = store.find(path)
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for s in (s for rank in opened.ranks for s in rank.slices):
        row = kinds.setdefault(
            (s.kind, s.dtype), {"kind": s.kind, "dtype": s.dtype, "tensors": set(), "elements": 0, "bytes": 0}
        )
        row["tensors"].add(s.param)
        row["elements"] += s.stop - s.start
        row["bytes"] += s.nbytes
    return {
        "folder": str(opened.folder), "step": opened.step, "ranks": opened.commit.world_size,
        "bytes": sum(r.data_bytes for r in opened.ranks),
        "kinds": [{**row, "tensors": len(row["tensors"])} for row in kinds.values()],
        "model_files": sorted(opened.run.get("model_files", {})), "layout": opened.run.get("layout", {}),
        "state": opened.run.get("state", {}), "tensors": _tensors(opened),
        **({} if world_size is None else {"reads": _reads(opened, world_size)}),
    }  # fmt: skip


def _tensors(opened: store.Opened) -> list[dict[str, Any]]:
    """Each parameter: shape, and dtype by kind."""
    found: dict[str, dict[str, Any]] = {}
    for s in (s for rank in opened.ranks for s in rank.slices):
        row = found.setdefault(s.param, {"name": s.param, "shape": list(s.shape), "kinds": {}})
        row["kinds"][s.kind] = s.dtype
    return list(found.values())


def _reads(opened: store.Opened, world_size: int) -> list[dict[str, int]]:
    """For each of so many ranks at ZeRO-3: bytes that it reads of each data file."""
    found = []
    for rank in range(world_size):
        wanted = []
        for (kind, param), held in opened.index.items():
            start, stop = owned_range(held[0][1].numel, rank, world_size)
            wanted.append(reshard.Wanted(param=param, kind=kind, shape=held[0][1].shape, start=start, stop=stop))
        sizes: dict[str, int] = {}
        for read in reshard.plan_reads(opened.index, wanted):
            name = opened.ranks[read.rank].data_name
            sizes[name] = sizes.get(name, 0) + read.count * read.saved.item_bytes
        found.append(sizes)
    return found


def describe(f: dict[str, Any], most: int | None = 10) -> str:
    """`facts` for people, with so many of the tensors."""
    lines = [f"{f['folder']}: step {f['step']}, written by {_ranks(f['ranks'])}, {f['bytes'] / 2**30:.3f} GiB"]
    lines += [
        f"  {k['kind']:<12} {k['dtype']:<5} {k['tensors']:>6} tensors {k['elements']:>16,} elements {k['bytes'] / 2**20:>12.1f} MiB"
        for k in f["kinds"]
    ]
    lines.append("  model files: " + (", ".join(f["model_files"]) or "none (give `bigtrain export` --model DIR)"))
    lines += [f"  {name}: {value}" for name, value in f["layout"].items()]
    lines += [f"  {_COUNTERS[name]}: {_plain(value)}" for name, value in f["state"].items() if name in _COUNTERS]
    shown = f["tensors"][:most]
    lines += [f"  {t['name']}  {t['shape']}  {', '.join(f'{k} {d}' for k, d in t['kinds'].items())}" for t in shown]
    if len(f["tensors"]) > len(shown):
        lines.append(f"  ... and {len(f['tensors']) - len(shown)} more tensors (--all)")
    for rank, sizes in enumerate(f.get("reads", ())):
        parts = ", ".join(f"{size / 2**20:.1f} MiB of {name}" for name, size in sizes.items())
        lines.append(f"  rank {rank} of {len(f['reads'])} (ZeRO-3) would read {parts or 'nothing'}")
    return "\n".join(lines)
