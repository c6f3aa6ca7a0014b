"""What a recomputed block keeps, and that nothing writes into it."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from bigtrain.errors import ModelError
from bigtrain.models import build_model, enable_activation_checkpointing
from bigtrain.models.recompute import POLICIES, runner


class Block(nn.Module):
    """Attention with a rotary embedding, as decoders have it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q, k = apply_rotary_pos_emb(self.q(x), self.k(x))
        # With a dimension of heads: torch has a fused kernel for nothing else.
        return x + self.out(nn.functional.scaled_dot_product_attention(*(t[:, None] for t in (q, k, x)))[:, 0])


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


@pytest.mark.parametrize("checked", [1, 0])
@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1.5),
        lambda y: y[:, :2].mul_(3).sum() * 0 + y,
        lambda y: y.index_add_(0, torch.arange(2), torch.ones(2, 4)),
    ],
    ids=["whole", "part", "rows"],
)
def test_a_block_may_write_into_its_own_products(write, checked):
    """`product.add_(bias)`, as experts of gpt-oss do: it was an error in the first steps, and unseen in any later call."""
    w = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    x = torch.linspace(0, 2, 12).view(3, 4).requires_grad_()

    def block(x):
        return write(x @ w).square() @ w

    wanted = torch.autograd.grad(block(x).sum(), (x, w))
    got = torch.autograd.grad(runner("selective", checked)(block, x).sum(), (x, w))
    assert _same(got, wanted)


@pytest.mark.parametrize("blocks", [None, 1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without_checkpointing(policy, blocks):
    assert _same(_gradients(policy, blocks), _gradients(None))


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        name = str(func).split(".")[1]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def test_each_policy_runs_again_what_it_does_not_keep():
    seen = {}
    for policy in (None, *POLICIES):
        with Count() as mode:
            _gradients(policy)
        seen[policy] = mode.counts
    blocks = 3
    for policy, once in (
        ("full", False),
        ("offload_inputs", False),
        ("attention", True),
        ("offload", True),
        ("selective", True),
    ):
        assert seen[policy][ATTENTION] == (blocks if once else 2 * blocks), policy
        assert seen[policy][f"{ATTENTION}_backward"] == blocks
        assert (seen[policy]["addmm"] > seen[None]["addmm"]) == (policy != "selective")
        assert seen[policy]["flip"] > seen[None]["flip"]


def test_operators_beside_attention_are_not_looked_at(monkeypatch):
    """A mode that sees each operator takes the host as long as the block itself (docs/log.md)."""
    from bigtrain.models import recompute

    seen = []
    for mode in (recompute._Keep, recompute._Replay):

        def noted(self, func, types, args=(), kwargs=None, was=mode.__torch_dispatch__):
            seen.append(str(func).split(".")[1])
            return was(self, func, types, args, kwargs)

        monkeypatch.setattr(mode, "__torch_dispatch__", noted)
    _gradients("attention")
    assert seen.count(ATTENTION) == 6 and not {"addmm", "flip", "add"} & set(seen)


@pytest.mark.parametrize("policy", ["attention", "offload"])
def test_a_kept_result_serves_a_second_backward_and_a_write_into_it_is_noticed(policy):
    def block(x):
        return nn.functional.scaled_dot_product_attention(x, x * 2, x).square()

    def writes(x):
        out = nn.functional.scaled_dot_product_attention(x, x * 2, x)
        out.detach().numpy()[:] += 1  # past torch's counters
        return out.square()

    x = torch.ones(1, 2, 4, 8).cumsum(2).requires_grad_()
    with Count() as mode:
        loss = runner(policy, 1)(block, x).sum()
        first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(first, torch.autograd.grad(block(x).sum(), x)[0])
    assert mode.counts[ATTENTION] == 1
    with pytest.raises(ModelError, match=f"policy {policy}: something wrote in place"):
        runner(policy, 1)(writes, x).sum().backward()


def test_operators_of_other_libraries_are_known_by_their_names():
    """As flash-attn has them, and torch for rows of several documents: called from an autograd.Function, or with a backward of their own."""
    ran = []

    @torch.library.custom_op("tests_flash_attn::_varlen_forward", mutates_args=())
    def forward(x: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append(dropout_p)
        return 2 * x, x.sum(-1)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dropout):
            out, stats = torch.ops.tests_flash_attn._varlen_forward(x, dropout)
            ctx.save_for_backward(x, out, stats)
            return out

        @staticmethod
        def backward(ctx, grad):
            x, out, _ = ctx.saved_tensors
            return out / x * grad, None

    forward.register_autograd(
        lambda ctx, grad, _: (2 * grad, None), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[0])
    )
    x = torch.ones(2, 4, requires_grad=True)
    for run in (lambda x, p: Function.apply(x * 3, p).square(), lambda x, p: forward(x * 3, p)[0].square()):
        for dropout, times in ((0.0, 1), (0.5, 2)):
            for policy in ("attention", "offload", "selective"):
                ran.clear()
                (grad,) = torch.autograd.grad(runner(policy, 1)(run, x, dropout).sum(), x)
                assert torch.equal(grad, torch.full((2, 4), 72.0)) and len(ran) == times


def test_where_nothing_of_attention_can_be_kept_that_is_said_once(caplog):
    def block(x, dropout):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    x = torch.ones(1, 2, 4, 8).cumsum(2).requires_grad_()
    for dropout, said in ((0.5, 1), (0.0, 0)):
        caplog.clear()
        run = runner("attention", 2)
        for _ in range(6):
            run(block, x, dropout)
        assert caplog.text.count("nothing of it is kept: it runs again in backward") == said


def test_attention_with_dropout_is_computed_again():
    """Its random numbers are part of the block's: skipped, later ones would differ."""

    def block(x, y):
        return nn.functional.dropout(nn.functional.scaled_dot_product_attention(x, y, x, dropout_p=0.3), 0.5)

    grads = []
    for run in (None, *(runner(policy, 1) for policy in POLICIES)):
        x = torch.ones(1, 2, 4, 8).cumsum(2).requires_grad_()
        torch.manual_seed(0)
        (block(x, x * 2) if run is None else run(block, x, x * 2)).square().sum().backward()
        grads.append(x.grad)
    assert all(torch.equal(grads[0], other) for other in grads[1:])


@pytest.mark.parametrize("policy", ["attention", "selective", "offload"])
def test_dropout_is_known_whatever_the_operator_calls_it(policy):
    """flash-attn's own binding, which its builds for the hub register as it is, says `p_dropout`: kept, later dropouts drew other numbers."""
    library = torch.library.Library("tests_flash_attn_hub", "FRAGMENT")
    library.define("mha_fwd(Tensor q, float p_dropout) -> Tensor")
    library.impl("mha_fwd", nn.functional.dropout, "CompositeExplicitAutograd")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.ops.tests_flash_attn_hub.mha_fwd(x, 0.5)

        @staticmethod
        def backward(ctx, grad):
            return grad

    drawn = []

    def block(x):
        x = Attention.apply(x)
        drawn.append(torch.rand(8))
        return (x * drawn[-1]).sin()

    torch.manual_seed(0)
    runner(policy, 1)(block, torch.ones(8, requires_grad=True)).sum().backward()
    assert len(drawn) == 2 and torch.equal(*drawn)


def test_wrong_numbers_and_policies_are_refused_and_a_second_call_decides():
    model = build_model(Net)
    with pytest.raises(ModelError, match="4 blocks are to be recomputed, and Net has 3: give a number from 1 to 3"):
        enable_activation_checkpointing(model, Block, 4)
    with pytest.raises(ModelError, match="'half': it must be one of full, attention, selective, offload, offload_inputs"):
        enable_activation_checkpointing(model, Block, policy="half")
    for number in (True, 1.5, "2", "auto"):
        with pytest.raises(ModelError, match="give a whole number, or None for all"):
            enable_activation_checkpointing(model, Block, number)
    with pytest.raises(ModelError, match="must be one of full, attention, selective, offload, offload_inputs"):
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


@pytest.mark.parametrize("policy", ["selective", "attention"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "opt"])
def test_the_planner_knows_what_is_kept(kind, policy, monkeypatch):
    """The bytes of kept results of one block, counted, and as planned."""
    from bigtrain.models import recompute
    from bigtrain.plan.activations import block_bytes
    from bigtrain.plan.geometry import geometry
    from tests.ranks import zoo

    model = build_model(zoo.source(kind)).train()
    ids = torch.randint(0, 59, (2, 16))
    seen = []

    class Counted(recompute._KeptResults):
        def contexts(self):
            keep, replay = super().contexts()
            seen.append(replay._kept)
            return keep, replay

    monkeypatch.setattr(recompute, "_KeptResults", Counted)
    enable_activation_checkpointing(model, policy=policy)
    loss = model(input_ids=ids, labels=ids).loss
    sizes = [sum(t.nbytes for results in kept.values() for out, _ in results for t in tree_leaves(out)) for kept in seen]
    planned = block_bytes(geometry(model.config.to_dict()), ids.numel())
    planned = planned.results if policy == "selective" else sum(planned.of_attention)
    assert sizes == [pytest.approx(planned, rel=0.01)] * 2  # statistics of attention that are empty on a CPU are a few bytes
    loss.backward()
    assert policy != "selective" or not any(seen)  # all of it was taken out again
