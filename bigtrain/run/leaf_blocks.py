"""`--leaf_blocks`: are a run's blocks leaf modules of ZeRO-3. What is decided is written into the ds_config, as DeepSpeed reads it.

A ds_config that says leaf modules itself stands. A run that goes on from a checkpoint does as the run did that wrote it, unless it is told
otherwise: last digits may depend on it, and the choice on the card.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigtrain import ranks
from bigtrain.config import Decision
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import PlanInput
from bigtrain.plan.leaf_choice import LeafChoice, choose_leafs, leafed, refuse_contrary
from bigtrain.plan.leafs import block_class
from bigtrain.plan.predict import quick
from bigtrain.run.job import Job
from bigtrain.run.runfolder import RunFolder

logger = logging.getLogger(__name__)
_PATH = "leaf_blocks"
_THRESHOLD = "stage3_module_granularity_threshold"


def as_said(job: Job) -> Job:
    """The job with `--leaf_blocks on` in its ds_config; others as they are.

    Raises:
        UsageError: see `leaf_choice.refuse_contrary`.
    """
    said, zero, own = job.args.leaf_blocks, _zero(job), job.block_classes or ()
    refuse_contrary(said, zero.get("stage", 0), own, _named(zero), _says(zero))
    if said != "on":
        return job
    return _with(job, () if _says(zero) else own, LeafChoice(True, "--leaf_blocks"), "flag")


def decided(job: Job, found: PlanInput | None, hardware: Hardware, resume: Path | None = None) -> Job:
    """The job with what was left open, the same on every rank. Collective.

    Args:
        found: its plan, settled otherwise; None: there is none.
        resume: the checkpoint that the run goes on from.
    """
    if _zero(job).get("stage", 0) != 3 or _says(_zero(job)):
        return job
    if job.args.leaf_blocks == "off":
        return _with(job, (), LeafChoice(False, "--leaf_blocks"), "flag")
    kept = ranks.main_decides(lambda: _kept(resume), "reading what the run before kept")
    choice = _choice(job, found, hardware, kept)
    if choice.on or found is None or found.device == "cuda":  # on a CPU there is nothing to choose
        logger.info("--leaf_blocks auto: %s", choice.text())
    return _with(job, (job.block_classes or ()) if choice.on else (), choice, "plan")


def _kept(resume: Path | None) -> bool | None:
    """Of the run before; None: it does not tell. One that says nothing at all is older than the choice: it had hooks on each layer."""
    found = RunFolder.kept(resume)
    return found.get("leaf_blocks", False) if found else None


def _choice(job: Job, found: PlanInput | None, hardware: Hardware, kept: bool | None) -> LeafChoice:
    as_before = "as in the run that it goes on from"
    if kept is False:
        return LeafChoice(False, as_before)
    if kept and job.block_classes and (found is None or block_class(found.parameters.kind) not in job.block_classes):
        return LeafChoice(True, as_before)  # it was told to, and there is no plan that would say that they do not fit
    if found is None:
        return LeafChoice(False, "this model or run has no plan")
    if block_class(found.parameters.kind) not in (job.block_classes or ()):
        return LeafChoice(False, "which modules are this model's blocks is not known")
    if kept:
        fits = hardware.holds(quick(leafed(found)))
        return LeafChoice(fits, as_before if fits else f"not {as_before}: with whole blocks it does not fit")
    choice = choose_leafs(found, hardware)
    assert choice is not None
    return choice


def _with(job: Job, classes: Sequence[str], choice: LeafChoice, source: Any) -> Job:
    config = copy.deepcopy(job.resolved.config)
    if classes:
        config["zero_optimization"]["leaf_module"] = {"classes": list(classes)}
    known = [one for one in job.resolved.decisions if one.path != _PATH]
    decision = Decision(_PATH, "on" if choice.on else "off", source, choice.why)
    return replace(job, leaf_blocks=choice.on, resolved=replace(job.resolved, config=config, decisions=[*known, decision]))


def _zero(job: Job) -> dict[str, Any]:
    return job.resolved.config.get("zero_optimization") or {}


def _says(zero: dict[str, Any]) -> bool:
    return any((zero.get("leaf_module") or {}).values()) or bool(zero.get(_THRESHOLD))


def _named(zero: dict[str, Any]) -> list[str]:
    names = (zero.get("leaf_module") or {}).get("classes") or []
    return [names] if isinstance(names, str) else list(names)
