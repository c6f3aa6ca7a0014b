"""LoRA adapters of a ZeRO-3 model, saved in full shape so that `peft` loads them without DeepSpeed."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from bigtrain import guards, ranks, zero
from bigtrain.errors import ModelError, WeightsError
from bigtrain.meeting import naming_the_lost
from bigtrain.weights import partial
from bigtrain.weights.replace import beside_adapter
from bigtrain.weights.slots import without_wrappers

log = logging.getLogger(__name__)
FILE = "adapter_model.safetensors"


@naming_the_lost()
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

    Trained weights that peft keeps in no adapter (layers of the base that a script unfroze) are named in a warning.
    """
    with ranks.together("preparing the adapter"):
        from peft import PeftModel, get_peft_model_state_dict

        if not isinstance(model, PeftModel):
            raise ModelError(f"{type(model).__name__} has no adapters: wrap the model with peft.get_peft_model first.")
        if adapter not in model.peft_config:
            raise ModelError(f"no adapter {adapter!r}; there are: {', '.join(model.peft_config)}.", [adapter])
        # every adapter weight is asked for by name and order alone; shapes come from ZeRO, because here they are [0]
        raw = {without_wrappers(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
        own = _entries(raw, adapter, model.peft_config[adapter])
        _tell_left_out(raw, own, set(model.peft_config) - {adapter})
        prompts = model.peft_config[adapter].is_prompt_learning
    whole = {}
    for name, tensor in own.items():
        if not isinstance(tensor, torch.nn.Parameter):
            whole[name] = tensor
            continue
        with zero.gathered([tensor]):  # adapters are small: one of them is held whole on rank 0 alone, prompts on all
            if ranks.is_main() or prompts:
                whole[name] = tensor.detach().to("cpu", dtype, copy=True)

    def entries() -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = get_peft_model_state_dict(
            model, state_dict={**whole}, adapter_name=adapter, save_embedding_layers=False
        )
        return found

    if prompts:  # peft runs the prompt's modules for its values: at stage 3 a gather of all ranks
        with torch.no_grad():
            made = {name: tensor.to("cpu", dtype) for name, tensor in entries().items()}
    return ranks.main_decides(
        lambda: _write(model, made if prompts else entries(), str(out_dir), adapter), "writing the adapter"
    )


def _entries(raw: dict[str, Any], adapter: str, config: Any) -> dict[str, Any]:
    """What may be of this adapter: its own names, and the base's biases if it trains those (`LoraConfig(bias=...)`)."""
    biases = getattr(config, "bias", "none") != "none"
    return {
        name: tensor
        for name, tensor in raw.items()
        if f".{adapter}." in name or name.endswith(f".{adapter}") or (biases and name.endswith(".bias"))
    }


def _tell_left_out(raw: dict[str, Any], own: dict[str, Any], others: set[str]) -> None:
    """Warn of trained weights that are of no adapter: its file would be loaded as if they had never moved."""
    held = {id(tensor) for tensor in own.values()}
    left = [
        name
        for name, tensor in raw.items()
        if tensor.requires_grad and id(tensor) not in held and not others.intersection(name.split("."))
    ]
    if left and ranks.is_main():
        log.warning(
            "%d trained weights are not in the adapter's file, as peft keeps none of the base's: %s. Name their modules in "
            "LoraConfig(modules_to_save=[...]); engine.save_checkpoint holds them.",
            len(left),
            guards.listing(left),
        )


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
