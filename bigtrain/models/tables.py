"""What a built model is made of."""

from __future__ import annotations

from collections import Counter

import torch


def tied_groups(model: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names that share one parameter, group by group."""
    by_id: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(p), []).append(name)
    return tuple(tuple(names) for names in by_id.values() if len(names) > 1)


def dtype_table(model: torch.nn.Module) -> dict[str, int]:
    """Number of tensors by kind and dtype, for a summary: {"parameter bfloat16": 21, "buffer float32": 2}."""
    short = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731
    counts = Counter(f"parameter {short(p.dtype)}" for p in model.parameters())
    counts.update(f"buffer {short(b.dtype)}" for b in model.buffers())
    return dict(counts)
