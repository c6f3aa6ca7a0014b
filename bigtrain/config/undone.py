"""What a file asks of DeepSpeed's own optimizer and scheduler, and bigtrain's own do otherwise: refused, not passed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bigtrain.config.problems import Problem, ordered, report
from bigtrain.errors import ConfigError, ModelError

# Key -> (what bigtrain does, what to write). DeepSpeed's meaning: runtime/lr_schedules.py and ops/adam of 0.19.8.
_SCHEDULE: dict[str, tuple[Any, str, str]] = {
    "warmup_min_lr": (0.0, "the warm-up starts at 0 here", "write 0"),
    "warmup_min_ratio": (0.0, "the warm-up starts at 0 here", "write 0"),
    "warmup_type": ("linear", "the warm-up is linear here", 'write "linear"'),
    "cos_min_ratio": (
        0.0001,  # DeepSpeed's default; what is not above it changes no rate by more
        "the schedule's own end is not read here",
        "remove it, and pass --lr_scheduler_kwargs '{\"min_ratio\": %s}' (the Engine: lr_scheduler_kwargs)",
    ),
}
_OPTIMIZER: dict[str, tuple[Any, str, str]] = {
    "bias_correction": (True, "AdamW corrects its moments for their start at 0 here", "remove it"),
    "fp32_optimizer_states": (
        True,
        "the optimizer's name says what it keeps here",
        "remove it, and see --optim adamw_split_bf16",
    ),
    "momentum": (0.95, "Muon's momentum is 0.95 here", "write 0.95, or remove it"),
    "ns_method": (None, "Muon's iteration is given here", "remove it"),
}


def undone(config: Mapping[str, Any], *, optimizer: bool = True, scheduler: bool = True) -> Iterator[Problem]:
    """Values of the sections `optimizer` and `scheduler` that training would not follow.

    Args:
        config: a ds_config, resolved or not: "auto" asks for nothing.
        optimizer, scheduler: whether the section counts: another one may have been given to the Engine.
    """
    if scheduler:
        yield from _other(config, "scheduler", _SCHEDULE)
    if not optimizer:
        return
    yield from _other(config, "optimizer", _OPTIMIZER)
    section = _section(config, "optimizer")
    params = _section(section, "params")
    if str(section.get("type")).lower() == "adam" and params.get("adam_w_mode") is False:
        yield Problem("optimizer.params.adam_w_mode", False, "error", "Adam with weight decay inside of the gradient is not among "
                      "bigtrain's optimizers", "remove it: AdamW, with decay apart from the gradient, is trained then")  # fmt: skip
    for name in ("muon_lr", "adam_lr"):
        own, lr = params.get(name), params.get("lr")
        if own not in (None, "auto", lr):
            yield Problem(f"optimizer.params.{name}", own, "error", "one learning rate serves both halves of Muon here",
                          "write the rate as lr, and remove this")  # fmt: skip


def refuse_undone(config: Mapping[str, Any], name: str = "ds_config", **counts: bool) -> None:
    """Refuse what `undone` finds.

    Raises:
        ConfigError: all of it in one report.
    """
    if problems := list(undone(config, **counts)):
        raise ConfigError(report(ordered(problems), name))


def refuse_kept(patterns: Sequence[str], stage: int, bf16: bool) -> None:
    """Refuse `keep_in_fp32` where DeepSpeed cannot.

    Raises:
        ModelError: patterns are given and the training is in bf16 at stages 1 to 3.
    """
    if patterns and bf16 and stage > 0:
        raise ModelError(
            f"keep_in_fp32={list(patterns)} at ZeRO stage {stage}: DeepSpeed 0.19.8 holds parameters in flat buffers of one "
            "dtype and reduces their gradients in it, so parameters cannot stay fp32 beside bf16 ones (buffers can, and do). Its "
            "fp32 master copy keeps the precision of updates anyway. Leave keep_in_fp32 out, use stage 0, train in fp32 (bf16.enabled "
            "false, or dtype=torch.float32), or cast inside the module: F.linear(x.float(), weight.float())."
        )


def _other(config: Mapping[str, Any], name: str, known: Mapping[str, tuple[Any, str, str]]) -> Iterator[Problem]:
    params = _section(_section(config, name), "params")
    for key, (does, why, fix) in known.items():
        asked = params.get(key, does)
        if asked in ("auto", does) or (key == "cos_min_ratio" and not (isinstance(asked, int | float) and asked > does)):
            continue  # what is no number the lint tells
        yield Problem(f"{name}.params.{key}", asked, "error", why, fix % asked if "%" in fix else fix)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where there is none, or something else, which `lint` tells."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
