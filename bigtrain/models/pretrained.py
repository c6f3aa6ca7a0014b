"""Values from weight files, and from the seed for what the files lack."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from bigtrain import ranks
from bigtrain.errors import ModelError
from bigtrain.weights.companions import generation_config_of

logger = logging.getLogger(__name__)


def load_weights(
    model: torch.nn.Module, directory: Path, allow_missing: Sequence[str], allow_unexpected: Sequence[str], verify: bool = False
) -> tuple[list[str], bool]:
    """Load a Hugging Face folder into an allocated model.

    Returns:
        The names that the files lack, and whether any parameter lost bits on the way. Names tied to one that was found are
        not missing.

    Raises:
        WeightsError: names are missing or unexpected that no pattern allows; with `verify`, a tensor is not what its file holds.
    """
    from bigtrain.weights import load_into

    report = load_into(model, directory, allow_missing=allow_missing, allow_unexpected=allow_unexpected, verify=verify)
    if verify and ranks.is_main():
        logger.info("verified: %d tensors have the hash of what %s holds", report.verified, directory)
    missing = set(report.missing)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = {id(p) for name, p in parameters.items() if name not in missing}
    missing -= {name for name, p in parameters.items() if id(p) in found}
    if missing:
        logger.warning(
            "%d names are not in %s and were drawn from the seed: %s", len(missing), directory, ", ".join(sorted(missing)[:10])
        )
    _take_generation_config(model, directory)
    return sorted(missing), report.rounded


def staging_for(directory: Path, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """While the block builds the model: memory through which this rank's share of the folder's weights will go to `device`."""
    from bigtrain.weights.read import staging_ahead

    files = [file for file in directory.glob("*.safetensors") if os.path.isfile(file)]  # the load itself tells what is none
    return staging_ahead(device, sum(file.stat().st_size for file in files) // ranks.world_size())


def _take_generation_config(model: torch.nn.Module, directory: Path) -> None:
    if hasattr(model, "generation_config") and (found := generation_config_of(directory)) is not None:
        model.generation_config = found


def initialise_missing(model: torch.nn.Module, missing: Sequence[torch.nn.Parameter]) -> None:
    """Draw `missing` as transformers does for a checkpoint without them; everything else keeps its value."""
    if not missing:
        return
    if not hasattr(model, "initialize_weights"):
        raise ModelError(f"{type(model).__name__} cannot draw the {len(missing)} parameters that its files lack.")
    wanted = {id(p) for p in missing}
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor._is_hf_initialized = id(tensor) not in wanted  # type: ignore[attr-defined]
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()  # type: ignore[operator]
