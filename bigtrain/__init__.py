"""bigtrain: train models larger than your GPU with DeepSpeed.

Importing this package is cheap: torch, transformers and deepspeed load when a name that needs them is first used.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# An environment that keeps its compiled ops in itself, as `make train` has it, finds them again: else the next command, started without
# make, would compile DeepSpeed's CPU Adam once more, into the cache that all environments share.
if os.path.isdir(_compiled := os.path.join(sys.prefix, "torch_extensions")):
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", _compiled)
# Each rank would warn so on a machine with CUDA's toolkit and no card, where the run is on the CPU: nothing that a user could mend.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime is found" not in str(record.msg))

# liger-kernel looks for each of its kernels in every backend that there could be, and takes another one where a backend is not installed.
logging.getLogger("liger_kernel.backends.registry").addFilter(
    lambda record: not (str(record.msg).startswith("Backend impl ") and "ModuleNotFoundError" in (record.args or ()))
)

if TYPE_CHECKING:
    from bigtrain.engine import Engine
    from bigtrain.models import build_model

__all__ = ["Engine", "__version__", "build_model"]


def lazily(package: str, **homes: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names load on first use: by module, the names that live there."""
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return find


__getattr__ = lazily(__name__, engine="Engine", models="build_model")
