"""A direct `load_state_dict` into a ZeRO-3 model cannot work; say so, and say what does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigtrain import zero
from bigtrain.errors import ModelError

_MARK = "_bigtrain_state_dict_guard"


def guard_state_dict(model: torch.nn.Module) -> None:
    """From now on, `model.load_state_dict` with whole tensors raises a `ModelError` that names `load_into`.

    Without it torch reports a size mismatch with shape [0] for every parameter. Calling it again changes nothing.
    """
    if not hasattr(model, _MARK):
        object.__setattr__(model, _MARK, model.register_load_state_dict_pre_hook(_refuse))


def _refuse(model: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    for name, param in model.named_parameters():
        value = state_dict.get(prefix + name)
        if zero.is_partitioned(param) and not zero.is_available(param) and isinstance(value, torch.Tensor) and value.numel():
            raise ModelError(
                f"{prefix}{name} is partitioned over the ranks by ZeRO-3: here it has no elements, the state dict has "
                f"{list(value.shape)}. Use bigtrain.weights.load_into(model, folder), which fills each rank's part from files, or copy what you "
                "hold inside bigtrain.zero.gathered(params, modifier_rank=0).",
                [prefix + name],
            )
