"""BatchNorm in a bf16 model: it computes in fp32, and a micro batch of one sample is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from bigtrain.errors import ModelError


def compute_in_fp32(model: torch.nn.Module) -> None:
    """Let BatchNorm, and InstanceNorm with running statistics, take bf16: they compute in fp32, and return the input's dtype.

    A running mean in bf16 stops moving once an update is below 2^-8 of it, so the statistics are fp32; torch then wants the
    layer's weight and bias in fp32 as well and fails otherwise, and InstanceNorm rounds statistics to the activations' dtype on their way.
    Weights stay parameters of the model's dtype. Calling it again changes nothing.
    """
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats):
            if getattr(layer.forward, "func", None) is not _forward_in_fp32:
                layer.forward = functools.partial(_forward_in_fp32, layer, layer.forward)  # type: ignore[method-assign]
            for stats in (layer.running_mean, layer.running_var):
                if stats is not None:
                    stats.data = stats.data.float()


def _forward_in_fp32(layer: torch.nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    x, *rest = (*args, *kwargs.values())  # the activations come first, by whatever name they are given
    with _raised(layer):
        out = own(x.float(), *args[1:], **kwargs) if args else own(**dict(zip(kwargs, (x.float(), *rest))))
    return out.to(x.dtype)


@contextmanager
def _raised(layer: torch.nn.Module) -> Iterator[None]:
    """Weight and bias in fp32: an instance attribute hides the parameter of the same name, without touching it."""
    own = {name: param for name in ("weight", "bias") if (param := layer._parameters.get(name)) is not None}
    layer.__dict__.update({name: param.float() for name, param in own.items()})
    try:
        yield
    finally:
        for name in own:
            del layer.__dict__[name]


def refuse_batchnorm_micro_batch_1(model: torch.nn.Module, micro_batch: int) -> None:
    """Statistics of one sample are no statistics: a training BatchNorm needs a micro batch of at least 2.

    Frozen (eval mode) and synchronised BatchNorms are left alone.

    Raises:
        ModelError: with the layers' names and the remedy.
    """
    if micro_batch != 1:
        return
    names = [
        name
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and not isinstance(m, torch.nn.SyncBatchNorm) and _will_train(m)
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
