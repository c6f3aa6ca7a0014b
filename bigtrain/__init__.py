"""bigtrain: train models larger than your GPU with DeepSpeed.

Importing this package is cheap: torch, transformers and deepspeed load when a name that needs them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bigtrain.engine import Engine
    from bigtrain.models import build_model

_LAZY = {"Engine": "bigtrain.engine", "build_model": "bigtrain.models"}
__all__ = ["Engine", "__version__", "build_model"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bigtrain' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
