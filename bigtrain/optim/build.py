"""Builders behind the table's rows."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch

from bigtrain.optim.options import Options
from bigtrain.optim.table import OPTIMIZERS, canonical_name

Groups = list[dict[str, Any]]


def build_optimizer(name: str, groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Build optimizer `name` for DeepSpeed to wrap. The config needs `engine_config_patch(name)` as well.

    Args:
        name: a key of `OPTIMIZERS` or an alias.
        groups: from `param_groups`.
        options: as the engine's settings have them; a builder takes what it has use for.

    Raises:
        UsageError: on an unknown name.
        BuildError: if the optimizer needs something that this machine lacks.
    """
    return pkgutil.resolve_name(OPTIMIZERS[canonical_name(name)].build)(groups, options)


def after_initialize(name: str, ds_engine: Any) -> None:
    """Call once after `deepspeed.initialize` with its engine: lets the optimizer settle into DeepSpeed's buffers."""
    hook = OPTIMIZERS[canonical_name(name)].hook
    if hook is not None:
        pkgutil.resolve_name(hook)(ds_engine)


def adamw(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """torch's fused AdamW on a GPU, DeepSpeed's CPU Adam when offloaded, plain torch AdamW elsewhere."""
    if options.offload is not None:
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

    compiled = (options.offload is not None or options.device == "cpu") and cpu_kernel.ready()
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
    from bigtrain.optim.split import AdamWSplit

    compiled = options.device == "cpu" and cpu_kernel.ready()
    return AdamWSplit(groups, moments=moments, compiled=compiled, offload=options.offload, **options.adam)


def muon(groups: Groups, options: Options) -> torch.optim.Optimizer:
    """Muon for hidden matrices and AdamW for the rest."""
    from bigtrain.optim.orthogonal import OrthogonalMomentum

    return OrthogonalMomentum(groups, **options.adam)
