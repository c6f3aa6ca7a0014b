"""What only a GPU shows of checkpointing policies: copies that overlap, kernels that work in place, memory that falls."""

import copy

import pytest
import torch

from bigtrain.kernels.attach import use_liger
from bigtrain.models import build_model, enable_activation_checkpointing

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
                    "offload": (None, "offload"), "some offload": (3, "offload")}  # fmt: skip
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
    assert bytes_["offload"] <= bytes_["full"]


def test_inputs_that_are_on_the_host_are_not_on_the_card():
    """Between forward and backward, when all of them are kept: 6 blocks' inputs, of which two at most may still be on their way."""
    plain, held = _model(liger=False), {}
    ids = torch.randint(0, 500, (4, 1024), generator=torch.Generator().manual_seed(0)).cuda()
    for policy in ("full", "offload"):
        model = copy.deepcopy(plain)
        enable_activation_checkpointing(model, policy=policy)
        start = torch.cuda.memory_allocated()
        loss = model(input_ids=ids, labels=ids).loss
        held[policy] = torch.cuda.memory_allocated() - start
        loss.backward()
        del model, loss
    assert held["full"] - held["offload"] >= 4 * ids.numel() * 512 * 2
