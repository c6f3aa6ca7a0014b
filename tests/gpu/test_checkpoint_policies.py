"""What only a GPU shows of checkpointing policies: copies that overlap, kernels that work in place, memory that falls."""

import contextlib
import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from bigtrain.kernels.attach import use_liger
from bigtrain.models import build_model, enable_activation_checkpointing
from bigtrain.models.recompute import runner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def _model(liger):
    model = build_model("preset:llama-50m", num_hidden_layers=6, dtype=torch.bfloat16).cuda().train()
    if liger:
        use_liger(model)
    return model


def _gradients(model, steps=3):
    """(gradients of each step, most bytes that a step held beside the weights)."""
    found = []
    ids = torch.randint(0, 500, (4, 1024), generator=torch.Generator().manual_seed(0)).cuda()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        model(input_ids=ids.roll(step, 1), labels=ids.roll(step, 1)).loss.backward()
        found.append([p.grad.clone().cpu() for p in model.parameters()])
    return found, torch.cuda.max_memory_allocated() - start


@pytest.mark.parametrize("liger", [False, True])
def test_policies_and_numbers_give_the_bits_of_full_checkpointing_in_less_memory(liger, monkeypatch):
    """Forward kernels are deterministic, so a recompute gives the same values; backward of attention is asked to be, too.

    Attention takes no notice of the wish where only a warning is asked for, and cuBLAS needs a workspace of fixed size.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        plain = _model(liger)
        variants = {"none": None, "full": (None, "full"), "some": (3, "full"), "selective": (None, "selective"),
                    "attention": (None, "attention"), "some attention": (3, "attention"), "offload": (None, "offload"),
                    "some offload": (3, "offload"), "inputs": (None, "offload_inputs")}  # fmt: skip
        grads, bytes_ = {}, {}
        for name, asked in variants.items():
            model = copy.deepcopy(plain)
            if asked is not None:
                assert enable_activation_checkpointing(model, None, *asked) == (asked[0] or 6)
            grads[name], bytes_[name] = _gradients(model)
            del model
    finally:
        torch.use_deterministic_algorithms(False)
    for name, steps in grads.items():
        for step, (mine, theirs) in enumerate(zip(steps, grads["full"])):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), (name, step)
    assert bytes_["full"] < bytes_["some"] < bytes_["none"] and bytes_["full"] <= bytes_["selective"] < bytes_["none"]
    assert bytes_["full"] <= bytes_["attention"] <= bytes_["selective"]
    assert bytes_["inputs"] <= bytes_["full"] and bytes_["inputs"] <= bytes_["offload"] <= bytes_["attention"]


def test_inputs_that_are_on_the_host_are_not_on_the_card():
    """Between forward and backward, when all of them are kept: 6 blocks' inputs, of which two at most may still be on their way."""
    plain, held = _model(liger=False), {}
    ids = torch.randint(0, 500, (4, 1024), generator=torch.Generator().manual_seed(0)).cuda()
    for policy in ("full", "offload_inputs"):
        model = copy.deepcopy(plain)
        enable_activation_checkpointing(model, policy=policy)
        start = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        held[policy] = torch.cuda.memory_allocated() - start
        loss.backward()
        del model, loss
    assert held["full"] - held["offload_inputs"] >= 4 * ids.numel() * 512 * 2


def test_attention_of_a_long_row_runs_once_and_its_results_lie_where_the_policy_says(monkeypatch):
    """Flash attention: bits of the gradients, kernels that ran, bytes that are held between forward and backward."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    tokens, blocks, plain = 16384, 6, _model(liger=False)
    ids = torch.randint(0, 500, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    result = tokens * (2 * plain.config.hidden_size + 4 * plain.config.num_attention_heads)
    grads, held, runs = {}, {}, {}
    torch.use_deterministic_algorithms(True)
    try:
        for policy in ("full", "attention", "offload_inputs", "offload"):
            model = copy.deepcopy(plain)
            enable_activation_checkpointing(model, policy=policy)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                for step in range(2):  # the first one checks that nobody wrote into what is kept
                    model.zero_grad(set_to_none=True)
                    start = torch.cuda.memory_allocated()
                    with profile(activities=[ProfilerActivity.CUDA]) if step else contextlib.nullcontext() as seen:
                        loss = model(input_ids=ids, labels=ids).loss
                        torch.cuda.synchronize()
                        torch.empty(2**20, device="cuda")  # memory lent to the stream of the copies comes back
                        held[policy] = torch.cuda.memory_allocated() - start
                        loss.backward()
                        torch.cuda.synchronize()
            runs[policy] = sum(e.count for e in seen.key_averages() if "flash_fwd" in e.key)
            grads[policy] = [p.grad for p in model.parameters()]
            del model, loss
    finally:
        torch.use_deterministic_algorithms(False)
    for policy in grads:
        assert all(torch.equal(a, b) for a, b in zip(grads[policy], grads["full"], strict=True)), policy
    assert runs == {"full": 2 * blocks, "attention": blocks, "offload_inputs": 2 * blocks, "offload": blocks}
    assert held["attention"] - held["full"] == pytest.approx(blocks * result, rel=0.02)
    # Of what goes to the host no more than two blocks' is still there.
    assert held["offload"] - held["offload_inputs"] <= 2 * result and held["full"] - held["offload_inputs"] > 3 * result


@pytest.mark.parametrize("policy", ["full", "attention", "selective", "offload", "offload_inputs"])
@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_of_a_block_that_is_called_by_names_is_that_of_forward(policy, autocast):
    """torch's checkpoint brings back random states of cards that positional arguments lie on, and here there are none."""
    run, found = runner(policy, 1), {}
    x = torch.randn(64, 256, device="cuda", requires_grad=True)

    def block(x):
        return torch.nn.functional.dropout(x.exp(), 0.5) * x

    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for name, call in {"kept": lambda: block(x=x), "run again": lambda: run(block, x=x)}.items():
            torch.manual_seed(0)
            out = call()
            torch.rand(3, device="cuda")
            (found[name],) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found["kept"], found["run again"])
