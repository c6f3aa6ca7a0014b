"""Which attention a run takes: the user's, or the fastest that is right for the model."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils._triton import has_triton_package

from bigtrain import data, ranks
from bigtrain.data.isolation_choice import VARLEN
from bigtrain.errors import UsageError
from bigtrain.models.attention import SINKS, left_out
from bigtrain.plan.family_kept import takes_compiled
from bigtrain.run.arguments import TrainArguments

logger = logging.getLogger(__name__)


def choose(args: TrainArguments, model_config: Any) -> str:
    """What "auto" means here. In sdpa packed rows are a dense [seq, seq] mask, and for others transformers asks the device.

    A model that caps its scores takes flex_attention, which is compiled for it, on GPUs; on CPUs that has no backward, and such a model
    runs eager.

    Raises:
        UsageError: the implementation that the user names would leave out a part of this model's attention.
    """
    from transformers import AutoModelForCausalLM

    cls: Any = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    asked = args.attn_implementation
    beyond = left_out(cls, model_config, (SINKS,) if asked == VARLEN else ())
    if beyond and asked in ("sdpa", VARLEN):
        raise UsageError(
            f"--attn_implementation {asked} would leave out a part of {cls.__name__}'s attention: {beyond}. Leave the flag out, or "
            "write flex_attention, on a GPU"
        )
    if asked == "flex_attention" and args.is_selective:
        raise UsageError(
            "--attn_implementation flex_attention cannot run with --checkpointing_policy selective, which watches every operator of the "
            "recomputed blocks: take policy full"
        )
    if asked != "auto":
        return asked
    fused = torch.cuda.is_available() and data.has_varlen()
    # gpt-oss gives its masks no position_ids, so that single operations do not keep its documents apart.
    if (fused or (beyond and args.packing == "isolated")) and _takes_varlen(cls, model_config, bool(beyond)):
        return data.register_varlen()
    if beyond:
        return "flex_attention" if torch.cuda.is_available() and _takes_flex(cls, model_config, args) else "eager"
    return "sdpa"


def _takes_varlen(cls: Any, model_config: Any, has_more: bool) -> bool:
    """Where sdpa will not do, attention is more than a product: by sinks, as flash kernels know them too, or by what nobody here knows.

    Some add to masks for sdpa and eager only.
    """
    if has_more and left_out(cls, model_config, (SINKS,)):
        return False
    like = "_supports_flash_attn" if has_more else "_supports_sdpa"
    pluggable = all(getattr(cls, name, False) for name in ("_supports_attention_backend", like))
    return pluggable and not data.adds_to_masks(model_config)


def _takes_flex(cls: Any, model_config: Any, args: TrainArguments) -> bool:
    """Triton makes its kernels."""
    text = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    fits = takes_compiled(args.seq_len, args.is_selective, getattr(text, "attention_dropout", 0.0) or 0.0)
    return bool(getattr(cls, "_supports_flex_attn", False)) and fits and has_triton_package()


def tell(args: TrainArguments, model: Any, seq_len: int) -> None:
    """One line where nobody asked for an attention that costs something and the model takes it all the same: why, and what it costs."""
    taken = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if taken not in ("eager", "flex_attention") or args.attn_implementation != "auto" or not ranks.is_main():
        return
    why = left_out(type(model), model.config)
    given = f"{type(model).__name__} gives it {why}, which sdpa and flash kernels here would leave out"
    if taken == "flex_attention":
        logger.info(
            "attention: flex_attention, since %s. It is compiled for the model: the first step takes some 25 s more, and one of the next as long "
            "where packed rows come after whole ones",
            given,
        )
        return
    logger.warning(
        "attention: eager, since %s. Right, but slower than fused kernels, and each layer holds %d x %d scores for each head and row (the "
        "plan counts them)",
        given if why else f"transformers has no other for {type(model).__name__}", seq_len, seq_len,
    )  # fmt: skip
