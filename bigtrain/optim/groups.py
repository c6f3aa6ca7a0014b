"""Which parameters decay and which do not."""

from __future__ import annotations

import re
from typing import Any

import torch

from bigtrain import zero
from bigtrain.errors import ModelError

_NORM_CLASS = re.compile(r"norm", re.IGNORECASE)
# An embedding table or an output head is a lookup, not a map between hidden spaces: Muon's orthogonalised step is wrong for it.
_HEAD_NAME = re.compile(r"(^|\.)(lm_head|embed_out|output_embeddings|score|classifier|head)$")


def param_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, with and without weight decay, each in the model's own order.

    No decay for biases (whatever has "bias" in its name: those of experts have two dimensions, T5's is a table), for everything
    that a normalisation layer owns, and for any parameter of one dimension or none. Everything else decays, embeddings included:
    the rule of the Hugging Face Trainer, which differs for 1-d parameters that are neither bias nor norm (gates, scales; the
    Trainer decays them) and for matrices in a module that is called a norm (the Trainer does not). Shapes are those of the model, so the groups are
    the same with and without ZeRO-3. Frozen parameters are left out; a tied parameter is listed once. Each parameter gets the
    attribute `is_hidden_matrix`: True for the matrices between hidden spaces.

    Args:
        model: whole or partitioned by zero.Init.
        weight_decay: for the first group.

    Returns:
        Groups for a torch optimizer, with the keys params, weight_decay, and `names` (dotted names, same order); an
        empty group is left out.

    Raises:
        ModelError: if no parameter is trainable.
    """
    owners = _owners(model)
    decay: list[tuple[str, torch.nn.Parameter]] = []
    plain: list[tuple[str, torch.nn.Parameter]] = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        module_name, module = owners[id(param)]
        (decay if _decays(name, param, module) else plain).append((name, param))
        param.is_hidden_matrix = _is_hidden_matrix(name, param, module_name, module)  # type: ignore[attr-defined]
    if not decay and not plain:
        raise ModelError(
            "no parameter of the model is trainable: everything is frozen. Unfreeze what should be trained. A model that is only asked (a "
            "reference, a teacher, a reward model) needs no Engine: build_model(...) without a ds_config, whole on each rank, "
            ".to(engine.device).eval(); one too large for that is a frozen part of the trained module (bigtrain.models.frozen_module)."
        )
    pairs = [(decay, weight_decay), (plain, 0.0)]
    return [{"params": [p for _, p in part], "names": [n for n, _ in part], "weight_decay": wd} for part, wd in pairs if part]


def _owners(model: torch.nn.Module) -> dict[int, tuple[str, torch.nn.Module]]:
    """Each parameter's first owning module, with the module's name; a tied weight belongs to the embedding that has it."""
    owners: dict[int, tuple[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        for param in module.parameters(recurse=False):
            if id(param) not in owners or isinstance(module, torch.nn.Embedding):
                owners[id(param)] = (name, module)
    return owners


def _decays(name: str, param: torch.nn.Parameter, module: torch.nn.Module) -> bool:
    if len(zero.full_shape(param)) <= 1 or "bias" in name.lower():
        return False
    # Embeddings that scale or norm what they look up are named for it, too.
    return isinstance(module, torch.nn.Embedding) or not _NORM_CLASS.search(type(module).__name__)


def _is_hidden_matrix(name: str, param: torch.nn.Parameter, module_name: str, module: torch.nn.Module) -> bool:
    if len(zero.full_shape(param)) != 2 or "bias" in name.lower() or isinstance(module, torch.nn.Embedding):
        return False
    return not _HEAD_NAME.search(module_name) and not _NORM_CLASS.search(type(module).__name__)
