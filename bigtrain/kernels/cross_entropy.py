"""Cross-entropy of an output head without the logits of the whole batch, and without a wait for the device.

Logits are the largest tensor of a training step: 16,384 tokens by 128,256 words are 8.4 GB in fp32. Here a chunk of tokens at a
time goes through head, softmax and both gradients, in one pass during the forward; what is kept are the gradients of the hidden
states and of the head, which any way of computing would have to hold, and the backward scales them where they lie. A factor of the logits and a soft cap are part of that pass, in fp32,
where transformers rounds to bf16 after each of them.

On a GPU with Triton the chunk's logits are bf16 (the weight's dtype), become their gradient in place, and the head's gradient is
summed up in its own dtype over at most 16 chunks. Relative error of that gradient against fp64 (16,384 tokens, bf16 products; a
single rounding to bf16 is 0.17 to 0.19 %): 0.31 to 0.36 % in the 8 chunks of a 128,256-word head, where an fp32 sum would hold
another 2 bytes a weight (0.8 to 1.1 GB) for 0.17 to 0.19 %; liger-kernel's 32 chunks give 0.58 to 0.68 %. Elsewhere chunks are
small and many (128 of them would give 1.4 to 2 %), and the sum is in fp32.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from bigtrain.errors import DataError, ModelError
from bigtrain.plan.activations import fused_loss_rows
from bigtrain.plan.constants import CHUNK_LOGITS, SCALED_AT_A_TIME

IGNORED = -100


class Kernels(NamedTuple):
    """What a chunk goes through beside its matrix products.

    Attributes:
        rows: of (logits [tokens, vocabulary], targets [tokens], losses fp32 [tokens], with_grad, scale, cap): writes each token's
            loss, 0 where its target is -100; with_grad also turns the logits into the gradient of the sum of losses, in place.
        scale: of (values, factor fp32 without dimensions): values *= factor in fp32, in place.
        fp32_sums: the head's gradient is summed in fp32, whatever its dtype.
    """

    rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float, float | None], None]
    scale: Callable[[torch.Tensor, torch.Tensor], None]
    fp32_sums: bool


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    num_items: torch.Tensor | int | float | None = None,
    scale: float = 1.0,
    cap: float | None = None,
    chunk_tokens: int | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(scale * (hidden @ weight.T + bias))[target], divided by `num_items`.

    Scale, cap, softmax and sums are in fp32, the matrix products in the dtype of `hidden` (or of autocast), as in transformers' own loss.
    The host waits for nothing on the device. Backward works once: it scales the gradients in place.

    Args:
        hidden: [..., hidden_size].
        weight: [vocabulary, hidden_size].
        targets: [...], int64, already shifted; -100 is left out.
        bias: [vocabulary] or None.
        num_items: what the sum is divided by: the target tokens of the whole global batch, for a loss that does not depend on
            how the batch is cut. None: the target tokens here (1 if there is none, so that the loss is 0 and not NaN).
        scale: factor of the logits. cap: above 0: of scaled logits x, cap * tanh(x / cap) goes into the softmax.
        chunk_tokens: tokens at a time; by default what the device can well hold (`plan.activations.fused_loss_rows` on a GPU).
        kernels: by default Triton's on a GPU that has them, torch's elsewhere.

    Returns:
        fp32, without dimensions.

    Raises:
        DataError: on a CPU, a target is no word of the vocabulary. On a GPU, which is not waited for, the loss is then NaN.
    """
    device = hidden.device
    if not torch.is_grad_enabled():  # a parameter says that it wants a gradient where nobody will ask for it, too
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    flat, wanted = hidden.reshape(-1, hidden.size(-1)), targets.reshape(-1).to(device)
    if device.type == "cpu":
        _refuse_unknown(wanted, weight.size(0))
    divisor = _divisor(num_items, wanted)
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        flat, weight, bias = flat.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    kernels = kernels or kernels_for(device.type)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS.get(device.type, CHUNK_LOGITS["cpu"]) // weight.size(0))
        if not kernels.fp32_sums:
            chunk_tokens = fused_loss_rows(weight.size(0), flat.size(0))
    return _LinearCrossEntropy.apply(flat, weight, bias, wanted, divisor, chunk_tokens, kernels, (scale, cap))


def _divisor(num_items: torch.Tensor | int | float | None, targets: torch.Tensor) -> torch.Tensor:
    """fp32 without dimensions, on the device; a number of the host's is filled in, because a copy from there would be waited for."""
    if num_items is None:
        return (targets != IGNORED).sum().clamp(min=1).float()
    if isinstance(num_items, torch.Tensor) and num_items.device == targets.device:
        return num_items.float().reshape(())
    return torch.full((), float(num_items), dtype=torch.float32, device=targets.device)


def _refuse_unknown(targets: torch.Tensor, vocabulary: int) -> None:
    unknown = targets[((targets < 0) & (targets != IGNORED)) | (targets >= vocabulary)]
    if unknown.numel():
        raise DataError(
            f"label {int(unknown[0])} is neither one of the {vocabulary} words of the output head nor {IGNORED} (left out of the "
            f"loss); {unknown.numel()} of {targets.numel()} labels are such. Is the tokenizer the model's own?"
        )


@functools.cache
def kernels_for(device_type: str) -> Kernels:
    """Triton's kernels on a GPU, torch's where there is no Triton."""
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from bigtrain.kernels import cross_entropy_triton

        return Kernels(cross_entropy_triton.rows, cross_entropy_triton.scale, fp32_sums=False)
    return Kernels(_rows, _scale, fp32_sums=True)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        divisor: torch.Tensor,
        chunk_tokens: int,
        kernels: Kernels,
        change: tuple[float, float | None],
    ) -> torch.Tensor:
        wanted = tuple(ctx.needs_input_grad[:3])
        losses, grads = _in_chunks((hidden, weight, bias), targets, chunk_tokens, kernels, change, wanted)
        ctx.save_for_backward(*grads, divisor)
        ctx.kernels, ctx.spent = kernels, False
        return losses.sum() / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.spent:
            raise ModelError(
                "backward ran twice over one forward of the chunked loss: its gradients are scaled where they lie. "
                "Run the forward again for each backward (retain_graph is not for this loss)"
            )
        ctx.spent = True
        *grads, divisor = ctx.saved_tensors
        factor = grad.float() / divisor
        for one in grads:
            if one is not None:
                ctx.kernels.scale(one, factor)
        return (*grads, None, None, None, None, None)


Triple = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _in_chunks(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    targets: torch.Tensor,
    chunk_tokens: int,
    kernels: Kernels,
    change: tuple[float, float | None],
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor, Triple]:
    """Losses of all tokens (fp32), and the gradients of their sum by hidden states, weight and bias, as far as `wanted`."""
    hidden, weight, bias = inputs
    tokens = hidden.size(0)
    # Without a chunk nothing is written. Whatever the strides of what it belongs to, a gradient is scaled as a row of numbers.
    make = functools.partial(torch.empty_like if tokens else torch.zeros_like, memory_format=torch.contiguous_format)
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    of_hidden = make(hidden) if wanted[0] else None
    of_weight = make(weight, dtype=torch.float32 if kernels.fp32_sums else weight.dtype) if wanted[1] else None
    of_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] and bias is not None else None
    room = hidden.new_empty(min(chunk_tokens, tokens), weight.size(0))
    for start in range(0, tokens, chunk_tokens):
        part = slice(start, min(start + chunk_tokens, tokens))
        _logits(hidden[part], weight, bias, out=room[: part.stop - start])
        kernels.rows(room[: part.stop - start], targets[part], losses[part], any(wanted), *change)
        _products(room[: part.stop - start], hidden[part], weight, (of_hidden, of_weight, of_bias), part)
    del room  # before another copy of the head's gradient
    return losses, (
        of_hidden,
        None if of_weight is None else of_weight.to(weight.dtype),
        None if of_bias is None or bias is None else of_bias.to(bias.dtype),
    )


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _products(grad_logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, into: Triple, part: slice) -> None:
    """This chunk's gradients: of its hidden states, and added to those of weight and bias."""
    of_hidden, of_weight, of_bias = into
    if of_hidden is not None:
        torch.mm(grad_logits, weight, out=of_hidden[part])
    if of_bias is not None:
        of_bias += grad_logits.sum(0, dtype=torch.float32)
    if of_weight is None:
        return
    if of_weight.dtype != grad_logits.dtype:
        product = grad_logits.t() @ hidden
        of_weight.add_(product) if part.start else of_weight.copy_(product)
    elif part.start:
        of_weight.addmm_(grad_logits.t(), hidden)
    else:  # the first one is written without reading what lies there
        torch.mm(grad_logits.t(), hidden, out=of_weight)


def _rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    with_grad: bool,
    scale: float = 1.0,
    cap: float | None = None,
) -> None:
    exact = logits.to(torch.float32, copy=(scale, cap) != (1, None))  # of fp32 logits, too, where it is changed in place
    tanh = None
    if cap is not None:
        tanh = exact.mul_(scale / cap).tanh_()
        exact = tanh * cap
    elif scale != 1:
        exact.mul_(scale)
    ignored = targets == IGNORED
    index = targets.masked_fill(ignored, 0).unsqueeze(1)
    log_sum = torch.logsumexp(exact, dim=1, keepdim=True)
    losses.copy_((log_sum - exact.gather(1, index)).squeeze(1).masked_fill_(ignored, 0.0))
    if with_grad:
        probability = exact.sub_(log_sum).exp_()
        probability.scatter_add_(1, index, probability.new_full((), -1.0).expand_as(index))
        if tanh is not None:
            probability.mul_(tanh.square_().neg_().add_(1))
        if scale != 1:
            probability.mul_(scale)
        logits.copy_(probability.masked_fill_(ignored.unsqueeze(1), 0.0))


def _scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    for part in values.view(-1).split(SCALED_AT_A_TIME):
        part.copy_(part.float() * factor)
