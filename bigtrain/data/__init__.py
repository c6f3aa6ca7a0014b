"""Training data: sources, tokenise, pack, order, loader.

Usual path: `load_source` -> `build_rows` -> `plan_steps` + `SampleOrder` -> `StepLoader`; for evaluation `plan_eval` ->
`EvalLoader`. `prepare_isolation(model, packing)` makes a model honour packed rows. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigtrain import lazily

if TYPE_CHECKING:
    from bigtrain.data.isolation import adds_to_masks, has_varlen, prepare_isolation, register_varlen
    from bigtrain.data.isolation_choice import Isolation, isolation_for
    from bigtrain.data.loader import EvalLoader, StepLoader
    from bigtrain.data.order import EvalPlan, SampleOrder, StepPlan, plan_eval, plan_steps
    from bigtrain.data.pack import PackStats, Rows, build_rows, stats_dict
    from bigtrain.data.sets import load_rows
    from bigtrain.data.source import load_source, split_validation

__all__ = [
    "EvalLoader",
    "EvalPlan",
    "Isolation",
    "PackStats",
    "Rows",
    "SampleOrder",
    "StepLoader",
    "StepPlan",
    "adds_to_masks",
    "build_rows",
    "isolation_for",
    "load_rows",
    "load_source",
    "plan_eval",
    "plan_steps",
    "prepare_isolation",
    "has_varlen",
    "register_varlen",
    "split_validation",
    "stats_dict",
]

__getattr__ = lazily(
    __name__,
    isolation="adds_to_masks has_varlen prepare_isolation register_varlen",
    isolation_choice="Isolation isolation_for",
    loader="EvalLoader StepLoader",
    order="EvalPlan SampleOrder StepPlan plan_eval plan_steps",
    pack="PackStats Rows build_rows stats_dict",
    sets="load_rows",
    source="load_source split_validation",
)
