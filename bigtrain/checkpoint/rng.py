"""Random number generators of this process as JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """This process's generators as JSON: Python, numpy, torch, CUDA."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist()).hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))


def reseed(seed: int, step: int, rank: int) -> None:
    """A stated start for a rank that has no state of its own to go on from (another number of ranks wrote the checkpoint)."""
    mixed = np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]
    random.seed(int(mixed))
    np.random.seed(int(mixed))
    torch.manual_seed(int(mixed))
