"""DeepSpeed's universal checkpoints (`ds_to_universal`), read as `deepspeed_folder` reads its ordinary ones: no code is run.

Layout (DeepSpeed 0.19.8, `checkpoint/ds_to_universal.py`): `zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt`, each a whole tensor
(stage 3: flat) or `{"param": tensor}`; `step.pt` beside them (stages 1 and 2); `zero/optimizer_state.pt`; and the model states of
the run that was converted, which hold names, shapes, buffers and counters.
"""

from __future__ import annotations

import glob
import math
import os
from pathlib import Path
from typing import Any

import torch

from bigtrain.errors import WeightsError
from bigtrain.weights.deepspeed_folder import (
    DeepSpeedFolder,
    counters_of,
    find_frozen,
    find_whole,
    model_files,
    steps_in,
    unpickle,
)
from bigtrain.weights.slots import Piece

_MASTER = "fp32"


def is_universal(path: str | Path) -> bool:
    """True if `path` is a universal checkpoint."""
    return bool(glob.glob(os.path.join(glob.escape(str(path)), "zero", "*", f"{_MASTER}.pt")))


def open_universal(path: str | Path) -> DeepSpeedFolder:
    """Find every weight and moment in a universal checkpoint; tensors stay memory-mapped.

    Args:
        path: the folder that holds `zero`.

    Raises:
        WeightsError: files are missing, damaged, of another shape than the model states say, or hold anything but tensors.
    """
    root = str(path)
    models = model_files(root)
    if not models:
        raise WeightsError(f"{root}: no *_model_states.pt beside `zero`: the conversion was not finished.", file=root)
    first = unpickle(models[0])
    optimizer_file = os.path.join(root, "zero", "optimizer_state.pt")
    common = unpickle(optimizer_file) if os.path.isfile(optimizer_file) else {}
    folder = DeepSpeedFolder(root, int(common.get("zero_stage", 0)), len(models))
    shapes = {name: tuple(shape) for group in first.get("param_shapes") or [] for name, shape in group.items()}
    for name, shape in shapes.items():
        _find(folder, name, shape)
    find_frozen(folder, [first, *map(unpickle, models[1:])] if folder.stage == 3 else [first])
    find_whole(folder, first)
    folder.tied = {new: old for new, old in dict(first.get("shared_params") or {}).items() if old in folder.shapes}
    folder.counters = counters_of(first)
    folder.steps = _steps(folder, shapes, common)
    return folder


def _find(folder: DeepSpeedFolder, name: str, shape: tuple[int, ...]) -> None:
    """The master and the moments of one trained parameter."""
    for file in sorted(glob.glob(os.path.join(glob.escape(folder.path), "zero", glob.escape(name), "*.pt"))):
        kind = os.path.basename(file)[: -len(".pt")]
        if kind == "step":
            continue
        flat = _tensor(file, math.prod(shape))
        if kind == _MASTER:
            folder.shapes[name], folder.pieces[name] = shape, [Piece(0, flat)]
        else:
            folder.moments.setdefault(kind, {})[name] = [Piece(0, flat)]
    if name not in folder.pieces:
        raise WeightsError(
            f"{folder.path}: zero/{name}/{_MASTER}.pt is missing: the conversion was not finished.", folder.path, name
        )


def _tensor(file: str, numel: int) -> torch.Tensor:
    value = unpickle(file)
    value = value.get("param") if isinstance(value, dict) else value
    if not isinstance(value, torch.Tensor) or value.numel() < numel:
        held = value.numel() if isinstance(value, torch.Tensor) else 0
        raise WeightsError(f"{file}: {held} values are there, the shape in the model states needs {numel}.", file=file)
    return value.reshape(-1)[:numel]


def _steps(folder: DeepSpeedFolder, shapes: dict[str, tuple[int, ...]], common: dict[str, Any]) -> int:
    """Updates made: beside each parameter at stages 1 and 2, in the common state at stage 3."""
    file = os.path.join(folder.path, "zero", next(iter(shapes), ""), "step.pt")
    if os.path.isfile(file):
        return int(unpickle(file))
    return steps_in(common.get("optimizer_state_dict") or {}) or steps_in(common)
