"""`bigtrain verify CKPT` and `bigtrain inspect CKPT`. Torch-free."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from bigtrain.checkpoint import store
from bigtrain.checkpoint.verify import verify


def add_parsers(subparsers: Any) -> None:
    """Register `verify`."""
    parser = subparsers.add_parser("verify", help="read a checkpoint whole and check every byte against its hash")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder, or a folder of checkpoints (the newest is meant)")
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> int:
    """Exit 0 when whole, 1 when damaged."""
    opened, problems = verify(args.checkpoint)
    if problems or opened is None:
        print(f"{args.checkpoint}: DAMAGED", *problems, sep="\n  ", file=sys.stderr)
        return 1
    size = sum(r.data_bytes for r in opened.ranks)
    print(f"{opened.folder}: whole. Step {opened.step}, {opened.commit.world_size} ranks, {size / 2**30:.3f} GiB checked.")
    return 0


def is_checkpoint(path: Path) -> bool:
    """True if `inspect` should treat `path` as a training checkpoint."""
    return (path / "COMMIT").is_file() or bool(store.steps(path))


def describe(path: Path) -> str:
    """What a checkpoint holds: ranks, bytes by kind, run state."""
    opened = store.find(path)
    by_kind: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for rank in opened.ranks:
        for s in rank.slices:
            by_kind[(s.kind, s.dtype)][0] += s.stop - s.start
            by_kind[(s.kind, s.dtype)][1] += s.nbytes
    lines = [f"{opened.folder}: step {opened.step}, written by {opened.commit.world_size} ranks"]
    lines += [f"  {kind:<20} {dtype:<5} {n:>16,} elements {b / 2**20:>12.1f} MiB" for (kind, dtype), (n, b) in by_kind.items()]
    lines.append("  layout: " + json.dumps(opened.run.get("layout", {})))
    lines.append("  state:  " + json.dumps(opened.run.get("state", {}))[:2000])
    return "\n".join(lines)
