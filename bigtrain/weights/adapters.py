"""LoRA adapters of a ZeRO-3 model, saved in full shape so that `peft` loads them without DeepSpeed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from bigtrain import ranks, zero
from bigtrain.errors import ModelError, WeightsError
from bigtrain.weights import partial
from bigtrain.weights.replace import beside_adapter
from bigtrain.weights.slots import without_wrappers

FILE = "adapter_model.safetensors"


def export_adapter(model: Any, out_dir: str | Path, *, adapter: str = "default", dtype: torch.dtype | None = None) -> list[str]:
    """Write one adapter of a `peft.PeftModel`, partitioned or plain; all ranks call it. The base model is not written.

    Args:
        model: the PeftModel (not its engine).
        out_dir: folder to make. Of an earlier adapter there the tokenizer's files and the model card stay.
        adapter: which adapter.
        dtype: of the written tensors; by default as they are.

    Returns:
        The names of the tensors in the file.

    Raises:
        ModelError: `model` is no PeftModel, or has no such adapter.
        WeightsError: a tensor of the adapter would be empty.
    """
    with ranks.together("preparing the adapter"):
        from peft import PeftModel, get_peft_model_state_dict

        if not isinstance(model, PeftModel):
            raise ModelError(f"{type(model).__name__} has no adapters: wrap the model with peft.get_peft_model first.")
        if adapter not in model.peft_config:
            raise ModelError(f"no adapter {adapter!r}; there are: {', '.join(model.peft_config)}.", [adapter])
        # every adapter weight is asked for by name and order alone; shapes come from ZeRO, because here they are [0]
        raw = {without_wrappers(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
        own = {name: tensor for name, tensor in raw.items() if f".{adapter}." in name or name.endswith(f".{adapter}")}
    whole = {}
    for name, tensor in own.items():
        if not isinstance(tensor, torch.nn.Parameter):
            whole[name] = tensor
            continue
        with zero.gathered([tensor]):  # adapters are small: one of them is held whole on rank 0 alone
            if ranks.is_main():
                whole[name] = tensor.detach().to("cpu", dtype, copy=True)

    def write() -> list[str]:
        saved = get_peft_model_state_dict(model, state_dict={**whole}, adapter_name=adapter, save_embedding_layers=False)
        return _write(model, saved, str(out_dir), adapter)

    return ranks.main_decides(write, "writing the adapter")


def _write(model: Any, saved: dict[str, torch.Tensor], out_dir: str, adapter: str) -> list[str]:
    from safetensors.torch import save_file

    empty = [name for name, tensor in saved.items() if tensor.numel() == 0]
    if empty or not saved:
        raise WeightsError(f"refusing to write an adapter with {len(empty)} empty of {len(saved)} tensors.", out_dir)
    beside_adapter(out_dir)
    temporary = partial.begin(out_dir)
    try:
        config = model.peft_config[adapter]
        before, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(temporary)
        finally:
            config.inference_mode = before
        save_file(
            {name: tensor.contiguous() for name, tensor in saved.items()}, os.path.join(temporary, FILE), {"format": "pt"}
        )
        for name in beside_adapter(out_dir):  # also what came there meanwhile
            there = os.path.join(out_dir, name)
            (shutil.copytree if os.path.isdir(there) else shutil.copy2)(there, os.path.join(temporary, name))
        partial.publish(temporary, out_dir)
    except BaseException:
        partial.drop(temporary)
        raise
    return sorted(saved)
