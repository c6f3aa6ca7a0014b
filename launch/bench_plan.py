#!/usr/bin/env python
"""Figures of the planner, as Markdown on standard output; docs/results/plan_*.md are made by it.

python launch/bench_plan.py cli                              seconds and imports of `bigtrain plan`
python launch/bench_plan.py ladder                           the public 8.36 B case at 47.4 GiB on 1, 2 and 8 cards
python launch/bench_plan.py accuracy OUT/rows.jsonl...       errors on one half of a sweep's cells, constants fitted on the other
python launch/bench_plan.py choice OUT/rows.jsonl...         --auto against brute force over the sweep's rows, at three caps
python launch/bench_plan.py host OUT/rows.jsonl              the planner's host figures on CPUs against measured PSS

`choice OUT/rows.jsonl --again`: by what this code predicts for the cells, not by what was predicted before they ran.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bigtrain import shapes
from bigtrain.bench import accuracy, grid, prediction
from bigtrain.bench.machine import Machine
from bigtrain.bench.rows import read_rows
from bigtrain.errors import BigtrainError, UsageError

MODELS = ("llama-405b", "llama-70b", "llama-8b", "qwen2.5-7b", "mixtral-8x7b", "qwen2.5-vl-7b")
CAPS_GIB = (24, 47.4, 80)
REPEATS = 5
_TIMED = (
    "import sys, time; from bigtrain.cli import main; code = main(sys.argv[1:]); "
    "print(code, time.process_time(), 'torch' in sys.modules, file=sys.stderr)"
)


def cli() -> str:
    """Seconds of the whole process for each named model on 64 cards of 80 GB."""
    words = ["--gpus", "64", "--gpus_per_node", "8", "--gpu_memory", "80GB", "--host_memory", "1TiB", "--json"]
    lines = [f"`bigtrain plan --model preset:NAME {' '.join(words)}`, whole process with the start of Python, {REPEATS} times; {where()}.",
             "", "| model | parameters | wall s, median | worst | CPU s | torch in sys.modules |", "|---|---|---|---|---|---|"]  # fmt: skip
    for name in MODELS:
        command = [sys.executable, "-c", _TIMED, "plan", "--model", f"preset:{name}", *words]
        walls, cpus, torch_there, plan = [], [], set(), {}
        for _ in range(REPEATS):
            begin = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            walls.append(time.perf_counter() - begin)
            _, cpu, loaded = done.stderr.split()[-3:]
            cpus.append(float(cpu))
            torch_there.add(loaded)
            plan = json.loads(done.stdout)
        lines.append(f"| {name} | {plan['model']['parameters']:,} | {statistics.median(walls):.2f} | {max(walls):.2f} | "
                     f"{statistics.median(cpus):.2f} | {'yes' if 'True' in torch_there else 'no'} |")  # fmt: skip
    return "\n".join(lines)


def ladder() -> str:
    """What `bigtrain plan --auto` says of the 8.36 B shape on cards of 47.4 GiB."""
    parts = []
    for cards, host in ((1, "126GiB"), (2, "252GiB"), (8, "1008GiB")):
        words = ["plan", "--model", "preset:llama-8.36b", "--gpus", str(cards), "--gpu_memory", "47.4GiB", "--host_memory", host,
                 "--seq_len", "4096", "--auto", "--kernels", "liger", "--calibration", "none"]  # fmt: skip
        done = subprocess.run([sys.executable, "-m", "bigtrain", *words], capture_output=True, text=True, cwd=ROOT, check=False)
        said = done.stdout.split("\nchosen:")
        chosen = f"\nchosen:{said[1]}" if len(said) > 1 else ""
        parts.append(f"## {cards} card(s) of 47.4 GiB, {host} of host memory\n\n    bigtrain {' '.join(words)}\n\nexit code "
                     f"{done.returncode}\n\n```\n{(said[0] + chosen).strip()}\n```")  # fmt: skip
    return "\n\n".join(parts)


def host(files: list[str]) -> str:
    """Predictions of this code for the sweep's cells, beside what they took; the most of the phases that a cell goes through."""
    rows = [r for r in read(files) if r["status"] == "ok" and r["runner"] == "bigtrain" and r.get("host_node_pss_bytes")]
    if not rows:
        raise UsageError(f"no cell of launch/train.py ran to its end in {' '.join(files)}")
    lines = [f"Two ranks, {rows[0]['card']}, {platform.machine()}; measured: peak PSS of the fuller rank (the kernel's own peak less what is "
             "shared), and the most of both together at one moment. Predicted: one rank's, and that twice.", "",
             "| model | ds_config | tokens of a row | accumulation | predicted GiB | measured GiB | error | both ranks | error |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    one, both = [], []
    for row in rows:
        cell = cell_again(row)
        machine = Machine(device="cpu", card=row["card"], gpu_bytes=None, host_bytes=None)
        said, seen, node = prediction.prediction(cell, machine)["host_bytes"], row["host_pss_bytes"], row["host_node_pss_bytes"]
        one.append(abs(said / seen - 1))
        both.append(abs(said * cell.num_gpus / node - 1))
        s = row["settings"]
        lines.append(f"| {row['model'].removeprefix('preset:')} | {s['ds_config']} | {s['seq_len']} | {s['gradient_accumulation_steps']} | "
                     f"{said / 2**30:.2f} | {seen / 2**30:.2f} | {said / seen - 1:+.1%} | {node / 2**30:.2f} | "
                     f"{said * cell.num_gpus / node - 1:+.1%} |")  # fmt: skip
    lines += [
        "",
        f"Mean absolute error over {len(rows)} cells, worst in brackets: the fuller rank {statistics.mean(one):.1%} ({max(one):.1%}), "
        f"both together {statistics.mean(both):.1%} ({max(both):.1%}).",
    ]
    return "\n".join(lines)


def cell_again(row: dict[str, Any]) -> grid.Cell:
    """The cell that a row was measured for, with the blocks and buffers that its run had, whatever would be chosen today."""
    own = {"runner", "num_gpus", "ds_config", "steps", "warmup", "env"}
    arguments = {k: v for k, v in row["settings"].items() if k not in own}
    told, config = row["predicted"], row["ds_config"]
    if "leaf_module" not in config.get("zero_optimization", {}):  # else the file says it
        chosen = "leaf blocks" in told.get("config", "")  # by auto, which older rows had not
        arguments.setdefault("leaf_blocks", "on" if chosen else "off")
    if arguments.get("checkpoint_blocks") == "auto":
        arguments["checkpoint_blocks"] = _blocks(row)
    if "buffers" in told:
        config = copy.deepcopy(config)
        config["zero_optimization"]["offload_optimizer"].setdefault("buffer_count", told["buffers"])
    model = Path(arguments["model_name_or_path"])
    if not model.exists() and model.name in shapes.names():  # a folder that was written for the sweep (bench_load_cards.py)
        arguments["model_name_or_path"] = f"preset:{model.name}"
    return grid.Cell(num_gpus=row["num_gpus"], ds_config=config, ds_name=row["settings"]["ds_config"], arguments=arguments)


def _blocks(row: dict[str, Any]) -> int | str:
    """How many blocks a run of `checkpoint_blocks: auto` recomputed; "auto" where its row does not say it."""
    told = row["predicted"]
    said = re.search(r"(\d+) of \d+ blocks", told.get("config", ""))
    offloads = row["ds_config"].get("zero_optimization", {}).get("offload_optimizer")
    if "blocks" in told:
        return int(told["blocks"])
    return int(said[1]) if said and not offloads else "auto"


def read(files: list[str]) -> list[dict[str, Any]]:
    """The last row of every cell of these files.

    Raises:
        UsageError: there is none, or a line is no row.
    """
    found = {row["cell"]: row for file in files for row in read_rows(Path(file))}
    if not found:
        raise UsageError(f"no rows in {' '.join(files) or 'no file at all'}: name the rows.jsonl of a sweep")
    return list(found.values())


def predicted_again(row: dict[str, Any]) -> dict[str, Any]:
    """The row with what this code predicts for its cell."""
    limits = row["predicted"]
    machine = Machine(
        device="cuda", card=row["card"], gpu_bytes=limits["gpu_limit_bytes"], host_bytes=limits["host_limit_bytes"],
        transformers=row["versions"].get("transformers"),
    )  # fmt: skip
    return {**row, "predicted": prediction.prediction(cell_again(row), machine)}


def where() -> str:
    """This machine in a few words."""
    return f"Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}"


ROOT = Path(__file__).resolve().parents[1]


def main(words: list[str] | None = None) -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cli", "ladder", "accuracy", "choice", "host"])
    parser.add_argument("rows", nargs="*", help="rows.jsonl of a sweep")
    parser.add_argument(
        "--again", action="store_true", help="choice: by predictions of this code, not those made before the cells ran"
    )
    args = parser.parse_args(words)
    try:
        print(told(args))
    except BigtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def told(args: argparse.Namespace) -> str:
    """What was asked for."""
    if args.what == "cli":
        return cli()
    if args.what == "ladder":
        return ladder()
    if args.what == "host":
        return host(args.rows)
    if args.what == "accuracy":
        return accuracy.accuracy_text(read(args.rows))
    rows = [predicted_again(row) if args.again else row for row in read(args.rows)]
    return accuracy.choices_text(accuracy.choices(rows, [int(cap * 2**30) for cap in CAPS_GIB]))


if __name__ == "__main__":
    raise SystemExit(main())
