"""The table, its names and its state layout as data."""

import subprocess
import sys

import pytest
import torch

from bigtrain import optim
from bigtrain.errors import UsageError
from bigtrain.optim.table import ALIASES, OPTIMIZERS


def _step(name, n, groups=None):
    param = torch.nn.Parameter(torch.randn(n))
    optimizer = optim.build_optimizer(name, groups or [{"params": [param]}], optim.Options(lr=1e-3, device="cpu"))
    param.grad = torch.randn(n)
    optimizer.step()
    return param, optimizer


def test_unknown_name_gets_the_nearest_ones():
    with pytest.raises(UsageError, match=r"'adamw_8bits'.*adamw_8bit"):
        optim.canonical_name("adamw_8bits")


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_hugging_face_names_are_accepted(alias):
    assert optim.canonical_name(alias) == ALIASES[alias]


def test_the_table_needs_no_torch():
    code = "import sys, bigtrain.optim.table, bigtrain.optim.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["adamw", "adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("n", [100, 4095, 4096, 10001])
def test_B69_reported_state_bytes_are_the_real_ones(name, n):
    param, optimizer = _step(name, n)
    tensors = {k: v for k, v in optimizer.state[param].items() if isinstance(v, torch.Tensor) and k != "step"}
    assert sum(v.numel() * v.element_size() for v in tensors.values()) == optim.state_bytes(name, n)
    if n >= OPTIMIZERS[name].fp32_below_elems:
        assert {k: str(v.dtype) for k, v in tensors.items()} == {t.name: f"torch.{t.dtype}" for t in OPTIMIZERS[name].state}


def test_B69_a_parameter_without_gradient_signal_does_not_move():
    param = torch.nn.Parameter(torch.randn(5000))
    before = param.detach().clone()
    optimizer = optim.build_optimizer("adamw_8bit", [{"params": [param]}], optim.Options(lr=1e-2, device="cpu"))
    for _ in range(5):
        param.grad = torch.zeros(5000)
        optimizer.step()
    assert torch.equal(param, before)


def test_a_stage_or_offload_that_would_be_wrong_is_refused():
    with pytest.raises(UsageError, match="stages 1, 2, 3, not 0"):
        optim.engine_config_patch("adamw_split", stage=0)


def test_deepspeed_is_not_told_of_an_offload_that_the_optimizer_does_itself():
    for name in ("adamw_split", "adamw_split_bf16", "adamw_split_8bit"):
        patch = optim.engine_config_patch(name, stage=2, offload=True)
        assert patch["zero_optimization"] == {"offload_optimizer": {"device": "none"}}
    assert optim.engine_config_patch("adamw", stage=2, offload=True)["zero_optimization"] == {}


def test_a_patch_can_be_changed_without_changing_the_table():
    optim.engine_config_patch("adamw_split")["bf16"]["enabled"] = False
    assert optim.engine_config_patch("adamw_split")["bf16"]["enabled"] is True


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": float("nan")}])
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(UsageError):
        optim.build_optimizer(
            "adamw", [{"params": [torch.nn.Parameter(torch.zeros(2))]}], optim.Options(**{"lr": 1e-3, **bad}, device="cpu")
        )


def test_a_device_may_be_one_card_or_an_object():
    assert [optim.Options(lr=1e-3, device=d).device for d in ("cuda:1", torch.device("cuda", 0), torch.device("cpu"))] == [
        "cuda",
        "cuda",
        "cpu",
    ]
