"""Which attention a run takes: the user's, or the fastest that is right for the model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from bigtrain import data, ranks
from bigtrain.data.isolation_choice import VARLEN
from bigtrain.errors import UsageError
from bigtrain.models.attention import left_out
from bigtrain.run.arguments import TrainArguments

logger = logging.getLogger(__name__)


def choose(args: TrainArguments, model_config: Any) -> str:
    """What "auto" means here. In sdpa packed rows are a dense [seq, seq] mask, and for others transformers asks the device.

    A model that gives attention more than sdpa takes runs eager: compiled flex_attention has no backward on a CPU, and on GPUs it was
    not tried beside sharded weights; a user may take it.

    Raises:
        UsageError: the implementation that the user names would leave out a part of this model's attention.
    """
    from transformers import AutoModelForCausalLM

    cls: Any = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    asked = args.attn_implementation
    beyond = left_out(cls, model_config)
    if beyond and asked in ("sdpa", VARLEN):
        raise UsageError(
            f"--attn_implementation {asked} would leave out a part of {cls.__name__}'s attention: {beyond}. Leave the flag out (eager is taken), or "
            "write flex_attention, on a GPU"
        )
    if asked != "auto":
        return asked
    if beyond:
        return "eager"
    # Where sdpa will not do, attention is more than a product. Some add to masks for sdpa and eager only.
    pluggable = all(getattr(cls, name, False) for name in ("_supports_attention_backend", "_supports_sdpa"))
    if torch.cuda.is_available() and pluggable and data.has_varlen() and not data.adds_to_masks(model_config):
        return data.register_varlen()
    return "sdpa"


def tell(args: TrainArguments, model: Any, seq_len: int) -> None:
    """One line where nobody asked for eager attention and the model takes it all the same: why, and what it costs."""
    taken = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if taken != "eager" or args.attn_implementation != "auto" or not ranks.is_main():
        return
    why = left_out(type(model), model.config)
    logger.warning(
        "attention: eager, since %s. Right, but slower than fused kernels, and each layer holds %d x %d scores for each head and row (the "
        "plan counts them)%s",
        f"{type(model).__name__} gives it {why}, which sdpa and flash kernels here would leave out" if why
        else f"transformers has no other for {type(model).__name__}",
        seq_len, seq_len,
        "; --attn_implementation flex_attention compiles a kernel without them, on a GPU"
        if getattr(model, "_supports_flex_attn", False) and torch.cuda.is_available() else "",
    )  # fmt: skip
