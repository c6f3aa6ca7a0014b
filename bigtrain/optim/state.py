"""Loading optimizer state without torch's casting rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def load_keeping_dtypes(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Load `state_dict` with `load` (the class's own method), then put back every tensor that it cast.

    torch.optim.Optimizer.load_state_dict casts floating-point state to the parameter's dtype: fp32 moments beside a bf16
    weight, or fp32 block scales, would be rounded.
    """
    load(state_dict)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [k for group in state_dict["param_groups"] for k in group["params"]]
    for key, param in zip(keys, params):
        for name, value in state_dict["state"].get(key, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            now = optimizer.state[param][name]
            if now.dtype != value.dtype or now is value:  # the same tensor would be updated by both optimizers
                optimizer.state[param][name] = value.to(device=param.device, copy=True)
