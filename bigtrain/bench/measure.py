"""`bigtrain plan --auto --measure N`: the best candidates, each run for a few steps here, as cells of a sweep."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigtrain.bench import sweep
from bigtrain.bench.grid import Cell
from bigtrain.bench.machine import Machine, this_machine
from bigtrain.errors import UsageError
from bigtrain.plan.choose import Candidate
from bigtrain.plan.command import train_command
from bigtrain.plan.machine import gpu_memory
from bigtrain.plan.roofline import speed_numbers
from bigtrain.run.auto import config_of, flags

STEPS, WARMUP = 6, 3
CELL_S = 600.0


def measure(model: str, candidates: Sequence[Candidate], out: Path | None = None) -> list[dict[str, Any]]:
    """Run each candidate; rows with what it is, its speed, and how to train with it, the fastest first, failures last.

    Args:
        model: `preset:NAME` or a folder. candidates: in the planner's order. out: folder for what the runs write; None: a
            new one below the system's folder for temporary files, which stays, for its logs and ds_configs.

    Raises:
        UsageError: this machine has fewer cards than the candidates have ranks.
    """
    machine = _machine(candidates)
    out = out or Path(tempfile.mkdtemp(prefix="bigtrain-measure-"))
    cells = [cell_of(model, candidate) for candidate in candidates]
    print(
        f"measuring the best {len(cells)} for {STEPS} steps each on {machine.card}; logs in {out}", file=sys.stderr, flush=True
    )
    job = sweep.Sweep(out=out, machine=machine, code=sweep.code_version())
    found = {row["cell"]: row for row in job.run(cells)}
    rows = [_row(at, candidates[at], cell, found[cell.key(job.code, machine.card)], out) for at, cell in enumerate(cells)]
    return sorted(rows, key=lambda row: -(row["tokens_per_s"] or 0.0))


def _machine(candidates: Sequence[Candidate]) -> Machine:
    machine, ranks, device = this_machine(), candidates[0].input.world_size, candidates[0].input.device
    if machine.device != device or (device == "cuda" and len(gpu_memory()) < ranks):
        here = f"{len(gpu_memory())} card(s)" if machine.device == "cuda" else "no card"
        raise UsageError(f"--measure needs the {ranks} card(s) that the plan is for; this machine has {here}: run it there")
    return machine


def cell_of(model: str, candidate: Candidate) -> Cell:
    """The candidate as a cell: the same ds_config and values that `launch/train.py --ds_config auto` would use."""
    plan = candidate.input
    arguments: dict[str, Any] = {
        "model_name_or_path": model,
        "seq_len": plan.seq_len,
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "optim": plan.optimizer,
        "gradient_checkpointing": plan.checkpointing != "none",
        **{name: value for name, value in flags(plan).items() if value not in (None, "full", "0.0", "auto")},
        "use_liger_kernel": plan.kernels == "liger" or plan.chunks_loss,
    }
    if plan.frozen:
        arguments["freeze"] = list(plan.frozen)
    return Cell(num_gpus=plan.world_size, steps=STEPS, warmup=WARMUP, max_cell_s=CELL_S, ds_config=config_of(plan.settings),
                ds_name=candidate.describe(), arguments=arguments)  # fmt: skip


def _row(at: int, candidate: Candidate, cell: Cell, row: dict[str, Any], out: Path) -> dict[str, Any]:
    speed = row["tokens_per_s_per_gpu"] * cell.num_gpus if row["status"] == "ok" else None
    flags = {**cell.arguments, "ds_config": out / "cells" / row["cell"] / "ds_config.json"}
    return {
        "candidate": at,
        "what": candidate.describe(),
        "status": row["status"],
        "error": f": {row['error'][:160]}" if row["error"] else "",
        "tokens_per_s": speed,
        "planned_tokens_per_s": speed_numbers(candidate.input.device, candidate.time)["tokens_per_s"],
        "step_time_s": row.get("step_time_s"),
        "ds_config": cell.ds_config,
        "command": train_command(candidate.input, sweep.flags(flags)),
    }
