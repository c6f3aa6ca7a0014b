"""`.bin` files: pickles of tensors, read through torch's restricted unpickler, memory-mapped, file by file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigtrain import standins
from bigtrain.errors import WeightsError
from bigtrain.weights.dtypes import NAMES
from bigtrain.weights.header import TensorInfo


def read(file: str) -> dict[str, torch.Tensor]:
    """The tensors of one .bin file, memory-mapped: nothing is read yet.

    Raises:
        WeightsError: damaged, not a mapping of names to tensors, or it wants to run code.
    """
    try:
        try:
            table = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:  # files written before torch 1.6 are not zip archives and cannot be mapped
            if "mmap" not in str(error):
                raise
            table = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        if why := standins.instead(file):
            raise WeightsError(f"{file} is {why}.", file=file) from error
        raise WeightsError(
            f"{file}: not readable as a pickle of tensors alone: {type(error).__name__}: {_said(error)}. "
            "Damaged, or it holds other objects, which are not loaded because unpickling them can run code.",
            file=file,
        ) from error
    if isinstance(table, Mapping) and isinstance(table.get("state_dict"), Mapping):
        table = table["state_dict"]
    pairs = table.items() if isinstance(table, Mapping) else [("", table)]
    wrong = [key or value for key, value in pairs if not (isinstance(key, str) and isinstance(value, torch.Tensor))]
    if wrong:
        raise WeightsError(f"{file}: expected tensors by name, found {str(wrong[0])[:60]}.", file=file)
    odd = {name: value for name, value in pairs if value.layout != torch.strided or value.is_meta}
    if odd:
        name, value = next(iter(odd.items()))
        what = "has no values (meta device)" if value.is_meta else f"is {str(value.layout).removeprefix('torch.')}"
        raise WeightsError(f"{file}: tensor {name} {what}: save it dense.", file=file, tensor=name)
    return dict(table)


def _said(error: Exception) -> str:
    """What torch says, without its advice to load the file in a way that runs the code in it."""
    lines = [line.strip() for line in str(error).splitlines()] or ["it ends too early"]
    reason = next((line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line), lines[0])
    return reason.split(" In PyTorch 2.6")[0].split(" Please use")[0].rstrip(". ")


def describe(file: str, tensors: Mapping[str, Any]) -> list[TensorInfo]:
    """What the file holds; the byte offset is -1, as pickled storages are reached through the mapping."""
    return [
        TensorInfo(name, file, NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape), -1, t.numel() * t.element_size())
        for name, t in tensors.items()
    ]
