"""What the planner says about a cell before it runs: memory, speed, whether it fits. Arithmetic only."""

from __future__ import annotations

import os
from typing import Any

from bigtrain import config as ds
from bigtrain import defaults, plan, shapes
from bigtrain.bench.grid import Cell
from bigtrain.bench.machine import Machine
from bigtrain.config import ModelShape, Resolved, RunValues
from bigtrain.diagnostics.metrics import FlopsFormula
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.plan.cards import H100_FLOPS, peak_bf16_flops
from bigtrain.plan.cli import model_config
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.judge import time_on
from bigtrain.plan.leaf_choice import as_said, with_leafs
from bigtrain.plan.machine import expandable_segments
from bigtrain.plan.predict import Plan
from bigtrain.plan.roofline import Rates, stored_rates
from bigtrain.plan.settled import buffers_are_open, settled
from bigtrain.plan.show import heading
from bigtrain.plan.spilled import asked_share
from bigtrain.plan.states import layout_name
from bigtrain.run.auto import AUTO, any_candidate, pick


def attention(cell: Cell, machine: Machine) -> plan.Attention:
    """Rows of a sweep are not packed unless told. Peers take sdpa."""
    asked = cell.arguments.get("attn_implementation", "auto" if cell.runner == "bigtrain" else "sdpa")
    kind = model_config(cell.model).get("model_type")
    told, dropout = cell.told, model_config(cell.model).get("attention_dropout") or 0.0
    return plan.attention_of(
        asked,
        told.packing,
        machine.device,
        kind,
        machine.transformers,
        seq_len=cell.seq_len,
        selective=told.is_selective,
        dropout=dropout,
    )


def kernels(cell: Cell, machine: Machine) -> dict[str, Any]:
    """The planner's words for the cell's kernels: fused ones on a GPU unless told not to, as in launch/train.py; peers, if told."""
    asked = cell.told.use_liger_kernel
    has_gpu = machine.device == "cuda"
    fused = defaults.fused_kernels(asked, has_gpu) if cell.runner == "bigtrain" else asked
    found = {"kernels": "hf", "chunks_loss": bool(fused)}
    if fused and has_gpu and machine.liger:
        found = plan.liger_for(model_config(cell.model).get("model_type"))
    return found if cell.runner == "bigtrain" else {"kernels": found["kernels"]}


def _plan_input(cell: Cell, machine: Machine, run: RunValues, **more: Any) -> PlanInput:
    """What is planned of a cell, as `bigtrain.run.capacity` does it of a run. `more`: other values of `plan.plan_input`."""
    return plan.plan_input(
        model_config(cell.model),
        attention=attention(cell, machine),
        grouped_experts=cell.runner == "bigtrain" and not cell.told.torch_compile,
        world_size=cell.num_gpus,
        gpus_per_node=cell.num_gpus,
        seq_len=cell.seq_len,
        optimizer=layout_name(run.optim or defaults.OPTIM),
        checkpoint_blocks=cell.told.recomputed_blocks,
        mlp_tile_tokens=cell.told.mlp_tile_tokens or 0,
        **kernels(cell, machine),
        device=machine.device,
        card_flops=peak_bf16_flops(machine.card) or H100_FLOPS,
        expandable=expandable_segments({**os.environ, **cell.env}),
        frozen=tuple(cell.told.freeze),
        drawn=shapes.is_preset(cell.model),
        **more,
    )


def resolved(cell: Cell, machine: Machine) -> Resolved:
    """The cell's ds_config with nothing left open; "auto" chooses as launch/train.py will.

    Raises:
        ConfigError: it cannot be used. DoesNotFitError: nothing fits.
    """
    return _resolved(cell, machine)[0]


def resolved_before_search(cell: Cell, machine: Machine) -> Resolved:
    """As `resolved`; of ds_config auto one of those that it will choose from, which costs no search.

    Raises:
        ConfigError, UsageError: it cannot be used.
    """
    if cell.ds_config != AUTO:
        return resolved(cell, machine)
    told = cell.told
    config, run = any_candidate(
        asked(cell, machine),
        told.run_values(cell.steps),
        share=asked_share(told.offload_gradients),
        leaf_blocks=told.leaf_blocks,
    )
    shape = ModelShape.from_config(model_config(cell.model))
    return ds.resolve(config, run=run, model=shape, world_size=cell.num_gpus, device=machine.device)


def _resolved(cell: Cell, machine: Machine) -> tuple[Resolved, PlanInput | None]:
    """The cell's config, and what the planner chose, for ds_config auto."""
    values, run, config, told = model_config(cell.model), cell.told.run_values(cell.steps), cell.ds_config, cell.told
    chosen = None
    if config == AUTO:
        picked = pick(
            asked(cell, machine),
            run,
            hardware(cell, machine),
            blocks_are_open=told.checkpoint_blocks == AUTO,
            share=asked_share(told.offload_gradients),
            leaf_blocks=told.leaf_blocks,
        )
        config, run, chosen = picked.config, picked.run, picked.candidate.input
    shape = ModelShape.from_config(values)
    return ds.resolve(config, run=run, model=shape, world_size=cell.num_gpus, device=machine.device), chosen


def hardware(cell: Cell, machine: Machine) -> Hardware:
    """What the cell may take of a card, the host, and this machine's rates."""
    cap, gpu = cell.told.gpu_memory_cap, machine.gpu_bytes
    gpu = min(gpu, int(cap * 2**30)) if gpu is not None and cap else gpu
    return Hardware(gpu, machine.host_bytes, stored_rates(machine.device) or Rates())


def asked(cell: Cell, machine: Machine, done: Resolved | None = None) -> PlanInput:
    """What the cell says, with nothing settled that it leaves open; of ds_config auto (`done` is None) what the search begins from.

    Raises:
        UsageError: the model's family has no formulas, or the cell's values contradict each other or the model.
    """
    told = cell.told
    if done is None:
        return _plan_input(cell, machine, told.run_values(cell.steps), checkpointing=told.checkpointing_policy)
    run = done.run
    assert run.micro_batch and run.accumulation
    found = _plan_input(
        cell,
        machine,
        run,
        ds_config=done.engine_config(),
        micro_batch=run.micro_batch,
        accumulation=run.accumulation,
        checkpointing=told.checkpointing_policy if run.gradient_checkpointing else "none",
    )
    return as_said(found.but(offload_gradients=asked_share(told.offload_gradients) or 0.0), told.leaf_blocks)


def planned(cell: Cell, machine: Machine) -> Plan:
    """The plan of a cell, as launch/train.py makes it.

    Raises:
        UsageError: the model's family has no formulas, or settings contradict each other.
    """
    done, chosen = _resolved(cell, machine)
    told = cell.told
    share, blocks_are_open = asked_share(told.offload_gradients), told.checkpoint_blocks == AUTO
    found = asked(cell, machine, done)
    if chosen is not None:
        share, blocks_are_open = chosen.settings.offload_gradients, False
        policy = told.checkpointing_policy if chosen.checkpointing == "none" else chosen.checkpointing
        found = found.but(
            offload_gradients=share,
            checkpointing=policy if done.run.gradient_checkpointing else "none",
            checkpoint_blocks=chosen.checkpoint_blocks,
        )
    here, buffers = hardware(cell, machine), not told.no_plan and buffers_are_open(done.config)
    found = settled(found, here, share=share is None, buffers=buffers, blocks=blocks_are_open)
    found = with_leafs(found, here) if told.leaf_blocks == AUTO else found
    return plan.predict(found, gpu_memory_bytes=here.gpu_bytes)


def prediction(cell: Cell, machine: Machine) -> dict[str, Any]:
    """Numbers to lay beside the measured ones; `{"none": why}` where the planner has no formulas."""
    try:
        found = planned(cell, machine)
    except UsageError as error:
        return {"none": str(error)}
    except DoesNotFitError as error:  # ds_config auto
        return {"none": str(error).splitlines()[-1], "fits": False}
    except Exception as error:  # values of a type that the program will refuse: the cell says so
        return {"none": f"no plan: {error!r}"}
    here = hardware(cell, machine)
    time, allocated = time_on(found, here), found.gpu.steps_bytes
    return {
        "config": spelled(found.input),
        "blocks": found.input.recomputed_blocks,
        **({"buffers": found.input.settings.buffers} if found.input.streams else {}),
        "gpu_allocated_bytes": allocated,
        "gpu_reserved_bytes": found.gpu_reserved_bytes,
        "gpu_used_bytes": found.gpu_used_bytes,
        "host_bytes": found.host.steps_bytes,  # a cell neither saves nor exports
        "host_node_bytes": found.host.steps_bytes * found.ranks_per_node,
        "gpu_need_bytes": found.gpu_need_bytes(),
        "host_need_bytes": found.host_need_bytes(),
        "gpu_limit_bytes": here.gpu_bytes,
        "host_limit_bytes": here.host_bytes,
        "fits": here.holds(found),
        "step_time_s": time.total_s if machine.device == "cuda" else None,
        "tokens_per_s_per_gpu": time.tokens_per_s / cell.num_gpus if machine.device == "cuda" else None,
    }


def spelled(found: PlanInput) -> str:
    """What was planned, in one line: for `auto` nothing else says it."""
    return heading(found).splitlines()[1]


def flops_formula(found: PlanInput) -> FlopsFormula:
    """Model FLOPs per token of what was planned: the same formula for every runner. Of experts the active ones count."""
    shape, counts = found.geometry, {True: 0, False: 0}
    for one, trains in zip(found.parameters.items, found.trains):
        sparse = ".experts." in one.name and shape.experts
        counts[trains] += one.elems * shape.experts_per_token // shape.experts if sparse else one.elems
    return FlopsFormula(
        trained_parameters=counts[True],
        frozen_parameters=counts[False],
        layers=shape.layers,
        hidden=shape.query,
        seq_len=found.seq_len,
        windows=shape.windows,
    )
