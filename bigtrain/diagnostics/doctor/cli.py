"""`bigtrain doctor`: is this machine fit to train? Exit 0: fine, or only warnings; 1: a run would fail."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigtrain import standins
from bigtrain.errors import UsageError

MOST_RANKS = 1024  # of one host: each is a process


def add_parsers(subparsers: Any) -> None:
    """Register the verb; the parser sets `run`, a function from args to exit code."""
    p = subparsers.add_parser(
        "doctor",
        help="test this machine, and say what to mend",
        description="Test this machine, and say what to mend. Exit code 0: nothing that makes a run fail (there may be warnings); 1: "
        "something would fail; 2: wrong usage.",
    )
    p.add_argument("--world_size", type=int, metavar="N", help="ranks to test with (default: one a GPU, 2 without)")
    p.add_argument("--quick", action="store_true", help="facts only, in a second: no compiling, no speeds, no ranks")
    p.add_argument("--build", action="store_true", help="compile native parts anew, in a scratch folder (a minute)")
    p.add_argument("--dir", default=".", metavar="DIR", help="where runs write to (default: here)")
    p.add_argument("--save", metavar="FILE", help="for measured rates (default: machine.json in ~/.cache/bigtrain)")
    p.add_argument("--no_ladder", action="store_true", help="do not look for settings that help when ranks cannot talk")
    p.add_argument("--limit_s", type=float, default=30.0, metavar="S", help="longest time for the ranks' test (default 30)")
    p.add_argument("--json", action="store_true", help="findings as JSON on standard output")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, print, and say by the exit code how it went."""
    from bigtrain.diagnostics.doctor import examine, show
    from bigtrain.diagnostics.doctor.finding import exit_code
    from bigtrain.plan.roofline import rates_file

    if args.world_size is not None and not 1 <= args.world_size <= MOST_RANKS:
        raise UsageError(f"--world_size {args.world_size}: ranks of this host, from 1 to {MOST_RANKS:,}")
    if not args.limit_s > 0:
        raise UsageError(f"--limit_s {args.limit_s:g}: a positive number of seconds")
    here = Path(args.dir).expanduser().absolute()
    place = next(one for one in (here, *here.parents) if os.path.lexists(one))
    if not place.is_dir():
        raise UsageError(
            f"--dir {args.dir}: {place} is {'a file' if place.is_file() else standins.instead(place)}, no folder that a run could write to"
        )
    request = examine.Request(
        world_size=args.world_size, quick=args.quick, build=args.build, folder=str(here), limit_s=args.limit_s,
        save=Path(args.save) if args.save else rates_file(), ladder=not args.no_ladder,
    )  # fmt: skip
    findings, seconds = examine.timed(examine.examine(request))
    code = exit_code(findings)
    if int(os.environ.get("RANK", "0")) == 0:
        table = {"exit_code": code, "seconds": round(seconds, 1), "findings": [asdict(f) for f in findings]}
        print(json.dumps(table, indent=2) if args.json else show.text(findings, seconds))
    elif (
        any(f.status != "ok" for f in findings) and os.environ.get("LOCAL_RANK", "0") == "0"
    ):  # another host under a launcher: its complaints
        import socket

        print(f"{socket.gethostname()}:\n{show.text([f for f in findings if f.status != 'ok'], seconds)}", file=sys.stderr)
    return code
