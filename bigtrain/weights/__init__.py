"""Pretrained weights in and out, rank-local.

    from bigtrain.weights import load_into, export_model
    report = load_into(model, "path/to/folder")          # each rank reads exactly its own bytes
    export_model(model, "out", dtype=torch.bfloat16)     # each rank writes exactly its own bytes
    export_adapter(peft_model, "adapter")                # LoRA, in full shape

Where bytes lie     header, folder (safetensors, torch-free), pickles (.bin), inspect (for people)
What they make      mapping and runs (which bytes make which tensor), slots (which elements this rank owns), dtypes
Loading             load; plan (all checks, before a byte is read), read (moves bytes), share (each GPU reads a part), verify, guard
Export              export; layout (names, shapes, shards), write (moves bytes), partial (until it has its name), lock, companions (config, tokenizer),
                    adapters (LoRA)
DeepSpeed's folders deepspeed_folder, deepspeed_universal (read), deepspeed_export (as a Hugging Face folder)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigtrain import lazily

if TYPE_CHECKING:
    from bigtrain.weights.adapters import export_adapter
    from bigtrain.weights.export import ExportReport, export_model
    from bigtrain.weights.load import LoadReport, load_into, load_masters

__all__ = ["ExportReport", "LoadReport", "export_adapter", "export_model", "load_into", "load_masters"]

__getattr__ = lazily(
    __name__,
    adapters="export_adapter",
    export="ExportReport export_model",
    load="LoadReport load_into load_masters",
)
