"""Routed experts by grouped products against transformers' loop over experts. The kernels of a GPU: tests/gpu/test_experts_gpu.py."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bigtrain.kernels.experts import NAME, routes, use_grouped_experts
from tests.unit.data.test_isolation import SHAPE

FEW = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
KINDS = {
    "mixtral": FEW,
    "qwen2_moe": {**FEW, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "gpt_oss": {**FEW, "head_dim": 8},
    "olmoe": FEW,
    "granitemoe": FEW,
    "dots1": {
        **FEW,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
    },
}


def _model(kind, experts):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SHAPE, **KINDS[kind], pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=experts, dtype=torch.float32).train()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # of zeros at first, in which nothing could be wrong
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(len(name)))
    return model


def _trained(model):
    logits = model(input_ids=torch.arange(3, 55).view(2, 26), use_cache=False).logits
    logits.pow(2).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_loop(kind):
    loop, mine = _model(kind, "eager"), _model(kind, "grouped_mm")
    assert use_grouped_experts(mine) == 2 and mine.config._experts_implementation == NAME
    (expected, theirs), (logits, ours) = _trained(loop), _trained(mine)
    assert (logits - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert theirs.keys() == ours.keys() and any("experts" in name for name in ours)
    for name, one in theirs.items():
        assert (ours[name] - one).norm() <= 1e-4 * one.norm(), name  # fp32, the same sums in another order


def test_implementations_that_a_user_chose_are_left_alone():
    model = _model("mixtral", "eager")
    assert use_grouped_experts(model) == 0 and model.config._experts_implementation == "eager"


def test_torch_compile_traces_transformers_own():
    """Whole, as without bigtrain's: an import on the way, even a remembered one, is not traced."""
    from bigtrain.kernels import experts

    model = _model("mixtral", "grouped_mm")
    use_grouped_experts(model)
    module = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    hidden, chosen = torch.randn(16, module.hidden_dim), torch.tensor([[0, 2]] * 16)
    expected = module(hidden, chosen, torch.rand(16, 2, generator=torch.Generator().manual_seed(0)))
    compiled = torch.compile(experts.experts_forward, fullgraph=True, backend="eager")
    found = compiled(module, hidden, chosen, torch.rand(16, 2, generator=torch.Generator().manual_seed(0)))
    assert (found - expected).abs().max() <= 1e-6


def test_the_saved_config_says_nothing_of_it(tmp_path):
    model = _model("mixtral", "grouped_mm")
    use_grouped_experts(model)
    model.save_pretrained(tmp_path)
    assert "bigtrain" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._experts_implementation != NAME


def test_routes_lead_there_and_back():
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3], [0, 2]])  # nobody chose expert 1
    at = routes(chosen, 4)
    assert at.expert.tolist() == [0, 0, 0, 2, 2, 2, 3, 3]
    assert at.ends.tolist() == [3, 3, 6, 8] and at.ends.dtype == torch.int32
    assert torch.equal(at.order[at.place.flatten()], torch.arange(8))
    assert torch.equal(chosen.flatten()[at.order], at.expert)
