"""Builders behind the table's rows."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain.errors import UsageError
from bigtrain.optim.table import OPTIMIZERS, canonical_name
from bigtrain.plan.constants import STATE_BUFFERS

Groups = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a builder may use. The four that follow `offload` are for optimizers that keep their state on the host themselves.

    Attributes:
        lr: peak learning rate; the engine sets the rate of each step.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: for groups that do not say their own.
        offload: the optimizer's state lives on the CPU although the model may be on a GPU.
        offload_ratio: the share of it that does.
        pin_memory: whether that memory is page-locked.
        offload_buffers: chunks of it that may be on the GPU at a time.
        offload_gradients: share of the gradients that leave the GPU during backward.
        device: where the model is; kept as "cuda" or "cpu", whichever card.

    Raises:
        UsageError: on values out of range.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    offload: bool = False
    offload_ratio: float = 1.0
    pin_memory: bool = True
    offload_buffers: int = STATE_BUFFERS
    offload_gradients: float = 0.0
    device: str | torch.device = "cuda"

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", torch.device(self.device).type)
        if not self.lr >= 0.0:
            raise UsageError(f"the learning rate is {self.lr}: it must be 0 or more.")
        if len(self.betas) != 2 or not all(0.0 <= b < 1.0 for b in self.betas):
            raise UsageError(f"betas are {self.betas}: they must be two numbers, each at least 0 and below 1.")
        if not self.eps >= 0.0:
            raise UsageError(f"eps is {self.eps}: it must be 0 or more.")
        if not self.weight_decay >= 0.0:
            raise UsageError(f"weight_decay is {self.weight_decay}: it must be 0 or more.")

    @property
    def adam(self) -> dict[str, Any]:
        """The keyword arguments common to all AdamW classes."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}


def build_optimizer(name: str, groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """Build optimizer `name` for DeepSpeed to wrap. The config needs `engine_config_patch(name)` as well.

    Args:
        name: a key of `OPTIMIZERS` or an alias.
        groups: from `param_groups`.
        **options: fields of `Options`; `lr` is needed.

    Raises:
        UsageError: on an unknown name or values out of range.
        BuildError: if the optimizer needs something that this machine lacks.
    """
    return pkgutil.resolve_name(OPTIMIZERS[canonical_name(name)].build)(groups, Options(**options))


def after_initialize(name: str, ds_engine: Any) -> None:
    """Call once after `deepspeed.initialize` with its engine: lets the optimizer settle into DeepSpeed's buffers."""
    hook = OPTIMIZERS[canonical_name(name)].hook
    if hook is not None:
        pkgutil.resolve_name(hook)(ds_engine)


def adamw(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """torch's fused AdamW on a GPU, DeepSpeed's CPU Adam when offloaded, plain torch AdamW elsewhere."""
    if options.offload:
        from bigtrain import zero

        return zero.cpu_adam(groups, **options.adam)
    if options.device == "cuda":
        return torch.optim.AdamW(groups, fused=True, **options.adam)
    return adamw_torch(groups, options)


def adamw_torch(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """torch's AdamW, one parameter after the other: the reference arithmetic."""
    return torch.optim.AdamW(groups, foreach=False, **options.adam)


def adamw_8bit(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """AdamW with bitsandbytes' block-wise 8-bit moments on partitions of any size."""
    from bigtrain.optim import cpu_kernel
    from bigtrain.optim.eight_bit import AdamW8bit

    compiled = (options.offload or options.device == "cpu") and cpu_kernel.ready()
    return AdamW8bit(groups, compiled=compiled, **options.adam)


def adamw_split(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """AdamW on bf16 weights with the rest of the fp32 master as 16 bits of state, fp32 moments."""
    return _split(groups, options, "float32")


def adamw_split_bf16(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """The same with bf16 moments."""
    return _split(groups, options, "bfloat16")


def adamw_split_8bit(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """The same with block-wise 8-bit moments."""
    return _split(groups, options, "8bit")


def _split(groups: Groups, options: Options, moments: str) -> torch.optim.Optimizer:
    from bigtrain.optim import cpu_kernel
    from bigtrain.optim.split import AdamWSplit, OnHost

    o = options
    compiled = o.device == "cpu" and cpu_kernel.ready()
    offload = OnHost(o.offload_ratio, o.pin_memory, o.offload_buffers, o.offload_gradients) if o.offload else None
    return AdamWSplit(groups, moments=moments, compiled=compiled, offload=offload, **o.adam)


def muon(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Muon for hidden matrices and AdamW for the rest."""
    from bigtrain.optim.orthogonal import OrthogonalMomentum

    return OrthogonalMomentum(groups, **options.adam)
