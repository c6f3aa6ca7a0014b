"""ds_configs: load, generate, lint, resolve. Plain Python: nothing here imports torch or DeepSpeed.

`load` reads a file, `lint` says everything that is wrong with it, `resolve` leaves no "auto" and says who decided what,
`generate` writes one from a few choices. `RunValues` is what the command line says, `ModelShape` what is known about
the model.
"""

from __future__ import annotations

from bigtrain.config.generate import PRESETS, GenerateOptions, dump, generate
from bigtrain.config.lint import check, lint
from bigtrain.config.load import load, parse
from bigtrain.config.problems import Problem, report
from bigtrain.config.resolve import Decision, Resolved, resolve, table
from bigtrain.config.rules_run import left_open
from bigtrain.config.run import RunValues
from bigtrain.config.shape import ModelShape
from bigtrain.config.undone import refuse_kept, refuse_undone, undone

__all__ = [
    "PRESETS",
    "Decision",
    "GenerateOptions",
    "ModelShape",
    "Problem",
    "Resolved",
    "RunValues",
    "check",
    "dump",
    "generate",
    "left_open",
    "lint",
    "load",
    "parse",
    "refuse_kept",
    "refuse_undone",
    "report",
    "resolve",
    "table",
    "undone",
]
