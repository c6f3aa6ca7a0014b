"""What can be said of checkpoints before anything is built, from a model without values (`models.skeleton`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bigtrain import optim
from bigtrain.checkpoint import deepspeed_format, deepspeed_import, live, store
from bigtrain.errors import CheckpointError, UsageError
from bigtrain.optim.groups import param_groups


def refuse_other(folder: Path, model: torch.nn.Module, layout: Mapping[str, Any]) -> None:
    """Compare a checkpoint with the run that is to go on from it: a load would refuse the same, after the model was built.

    Args:
        folder: one checkpoint, bigtrain's or DeepSpeed's.
        model: names, shapes and frozen parts of this run's.
        layout: `live.layout_of` this run.

    Raises:
        UsageError: another optimizer, precision or model; names what differs.
        CheckpointError, WeightsError: the checkpoint is damaged.
    """
    opened = store.open_checkpoint(folder) if (folder / "COMMIT").is_file() else None
    index = opened.index if opened is not None else {}  # outside: a damaged one is no other one
    try:
        if opened is None:
            _refuse_other_foreign(folder, model, layout)
            return
        live.check_layout(opened.run["layout"], layout, index)
        live.check_names(index, model)
        live.check_shapes(index, model)
    except CheckpointError as error:
        raise UsageError(f"this run cannot go on from {folder}: {error}\nNothing was built.") from error


def _refuse_other_foreign(folder: Path, model: torch.nn.Module, layout: Mapping[str, Any]) -> None:
    run = folder / deepspeed_format.RUN
    told = json.loads(run.read_text()) if (folder / deepspeed_format.COMPLETE).is_file() and run.is_file() else {}
    if all(told.get(name) == layout[name] for name in ("world_size", "stage")):
        live.check_layout({**layout, "optimizer": told["optimizer"]}, layout, {})  # DeepSpeed itself reads it
    else:
        deepspeed_import.refuse_other(folder, layout["optimizer"], model)


def checkpoint_bytes(model: torch.nn.Module, optimizer: str, bf16: bool, bf16_masters: bool = False) -> int:
    """Bytes of a checkpoint's tensors once the optimizer has stepped, over all ranks.

    Exact for optimizers that keep one value for each element; 8-bit ones keep a few values more for small partitions.

    Args:
        model: names, shapes and frozen parts.
        optimizer: of `optim.OPTIMIZERS`.
        bf16: weights are bf16, else fp32.
        bf16_masters: the ds_config asks DeepSpeed for masters and moments in bf16.
    """
    row = optim.OPTIMIZERS[optimizer]
    params = [p for group in param_groups(model, 0.0) for p in group["params"]]
    trained = sum(p.numel() for p in params)
    other = sum(p.numel() for p in params if not p.is_hidden_matrix) if row.other_state else 0
    weight = 2 if bf16 else 4
    state = trained * row.master_bytes or trained * weight
    state += optim.state_bytes(optimizer, trained - other, other_elems=other)
    if bf16_masters and row.master_bytes:
        state //= 2
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return state + frozen * weight + sum(buffer.nbytes for _, buffer in live.persistent_buffers(model))


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters exported in bf16."""
    return 2 * sum(p.numel() for p in model.parameters())
