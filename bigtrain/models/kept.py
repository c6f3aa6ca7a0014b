"""Parameters that stay fp32 in a model that trains in bf16 (`keep_in_fp32`): which names are meant, and where none can be."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from bigtrain.errors import ModelError


def is_kept(name: str, patterns: Sequence[str]) -> bool:
    """Whether a parameter is meant by one of these: with `*` a shell pattern of its whole name, else a part of it ("router")."""
    return any(fnmatchcase(name, pattern if "*" in pattern else f"*{pattern}*") for pattern in patterns)


def kept_names(model: torch.nn.Module, patterns: Sequence[str], stage: int, bf16: bool) -> set[str]:
    """Names of the parameters to keep in fp32; none with fp32 training, which keeps everything anyway.

    Raises:
        ModelError: see `refuse_kept`; or a pattern matches nothing.
    """
    if not bf16:
        return set()
    refuse_kept(patterns, stage, bf16)
    names = [n for n, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(is_kept(name, [pattern]) for name in names):
            raise ModelError(f"keep_in_fp32: no parameter matches {pattern!r}; names look like {names[:3]}")
    return {name for name in names if is_kept(name, patterns)}


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
