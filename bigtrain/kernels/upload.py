"""A batch onto a GPU by a kernel that reads page-locked memory, not by a copy engine.

Copies in one direction share an engine. While an optimizer's state is on its way up, a batch's copy waits for all of it, although
it is in a stream of its own: 0.17 s for 400 KB on an H200 (3B, streamed AdamW), and with it waits the forward that was to hide that
traffic. A kernel asks no engine.
"""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device, held: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The tensor on `device`, without waiting for it.

    Args:
        tensor: in host memory; page-locked, or it is copied into memory that is.
        device: where it goes.
        held: gets what must be kept until the device has passed this point; None for an ordinary copy.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.numel() == 0:
        return tensor.to(device, non_blocking=True)
    source = tensor.contiguous()
    if not source.is_pinned():  # a copy from pageable memory may wait for the device, whatever it is told
        source = source.pin_memory()
    if held is None:
        return source.to(device, non_blocking=True)
    from bigtrain.kernels import upload_kernel

    held.append(source)
    out = torch.empty(source.shape, dtype=source.dtype, device=device)
    upload_kernel.copy(_words(source), _words(out))
    return out


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as int64 where they are whole ones, else as uint8."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 and flat.data_ptr() % 8 == 0 else flat
