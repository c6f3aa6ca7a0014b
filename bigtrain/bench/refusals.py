"""What launch/train.py would refuse of a cell once it has the model's config, found before the first cell takes the cards.

Types of values, and what arguments say of each other, are looked at where a grid is read (`bigtrain.bench.values`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bigtrain import config as ds
from bigtrain import defaults, optim, plan
from bigtrain.bench import prediction
from bigtrain.bench.grid import Cell, labels
from bigtrain.bench.machine import Machine
from bigtrain.bench.values import as_keys
from bigtrain.config import Resolved
from bigtrain.errors import UsageError
from bigtrain.plan.cli import model_config
from bigtrain.plan.families import position_limit
from bigtrain.run.argument_problems import too_long
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.auto import AUTO


def refuse_impossible(cells: Sequence[Cell], machine: Machine, *, run: bool = True) -> None:
    """Look at every cell.

    Args:
        run: the cells are to run here; else they are planned, for any number of cards.

    Raises:
        UsageError: with each cell and what is wrong with it.
    """
    problems = []
    for cell, label in zip(cells, labels(cells) if cells else ()):
        try:
            _refuse(cell, machine)
            if run:
                _refuse_missing_cards(cell, machine)
        except UsageError as error:
            problems.append(f"cell {label}: {as_keys(str(error).rstrip())}")
    if problems:
        raise UsageError(
            "\n".join([*dict.fromkeys(problems[:10]), *([f"and {len(problems) - 10} more cells"] if problems[10:] else [])])
        )


def _refuse(cell: Cell, machine: Machine) -> None:
    config, args = model_config(cell.model), cell.told
    optim.canonical_name(args.optim or defaults.OPTIM)
    done = prediction.resolved_before_search(cell, machine)
    if cell.runner == "bigtrain":
        optim.canonical_name(done.run.optim or defaults.OPTIM)
        if cell.ds_config != AUTO:
            ds.refuse_undone(cell.ds_config, cell.ds_name)
        zero, bf16 = done.config.get("zero_optimization") or {}, (done.config.get("bf16") or {}).get("enabled")
        ds.refuse_kept(args.keep_in_fp32, int(zero.get("stage", 0)), bool(bf16))
    _refuse_schedule(args, done, cell.steps)
    if why := too_long(cell.seq_len, position_limit(config), cell.model):
        raise UsageError(why)
    _refuse_contrary(cell, machine, done, config)


def _refuse_schedule(args: TrainArguments, done: Resolved, steps: int) -> None:
    run, warmup = done.run, args.warmup(steps)
    if warmup is None:
        warmup = run.warmup_steps or 0
    kind = args.lr_scheduler_type or run.lr_scheduler_type or "linear"
    optim.refuse_unknown(args.scheduler_kwargs)
    optim.schedule(kind, warmup_steps=int(warmup), total_steps=steps, **args.scheduler_kwargs)


def _refuse_contrary(cell: Cell, machine: Machine, done: Resolved, config: dict[str, Any]) -> None:
    """Names of parameters and numbers of blocks that the model does not have, and what ds_config and optimizer do not go with.

    Of a model or ds_config that the planner does not count nothing is known here: the cell itself will tell.
    """
    try:
        plan.plan_input(config, ds_config=done.engine_config())
    except UsageError:
        return
    if cell.arguments.get("offload_gradients", prediction.AUTO) != prediction.AUTO:
        # What a share goes with is the same on a CPU, which has nothing to plan of it.
        machine = replace(machine, device="cuda")
    prediction.asked(cell, machine, None if cell.ds_config == AUTO else done)


def _refuse_missing_cards(cell: Cell, machine: Machine) -> None:
    if not machine.cards or cell.num_gpus <= len(machine.cards):
        return
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    by = f" by CUDA_VISIBLE_DEVICES={chosen}" if chosen is not None else ""
    raise UsageError(f"num_gpus {cell.num_gpus}: its ranks see {len(machine.cards)} GPU(s){by}, one for each is needed")
