"""Frozen parts, activation checkpointing, expert blocks, BatchNorm: rules on a single process."""

import copy
import logging

import pytest
import torch
from torch import nn

from bigtrain import ranks
from bigtrain.errors import ModelError, WeightsError
from bigtrain.models import (
    build_model,
    enable_activation_checkpointing,
    frozen_module,
    refuse_batchnorm_micro_batch_1,
    set_moe_leaf_modules,
)
from bigtrain.models.batchnorm import compute_in_fp32
from bigtrain.weights.companions import exported_config
from tests.ranks import families


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))

    def forward(self, x):
        return self.body(self.tower(x))


# ---------------------------------------------------------------- frozen


def test_a_frozen_part_stays_in_eval_mode_also_as_a_copy():
    model = build_model(Net, freeze=("tower",), dtype=torch.float32)
    for m in (model, copy.deepcopy(model)):
        before = m.tower[1].running_mean.clone()
        m.train()
        m(torch.randn(2, 3, 8, 8)).sum().backward()
        assert not m.tower[1].training and m.body[1].training and torch.equal(before, m.tower[1].running_mean)
        assert all(p.grad is None for p in m.tower.parameters()) and m.body[0].weight.grad is not None
    assert model.bigtrain_info.frozen == ("tower.0.weight", "tower.0.bias", "tower.1.weight", "tower.1.bias")


def test_one_parameter_can_be_frozen_and_a_prefix_ends_at_a_dot():
    model = build_model(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(2, 2)}), freeze=("a", "ab.bias"))
    assert model.bigtrain_info.frozen == ("a.weight", "a.bias", "ab.bias")


@pytest.mark.parametrize(
    ("content", "kwargs", "error", "says"),
    [
        ({"w": 1}, {}, WeightsError, "holds no tensors"),
        ({"model": {"weight": torch.ones(2, 2)}}, {"key": "net"}, WeightsError, "no key 'net'; there is: model"),
        ({"weight": torch.ones(2, 2)}, {}, ModelError, r"not in the file \(1\): bias"),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, {}, ModelError, r"different shape .*weight: \(2, 3\)"),
        (
            {"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(1)},
            {},
            ModelError,
            r"not in the module \(1\)",
        ),
        ({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, {"strip_prefix": "x."}, WeightsError, "no name starts with 'x.'"),
    ],
)
def test_a_checkpoint_that_does_not_match_is_refused(tmp_path, content, kwargs, error, says):
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(error, match=says):
        frozen_module(nn.Linear(2, 2), tmp_path / "c.pt", **kwargs)


def test_checkpoint_keys_and_prefixes(tmp_path):
    values = {"weight": torch.full((2, 2), 5.0), "bias": torch.ones(2)}
    prefixed = {f"module.net.{k}": v for k, v in values.items()}
    torch.save({"a": {"b": prefixed}}, tmp_path / "c.pt")
    module = frozen_module(nn.Linear(2, 2), tmp_path / "c.pt", key="a.b", strip_prefix="module.net.")
    found = frozen_module(lambda: nn.Linear(2, 2), tmp_path / "c.pt", key="a.b")
    assert torch.equal(module.weight, values["weight"]) and torch.equal(found.weight, values["weight"])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_damaged_checkpoint(tmp_path, content):
    for name in ("c.pt", "c.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=r"cannot be read|would run code"):
            frozen_module(nn.Linear(2, 2), tmp_path / name)
    with pytest.raises(WeightsError, match="there is no checkpoint"):
        frozen_module(nn.Linear(2, 2), tmp_path / "absent.pt")


@pytest.mark.parametrize(
    ("environment", "index"),
    [({"LOCAL_RANK": "3"}, 3), ({"SLURM_LOCALID": "2"}, 2), ({"RANK": "5"}, 1), ({"RANK": "2", "LOCAL_RANK": "1"}, 1), ({}, 0)],
)
def test_a_rank_uses_its_own_device_with_and_without_LOCAL_RANK(monkeypatch, environment, index):
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks.device() == torch.device("cuda", index)


# ---------------------------------------------------------------- activation checkpointing


def test_B42_nothing_wrapped_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert enable_activation_checkpointing(build_model(Net)) == 0
    assert "nothing in Net got wrapped" in caplog.text
    with pytest.raises(ModelError, match="no module of class Blok"):
        enable_activation_checkpointing(build_model(Net), "Blok")


def test_a_block_with_dropout_recomputes_the_same_and_without_gradients_runs_once():
    model = build_model(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 1)), dtype=torch.float32
    )
    twin = copy.deepcopy(model)
    assert enable_activation_checkpointing(model[0], nn.Linear) == 1
    grads = []
    for m in (model, twin):
        torch.manual_seed(0)
        m(torch.ones(3, 4)).sum().backward()
        grads.append([p.grad for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    with torch.no_grad():
        assert model(torch.ones(1, 4)).shape == (1, 1)


def test_B47_use_cache_is_off_in_training_and_back_in_the_export():
    model = build_model("preset:llama-tiny", num_hidden_layers=1)
    assert model.config.use_cache is False and model.bigtrain_info.use_cache is True
    assert exported_config(model, torch.bfloat16).use_cache is True
    model = build_model(lambda: families.make("llava"))  # the outer config says nothing of a cache
    exported = exported_config(model, torch.bfloat16)
    assert model.config.text_config.use_cache is False and exported.text_config.use_cache is True
    assert not hasattr(exported, "use_cache")


# ---------------------------------------------------------------- experts


class Sparse(nn.Module):
    def __init__(self, experts=4, gate=None):
        super().__init__()
        self.router = gate or nn.Linear(8, experts)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))


def _names(*modules):
    return set_moe_leaf_modules(nn.Sequential(*modules))


def test_what_counts_as_an_expert_block():
    router = nn.Module()
    router.weight = nn.Parameter(torch.ones(4, 8))
    plain_stack = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), "emb": nn.Embedding(4, 8)})
    wrong_width = Sparse(gate=nn.Linear(5, 4))
    assert _names(Sparse(), Sparse(gate=router), plain_stack, wrong_width, nn.Sequential(Sparse())) == ["0", "1", "4.0"]
    assert set_moe_leaf_modules(Sparse()) == []  # the whole model is never a leaf


def test_one_module_with_all_experts_stacked_is_called_for_each():
    class Stacked(nn.Module):
        def __init__(self, experts=4, rows=24, parts=3):
            super().__init__()
            self.router = nn.Linear(8, experts, bias=False)
            self.glu = nn.ParameterList(nn.Parameter(torch.ones(rows, 8)) for _ in range(parts))

    assert _names(Stacked(), Stacked(experts=5), Stacked(rows=4), Stacked(parts=2), Stacked(experts=1)) == ["0"]


def test_fused_experts_and_decoders_need_nothing():
    model = build_model(
        {"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    )  # fmt: skip
    assert set_moe_leaf_modules(model) == []


# ---------------------------------------------------------------- BatchNorm and dtypes


def test_a_bf16_batchnorm_takes_its_activations_by_name():
    model = nn.Sequential(nn.BatchNorm1d(3)).bfloat16()
    compute_in_fp32(model)
    x = torch.randn(4, 3).bfloat16()
    assert torch.equal(model[0](input=x), model[0](x))


def test_batchnorm_with_a_micro_batch_of_one_is_refused():
    model = build_model(Net)
    with pytest.raises(ModelError, match=r"2 BatchNorm layers \(first: tower.1\).*2 or more") as caught:
        refuse_batchnorm_micro_batch_1(model, 1)
    assert caught.value.names == ("tower.1", "body.1")
    refuse_batchnorm_micro_batch_1(model, 2)
    with pytest.raises(ModelError, match=r"body\.1"):
        refuse_batchnorm_micro_batch_1(build_model(Net, freeze=("tower",)), 1)
    refuse_batchnorm_micro_batch_1(build_model(nn.Linear, in_features=2, out_features=2), 1)


def test_batchnorm_computes_with_fp32_statistics_in_a_bf16_model():
    model = build_model(lambda: nn.BatchNorm2d(3))
    reference = nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5).bfloat16()
    out = model(x)
    assert out.dtype == torch.bfloat16 and model.running_mean.dtype == torch.float32
    assert torch.equal(out, reference(x.float()).bfloat16()) or (out.float() - reference(x.float())).abs().max() < 0.02
    assert torch.allclose(model.running_mean, reference.running_mean, atol=1e-6)
    out.float().square().sum().backward()
    assert model.weight.grad.dtype == torch.bfloat16 and [n for n, _ in model.named_parameters()] == ["weight", "bias"]


def test_B40_named_parameters_stay_in_fp32_and_stages_that_cannot_are_refused():
    model = build_model(Net, keep_in_fp32=("tower.*.weight",))
    assert model.tower[0].weight.dtype == torch.float32 and model.body[0].weight.dtype == torch.bfloat16
    assert {b.dtype for b in model.buffers()} == {torch.float32, torch.int64}
    with pytest.raises(ModelError, match=r"no parameter matches 'body\.norm\*'"):
        build_model(Net, keep_in_fp32=("tower.*.weight", "body.norm*"))
    with pytest.raises(ModelError, match=r"keep_in_fp32=.* at ZeRO stage 2"):
        build_model(Net, keep_in_fp32=("tower.*",), ds_config={"zero_optimization": {"stage": 2}})
