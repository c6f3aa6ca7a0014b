"""The chunked loss equals transformers' own, value and gradients, and never holds all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)  # fmt: skip

from bigtrain.errors import ModelError
from bigtrain.kernels import attach
from bigtrain.kernels.attach import use_chunked_loss, use_liger
from bigtrain.kernels.cross_entropy import Kernels, _rows, _scale, kernels_for, linear_cross_entropy

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def _batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 97, (3, 17), generator=generator)
    labels = ids.clone()
    labels[0, :9] = -100
    labels[2] = -100
    return ids, labels


def _build(config_class, model_class, dtype=torch.float32, **kw):
    torch.manual_seed(1)
    return model_class(config_class(**SMALL, **kw)).to(dtype)


def _loss_and_grads(model, **kw):
    ids, labels = _batch()
    model.zero_grad()
    out = model(input_ids=ids, labels=labels, **kw)
    (out.loss * 0.5).backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setitem(attach.linear_cross_entropy.__globals__["CHUNK_LOGITS"], "cpu", 97 * 7)


KINDS = [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (MixtralConfig, MixtralForCausalLM)]


@pytest.mark.parametrize("config_class, model_class", KINDS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_items", [None, 23, torch.tensor(23)])
def test_equals_transformers(config_class, model_class, tied, num_items, small_chunks):
    model = _build(config_class, model_class, tie_word_embeddings=tied)
    expected, expected_grads = _loss_and_grads(model, num_items_in_batch=num_items)
    assert use_chunked_loss(model).kind == "chunked"
    got, grads = _loss_and_grads(model, num_items_in_batch=num_items)
    assert got.logits is None
    # fp32; sums run in another order, chunk by chunk
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert set(grads) == set(expected_grads)
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).abs().max() <= 1e-6 * max(1.0, expected_grads[name].abs().max().item()), name


def test_in_bf16_it_differs_by_the_rounding_of_the_chunks_only(small_chunks):
    model = _build(LlamaConfig, LlamaForCausalLM, torch.bfloat16)
    expected, expected_grads = _loss_and_grads(model)
    use_chunked_loss(model)
    got, grads = _loss_and_grads(model)
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)  # bf16 logits are the same, row by row
    for name, grad in grads.items():
        scale = expected_grads[name].float().abs().max()
        # each gradient is rounded to bf16 (2^-9) a few times more on its way down
        assert (grad.float() - expected_grads[name].float()).abs().max() <= 2**-6 * scale, name


def test_any_split_of_a_batch_gives_the_same_gradient(small_chunks):
    ids, labels = _batch()
    model = _build(LlamaConfig, LlamaForCausalLM)
    use_chunked_loss(model)
    items = int((labels[:, 1:] != -100).sum())
    model(input_ids=ids, labels=labels, num_items_in_batch=items).loss.backward()
    whole = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for row in range(3):
        model(input_ids=ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=items).loss.backward()
    for name, param in model.named_parameters():
        assert (param.grad - whole[name]).abs().max() < 1e-6, name


class _Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.elems = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elems = max(self.elems, tensor.numel())
        return out


def test_the_logits_of_the_batch_never_exist():
    config = {**SMALL, "vocab_size": 5000}
    model = LlamaForCausalLM(LlamaConfig(**config))
    use_chunked_loss(model)
    ids = torch.randint(0, 5000, (2, 64))
    attach.linear_cross_entropy.__globals__["CHUNK_LOGITS"]["cpu"], before = 5000 * 8, 1 << 22
    try:
        with _Largest() as seen:
            model(input_ids=ids, labels=ids).loss.backward()
    finally:
        attach.linear_cross_entropy.__globals__["CHUNK_LOGITS"]["cpu"] = before
    assert seen.elems == 5000 * 32  # the head's own gradient; all logits would be 5000 * 128


def test_without_labels_or_for_the_last_logits_only_nothing_changes():
    model = _build(LlamaConfig, LlamaForCausalLM)
    ids, labels = _batch()
    expected = model(input_ids=ids).logits
    use_chunked_loss(model)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert model(ids, labels=labels[:, -2:], logits_to_keep=2).logits.shape == (3, 2, 97)
    assert model.generate(ids[:1], max_new_tokens=3, do_sample=False).shape == (1, 20)
    assert model(input_ids=ids, labels=labels, return_dict=False)[1] is None


def test_other_heads():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2)).eval()  # no dropout
    expected, _ = _loss_and_grads(model)
    assert use_chunked_loss(model).kind == "chunked"
    got, _ = _loss_and_grads(model)
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert use_chunked_loss(torch.nn.Linear(2, 2)).kind == "model"


def test_bias_frozen_head_and_no_targets():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(s, generator=generator).requires_grad_() for s in ((10, 8), (11, 8), (11,)))
    targets = torch.randint(0, 11, (10,), generator=generator)
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=3)
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t() + bias, targets)
    for got, want in zip(grads, torch.autograd.grad(expected, (hidden, weight, bias))):
        assert (got - want).abs().max() < 1e-6
    linear_cross_entropy(hidden, weight.detach(), targets).backward()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets, bias=bias).item() == pytest.approx(expected.item(), rel=1e-6)
    nothing = linear_cross_entropy(hidden, weight, torch.full((10,), -100))
    assert nothing.item() == 0.0 and not torch.autograd.grad(nothing, weight)[0].any()


def test_liger_falls_back_and_says_so():
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    path = use_liger(_build(LlamaConfig, LlamaForCausalLM))
    assert path.kind == "chunked" and "no CUDA device" in path.why


# What a GPU does beside its own kernels: sums in the weight's dtype, everything in place.
IN_PLACE = Kernels(_rows, _scale, fp32_sums=False)


def _problem(tokens, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator) + torch.randn(64, generator=generator)
    weight = torch.randn(211, 64, generator=generator) * 0.1
    targets = (torch.rand(tokens, generator=generator) ** 3 * 211).long()
    targets[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _exact(hidden, weight, targets, factor):
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)
    return loss.item(), torch.autograd.grad(loss * factor, (hidden, weight))


def _error(mine, exact):
    return ((mine.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("kernels", [IN_PLACE, kernels_for("cpu")], ids=["in place", "cpu"])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_gradients_against_fp64(kernels, dtype, bound):
    """In bf16 a single rounding is 0.17 %, and logits are rounded too; 8 sums in bf16 come to 0.36 %."""
    hidden, weight, targets = _problem(2048, dtype)
    factor = 1.0 / 3.0
    loss, again = (linear_cross_entropy(hidden, weight, targets, chunk_tokens=256, kernels=kernels) for _ in range(2))
    mine = torch.autograd.grad(loss * factor, (hidden, weight))
    whole = torch.autograd.grad(again, (hidden, weight))
    value, exact = _exact(hidden, weight, targets, factor)
    assert loss.item() == pytest.approx(value, rel=1e-6 if dtype == torch.float32 else 1e-3)
    for one, all_of_it, wanted in zip(mine, whole, exact):
        assert one.dtype == dtype and _error(one, wanted) < bound
        all_of_it = all_of_it.double()
        share = (one.double() * all_of_it).sum() / all_of_it.square().sum()
        assert abs(share.item() / factor - 1) < 1e-3  # roundings of single values nearly cancel; 1/3 in bf16 is off by 2e-3


def test_few_large_chunks_are_nearer_to_fp64_than_many_small_ones():
    hidden, weight, targets = _problem(2048, torch.bfloat16)
    exact = _exact(hidden, weight, targets, 1.0)[1][1]
    errors = []
    for chunk in (256, 64):  # 8 and 32 of them: liger-kernel's number for 16,384 tokens of a 128,256-word head
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk, kernels=IN_PLACE)
        errors.append(_error(torch.autograd.grad(loss, weight)[0], exact))
    assert errors[0] < 0.7 * errors[1]


def test_a_second_backward_over_one_forward_is_refused():
    hidden, weight, targets = _problem(64, torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="backward ran twice"):
        loss.backward()


@pytest.mark.parametrize("kernels", [IN_PLACE, None])
def test_frozen_parts_no_tokens_and_autocast(kernels):
    hidden, weight, targets = _problem(96, torch.float32)
    whole = linear_cross_entropy(hidden, weight, targets, kernels=kernels)
    both = torch.autograd.grad(whole, (hidden, weight))
    for given, wanted in (((hidden.detach(), weight), both[1]), ((hidden, weight.detach()), both[0])):
        loss = linear_cross_entropy(*given, targets, chunk_tokens=96, kernels=kernels)
        assert torch.equal(torch.autograd.grad(loss, [x for x in given if x.requires_grad])[0], wanted)
    nothing = linear_cross_entropy(hidden[:0], weight, targets[:0], kernels=kernels)
    assert nothing.item() == 0.0 and not torch.autograd.grad(nothing, weight)[0].any()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = linear_cross_entropy(hidden, weight, targets, kernels=kernels)
    assert mixed.item() == pytest.approx(whole.item(), rel=1e-2)
    assert _error(torch.autograd.grad(mixed, weight)[0], both[1].double()) < 2e-2  # bf16 products


def test_the_number_of_targets_may_come_in_any_form():
    hidden, weight, targets = _problem(96, torch.float32)
    found = {
        linear_cross_entropy(hidden, weight, targets, num_items=n).item()
        for n in (7, 7.0, torch.tensor(7), torch.tensor([7.0]))
    }
    assert len(found) == 1


@pytest.mark.parametrize("kernels", [IN_PLACE, None])
def test_transposed_tensors(kernels):
    hidden, weight, targets = _problem(96, torch.float32)
    whole = linear_cross_entropy(hidden, weight, targets, kernels=kernels)
    turned = [x.detach().t().contiguous().t().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*turned, targets, kernels=kernels)
    for mine, wanted in zip(torch.autograd.grad(loss, turned), torch.autograd.grad(whole, (hidden, weight))):
        assert (mine - wanted).abs().max() < 1e-6  # products of other layouts are summed in another order
