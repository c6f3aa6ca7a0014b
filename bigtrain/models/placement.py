"""Which device a rank uses, and a random state that a build leaves as it found it."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import torch

from bigtrain import ranks

_LOCAL_RANK_NAMES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def rank_device() -> torch.device:
    """This rank's own device: a CUDA device, or the CPU where there is none.

    Without a launcher's local rank, hosts are taken to be filled in rank order, so that two ranks never share device 0.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    known = any(name in os.environ for name in _LOCAL_RANK_NAMES)
    index = ranks.local_rank() if known else ranks.rank()
    return torch.device("cuda", index % torch.cuda.device_count())


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run with Python's, numpy's and torch's random state set from `seed`; the caller's state comes back afterwards."""
    import numpy

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=devices):
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)
