"""What a recomputed block keeps, and that nothing writes into it."""

import functools
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bigtrain.errors import ModelError
from bigtrain.models import build_model, enable_activation_checkpointing
from bigtrain.models.recompute import runner


class Block(nn.Module):
    """Attention with a rotary embedding, as decoders have it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = apply_rotary_pos_emb(self.q(x), self.k(x))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _Turn(torch.autograd.Function):
    """Turns in place, past torch's version counters, as liger's Triton kernel does; backward turns back."""

    @staticmethod
    def forward(ctx, q, k):
        for x in (q.detach().numpy(), k.detach().numpy()):
            x[:] = x[..., ::-1].copy()
        ctx.mark_non_differentiable()
        return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx, dq, dk):
        return dq.flip(-1), dk.flip(-1)


def rotate_in_place(q, k):
    return _Turn.apply(q, k)


def apply_rotary_pos_emb(q, k):
    return q.flip(-1), k.flip(-1)


def _gradients(policy, blocks=None):
    torch.manual_seed(0)
    model = build_model(Net, dtype=torch.float32)
    if policy is not None:
        enable_activation_checkpointing(model, Block, blocks, policy)
    model(torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()).backward()
    return [p.grad for p in model.parameters()]


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_selective_survives_a_rotary_kernel_that_works_in_place(monkeypatch):
    here = sys.modules[__name__]
    reference = _gradients(None)
    monkeypatch.setattr(here, "apply_rotary_pos_emb", rotate_in_place)
    assert _same(_gradients("full"), reference)
    # A kernel of unknown origin: its work is noticed instead of giving wrong gradients.
    with pytest.raises(ModelError, match="something wrote in place into a result of aten"):
        _gradients("selective")
    monkeypatch.setattr(rotate_in_place, "__module__", "liger_kernel.transformers.rope")
    monkeypatch.setattr(here, "apply_rotary_pos_emb", rotate_in_place)
    assert _same(_gradients("selective"), reference)


@pytest.mark.parametrize("blocks", [None, 1, 2])
@pytest.mark.parametrize("policy", ["full", "selective", "offload"])
def test_gradients_are_those_without_checkpointing(policy, blocks):
    assert _same(_gradients(policy, blocks), _gradients(None))


def test_selective_runs_matrix_products_and_attention_once():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            name = str(func).split(".")[1]
            counts[name] = counts.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    seen = {}
    for policy in (None, "full", "selective"):
        counts = seen[policy] = {}
        with Count():
            _gradients(policy)
    forward = "addmm", "_scaled_dot_product_flash_attention_for_cpu"
    assert [seen["selective"].get(n) for n in forward] == [seen[None].get(n) for n in forward]
    assert seen["full"]["addmm"] > seen[None]["addmm"] and seen["selective"]["flip"] > seen[None]["flip"]


def test_attention_with_dropout_is_computed_again():
    """Its random numbers are part of the block's: skipped, later ones would differ."""

    def block(x, y):
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(x, y, x, dropout_p=0.3), 0.5)

    grads = []
    for run in (None, runner("selective", 1)):
        x = torch.ones(1, 2, 4, 8).cumsum(2).requires_grad_()
        torch.manual_seed(0)
        (block(x, x * 2) if run is None else run(block, x, x * 2)).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_wrong_numbers_and_policies_are_refused_and_a_second_call_decides():
    model = build_model(Net)
    with pytest.raises(ModelError, match="4 blocks are to be recomputed, and Net has 3: give a number from 1 to 3"):
        enable_activation_checkpointing(model, Block, 4)
    with pytest.raises(ModelError, match="'half': it must be one of full, selective, offload"):
        enable_activation_checkpointing(model, Block, policy="half")
    for number in (True, 1.5, "2", "auto"):
        with pytest.raises(ModelError, match="give a whole number, or None for all"):
            enable_activation_checkpointing(model, Block, number)
    with pytest.raises(ModelError, match="must be one of full, selective, offload"):
        enable_activation_checkpointing(model, Block, policy=["full"])
    with pytest.raises(ModelError, match="block_classes holds 3"):
        enable_activation_checkpointing(model, [Block, 3])
    calls = []
    for block in model.blocks:
        block.q.register_forward_hook(lambda *_: calls.append(1))
    for blocks, runs in ((3, 6), (1, 4), (None, 6)):
        calls.clear()
        assert enable_activation_checkpointing(model, Block, blocks) == model.bigtrain_info.checkpointed_blocks
        model(torch.ones(1, 2, 8).bfloat16().requires_grad_()).backward()
        assert len(calls) == runs


def test_a_model_that_can_only_recompute_all_its_blocks_says_so():
    class Old(nn.Module):
        supports_gradient_checkpointing = True

        def __init__(self):
            super().__init__()
            self.encoder, self.config = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), types.SimpleNamespace()
            for part in self.encoder:
                part.gradient_checkpointing = False

    with pytest.raises(ModelError, match="Old recomputes all of its blocks or none"):
        enable_activation_checkpointing(Old(), None, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "opt"])
def test_the_planner_knows_what_selective_keeps(kind):
    """The bytes of kept results of one block, counted, and as planned."""
    from bigtrain.models.recompute import _KeptProducts
    from bigtrain.plan.activations import block_bytes
    from bigtrain.plan.geometry import geometry
    from tests.ranks import zoo

    model = build_model(zoo.source(kind)).train()
    ids = torch.randint(0, 59, (2, 16))
    seen = []

    class Counted(_KeptProducts):
        def contexts(self):
            keep, replay = super().contexts()
            seen.append(keep._kept)
            return keep, replay

    enable_activation_checkpointing(model)
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = functools.partial(
                torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=Counted(2).contexts
            )
    loss = model(input_ids=ids, labels=ids).loss
    sizes = [sum(t.nbytes for results in kept.values() for out, _ in results for t in tree_leaves(out)) for kept in seen]
    planned = block_bytes(geometry(model.config.to_dict()), ids.numel()).results
    assert sizes == [pytest.approx(planned, rel=0.01)] * 2  # statistics of attention that are empty on a CPU are a few bytes
    loss.backward()
    assert not any(seen)  # all of it was taken out again
