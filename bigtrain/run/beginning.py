"""What a run says of its settings before the first step: what matters, and where the rest stands."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from bigtrain.config import Resolved, report

# Decisions of the plan that had a line of their own when they were made.
_TOLD = ("checkpoint_blocks", "checkpointing_policy", "leaf_blocks")


def story(resolved: Resolved, folder: Path) -> Iterator[tuple[int, str]]:
    """(level of logging, text): how it trains, what the machine or the plan changed, and warnings about the ds_config.

    Args:
        folder: of the run, where every value stands with who decided it.
    """
    run, zero = resolved.run, resolved.config.get("zero_optimization") or {}
    away = [what for what in ("optimizer", "param") if (zero.get(f"offload_{what}") or {}).get("device", "none") != "none"]
    words = {"optimizer": "optimizer states", "param": "parameters"}
    parts = [
        f"ZeRO stage {zero.get('stage', 0)}"
        + (f" with {' and '.join(words[what] for what in away)} offloaded" if away else ""),
        "bf16" if run.bf16 else "fp32",
        str(run.optim),
        f"learning rate {run.learning_rate:g} ({run.lr_scheduler_type}, {run.warmup_steps} warm-up steps)",
        f"gradients clipped at {run.max_grad_norm:g}" if run.max_grad_norm else "gradients not clipped",
    ]
    if run.gradient_checkpointing:
        parts.append("activations recomputed")
    yield logging.INFO, f"{', '.join(parts)}; every value, with who decided it: {folder / 'ds_config.resolved.json'}"
    here = [d for d in resolved.decisions if d.source == "device" or (d.source == "plan" and d.path not in _TOLD)]
    for decision in here:
        yield logging.INFO, f"  {decision.path} is {decision.value}: {decision.reason}"
    known = {decision.path for decision in here}
    if problems := [p for p in resolved.problems if p.severity != "note" or p.path not in known]:
        yield logging.WARNING, report(problems, "ds_config")
