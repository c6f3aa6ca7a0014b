"""Optimizers as a table, parameter groups, learning-rate schedules. The table and the schedules need no torch."""

from __future__ import annotations

from bigtrain import lazily

__all__ = [
    "OPTIMIZERS",
    "Offload",
    "Optimizer",
    "Options",
    "after_initialize",
    "build_optimizer",
    "canonical_name",
    "engine_config_patch",
    "own_schedule",
    "param_groups",
    "refuse_unknown",
    "schedule",
    "state_bytes",
]

__getattr__ = lazily(
    __name__,
    build="after_initialize build_optimizer",
    groups="param_groups",
    options="Offload Options",
    schedules="own_schedule refuse_unknown schedule",
    table="OPTIMIZERS Optimizer canonical_name engine_config_patch state_bytes",
)
