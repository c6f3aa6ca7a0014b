"""Memory from the system and back: fresh pages in one call, freed ones returned.

glibc keeps freed blocks below its mmap threshold in its heap: by itself up to 32 MiB (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX),
on CPUs what `zero.startup.map_blocks` has set.
Building a model and starting the engine leave fp32 slices and conversion copies there: 0.6 GB of 1.1 GB resident for 360 M
parameters on each of two CPU ranks, which no later, differently sized block fits into.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import sys
from collections.abc import Callable

POPULATE_BYTES = 128 << 10  # less fresh memory is not worth a system call more
_MADV_POPULATE_WRITE = 23  # linux/mman.h


def give_back(garbage: bool = True) -> None:
    """Collect garbage, then return the heap's free pages; does nothing where the C library is not glibc.

    Args:
        garbage: False where nothing large can be in cycles: collecting walks every object of every library, 0.2 s once transformers
            and deepspeed are imported, the returning itself takes less than a millisecond.
    """
    if garbage:
        gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call


def populate(address: int, nbytes: int) -> None:
    """Have the kernel back fresh CPU memory with pages in one call, not one fault per page: an eighth less time for a read.

    Advice only: a kernel before Linux 5.14, or one short of memory, refuses, and the pages come one by one.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if length >= POPULATE_BYTES and sys.platform == "linux":
        _madvise()(begin, length, _MADV_POPULATE_WRITE)
