"""Give memory that was freed back to the system.

glibc keeps freed blocks below 32 MiB (its largest mmap threshold, malloc/malloc.c DEFAULT_MMAP_THRESHOLD_MAX) in its heap.
Building a model and starting the engine leave fp32 slices and conversion copies there: 0.6 GB of 1.1 GB resident for 360 M
parameters on each of two CPU ranks, which no later, differently sized block fits into.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc


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
