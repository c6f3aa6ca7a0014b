"""DeepSpeed's compiled AdamW for CPUs: whether it can be had, and how a resumed run goes on with the same bits."""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
import torch

from bigtrain import ranks
from bigtrain.builds import first_cause, load_op, why_no_tools
from bigtrain.zero import startup

log = logging.getLogger(__name__)


def cpu_adam(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Any:
    """DeepSpeed's compiled CPU AdamW; where it cannot be compiled, torch's AdamW and a warning that says why.

    The compile runs once a host: local rank 0 first. All ranks take the same way, because the two round differently.
    """
    why: str | None = None
    with ranks.main_first("compiling DeepSpeed's CPU Adam"):
        why = why_no_cpu_adam()
    reasons = {r: w for r, w in enumerate(ranks.all_gather_object(why)) if w}
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    if not reasons:
        return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
    first = min(reasons)
    log.warning(
        "DeepSpeed's CPU Adam cannot be used (rank %d: %s). Falling back to torch's AdamW on the CPU: same result within fp32 "
        "rounding, several times slower a step.",
        first,
        reasons[first],
    )
    return torch.optim.AdamW(groups, foreach=False, **settings)


def replay_cpu_adam(optimizer: Any) -> None:
    """Bring DeepSpeed's CPU Adam to where the updates counted in its state brought it; other optimizers need nothing.

    The compiled part multiplies the powers of the betas up, update by update, in float. In a new process it would begin with pow(),
    which rounds differently (csrc/includes/cpu_adam.h, IncrementStep), and a resumed run would part from the unbroken one.
    """
    if not isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam):
        return
    updates = max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)
    group = optimizer.param_groups[0]
    rest = *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"]
    nothing = [torch.zeros(1) for _ in range(4)]  # parameter, gradient, moments
    for update in range(1, updates + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, update, group["lr"], *rest, *nothing)


def why_no_cpu_adam() -> str | None:
    """Why DeepSpeed's CPU Adam cannot be loaded here, the first cause first; None if it can. Compiles it if needed."""
    from deepspeed.git_version_info import installed_ops

    if not installed_ops.get("cpu_adam", False) and (why := why_no_tools()):
        return why
    startup.ask_cpu_once()
    try:
        load_op(deepspeed.ops.op_builder.CPUAdamBuilder())
    except Exception as error:
        return first_cause(error)
    return None
