"""Buffers keep the dtype they were built with and rank 0's value; running statistics work, and stay equal on all ranks, under bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _Orthogonal

from bigtrain import ranks
from bigtrain.checkpoint.live import flat_view, persistent_buffers
from bigtrain.whereabouts import HERE

PIECE_BYTES = 64 * 2**20


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The floating buffers as they are now, persistent or not, by name."""
    return {name: b.detach().clone() for name, b in model.named_buffers() if b.is_floating_point()}


def restore(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> list[str]:
    """Undo casts of buffers since `snapshot` (rotary inv_freq in bf16 changes the loss); names of those undone."""
    undone = []
    for name, buffer in model.named_buffers():
        before = saved.get(name)
        if before is not None and buffer.dtype != before.dtype:
            buffer.data = before.to(buffer.device)
            undone.append(name)
    return undone


@torch.no_grad()
def take_from_rank_0(model: torch.nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's persistent buffers, as DeepSpeed does with parameters alone: ranks may have drawn theirs by other seeds.

    Buffers that no checkpoint keeps stay as they are: they follow from the config, and ranks may hold different.

    Args:
        model: the same on all ranks (`agreement.same_model`).
        device: of the process group's collectives.
    """
    if ranks.world_size() == 1:
        return
    # As bytes: one broadcast for all dtypes. In pieces: quantised weights may be buffers too.
    ahead = [
        piece for _, b in persistent_buffers(model) if b.numel() for piece in flat_view(b).view(torch.uint8).split(PIECE_BYTES)
    ]
    while ahead:
        taken = [ahead.pop(0)]
        while ahead and sum(p.numel() for p in taken) + ahead[0].numel() <= PIECE_BYTES:
            taken.append(ahead.pop(0))
        flat = torch.cat([piece.to(device) for piece in taken])
        with HERE.together("taking rank 0's buffers"):
            dist.broadcast(flat, 0)
        for piece, value in zip(taken, flat.split([p.numel() for p in taken])):
            piece.copy_(value)


def with_running_statistics(model: torch.nn.Module) -> list[_NormBase]:
    """Modules of BatchNorm and InstanceNorm that keep running statistics, in the model's order."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]


def compute_in_fp32(model: torch.nn.Module) -> int:
    """Make BatchNorm take any activation dtype: statistics and arithmetic in fp32, the result in the input's dtype.

    InstanceNorm with running statistics too: torch rounds them to the activations' dtype on their way.

    Running statistics in bf16 stop moving (an update of 0.1 % rounds to nothing), and torch refuses bf16 weights beside fp32
    statistics on the CPU. Weights stay parameters of the model's dtype with fp32 masters. SyncBatchNorm is left as it is.
    """
    found = 0
    for module in model.modules():
        batch = isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
        if batch or (isinstance(module, _InstanceNorm) and module.track_running_stats):
            if batch:
                module.forward = _Fp32BatchNorm(module)  # type: ignore[arg-type]
            else:
                module._apply_instance_norm = functools.partial(_instance_norm_in_fp32, module)  # type: ignore[arg-type, assignment]
            for name in ("running_mean", "running_var"):
                stats = getattr(module, name, None)
                if stats is not None:
                    stats.data = stats.data.float()
            found += 1
    return found


def parametrize_in_fp32(model: torch.nn.Module) -> int:
    """Make parametrizations with vectors or bases of their own (spectral_norm, orthogonal) take bf16 weights: they compute in fp32.

    Their buffers are fp32 and torch refuses both in one product; the maps of `orthogonal` have no bf16 at all. Others are as they were.
    """
    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    found = {one for ones in lists for one in ones if isinstance(one, _Orthogonal) or _has_floats(one)}
    for one in found:
        one.forward = functools.partial(_map_in_fp32, one.forward)
    return len(found)


def _has_floats(module: torch.nn.Module) -> bool:
    return any(b.is_floating_point() for b in module.buffers())


def _map_in_fp32(forward: Callable[..., torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
    return forward(*(w.float() for w in weights)).to(weights[0].dtype)


def _instance_norm_in_fp32(m: _InstanceNorm, x: torch.Tensor) -> torch.Tensor:
    weight = None if m.weight is None else m.weight.float()
    bias = None if m.bias is None else m.bias.float()
    momentum = 0.0 if m.momentum is None else m.momentum
    return F.instance_norm(x.float(), m.running_mean, m.running_var, weight, bias, m.training, momentum, m.eps).to(x.dtype)


class _Fp32BatchNorm:
    """Forward of a BatchNorm module with fp32 arithmetic; follows torch.nn.modules.batchnorm._BatchNorm.forward (2.13)."""

    def __init__(self, module: _BatchNorm):
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        m = self.module
        m._check_input_dim(x)
        momentum = 0.0 if m.momentum is None else m.momentum
        if m.training and m.track_running_stats and m.num_batches_tracked is not None:
            m.num_batches_tracked.add_(1)
            if m.momentum is None:
                momentum = 1.0 / float(m.num_batches_tracked)
        by_batch = m.training or (m.running_mean is None and m.running_var is None)
        keep = not m.training or m.track_running_stats
        weight = None if m.weight is None else m.weight.float()
        bias = None if m.bias is None else m.bias.float()
        mean, var = (m.running_mean, m.running_var) if keep else (None, None)
        return F.batch_norm(x.float(), mean, var, weight, bias, by_batch, momentum, m.eps).to(x.dtype)


class RunningStats:
    """Running statistics over a step, of BatchNorm and InstanceNorm: equal on all ranks after it, and as before it where it was skipped.

    Args:
        modules: those with running statistics.
    """

    def __init__(self, modules: list[_NormBase]):
        found = [s for m in modules for s in (m.running_mean, m.running_var, m.num_batches_tracked) if s is not None]
        self._stats: list[torch.Tensor] = found
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """Before the first forward of a step."""
        self._kept = [s.clone() for s in self._stats]

    def settle(self, applied: bool) -> None:
        """At the end of a step: one NaN would stay in the statistics for ever, though its step was skipped.

        Each rank saw other samples, but there is one model: they take the mean. One small collective a step, only for models
        that have them.
        """
        if not applied:
            for stat, kept in zip(self._stats, self._kept):
                stat.copy_(kept)
            return
        shared = [s for s in self._stats if s.is_floating_point()]
        if ranks.world_size() == 1 or not shared:
            return
        flat = torch.cat([s.reshape(-1).float() for s in shared])
        dist.all_reduce(flat)
        flat.div_(ranks.world_size())
        for stat, part in zip(shared, flat.split([s.numel() for s in shared])):
            stat.copy_(part.view_as(stat))
