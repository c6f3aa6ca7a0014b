"""BatchNorm in a bf16 model: statistics stay in fp32, and a micro batch of one sample is refused."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bigtrain.errors import ModelError


def keep_statistics_in_fp32(model: torch.nn.Module) -> int:
    """Let layers with running statistics (BatchNorm, tracking InstanceNorm) work with bf16 weights beside fp32 statistics.

    A running mean in bf16 stops moving once an update is below 2^-8 of it, so the statistics stay in fp32; torch then wants
    the layer's weight and bias in fp32 as well and fails otherwise. They are raised to fp32 for the computation alone.

    Returns:
        How many layers that concerns.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._NormBase) and m.running_mean is not None]
    for layer in layers:
        if "forward" not in layer.__dict__:
            layer.forward = types.MethodType(_forward_in_fp32, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward_in_fp32(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _raised(self):
        return type(self).forward(self, *args, **kwargs)


@contextmanager
def _raised(layer: torch.nn.Module) -> Iterator[None]:
    """An instance attribute hides the parameter of the same name, without touching it."""
    dtype = layer.running_mean.dtype  # type: ignore[union-attr]
    names = [n for n in ("weight", "bias") if layer._parameters.get(n) is not None]
    for name in names:
        layer.__dict__[name] = layer._parameters[name].to(dtype)  # type: ignore[union-attr, arg-type]
    try:
        yield
    finally:
        for name in names:
            layer.__dict__.pop(name, None)


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
