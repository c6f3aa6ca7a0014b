"""What is looked at before training starts."""

from __future__ import annotations

from collections import Counter

import torch

from bigtrain.errors import ModelError


def refuse_batchnorm_micro_batch_1(model: torch.nn.Module, micro_batch: int) -> None:
    """Statistics of one sample are no statistics: a training BatchNorm needs a micro batch of at least 2.

    Frozen (eval mode) and synchronised BatchNorms are left alone.

    Raises:
        ModelError: with the layers' names and the remedy.
    """
    if micro_batch != 1:
        return
    kinds = torch.nn.modules.batchnorm._BatchNorm
    names = [
        name
        for name, m in model.named_modules()
        if isinstance(m, kinds) and not isinstance(m, torch.nn.SyncBatchNorm) and _will_train(m)
    ]
    if names:
        raise ModelError(
            f"{len(names)} BatchNorm layers (first: {names[0]}) would normalise over a micro batch of 1. Set the micro batch "
            "(--per_device_train_batch_size, train_micro_batch_size_per_gpu) to 2 or more, freeze the part that holds them, or "
            "replace them by GroupNorm.",
            names,
        )


def _will_train(module: torch.nn.Module) -> bool:
    """A frozen module's `train` was replaced (see bigtrain.models.frozen), so asking it shows what model.train() will do."""
    return "train" not in module.__dict__


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
