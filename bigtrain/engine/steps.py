"""What a step is made of: the targets it counts, the batches it moves, what it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from bigtrain.errors import DataError, ModelError
from bigtrain.kernels import documents, upload

IGNORE = -100
_UNSHIFTED = ("MaskedLM", "TokenClassification", "Segmentation")  # in transformers' names of losses (loss/loss_utils.py, 5.24)
# Heads that compare each position with the label at the same one, whatever their `loss_type` says (transformers 5.24, seen by a label
# at the first position alone). As causal models they learn the next token only from labels that the caller has shifted.
_UNSHIFTED_HEADS = frozenset(
    [
        "BartForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "CpmAntForCausalLM",
        "ElectraForPreTraining",
        "FlaubertWithLMHeadModel",
        "MBartForCausalLM",
        "MarianForCausalLM",
        "MvpForCausalLM",
        "PLBartForCausalLM",
        "PegasusForCausalLM",
        "ProphetNetForCausalLM",
        "TrOCRForCausalLM",
        "WhisperForCausalLM",
        "XLMWithLMHeadModel",
        "XLNetLMHeadModel",
    ]
)
Batch = Mapping[str, Any]
CountTargets = Callable[[Batch], int]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        step: its number, from 1; skipped steps count.
        loss: sum of the losses of all target tokens of the global batch, over their number (through `backward`: mean over
            micro batches and ranks of the loss given).
        lr: learning rate used, of the first parameter group.
        grad_norm: global 2-norm of the gradient before clipping; NaN if the step was skipped.
        tokens: target tokens in the global batch (samples, for a model without labels; 0 if unknown).
        applied: False if the update was skipped.
        skipped: steps skipped so far.
        reason: why it was skipped.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    applied: bool
    skipped: int
    reason: str = ""


@dataclass(frozen=True)
class EvalResult:
    """Loss over an evaluation set: sum over target tokens of all ranks, over their number."""

    loss: float
    tokens: int


def target_counter(model: torch.nn.Module) -> CountTargets:
    """How many terms the model's own mean loss has for a batch, by what the model says of itself.

    Causal language models shift the labels by one, so the first of each row is no target. Masked and sequence-to-sequence
    models, those that label each token or pixel, and a few decoders (Bart's and its kin's, XLNet), do not shift. Labels of one dimension are one a sample, and torch's cross
    entropy leaves samples labelled -100 out of its mean too. Float labels and batches without labels count samples.
    """
    config, loss = getattr(model, "config", None), str(getattr(model, "loss_type", ""))
    still = bool(_unshifted_head(model)) or any(kind in loss for kind in _UNSHIFTED)
    shifts = not still and not getattr(config, "is_encoder_decoder", False)
    ignored = getattr(config, "semantic_loss_ignore_index", IGNORE) if "Segmentation" in loss else IGNORE

    def count(batch: Batch) -> int:
        labels = batch.get("labels")
        if not _ignores(labels):
            return samples(batch)
        return int(((labels[..., 1:] if shifts and labels.dim() > 1 else labels) != ignored).sum())

    return count


def _unshifted_head(model: torch.nn.Module) -> str:
    """The class of the one that `model` is or, as an adapter, holds; empty if there is none."""
    return next((name for m in model.modules() if (name := type(m).__name__) in _UNSHIFTED_HEADS), "")


def shifting(model: torch.nn.Module) -> torch.nn.Module:
    """The model, if it learns the next token from rows whose labels are the tokens themselves.

    Raises:
        ModelError: its head compares each position with the label at the same one.
    """
    if (head := _unshifted_head(model)) and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{head} does not shift labels, as causal models do: from these rows it would learn to copy the token that it reads. Take a model "
            "that shifts them, or a loop of your own (bigtrain.engine.Engine) that gives shifted labels."
        )
    return model


def _ignores(labels: Any) -> TypeGuard[torch.Tensor]:
    """True for class numbers, among which one means that there is no target."""
    return isinstance(labels, torch.Tensor) and labels.dim() > 0 and not labels.is_floating_point()


def samples(batch: Batch) -> int:
    """Rows of a batch."""
    for value in tensors_in(batch):
        if value.dim() > 0:
            return int(value.shape[0])
    held = {name: type(value).__name__ for name, value in batch.items()}
    raise DataError(f"a batch holds no tensor with a batch dimension; it holds {held}")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a batch, in mappings, lists and tuples too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def listed(batches: Iterable[Batch]) -> list[Batch]:
    """The micro batches of a step, which are gone through twice.

    Raises:
        DataError: this is one batch.
    """
    if isinstance(batches, Mapping):
        raise DataError("train_step() takes a list of micro batches, and got one batch: call train_step([batch])")
    return list(batches)


def counted(batch: Batch, count: CountTargets) -> int:
    """The number of loss terms in a batch whose loss is the mean over them.

    Raises:
        DataError: the batch is no mapping, or says itself what its loss is divided by.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"a batch is a mapping of the model's inputs by name, such as {{'input_ids': ..., 'labels': ...}}; got {type(batch).__name__}. "
            "train_step() and evaluate() take a list of such batches"
        )
    if batch.get("num_items_in_batch") is not None:
        raise DataError(
            f"the batch holds num_items_in_batch = {batch['num_items_in_batch']}: train_step() and evaluate() divide by the targets of "
            "all batches themselves, and its loss would be divided twice. Leave it out, or use engine(**batch), backward and step"
        )
    return count(batch)


def without_targets(batch: Batch) -> Batch:
    """The batch with one label made valid: a mean over no target is 0/0, and a NaN times a weight of zero stays NaN."""
    labels = batch.get("labels")
    if not _ignores(labels):
        return batch
    labels = labels.clone()
    labels[..., -1] = 0
    return {**batch, "labels": labels}


def move(batch: Batch, device: torch.device, dtype: torch.dtype, held: list[torch.Tensor] | None = None) -> dict[str, Any]:
    """Tensors, also in mappings, lists and tuples, onto the device; floating inputs to the model's dtype, as the Hugging Face Trainer does under DeepSpeed.

    Args:
        held: of `kernels.upload.to_device`, where copies would wait behind optimizer state.
    """
    out = {name: _moved(value, device, dtype, held) for name, value in batch.items()}
    documents.remember(batch.get("position_ids"), out.get("position_ids"), held)
    return out


def _moved(value: Any, device: torch.device, dtype: torch.dtype, held: list[torch.Tensor] | None) -> Any:
    if isinstance(value, torch.Tensor):
        value = upload.to_device(value, device, held)
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _moved(one, device, dtype, held) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device, dtype, held) for one in value)
    return value


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: `.loss`, `["loss"]`, the first of a tuple, or the output itself.

    Raises:
        DataError: if there is none.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple):
        loss = output[0]
    else:
        loss = output.loss if hasattr(output, "loss") else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise DataError(
            "the model returned no scalar loss: give it labels, or let its forward return the loss first (or as `.loss`). "
            f"It returned {type(output).__name__}."
        )
    return loss.reshape(())


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output that a backward could start from."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    if isinstance(output, Mapping):
        return [t for v in output.values() for t in output_tensors(v)]
    if isinstance(output, (tuple, list)):
        return [t for v in output for t in output_tensors(v)]
    return []
