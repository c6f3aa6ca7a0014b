"""Buffers keep the dtype they were built with and rank 0's value; running statistics are equal on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _NormBase
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


def parametrize_in_fp32(model: torch.nn.Module) -> None:
    """Make parametrizations with vectors or bases of their own (spectral_norm, orthogonal) take bf16 weights: they compute in fp32.

    Their buffers are fp32 and torch refuses both in one product; the maps of `orthogonal` have no bf16 at all. Others are as they were.
    """
    lists = [m for m in model.modules() if isinstance(m, parametrize.ParametrizationList)]
    found = {one for ones in lists for one in ones if isinstance(one, _Orthogonal) or _has_floats(one)}
    for one in found:
        one.forward = functools.partial(_map_in_fp32, one.forward)


def _has_floats(module: torch.nn.Module) -> bool:
    return any(b.is_floating_point() for b in module.buffers())


def _map_in_fp32(forward: Callable[..., torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
    return forward(*(w.float() for w in weights)).to(weights[0].dtype)


class RunningStats:
    """Running statistics over a step, of BatchNorm and InstanceNorm: equal on all ranks after it, and as before it where it was skipped.

    Args:
        model: the same on all ranks.
    """

    def __init__(self, model: torch.nn.Module):
        norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        found = [s for m in norms for s in (m.running_mean, m.running_var, m.num_batches_tracked) if s is not None]
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
