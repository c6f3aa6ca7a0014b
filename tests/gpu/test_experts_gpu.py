"""Routed experts on a GPU: the kernels around the grouped products, and whole blocks against transformers' loop in fp32."""

from __future__ import annotations

import pytest
import torch

from bigtrain.kernels.experts import use_grouped_experts
from bigtrain.models import enable_activation_checkpointing
from tests.unit.kernels.test_experts import KINDS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, WIDTH, EXPERTS = 300, 1500, 5


def _gate_by_definition(given, bias, expert, share, gate):
    rows = given if bias is None else given + bias[expert]
    first, up = (rows[:, ::2], rows[:, 1::2]) if gate.interleaved else rows.chunk(2, -1)
    if gate.limit is not None:
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return first * torch.sigmoid(gate.alpha * first) * (up + gate.plus) * share[:, None]


@pytest.mark.parametrize("width", [24, WIDTH, 9000])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("words", [(1.0, None, 0.0, False), (1.702, 1.5, 1.0, True)], ids=["silu", "gpt-oss"])
def test_the_gate_and_its_gradients(words, biased, width):
    from bigtrain.kernels.experts_triton import Gate, gated, gated_backward

    torch.manual_seed(0)
    gate = Gate(*words)
    expert = torch.randint(EXPERTS, (ROWS,), device="cuda").sort().values
    given, share = torch.randn(ROWS, 2 * width, device="cuda"), torch.rand(ROWS, device="cuda")
    bias = torch.randn(EXPERTS, 2 * width, device="cuda") if biased else None
    grad = torch.randn(ROWS, width, device="cuda")
    exact = [one.double().requires_grad_() for one in (given, share)]
    expected = _gate_by_definition(exact[0], None if bias is None else bias.double(), expert, exact[1], gate)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    found = (gated(given, bias, expert, share, gate), *gated_backward(grad, given, bias, expert, share, gate))
    for mine, theirs in zip(found, (expected, *wanted)):
        assert (mine - theirs).norm() <= 1e-6 * theirs.norm()  # fp32: exp, and sums of a row


def test_a_broken_weight_is_seen():
    """A limit is no place for a NaN to hide."""
    from bigtrain.kernels.experts_triton import Gate, gated, gated_backward

    given = torch.randn(3, 48, device="cuda")
    given[0, 0] = given[1, 1] = float("nan")
    expert, share, grad = (
        torch.zeros(3, device="cuda", dtype=torch.int64),
        torch.ones(3, device="cuda"),
        torch.ones(3, 24, device="cuda"),
    )
    gate = Gate(1.702, 7.0, 1.0, True)
    found = (gated(given, None, expert, share, gate), *gated_backward(grad, given, None, expert, share, gate))
    for one in found:
        assert [bool(row.isnan().any()) for row in one] == [True, True, False]


def test_rows_are_summed_in_fp32():
    from bigtrain.kernels.experts_triton import sum_rows

    rows = torch.randn(4 * ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    place = torch.randperm(4 * ROWS, device="cuda").view(ROWS, 4)
    assert torch.equal(sum_rows(rows, place), rows[place].sum(1, dtype=torch.float32).bfloat16())


def _model(kind, experts, dtype):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {**KINDS[kind], "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    more |= {"moe_intermediate_size": 48} if "moe_intermediate_size" in more else {}
    config = AutoConfig.for_model(kind, **shape, **more)
    model = AutoModelForCausalLM.from_config(
        config, experts_implementation=experts, attn_implementation="eager", dtype=torch.float32
    )
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, 0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model.to("cuda", dtype).train()


def _block(kind, experts, dtype):
    """The experts module of a model's first block, and what goes in: 512 tokens, 2 experts each, with weights."""
    model = _model(kind, experts, dtype)
    if experts == "grouped_mm":
        assert use_grouped_experts(model) == 2
    module = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    generator = torch.Generator().manual_seed(1)
    hidden = (2 * torch.randn(512, 64, generator=generator)).to("cuda", dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(512)]).cuda()
    share = torch.rand(512, 2, generator=generator).to("cuda", dtype).requires_grad_()
    grad = torch.randn(512, 64, generator=generator).to("cuda", dtype)
    out = module(hidden, chosen, share)
    inputs = {"hidden": hidden, "share": share, **dict(module.named_parameters())}
    return out.detach(), dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), grad)))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "olmoe", "qwen2_moe"])
def test_experts_in_bf16_are_as_near_to_fp32_as_the_loop(kind):
    exact, wanted = _block(kind, "eager", torch.float32)
    loop, theirs = _block(kind, "eager", torch.bfloat16)
    mine, ours = _block(kind, "grouped_mm", torch.bfloat16)

    def error(found, right):
        return ((found.float() - right).norm() / right.norm()).item()

    # Rounding to bf16 in other places. The loop sums a token's results in bf16, which these do not.
    assert error(mine, exact) <= 1.2 * error(loop, exact)
    for name, right in wanted.items():
        assert error(ours[name], right) <= max(1.2 * error(theirs[name], right), 5e-3), name


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_an_expert_that_nobody_chose_has_a_gradient_of_zeros(kind):
    """torch's grouped product makes one matrix for each expert, also of no rows."""
    model = _model(kind, "grouped_mm", torch.bfloat16)
    use_grouped_experts(model)
    module = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    torch.full((2**24,), float("nan"), device="cuda")  # memory that is handed out anew without being written tells
    hidden = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.tensor([0, 2], device="cuda").expand(512, 2)
    module(hidden, chosen, torch.rand(512, 2, device="cuda", dtype=torch.bfloat16)).sum().backward()
    for name, one in module.named_parameters():
        assert one.grad[[1, 3]].eq(0).all() and one.grad[[0, 2]].ne(0).any() and one.grad.isfinite().all(), name
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("policy", ["full", "selective", "attention"])
def test_recomputed_blocks_give_the_same_bits(policy):
    found = []
    for recomputed in (False, True):
        model = _model("gpt_oss", "grouped_mm", torch.bfloat16)
        use_grouped_experts(model)
        if recomputed:
            enable_activation_checkpointing(model, None, None, policy)
        ids = torch.arange(512, device="cuda").view(2, 256) % 256
        model(input_ids=ids, use_cache=False).logits.float().pow(2).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*found)
