"""Memory of the other ranks of this host, read straight from their processes (process_vm_readv(2), Linux).

At stages 1 and 2 every rank holds all weights and masters for a part of them. After a load each rank has rounded its own part; on
CPU ranks of one host the others copy it from there: once, at the speed of memory, where gloo's all-gather took longer than
reading the checkpoint (docs/log.md), and reading the other ranks' masters too took twice the bytes from the disk.

The kernel allows it to processes of one user, unless ptrace is restricted: Yama's mode 1 asks the one that is read for consent, which
`reachable` gives (as MPI libraries do); a container may forbid the call. Whether it works is tried, not guessed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

import torch

from bigtrain import ranks

REQUEST_BYTES = 64 << 20
PROBE_BYTES = 32
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # linux/prctl.h


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def reachable() -> bool:
    """Whether every rank can read every other rank's memory; the same answer on all ranks, which all call it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    probe = torch.frombuffer(bytearray(os.urandom(PROBE_BYTES)), dtype=torch.uint8)
    told = ranks.all_gather_object((os.getpid(), probe.data_ptr(), bytes(probe.tolist())))
    everywhere = all(_is_there(*other) for rank, other in enumerate(told) if rank != ranks.rank())
    return all(ranks.all_gather_object(everywhere))  # also keeps the probe until all have read


def _is_there(pid: int, address: int, content: bytes) -> bool:
    """On another host or in another container the number is another process, or none."""
    found = torch.zeros(len(content), dtype=torch.uint8)
    try:
        read_memory(pid, address, found)
    except OSError:
        return False
    return bytes(found.tolist()) == content


def gather(parts: Sequence[tuple[Sequence[torch.Tensor], Sequence[int]]]) -> bool:
    """Fill the other ranks' parts of flat tensors from their memory; all ranks call it.

    Args:
        parts: of each flat tensor its parts, CPU tensors, and the rank that has the content of each.

    Returns:
        False, on all ranks, if that failed on one.
    """
    own = [[p.data_ptr() if owner == ranks.rank() else 0 for p, owner in zip(*flat)] for flat in parts]
    told = ranks.all_gather_object((os.getpid(), own))  # from here on every rank's own parts are final
    try:
        for number, (tensors, owners) in enumerate(parts):
            for position, (tensor, owner) in enumerate(zip(tensors, owners)):
                if owner != ranks.rank():
                    pid, addresses = told[owner]
                    read_memory(pid, addresses[number][position], tensor)
        done = True
    except OSError:
        done = False
    return all(ranks.all_gather_object(done))  # and until here nobody changes them


def read_memory(pid: int, address: int, into: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor from another process's memory.

    Raises:
        OSError: it is not there, or not allowed.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError as error:
        raise OSError("no process_vm_readv here") from error
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    here, done = into.data_ptr(), 0
    while done < into.nbytes:
        size = min(REQUEST_BYTES, into.nbytes - done)
        mine, theirs = _Span(here + done, size), _Span(address + done, size)
        count = call(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), f"cannot read the memory of process {pid}")
        done += count
