"""Put the chunked loss, or liger-kernel, into a Hugging Face causal language model."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bigtrain import zero
from bigtrain.errors import ModelError
from bigtrain.kernels.cross_entropy import IGNORED, linear_cross_entropy
from bigtrain.kernels.experts import use_grouped_experts
from bigtrain.kernels.logits import Change, Use, change_by, loss_changed_by, use_of
from bigtrain.kernels.standin import Joined, StandIn, is_changed_so, telling

log = logging.getLogger(__name__)


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
    or not. A factor of the logits and a soft cap become part of it, in fp32. Calls without labels, or with `logits_to_keep`, are
    as before. A model that does not fit is left as it is.

    Args:
        model: a transformers model with a linear output head.

    Returns:
        What was done, and why.
    """
    if getattr(getattr(model, "forward", None), "of_bigtrain", False):
        return LossPath("chunked", "already in place")
    reason = why_not_chunked(model)
    if reason is not None:
        log.warning("the loss is computed from the logits of the whole batch: %s", reason)
        return LossPath("model", reason)
    _patch(model)
    change = change_by(model._bigtrain_steps, model)  # type: ignore[arg-type]
    with_it = "" if change == Change() else f" (logits {change})"
    path = LossPath("chunked", f"{type(model).__name__}: head and cross-entropy run a chunk of tokens at a time{with_it}")
    log.info("%s", path.why)
    return path


def why_not_chunked(model: torch.nn.Module) -> str | None:
    """Why the chunked loss cannot replace the model's own, or None."""
    name = type(model).__name__
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    if not isinstance(head, torch.nn.Linear):
        return f"{name} has no plain linear output head ({type(head).__module__}.{type(head).__name__})"
    if type(head).forward is not torch.nn.Linear.forward or "forward" in vars(head) or not head.weight.is_floating_point():
        return f"{name}'s output head is more than a linear layer ({type(head).__name__} of {head.weight.dtype})"
    if head is not getattr(model, "lm_head", None):
        return f"{name}'s output head is not its attribute lm_head"
    if (change := loss_changed_by(getattr(model, "config", None))) is not None:
        return f"{name} computes more than cross entropy from its logits ({change})"
    return _why_not_by_source(model, name) or _why_not_by_loss(model, name)


def _why_not_by_source(model: torch.nn.Module, name: str) -> str | None:
    try:
        use = _use(model)
        if use is None:
            return f"{name}.forward does not hand the logits of lm_head to loss_function"
        change_by(use.steps, model)
    except (OSError, TypeError, SyntaxError):
        return f"the source of {name}.forward cannot be read, so it is unknown what happens to the logits"
    except ValueError as error:
        return f"{name} changes its logits before the loss in a way the chunked loss does not ({error})"
    if use.strange is not None:
        return f"{name}.forward does more with its logits than to scale or cap them and hand them to loss_function: `{use.strange}`"
    return None


def _use(model: torch.nn.Module) -> Use | None:
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    return use_of(source) if "self.lm_head(" in source and "self.loss_function(" in source else None


def _why_not_by_loss(model: Any, name: str) -> str | None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    # Not by loss_type: image-text models have the same loss under another type.
    if model.loss_function is not ForCausalLMLoss:
        given = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
        return f"{name}'s loss_function is {given}, not the causal loss"
    return None


@dataclass
class _Pending:
    """The targets of the forward that is running, and the loss that the head made of them.

    Attributes:
        change: what the forward is going to do to the logits; None: it has no line that could.
        handed: what head or forward handed on as logits: the loss, or a stand-in where the forward may change it.
    """

    targets: torch.Tensor
    num_items: Any
    change: Change | None = None
    loss: torch.Tensor | None = None
    handed: torch.Tensor | None = None


def _patch(model: Any) -> None:
    """Methods that find everything through the module that they are of: a copy of a module must not compute with the original."""
    running: list[_Pending] = []
    use = _use(model)
    model._bigtrain_steps, model._bigtrain_checked = use.steps if use else (), None
    model._bigtrain_running = model.lm_head._bigtrain_running = running
    model._bigtrain_loss, model.loss_function = model.loss_function, types.MethodType(_loss_function, model)
    for module, forward in ((model, _model_forward), (model.lm_head, _head_forward)):
        module._bigtrain_forward, module.forward = module.forward, _method(module, forward)


def _method(module: torch.nn.Module, forward: Callable[..., Any]) -> types.MethodType:
    """The module's forward, by which it also knows the signature and name of the one before."""
    before = module.forward
    signature = inspect.signature(before)

    @functools.wraps(before)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, signature, *args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.of_bigtrain = True  # type: ignore[attr-defined]
    return types.MethodType(method, module)


def _model_forward(self: Any, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
    given = signature.bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    targets = _targets(given)
    keep = given.get("logits_to_keep", 0)
    own_mark = given.get("ignore_index", IGNORED) != IGNORED
    if targets is None or isinstance(keep, torch.Tensor) or keep or own_mark:
        return self._bigtrain_forward(*args, **kwargs)
    now = _Pending(targets, given.get("num_items_in_batch"), _change(self))
    self._bigtrain_running.append(now)
    try:
        out = self._bigtrain_forward(*args, **kwargs)
    finally:
        self._bigtrain_running.pop()
    if now.loss is None:  # another head has taken the place of the one that was patched
        return out
    if isinstance(out, tuple):
        return tuple(None if _is_alias(x, now.handed) else x for x in out)
    return type(out)(**{k: v for k, v in out.items() if k != "logits"})


def _change(model: Any) -> Change | None:
    """What the forward will do to its logits, by its values of now; None: it has no line that could."""
    try:
        return change_by(model._bigtrain_steps, model) if model._bigtrain_steps else None
    except ValueError as error:
        raise ModelError(f"{type(model).__name__} cannot scale or cap its logits so ({error}): correct its config") from error


def _is_alias(value: Any, handed: Any) -> bool:
    """ZeRO-3 hands on an alias of what the head returned; any computation would have made a new tensor."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.data_ptr() == handed.data_ptr()


def _targets(given: dict[str, Any]) -> torch.Tensor | None:
    """The shifted targets, as transformers makes them: token i is compared with label i + 1."""
    if given.get("labels") is None:
        return None  # the model computes no loss without labels
    if given.get("shift_labels") is not None:
        return given["shift_labels"]
    return torch.nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]


def _head_forward(self: Any, _: inspect.Signature, hidden: torch.Tensor) -> torch.Tensor:
    if not self._bigtrain_running:
        return self._bigtrain_forward(hidden)
    now = self._bigtrain_running[-1]
    if hidden.shape[:-1].numel() != now.targets.numel():
        raise ModelError(f"{hidden.shape[:-1].numel()} hidden states came for {now.targets.numel()} labels")
    scale, cap = now.change or Change()
    now.loss = linear_cross_entropy(
        hidden, self.weight, now.targets, bias=self.bias, num_items=now.num_items, scale=scale, cap=cap
    )
    now.handed = now.loss if now.change is None else StandIn.apply(now.loss, telling(now.change))
    return now.handed


def _loss_function(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not self._bigtrain_running or self._bigtrain_running[-1].loss is None:
        return self._bigtrain_loss(logits, *args, **kwargs)
    now = self._bigtrain_running[-1]
    if not (_is_alias(logits, now.loss) if now.change is None else _is_changed(self, logits, now.change)):
        raise ModelError(
            f"{type(self).__name__} changes its logits between lm_head and loss by more than its own factor and cap, and the chunked loss never makes them. Wrap the head "
            "(LoRA) before use_chunked_loss or use_liger; or train without them (use_liger_kernel false)"
        )
    now.handed = logits
    return logits.clone() if now.change is None else Joined.apply(now.loss, logits)


def _is_changed(self: Any, handed: torch.Tensor, change: Change) -> bool:
    """The stand-in went through the forward's known lines alone; once for each change, as the value is waited for."""
    if handed.dim() or (self._bigtrain_checked != change and not is_changed_so(handed, change)):
        return False
    self._bigtrain_checked = change
    return True


def use_liger(model: torch.nn.Module) -> LossPath:
    """Put liger-kernel's fused kernels into the instance: on CUDA, where it is installed and knows the model's type. Routed experts are
    bigtrain's there, with and without it (`experts.use_grouped_experts`).

    The loss stays bigtrain's own, because liger's asks the device for its number of targets, which waits for everything that is
    queued there, once in forward and once in backward, and reads the head's weight without calling the head, so that ZeRO-3
    has not gathered it. It is taken where the chunked loss does not fit. Without liger, or elsewhere, nothing but the loss is
    changed.

    Returns:
        What was done, and why.
    """
    classes = {type(module) for module in model.modules() if hasattr(module, "is_transposed")}
    path = _liger_and_loss(model)
    for one in classes:  # liger-kernel puts its experts in their place for every later model of this process
        setattr(sys.modules[one.__module__], one.__name__, one)
    if torch.cuda.is_available() and (count := use_grouped_experts(model)):
        log.info("%d modules of routed experts run by bigtrain's grouped products", count)
    return path


def _liger_and_loss(model: torch.nn.Module) -> LossPath:
    reason, apply = _liger_for(getattr(getattr(model, "config", None), "model_type", None))
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


def why_no_liger(kind: str | None) -> str:
    """Why `use_liger` cannot put liger-kernel's kernels into models of this type here; empty: it can."""
    return _liger_for(kind)[0]


def _liger_for(kind: str | None) -> tuple[str, Any]:
    """Why liger-kernel cannot be used here, and its function for this type of model (None if it cannot)."""
    if not torch.cuda.is_available():
        return "no CUDA device", None
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        return f"not installed: {error}; pip install -c constraints.txt -e '.[gpu]'", None
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    return ("", apply) if apply is not None else (f"it does not know the model type {kind!r}", None)
