"""Pretrained weights in and out, rank-local.

    from bigtrain.weights import load_into, export_model
    report = load_into(model, "path/to/folder")          # each rank reads exactly its own bytes
    export_model(model, "out", dtype=torch.bfloat16)     # each rank writes exactly its own bytes
    export_adapter(peft_model, "adapter")                # LoRA, in full shape

`header` and `folder` say where bytes lie (torch-free), `mapping` and `runs` which bytes make which parameter, `slots` which
elements this rank owns, `plan` checks everything before a byte is read, `read` and `write` move bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigtrain.weights.adapters import export_adapter
    from bigtrain.weights.export import ExportReport, export_model
    from bigtrain.weights.load import LoadReport, load_into, load_masters

__all__ = ["ExportReport", "LoadReport", "export_adapter", "export_model", "load_into", "load_masters"]
_HOME = {
    "load_into": "load",
    "LoadReport": "load",
    "load_masters": "load",
    "export_model": "export",
    "ExportReport": "export",
    "export_adapter": "adapters",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
