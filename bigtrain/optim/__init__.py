"""Optimizers as a table, parameter groups, learning-rate schedules. The table and the schedules need no torch."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "OPTIMIZERS": "table",
    "Optimizer": "table",
    "canonical_name": "table",
    "engine_config_patch": "table",
    "state_bytes": "table",
    "schedule": "schedules",
    "Offload": "options",
    "Options": "options",
    "build_optimizer": "build",
    "after_initialize": "build",
    "param_groups": "groups",
}

__all__ = [
    "OPTIMIZERS",
    "Offload",
    "Optimizer",
    "Options",
    "after_initialize",
    "build_optimizer",
    "canonical_name",
    "engine_config_patch",
    "param_groups",
    "schedule",
    "state_bytes",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"bigtrain.optim.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
