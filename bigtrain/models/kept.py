"""Parameters that stay fp32 in a model that trains in bf16 (`keep_in_fp32`): which names are meant, and where none can be."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from bigtrain.config import refuse_kept
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
