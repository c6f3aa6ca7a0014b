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
        routing: router logits and gathered tokens of a sparse block. chosen: one tensor of its experts' inputs, or of their results.
        in_passing: the same where bigtrain's experts do not keep it. shared: one feed-forward tensor of experts that all tokens use.
        forward_extra: most that is held for a moment in forward and not kept.
        forward_attention: most that attention holds in forward where nothing is kept, if it has no fused kernel; scores_passing: beside
            what it keeps, where it keeps it; scores: the largest tensor of these.
        attention_extra: gradients inside attention's backward (dout, dq, dk, dv, fp32 accumulator, expanded dk and dv).
        norm_extra: temporaries of a norm's backward.
        feed: width in bytes of one feed-forward tensor (2 t f).
        stream: the residual stream, 2 t d; with checkpointing this is all that stays.
        results: results of matrix products and of attention, which selective checkpointing keeps too.
        results_used: the part of them that backward needs too (not what an output projection adds to the stream).
        of_attention: results of attention that can be kept by themselves, tensor by tensor: outputs and their fp32 statistics.
    """

    first_norm: int
    attention: int
    second_norm: int
    product: int
    middle: int
    gate: int
    routing: int
    forward_extra: int
    forward_attention: int
    scores_passing: int
    scores: int
    attention_extra: int
    norm_extra: int
    feed: int
    stream: int
    results: int = 0
    results_used: int = 0
    of_attention: tuple[int, ...] = ()
    chosen: int = 0
    in_passing: int = 0
    shared: int = 0

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
    return (g.keeps.norm - 2) * t * g.hidden + 4 * t + output


def norm_passing(g: Geometry, t: int, kernels: str) -> int:
    """Most that the backward of one norm holds beside what it keeps and the gradient that comes: of fp32 operations, or of one kernel."""
    if kernels == "liger" or not g.rms:
        return 2 * t * g.hidden
    return (14 if g.keeps.norm in (8, 10) else 8) * t * g.hidden  # 8: the norm itself is one operation, in fp32


@dataclass(frozen=True)
class _Attention:
    """Bytes: kept for backward; most that a forward without gradients holds; gradients; results of the products; of one operator;
    most that a forward holds beside what it keeps; of one tensor of scores."""

    kept: int
    forward: int
    backward: int
    results: int
    fused: tuple[int, ...] = ()
    in_passing: int = 0
    scores: int = 0


def _attention(g: Geometry, t: int, seq_len: int, device: str, bias: bool) -> _Attention:
    """The kernel that torch takes, or the operations in its place.

    On CPUs torch's fused kernel takes no dropout, no bias with a gradient and no value of another width than the keys
    (aten/src/ATen/native/transformers/sdp_utils_cpp.cpp, `use_flash_attention_cpp`). On GPUs one of three takes each of these and
    keeps no matrix for it (.../cuda/sdp_utils.cpp: cuDNN's and flash attention take dropout, the memory-efficient one all).
    """
    if g.keeps.matrix:
        return _by_operations(g, t, seq_len, device)
    if g.keeps.plain or (device == "cpu" and (g.keeps.attention_dropout or bias or g.value != g.key)):
        return _in_fp32(g, t, seq_len, device)
    return _fused(g, t, seq_len, bias)


def _by_operations(g: Geometry, t: int, seq_len: int, device: str) -> _Attention:
    """transformers' `eager_attention_forward`: keys and values are repeated for each head of queries."""
    k, matrix = g.keeps, t * seq_len * g.heads
    wide = 2 * t * (3 * g.query + _out(g))
    views = 2 * t * k.key * g.key if g.key == g.query else 0  # values are views of one product with queries and keys
    # A softmax in bf16 is kept beside what dropout leaves of it; one in fp32 is cast before that.
    low, dropped = k.matrix == 2, 2 if k.attention_dropout else 0
    mask = _mask_bytes(device) + (2 if low else 0) if dropped else 0
    kept = wide + views + (k.matrix + mask) * matrix
    in_passing = (k.scores_passing + (dropped if low else 0)) * matrix
    passing = ((4 if low else 6) - dropped) * matrix  # what dropout left is freed before the softmax's gradient comes
    passing += _softmax_product(2 if low else 4, matrix, device)
    forward = _grads(g, t) + 2 * t * 3 * g.query + (k.matrix - k.capped + k.handed_on) * matrix + in_passing
    results = _grads(g, t) + 2 * t * _out(g) + 2 * matrix
    # Gradients of queries and keys come once the matrices are gone.
    scores = (2 if low else 4) * matrix
    return _Attention(kept, forward, 2 * t * g.query + passing, results, in_passing=in_passing, scores=scores)


def _softmax_product(width: int, matrix: int, device: str) -> int:
    """On GPUs a softmax's backward makes the product of result and gradient first (aten/src/ATen/native/cuda/SoftMax.cu `softmax_backward_cuda_out`)."""
    return width * matrix if device == "cuda" else 0


def _in_fp32(g: Geometry, t: int, seq_len: int, device: str) -> _Attention:
    """torch's `_scaled_dot_product_attention_math`: fp32 copies, the probabilities and, with dropout, the mask and what it leaves."""
    k, matrix = g.keeps, t * seq_len * g.heads
    copies = 4 * t * (g.query + g.key + g.value if k.plain or g.latent else 3 * g.query)
    matrices, passing = (12 * matrix, 4 * matrix) if k.attention_dropout else (4 * matrix, 8 * matrix)
    passing += _softmax_product(4, matrix, device)
    results = _grads(g, t) + 4 * matrix + 4 * t * _out(g)
    return _Attention(
        copies + matrices + 2 * t * _out(g), copies + max(matrices, 8 * matrix), _grads(g, t) + copies + passing, results,
        scores=4 * matrix,
    )  # fmt: skip


def _fused(g: Geometry, t: int, seq_len: int, bias: bool) -> _Attention:
    k, out = g.keeps, _out(g)
    fused = (2 * t * out, 4 * t * g.heads)
    results = _grads(g, t) + sum(fused)
    copies = t * (k.query * out + k.key * g.key + 2 * g.latent) + (2 * t * seq_len * g.heads if bias else 0)
    if k.masked or 0 < k.window < seq_len:
        # What is repeated is no view of one product any more.
        views = 2 * (g.query + g.key) if k.key and g.key != g.query else 0
        copies += t * (4 * (g.query - g.key) - views + (0 if k.mask else 2 * seq_len))
    elif k.key and g.windows and min(g.windows) < seq_len:
        # kernels/cudnn_attention.py `_Packed` copies values out of their one product with queries and keys, which then goes.
        copies -= 2 * t * (g.query + g.key)
    expanded = 2 * t * 2 * g.query if g.key != g.query else 0
    # Of queries, keys and values, copies of them, and of the output, which they are made from.
    grads = _grads(g, t) + expanded + 4 * t * g.query + 4 * t * g.heads + 2 * t * out
    # models/recompute.py: one that draws random numbers has to draw them again.
    return _Attention(results + copies, 0, grads, results, () if k.attention_dropout or k.unseen else fused)


def _grads(g: Geometry, t: int) -> int:
    """Queries, keys and values, and as much again are their gradients."""
    return 2 * t * (g.query + g.key + g.value)


def _out(g: Geometry) -> int:
    """A latent attention's value is as wide as its output; otherwise the output is as wide as the queries."""
    return g.value if g.latent else g.query


def _mask_bytes(device: str) -> int:
    """Of one element's dropout: on CPUs torch keeps the mask in the dtype of what it drops (aten/src/ATen/native/Dropout.cpp)."""
    return 2 if device == "cpu" else 1


def block_bytes(
    g: Geometry, t: int, kernels: str = "hf", block: int = 0, seq_len: int = 0, device: str = "cuda", tile: int = 0
) -> BlockBytes:
    """Bytes of block number `block` (sparse models may have dense blocks first).

    Args:
        t: tokens of a micro step. seq_len: tokens of one sequence, for attention that keeps its matrix.
        device: "cuda" or "cpu", on which torch has fewer fused kernels.
        tile: tokens of one tile of the feed-forward part, of which nothing is kept then; 0: it runs in one piece.
    """
    whole = _whole_block(g, t, kernels, block, seq_len, device)
    if not tile:
        return whole
    one = _whole_block(g, tile, kernels, block, tile, device)
    # Gate and up, and what the last projection adds to the stream, are results inside of tiles.
    inner = (2 if g.gated else 1) * whole.feed
    return replace(
        whole,
        product=0,
        middle=0,
        gate=0,
        feed=one.feed,
        forward_extra=max(3 * one.feed + 4 * t * g.hidden, whole.norm_extra + 2 * t * g.hidden),
        results=whole.results - inner - 2 * t * g.hidden,
        results_used=max(0, whole.results_used - inner),
    )


def _whole_block(g: Geometry, t: int, kernels: str, block: int, seq_len: int, device: str) -> BlockBytes:
    dense, liger = g.is_dense(block), kernels == "liger"
    if liger and g.keeps.spared:
        g = replace(g, keeps=replace(g.keeps, query=g.keeps.query - g.keeps.spared))
    d, k = g.hidden, g.keeps
    cross = bool(g.cross_from) and block >= g.cross_from
    width = (g.dense_ffn or g.ffn) if dense else g.ffn * g.experts_per_token + g.shared_ffn
    feed, mask = 2 * t * width, _mask_bytes(device)
    parts = [_attention(g, t, seq_len or t, device, bias) for bias in ((k.bias, False) if cross else (k.bias,))]
    first, second = _norms(g, t, kernels, cross)
    fused = liger or not g.rms
    # bigtrain's routed experts keep gate and up, and gather tokens and make what goes into the last product anew in backward.
    fused_experts = not dense and k.fused_experts
    shared = 0 if dense else 2 * t * g.shared_ffn
    product = shared if fused_experts else feed
    middle, gate = _middle_and_gate(g, t * (g.shared_ffn if fused_experts else width), liger)
    if fused_experts:
        middle, gate = middle + feed - shared, gate + feed - shared
    if k.feed_mask:
        product += mask * t * width + (0 if g.gated or k.activation else feed)
    masks = k.masks + (1 if cross and k.masks else 0)
    kept = sum(a.kept for a in parts) + _beside_attention(g, t, seq_len or t, liger) + (t * (seq_len or t) if cross else 0)
    used, ends = _results(g, t, width, sum(a.results for a in parts), dense)
    chosen = 0 if dense else 2 * t * g.hidden * g.experts_per_token
    found = BlockBytes(
        first_norm=first,
        attention=kept + (mask * t * d if masks else 0),
        second_norm=second + mask * t * d * max(0, masks - 1),
        product=product,
        middle=middle,
        gate=gate,
        routing=0 if dense else _routing(g, t) - (2 * chosen if fused_experts else 0),
        forward_extra=max(
            _feed_forward_extra(g, t, feed, dense) + (chosen if fused_experts else 0), (4 if fused else 14) * t * d
        ),
        forward_attention=max(a.forward for a in parts),
        scores_passing=max(a.in_passing for a in parts),
        scores=max(a.scores for a in parts),
        attention_extra=max(a.backward for a in parts),
        norm_extra=norm_passing(g, t, kernels),
        feed=feed,
        stream=2 * t * d,
        results=used + ends,
        of_attention=tuple(size for a in parts for size in a.fused),
        chosen=0 if fused_experts else chosen,
        in_passing=chosen if fused_experts else 0,
        shared=shared,
    )
    return replace(found, results_used=min(used, found.kept))


def _feed_forward_extra(g: Geometry, t: int, feed: int, dense: bool) -> int:
    """Most that a feed-forward part holds in forward where nothing is kept: two inputs and their product, or every step of gpt-oss's
    experts, whose names last until all are done (transformers/integrations/moe.py, modeling_gpt_oss.py `_apply_gate`)."""
    own = g.keeps.own_experts and not g.keeps.fused_experts and not dense
    return (9 if own else 3) * feed + 4 * t * g.hidden + (2 * t * g.hidden * g.experts_per_token if own else 0)


def _norms(g: Geometry, t: int, kernels: str, cross: bool) -> tuple[int, int]:
    """Of the first half of a block and of the second."""
    if kernels != "liger":
        half = g.keeps.hidden * t * g.hidden // 2
        return half + 4 * t, (2 * half if cross else half) + 4 * t
    first, second = norm_kept(g, t, kernels), norm_kept(g, t, kernels) if g.norms >= 2 else 0
    return first, second + max(0, g.norms - 2) * norm_kept(g, t, kernels, feeds_linear=False)


def _beside_attention(g: Geometry, t: int, seq_len: int, liger: bool) -> int:
    """Norms and rotary embeddings of queries and keys, latent vectors, masks."""
    k = g.keeps
    norm = min(2, k.qk_norm) if liger and not k.own_qk_norm else k.qk_norm
    token = k.token // 2 if liger else k.token
    return t * (norm * (g.query + g.key) + k.head * g.query // g.heads + token + k.mask * seq_len)


def _middle_and_gate(g: Geometry, elems: int, liger: bool) -> tuple[int, int]:
    return (2 * elems, 2 * elems) if liger and g.gated and not g.keeps.own_experts else _activation(g, elems)


def _activation(g: Geometry, elems: int) -> tuple[int, int]:
    """(what lies between activation and product, the activation's input) of so many elements."""
    at_input = min(2, g.keeps.activation)
    return (g.keeps.activation - at_input + (4 if g.gated else 0)) * elems, at_input * elems


def _routing(g: Geometry, t: int) -> int:
    """The router's probabilities, where each chosen token goes, and the experts' inputs and results."""
    chosen = 40 + 4 * g.hidden
    return t * (4 * g.experts + chosen * g.experts_per_token + g.keeps.router * g.hidden)


def _results(g: Geometry, t: int, width: int, attention: int, dense: bool) -> tuple[int, int]:
    """(results inside of attention and feed-forward part, results of the two output projections) of a block.

    Gate and up, queries, keys, values, attention's output with its fp32 statistics (or, without a fused kernel, its matrix);
    the output projections come once for the block and, in a sparse one, once for each active expert.
    """
    inner = 2 * t * (2 if g.gated else 1) * width
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


def embedding_backward(shape: tuple[int, ...], t: int, device: str) -> int:
    """Bytes of an embedding's gradient, and on a GPU of sums in fp32 of the rows that get one, ten tokens at most in each.

    aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel`: `grad_weight_per_segment`. 0: no matrix.
    """
    if len(shape) != 2:
        return 0
    rows, width = shape
    return 2 * rows * width + (4 * min(t, rows + t // 10) * width if device == "cuda" else 0)
