"""Buffers of a transformers model in bf16: each in the element type that plain `from_pretrained` gives it."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from bigtrain import ranks
from bigtrain.models.source import ignoring_hf_deepspeed
from bigtrain.weights.dtypes import kept_in_fp32

logger = logging.getLogger(__name__)


def take_dtypes(model: torch.nn.Module, dtype: torch.dtype, construct: Callable[[], torch.nn.Module] | None = None) -> None:
    """Round the buffers that the model's class makes in the model's own dtype: tables of sines, frozen norms, scales.

    They are added to and multiplied with activations: in fp32 beside weights in bf16 they stop the forward (M2M100, NLLB, XGLM, RT-DETR), or
    raise what comes after them. What the class makes in fp32 by name (inv_freq), or wants in fp32, stays so, and running statistics too
    (see batchnorm.py). Modules that are not of transformers are left alone. Calling it again changes nothing.

    Args:
        dtype: of the parameters.
        construct: makes the model anew in torch's default dtype; by default its class, from its config.
    """
    from transformers import PreTrainedModel

    if dtype == torch.float32 or not isinstance(model, PreTrainedModel):
        return
    saved = set(model.state_dict(keep_vars=True))
    found = dict(_floating(model, dtype))
    if all(name.endswith("inv_freq") and name not in saved for name in found):
        return  # nearly every language model: spares the second skeleton
    try:
        with _on_meta(dtype), ignoring_hf_deepspeed():
            twin = construct() if construct else type(model)(copy.deepcopy(model.config))
    except Exception as error:  # custom code that needs values
        if ranks.is_main():
            logger.warning(
                "no fresh %s to ask for its buffers' dtypes: %s: %s", type(model).__name__, type(error).__name__, error
            )
        return
    made, fp32 = dict(twin.named_buffers()), kept_in_fp32(model, dtype)
    for name, buffer in found.items():
        if name in made and not (name in saved and fp32 is not None and fp32.search(name)):
            buffer.data = buffer.data.to(made[name].dtype)


def _floating(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of another floating type than `dtype`, but for running statistics."""
    statistics = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers(recurse=False)}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.dtype != dtype and id(buffer) not in statistics:
            yield name, buffer


@contextlib.contextmanager
def _on_meta(dtype: torch.dtype) -> Iterator[Any]:
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), no_init_weights():
            yield
    finally:
        torch.set_default_dtype(before)
