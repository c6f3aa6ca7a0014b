"""Cross-entropy of an output head without the logits of the whole batch.

Logits are the largest tensor of a training step: 16,384 tokens by 128,256 words are 8.4 GB in fp32. Here a chunk of tokens at a
time goes through head, softmax and both gradients, in one pass during the forward; the backward only scales what is kept: the
gradients of the hidden states and of the head, which any way of computing would have to hold.
"""

from __future__ import annotations

from typing import Any

import torch

IGNORED = -100
# Logits alive at a time, in elements of fp32: on a GPU enough rows to fill it, on a CPU few enough to stay near the cache.
CHUNK_LOGITS = {"cuda": 1 << 27, "cpu": 1 << 22}


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    num_items: torch.Tensor | int | float | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T + bias)[target], divided by `num_items`.

    Softmax and sums are in fp32, the matrix products in the dtype of `hidden`, as in transformers' own loss.

    Args:
        hidden: [..., hidden_size].
        weight: [vocabulary, hidden_size].
        targets: [...], int64, already shifted; -100 is left out.
        bias: [vocabulary] or None.
        num_items: what the sum is divided by: the target tokens of the whole global batch, for a loss that does not depend on
            how the batch is cut. None: the target tokens here (1 if there is none, so that the loss is 0 and not NaN).
        chunk_tokens: tokens at a time; by default as many as `CHUNK_LOGITS` allows.

    Returns:
        fp32, without dimensions.
    """
    flat, wanted = hidden.reshape(-1, hidden.size(-1)), targets.reshape(-1).to(hidden.device)
    if num_items is None:
        num_items = (wanted != IGNORED).sum().clamp(min=1)
    divisor = torch.as_tensor(num_items, dtype=torch.float32).to(hidden.device)
    if chunk_tokens is None:
        chunk_tokens = max(1, CHUNK_LOGITS.get(hidden.device.type, 1 << 22) // weight.size(0))
    return _LinearCrossEntropy.apply(flat, weight, bias, wanted, divisor, chunk_tokens)


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
    ) -> torch.Tensor:
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # summed over chunks in fp32: a bf16 sum would round at every chunk
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            loss, grad_logits = _chunk(hidden[rows], weight, bias, targets[rows], divisor, any(ctx.needs_input_grad[:3]))
            total += loss
            if grad_hidden is not None:
                torch.mm(grad_logits, weight.to(grad_logits.dtype), out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        ctx.save_for_backward(
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total / divisor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        scaled = [None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors]
        return (*scaled, None, None, None)


def _chunk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    divisor: torch.Tensor,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk's summed loss and d(loss / divisor) / d(logits) in the dtype of `hidden`: [tokens, vocabulary]."""
    logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    logits = logits.float()
    valid = targets != IGNORED
    index = targets.masked_fill(~valid, 0).unsqueeze(1)
    log_sum = torch.logsumexp(logits, dim=1, keepdim=True)
    loss = (log_sum - logits.gather(1, index)).masked_fill_(~valid.unsqueeze(1), 0.0).sum()
    if not with_grad:
        return loss, logits
    share = (valid / divisor).unsqueeze(1)
    probability = logits.sub_(log_sum).exp_()
    probability.scatter_add_(1, index, probability.new_full((), -1.0).expand_as(index))
    return loss, probability.mul_(share).to(hidden.dtype)
