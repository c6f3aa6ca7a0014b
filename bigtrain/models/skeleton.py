"""A model without its values: names and shapes, for whatever can be said before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigtrain.models.source import resolve


def skeleton(config: Any, *, overrides: Mapping[str, Any] | None = None, trust_remote_code: bool = False) -> torch.nn.Module:
    """What `build_model` would make of a transformers config, on the meta device. It takes milliseconds, and no memory.

    Args:
        config: Hugging Face config; the number of embeddings that it tells is that of the model after a resize.
        overrides, trust_remote_code: as for `build_model`.

    Raises:
        ModelError: as `build_model` would: no such class or setting.
    """
    from transformers.initialization import no_init_weights

    recipe = resolve(config, attn_implementation=None, overrides=overrides, trust_remote_code=trust_remote_code)
    with torch.device("meta"), no_init_weights():
        model = recipe.construct()
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]  # not done on the meta device
    return model
