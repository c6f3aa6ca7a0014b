"""Put the chunked loss, or liger-kernel, into a Hugging Face causal language model."""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain import zero
from bigtrain.errors import ModelError
from bigtrain.kernels.cross_entropy import IGNORED, linear_cross_entropy

log = logging.getLogger(__name__)
# Settings with which a model changes its logits between head and loss; the value that means "does not".
LOGIT_CHANGES = {
    "final_logit_softcapping": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    "lm_head_multiplier": 1,
    "logits_mup_width_multiplier": 1,
}


@dataclass(frozen=True)
class LossPath:
    """How the model computes its loss now.

    Attributes:
        kind: "chunked" (`cross_entropy`), "liger" (its own fused loss) or "model" (its own way, logits of the whole batch).
        why: one sentence for the log and the run's summary.
    """

    kind: str
    why: str


def use_chunked_loss(model: torch.nn.Module) -> LossPath:
    """Let `model(input_ids=..., labels=..., num_items_in_batch=...)` compute its loss in chunks; `logits` is then None.

    Works on the instance: the head's own forward computes the loss, so that ZeRO-3 gathers its weight as for any module, tied
    or not. Calls without labels, or with `logits_to_keep`, are as before. A model that does not fit is left as it is.

    Args:
        model: a transformers model with a linear output head.

    Returns:
        What was done, and why.
    """
    reason = why_not_chunked(model)
    if reason is not None:
        log.warning("the loss is computed from the logits of the whole batch: %s", reason)
        return LossPath("model", reason)
    if getattr(model, "_bigtrain_chunked_loss", False):
        return LossPath("chunked", "already in place")
    _patch(model)
    path = LossPath("chunked", f"{type(model).__name__}: head and cross-entropy run a chunk of tokens at a time")
    log.info("%s", path.why)
    return path


def why_not_chunked(model: torch.nn.Module) -> str | None:
    """Why the chunked loss cannot replace the model's own, or None."""
    name = type(model).__name__
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, torch.nn.Linear):
        return f"{name} has no plain linear output head ({type(head).__name__})"
    if head is not getattr(model, "lm_head", None):
        return f"{name}'s output head is not its attribute lm_head"
    config = getattr(model, "config", None)
    for key, neutral in LOGIT_CHANGES.items():
        value = getattr(config, key, neutral)
        if value != neutral and value is not None:
            return f"{name} changes its logits before the loss ({key} = {value})"
    try:
        source = inspect.getsource(inspect.unwrap(type(model).forward))
    except (OSError, TypeError):
        return f"the source of {name}.forward cannot be read, so it is unknown what happens to the logits"
    if "self.lm_head(" not in source or "self.loss_function(" not in source:
        return f"{name}.forward does not hand the logits of lm_head to loss_function"
    if getattr(model, "loss_type", "ForCausalLM") not in (None, "ForCausalLM"):
        return f"{name} has a loss of its own ({model.loss_type})"
    return None


@dataclass
class _Pending:
    """The targets of the forward that is running, and where the head put its loss."""

    targets: torch.Tensor
    num_items: Any
    address: int | None = None


def _patch(model: Any) -> None:
    running: list[_Pending] = []
    model.forward = _model_forward(model, running)
    model.lm_head.forward = _head_forward(model.lm_head, running)
    model.loss_function = _loss_function(type(model).__name__, model.loss_function, running)
    model._bigtrain_chunked_loss = True


def _model_forward(model: Any, running: list[_Pending]) -> Any:
    original, signature = model.forward, inspect.signature(model.forward)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        targets = _targets(given)
        keep = given.get("logits_to_keep", 0)
        if targets is None or isinstance(keep, torch.Tensor) or keep:
            return original(*args, **kwargs)
        running.append(_Pending(targets, given.get("num_items_in_batch")))
        try:
            out = original(*args, **kwargs)
        finally:
            running.pop()
        if isinstance(out, tuple):
            return (out[0], None, *out[2:])
        return type(out)(**{k: v for k, v in out.items() if k != "logits"})

    return forward


def _targets(given: dict[str, Any]) -> torch.Tensor | None:
    """The shifted targets, as transformers makes them: token i is compared with label i + 1."""
    if given.get("labels") is None:
        return None  # the model computes no loss without labels
    if given.get("shift_labels") is not None:
        return given["shift_labels"]
    return torch.nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]


def _head_forward(head: torch.nn.Linear, running: list[_Pending]) -> Any:
    original = head.forward

    @functools.wraps(original)
    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not running:
            return original(hidden)
        now = running[-1]
        if hidden.shape[:-1].numel() != now.targets.numel():
            raise ModelError(f"{hidden.shape[:-1].numel()} hidden states came for {now.targets.numel()} labels")
        loss = linear_cross_entropy(hidden, head.weight, now.targets, bias=head.bias, num_items=now.num_items)
        now.address = loss.data_ptr()
        return loss

    return forward


def _loss_function(name: str, original: Any, running: list[_Pending]) -> Any:
    def loss_function(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not running:
            return original(logits, *args, **kwargs)
        # ZeRO-3 hands on an alias of what the head returned; any computation would have made a new tensor
        if logits.data_ptr() != running[-1].address:
            raise ModelError(f"{name} changes its logits between lm_head and loss: turn the chunked loss off for it")
        return logits.clone()

    return loss_function


def use_liger(model: torch.nn.Module) -> LossPath:
    """Put liger-kernel's fused kernels into the instance: on CUDA, where it is installed and knows the model's type.

    The loss stays bigtrain's own, because liger's asks the device for its number of targets, which waits for everything that is
    queued there, once in forward and once in backward, and reads the head's weight without calling the head, so that ZeRO-3
    has not gathered it. Liger's is taken where the model changes its logits before the loss. Without liger, or elsewhere,
    nothing but the loss is changed.

    Returns:
        What was done, and why.
    """
    reason, apply = _liger_for(model)
    if apply is None:
        path = use_chunked_loss(model)
        log.info("liger-kernel is not used: %s", reason)
        return LossPath(path.kind, f"no liger-kernel ({reason}); {path.why}")
    own = why_not_chunked(model)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if own is not None and not (head is not None and zero.is_partitioned(head.weight)):
        apply(model=model)
        log.info("liger-kernel's fused kernels and loss are used for %s: %s", type(model).__name__, own)
        return LossPath("liger", f"liger-kernel for {type(model).__name__}, loss included: {own}")
    taken = inspect.signature(apply).parameters
    apply(model=model, **{name: False for name in ("fused_linear_cross_entropy", "cross_entropy") if name in taken})
    path = use_chunked_loss(model)
    return LossPath(path.kind, f"liger-kernel for everything but the loss; {path.why}")


def _liger_for(model: torch.nn.Module) -> tuple[str, Any]:
    """Why liger-kernel cannot be used here, and its function for this model (None if it cannot)."""
    if not torch.cuda.is_available():
        return "no CUDA device", None
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        return f"not installed: {error}; pip install 'bigtrain[gpu]'", None
    kind = getattr(getattr(model, "config", None), "model_type", None)
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    return ("", apply) if apply is not None else (f"it does not know the model type {kind!r}", None)
