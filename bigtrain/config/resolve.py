"""Turning a ds_config with "auto" in it into one that says everything, and saying who decided each value."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bigtrain.config import resolve_training, resolve_zero
from bigtrain.config.lint import lint
from bigtrain.config.problems import Problem, ordered, raise_if_errors, shorten
from bigtrain.config.resolve_steps import AUTO, Decision, Work
from bigtrain.config.rules import Context
from bigtrain.config.run import RunValues
from bigtrain.config.schema import Key
from bigtrain.config.schema_sections import ROOT
from bigtrain.config.shape import ModelShape
from bigtrain.config.structure import params_key

CODE_OWNED = ("optimizer", "scheduler")
STEPS: tuple[Callable[[Work], None], ...] = (
    resolve_zero.modernise,
    resolve_training.precision,
    resolve_training.batch,
    resolve_training.accumulation_dtype,
    resolve_training.optimizer,
    resolve_training.schedule,
    resolve_training.clipping,
    resolve_training.activation_checkpointing,
    resolve_zero.buckets,
    resolve_zero.optimizer_flags,
    resolve_zero.without_gpu,
    resolve_zero.housekeeping,
)
"""In order: later steps read what earlier ones decided."""


@dataclass(frozen=True)
class Resolved:
    """The outcome of `resolve`.

    Attributes:
        config: no "auto" left; runs under plain `deepspeed.initialize`.
        decisions: who decided each value that somebody had to decide.
        run: the run values, complete: what the optimizer and the schedule are built from.
        problems: warnings and notes about the file.
    """

    config: dict[str, Any]
    decisions: list[Decision]
    run: RunValues
    problems: list[Problem] = field(default_factory=list)

    def engine_config(self) -> dict[str, Any]:
        """The config for a program that builds optimizer and schedule itself and hands the optimizer to DeepSpeed.

        Without these two sections: DeepSpeed 0.19.8 would attach the file's scheduler to the program's optimizer, and
        two parties would then set the learning rate.
        """
        return {key: copy.deepcopy(value) for key, value in self.config.items() if key not in CODE_OWNED}


def resolve(
    config: Mapping[str, Any],
    *,
    run: RunValues | None = None,
    model: ModelShape | None = None,
    world_size: int = 1,
    device: str = "cuda",
    name: str = "ds_config",
) -> Resolved:
    """Decide every open value of a ds_config.

    Precedence: a value in the file stands; "auto" or a missing key takes the command line's value, then the model's,
    then a default. File and command line saying different things is an error, never a choice.

    Args:
        config: the file's content.
        run: what the command line says.
        model: what is known about the model; without it the bucket formulas fall back to DeepSpeed's defaults.
        world_size: number of ranks.
        device: `cuda` or `cpu`; on cpu, options that need a GPU are dropped.
        name: what to call the file in an error.

    Raises:
        ConfigError: every lint error, every disagreement and every "auto" that nothing can fill, in one report.
    """
    run = run or RunValues()
    problems = lint(config, world_size=world_size, model=model, run=run, device=device)
    if Context(config).fp16:
        problems.append(_no_fp16())
    raise_if_errors(ordered(problems), name)
    work = Work(copy.deepcopy(dict(config)), run, model, world_size, device)
    for step in STEPS:
        step(work)
    errors = [*work.errors, *_left_open(work.config, ROOT, "", {e.path for e in work.errors})]
    raise_if_errors(ordered([*errors, *problems]), name)
    return Resolved(work.config, work.decisions, work.run, problems)


def _no_fp16() -> Problem:
    return Problem("fp16.enabled", True, "error", "bigtrain trains in bf16 or fp32, without loss scaling",
                   "write bf16.enabled true and remove the fp16 section")  # fmt: skip


def _left_open(body: Mapping[str, Any], table: Key, path: str, known: set[str]) -> list[Problem]:
    """Every "auto" that is still there and that DeepSpeed does not understand itself."""
    found: list[Problem] = []
    for name, value in body.items():
        here = f"{path}.{name}" if path else name
        row = table.lookup(name)
        key = params_key(path, body) if here in ("optimizer.params", "scheduler.params") else row[1] if row else None
        if isinstance(value, Mapping):
            found += _left_open(value, key or Key(kind="section", open=True), here, known)
        elif value == AUTO and (key is None or key.auto != "native") and here not in known:
            found.append(Problem(here, AUTO, "error", "nothing says what it should be", "write a value"))
    return found


def table(decisions: list[Decision]) -> str:
    """The decisions as text, one a line: path, value, who, why."""
    rows = [(d.path, "-" if d.value is None else shorten(d.value, 40), d.source, d.reason) for d in decisions]
    widths = [max((len(r[i]) for r in rows), default=0) for i in range(3)]
    return "\n".join("  ".join((*(r[i].ljust(widths[i]) for i in range(3)), r[3])) for r in rows)
