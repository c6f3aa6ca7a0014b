"""Bytes that one block keeps for its backward pass, and what it needs on the way, tensor by tensor.

Symbols: t tokens of a micro step (micro batch x sequence length), d hidden, q/k/v width of all heads, f feed-forward
width, V vocabulary. bf16 is 2 bytes, fp32 4. "hf" follows the eager modules of transformers 5.24 with sdpa attention
(flash kernels): an RMSNorm computes in fp32 and keeps its fp32 input and its bf16 normalised value; SwiGLU keeps gate,
activation, up and product. "liger" follows liger-kernel's fused modules: RMSNorm keeps its input, SwiGLU gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bigtrain.plan.geometry import Geometry


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block at t tokens.

    Attributes:
        first_norm, attention, second_norm: kept tensors of those parts.
        product, middle, gate: kept tensors of the feed-forward part, in the order in which backward frees them.
        routing: router logits and gathered tokens of a sparse block.
        forward_extra: most that is held for a moment in forward and not kept.
        attention_extra: gradients inside attention's backward (dq, dk, dv, fp32 accumulator, expanded dk and dv).
        norm_extra: temporaries of a norm's backward.
        feed: width in bytes of one feed-forward tensor (2 t f).
        stream: the residual stream, 2 t d; with checkpointing this is all that stays.
        results: results of matrix products and of attention, which selective checkpointing keeps too.
        results_used: the part of them that backward needs too (not what an output projection adds to the stream).
    """

    first_norm: int
    attention: int
    second_norm: int
    product: int
    middle: int
    gate: int
    routing: int
    forward_extra: int
    attention_extra: int
    norm_extra: int
    feed: int
    stream: int
    results: int = 0
    results_used: int = 0

    @property
    def kept(self) -> int:
        """All that is kept without checkpointing."""
        norms = self.first_norm + self.second_norm
        return norms + self.attention + self.product + self.middle + self.gate + self.routing

    @property
    def made_again(self) -> int:
        """What a selective recompute makes: all that is kept without checkpointing, but for the results it finds."""
        return max(0, self.kept - self.results_used)


def norm_kept(g: Geometry, t: int, kernels: str, feeds_linear: bool = True) -> int:
    """Kept by one norm, with its output if a linear layer keeps that as its input."""
    output = 2 * t * g.hidden if feeds_linear else 0
    if kernels == "liger" or not g.rms:
        return 2 * t * g.hidden + 8 * t + output
    return (4 + 2) * t * g.hidden + 4 * t + output


def _attention_kept(g: Geometry, t: int, kernels: str) -> int:
    # A latent attention's value is as wide as its output; otherwise the output is as wide as the queries.
    out = g.value if g.key == g.query != g.value else g.query
    kept = 2 * t * (g.query + g.key + g.value + out) + 4 * t * g.heads
    if g.qk_norm:
        kept += (2 if kernels == "liger" else 4 + 2) * t * (g.query + g.key)
    return kept + (t * g.hidden if g.dropout else 0)


def _attention_backward(g: Geometry, t: int) -> int:
    grads = 2 * t * (g.query + g.key + g.value)
    expanded = 2 * t * 2 * g.query if g.key != g.query else 0
    return grads + expanded + 4 * t * g.query + 4 * t * g.heads


def _counted(g: Geometry, t: int, general: BlockBytes) -> BlockBytes:
    """The family's own counts (`geometry.KEPT`) in place of the general rules."""
    if g.kept is None:
        return general
    hidden, query, key, feed = g.kept
    width = general.feed // 2
    return replace(
        general,
        first_norm=hidden * t * g.hidden // 2 + 4 * t,
        second_norm=hidden * t * g.hidden - hidden * t * g.hidden // 2 + 4 * t,
        attention=t * (query * g.query + key * g.key) + 4 * t * g.heads,
        product=general.feed,
        middle=max(0, feed - 4) * width,
        gate=max(0, min(2, feed - 2)) * width,
    )


def block_bytes(g: Geometry, t: int, kernels: str = "hf", block: int = 0, seq_len: int = 0) -> BlockBytes:
    """Bytes of block number `block` (sparse models may have dense blocks first).

    Args:
        t: tokens of a micro step. seq_len: tokens of one sequence, for attention that keeps its matrix.
    """
    d, dense = g.hidden, g.is_dense(block)
    width = (g.dense_ffn or g.ffn) if dense else g.ffn * g.experts_per_token + g.shared_ffn
    feed = 2 * t * width
    routing = 0 if dense else 8 * t * g.experts + 4 * t * d * g.experts_per_token
    products, middle = (feed, 2 * feed) if g.gated else (feed, 0)
    if g.gated and kernels == "liger":
        middle = feed
    first, second = norm_kept(g, t, kernels), norm_kept(g, t, kernels) if g.norms >= 2 else 0
    second += (g.norms - 2) * norm_kept(g, t, kernels, feeds_linear=False) if g.norms > 2 else 0
    fused = kernels == "liger" or not g.rms
    matrix = (10 if g.soft_cap else 6) * t * (seq_len or t) * g.heads if g.eager else 0
    general = BlockBytes(
        first_norm=first,
        attention=_attention_kept(g, t, kernels) + matrix,
        second_norm=second + (t * d if g.dropout else 0),
        product=products,
        middle=middle,
        gate=feed,
        routing=routing,
        forward_extra=max(3 * feed + 4 * t * d, (4 if fused else 14) * t * d),
        attention_extra=_attention_backward(g, t),
        norm_extra=(2 if fused else 12) * t * d,
        feed=feed,
        stream=2 * t * d,
    )
    found = general if kernels == "liger" else _counted(g, t, general)
    used, ends = _results(g, t, width, matrix, dense)
    return replace(found, results=used + ends, results_used=min(used, found.kept))


def _results(g: Geometry, t: int, width: int, matrix: int, dense: bool) -> tuple[int, int]:
    """(results inside of attention and feed-forward part, results of the two output projections) of a block.

    Gate and up, queries, keys, values, attention's output with its fp32 statistics (or, without a fused kernel, its matrix);
    the output projections come once for the block and, in a sparse one, once for each active expert.
    """
    out = g.value if g.key == g.query != g.value else g.query
    inner = 2 * t * (2 if g.gated else 1) * width
    attention = 2 * t * (g.query + g.key + g.value + out) + (matrix // 3 if g.eager else 4 * t * g.heads)
    experts = 1 if dense else max(1, g.experts_per_token)
    router = 0 if dense else 2 * t * g.experts
    return inner + attention, 2 * t * g.hidden * (1 + experts) + router


# kernels/cross_entropy.py with Triton. Logits alive at a time on a GPU, in elements (512 MiB in bf16): 2,048 tokens of a 128,256-word
# head, so that the matrix products are large; and the most chunks that are summed up in bf16, whatever that takes.
FUSED_LOSS_ELEMS = 2**28
FUSED_LOSS_CHUNKS = 16


def fused_loss_rows(vocab: int, t: int) -> int:
    """Tokens of one chunk of the fused loss: chunks of about one size, in whole tiles of 256 tokens."""
    most = max(1, FUSED_LOSS_ELEMS // vocab, -(-t // FUSED_LOSS_CHUNKS))
    chunks = max(1, -(-t // most))
    return max(1, min(t, -(-t // chunks // 256) * 256))
