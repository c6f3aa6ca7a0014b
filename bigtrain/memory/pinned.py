"""Page-locked host memory of exactly the size asked for: what passes between a device and the host at the bus's speed."""

from __future__ import annotations

import contextlib
import logging
import mmap

import torch

log = logging.getLogger(__name__)


class HostMemory:
    """Zeroed host memory of exactly the size asked for, page-locked if wanted and possible.

    torch's own pinned allocator rounds every block up to a power of two and gives nothing back (c10 CachingHostAllocator): up
    to twice the bytes. Here pages are mapped, touched by all threads, and registered with the driver.

    Args:
        layout: length and dtype of each tensor.
        pin: page-lock it, where there is a CUDA device.

    Attributes:
        tensors: by the names of `layout`.
        pinned: whether it is page-locked.
    """

    def __init__(self, layout: dict[str, tuple[int, torch.dtype]], pin: bool):
        sizes = {name: n * dtype.itemsize for name, (n, dtype) in layout.items()}
        self._size = sum(_page(size) for size in sizes.values())
        self._map = mmap.mmap(-1, max(self._size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages are for private memory only; a child process must not take part in it, or a write would move the page away
        # from the device that reads it.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):
                    self._map.madvise(getattr(mmap, advice))
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = whole.data_ptr()
        self.tensors, at = {}, 0
        for name, (_, dtype) in layout.items():
            self.tensors[name] = whole[at : at + sizes[name]].view(dtype)
            at += _page(sizes[name])
        self.pinned = False
        if pin and torch.cuda.is_available():
            whole.zero_()
            self.pinned = self._register()

    def _register(self) -> bool:
        error = int(torch.cuda.cudart().cudaHostRegister(self._address, self._size, 0))
        if error:
            log.warning(
                "cannot page-lock %.1f GiB of host memory (CUDA error %d): copies of optimizer state will be slow. Look at what is free "
                "(a container's limit, other programs' pinned memory), on WSL at its own limit; or write pin_memory false to say that this is wanted.",
                self._size / 2**30,
                error,
            )
        return error == 0

    def __del__(self) -> None:
        if getattr(self, "pinned", False):
            with contextlib.suppress(Exception):
                torch.cuda.cudart().cudaHostUnregister(self._address)


def _page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
