"""Bytes per rank and seconds per step before anything is built: arithmetic only, no torch.

`predict(PlanInput) -> Plan` says what fits and where every byte goes; `choose(...) -> Choice` picks the fastest
configuration that fits. `plan_input(config, ...)` makes the input from a Hugging Face config and a ds_config.

The model        families (every named parameter), family_decoders, family_others (a family's own), family_defaults (sizes that a config
                 leaves out), parameters, parts (where they stand in a step), impossible (sizes that are refused)
Activations      geometry (the sizes that decide), activations (what a block keeps), family_kept (a family's own), experts (a sparse
                 block's backward), moved (what its operations read and write)
The run          zero_settings (a ds_config as numbers), states (bytes of each optimizer), leafs (leaf modules), inputs (all that a plan
                 is made from), constants (what no formula gives; what a run takes at a time)
The GPU          device (a run, phase by phase; losses: its head and loss) writes a tape (tape); what is ZeRO's of it: zero_flat (stages 1, 2), zero_sliced (3), zero_none
                 (0, and 1 with fp32 sums), groups (the optimizer's), gathered (whole weights at stage 3), streamed (state that passes
                 through); shared (the same peaks without writing each tape), allocator (what is reserved for it)
The host         host (its tape), resident (CPU ranks: one memory), disk (what checkpoints take)
Answers          predict (bytes), rows (formulas of its rows), roofline (seconds), hardware (what both are held against), judge (does one configuration fit)
Choices          settled (what a run leaves open), spilled (gradients that leave), leaf_choice, longest (sequence), choose (all of it)
The machine      machine (what it has), room (what is in use now), cards (by their names)
The command      cli, show
"""

from __future__ import annotations

from bigtrain.plan.choose import Candidate, Choice, choose
from bigtrain.plan.family_kept import Attention, attention_of, liger_for
from bigtrain.plan.inputs import PlanInput, block_count, plan_input
from bigtrain.plan.predict import Plan, predict
from bigtrain.plan.roofline import Rates, StepTime, rates_from, step_time
from bigtrain.plan.settled import least_blocks
from bigtrain.plan.zero_settings import ZeroSettings, settings_from_config

__all__ = [
    "Attention",
    "Candidate",
    "Choice",
    "Plan",
    "PlanInput",
    "Rates",
    "StepTime",
    "ZeroSettings",
    "block_count",
    "attention_of",
    "liger_for",
    "choose",
    "least_blocks",
    "plan_input",
    "predict",
    "rates_from",
    "settings_from_config",
    "step_time",
]
