"""Bytes per rank and seconds per step before anything is built: arithmetic only, no torch.

`predict(PlanInput) -> Plan` says what fits and where every byte goes; `choose(...) -> Choice` picks the fastest
configuration that fits. `plan_input(config, ...)` makes the input from a Hugging Face config and a ds_config.
"""

from __future__ import annotations

from bigtrain.plan.blocks import least_blocks
from bigtrain.plan.choose import Candidate, Choice, choose
from bigtrain.plan.families import model_parameters, parameters_from_shapes
from bigtrain.plan.family_kept import Attention, attention_of, liger_for
from bigtrain.plan.inputs import PlanInput, block_count, plan_input
from bigtrain.plan.predict import Plan, Row, Tree, predict
from bigtrain.plan.roofline import Rates, StepTime, rates_from, step_time
from bigtrain.plan.zero_settings import ZeroSettings, settings_from_config

__all__ = [
    "Attention",
    "Candidate",
    "Choice",
    "Plan",
    "PlanInput",
    "Rates",
    "Row",
    "StepTime",
    "Tree",
    "ZeroSettings",
    "block_count",
    "attention_of",
    "choose",
    "least_blocks",
    "liger_for",
    "model_parameters",
    "parameters_from_shapes",
    "plan_input",
    "predict",
    "rates_from",
    "settings_from_config",
    "step_time",
]
