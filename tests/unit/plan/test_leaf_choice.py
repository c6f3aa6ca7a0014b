"""Blocks as leaf modules where nobody says so: what was measured decides, and what cannot be right is left alone."""

import json

import pytest

from bigtrain import cli, shapes
from bigtrain.errors import UsageError
from bigtrain.plan import cards, choose, machine, plan_input, predict
from bigtrain.plan.cards import peak_bf16_flops
from bigtrain.plan.choose import search_settings
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.leaf_choice import as_said, choose_leafs, either, leafed, with_leafs
from bigtrain.run.auto import config_of, flags
from tests.unit.plan.family_configs import CAUSAL, OTHER

GIB = 2**30
LLAMA_8B = shapes.config_dict("llama-8b")


def plan(config=LLAMA_8B, zero=None, **values):
    ds_config = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", **(zero or {})}}
    usual = {"world_size": 2, "seq_len": 4096, "optimizer": "adamw_split_8bit", "kernels": "liger", "checkpointing": "none"}
    return plan_input(config, ds_config=ds_config, **{**usual, **values})


@pytest.mark.parametrize(
    "values, on",
    [  # H200, e06e225, tokens/s a card without and with: 3,909 and 5,221; 10,662 and 10,433
        ({"checkpointing": "full"}, True),
        ({"world_size": 4, "micro_batch": 4}, False),
        ({"world_size": 1, "micro_batch": 4}, False),
    ],
)
def test_what_was_measured_is_chosen(values, on):
    found = choose_leafs(plan(**values), Hardware(139 * GIB, 500 * GIB))
    assert found.on is on and ("less than 10% shorter" in found.text()) is not on


def test_a_slower_card_is_what_a_step_waits_for():
    a100 = peak_bf16_flops("NVIDIA A100-SXM4-80GB")
    assert choose_leafs(plan(checkpointing="full"), Hardware()).on
    assert not choose_leafs(plan(checkpointing="full", card_flops=a100), Hardware()).on
    b200 = peak_bf16_flops("NVIDIA B200")
    assert not choose_leafs(plan(checkpointing="full", micro_batch=3), Hardware()).on
    assert choose_leafs(plan(checkpointing="full", micro_batch=3, card_flops=b200), Hardware()).on


def test_between_hosts_it_is_the_network():
    qwen = shapes.config_dict("qwen2.5-7b")  # of its twelve weights and biases a block
    found = choose_leafs(plan(qwen, world_size=16, gpus_per_node=8), Hardware())
    assert found == (False, "what a step waits for is the network between the hosts")
    assert choose_leafs(plan(qwen, world_size=16), Hardware()).on


def test_whole_blocks_must_fit():
    zero = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 1_000_000}
    one = plan(
        {**LLAMA_8B, "vocab_size": 512}, zero, checkpointing="full", seq_len=512
    )  # its peak is in a block, not in the head
    whole, hooked = (predict(p).gpu_need_bytes() for p in (leafed(one), one))
    assert hooked + GIB // 8 < whole
    # At a card's limit the allocator gives pages back, and may need a little more than without one (`least_limit`).
    assert choose_leafs(one, Hardware(whole + whole // 100)).on
    found = choose_leafs(one, Hardware((whole + hooked) // 2))
    assert not found.on and found.why.endswith("but with whole blocks it does not fit")


@pytest.mark.parametrize(
    "config, values, why",
    [
        (LLAMA_8B, {"device": "cpu"}, "a CPU's seconds are not planned"),
        (OTHER["t5"][1], {"kernels": "hf"}, "t5's last digits would be others"),
        (CAUSAL["exaone4"], {"kernels": "hf"}, "exaone4's last digits would be others"),
        (OTHER["llava"][1], {"kernels": "hf"}, "the class of this model's blocks is not known"),
        (OTHER["qwen2_vl"][1], {"kernels": "hf"}, "blocks of its vision tower are not in the plan"),
    ],
)
def test_where_it_is_never_chosen(config, values, why):
    one = plan(config, seq_len=32, optimizer="adamw", **values)
    assert choose_leafs(one, Hardware()) == (False, why) and either(one) == (one,) and with_leafs(one, Hardware()) == one


@pytest.mark.parametrize(
    "zero", [{"stage": 2}, {"leaf_module": {"classes": ["Other"]}}, {"stage3_module_granularity_threshold": 10}]
)
def test_what_the_file_says_stands(zero):
    assert choose_leafs(plan(zero=zero), Hardware()) is None and with_leafs(plan(zero=zero), Hardware()) == plan(zero=zero)


def test_the_choice_is_the_same_for_a_plan_with_and_without_measured_rates(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = choose_leafs(plan(), Hardware())
    (tmp_path / "bigtrain").mkdir()
    (tmp_path / "bigtrain" / "machine.json").write_text(json.dumps({"matmul_flops": 1e12}))
    assert choose_leafs(plan(), Hardware()) == before


def test_on_needs_stage_3_and_blocks_that_are_known():
    with pytest.raises(UsageError, match=r"leaf_blocks on needs zero_optimization\.stage 3, not 2"):
        leafed(plan(zero={"stage": 2}))
    with pytest.raises(UsageError, match=r"class of this model's blocks is not known .*leaf_module.classes"):
        leafed(plan_input(shapes=[["a.weight", [4, 4]]]))


@pytest.mark.parametrize(
    "said, zero, words",
    [
        (
            "off",
            {"leaf_module": {"classes": ["LlamaDecoderLayer"]}},
            "leaf_blocks off, but leaf_module.classes .* LlamaDecoderLayer",
        ),
        ("on", {"leaf_module": {"names": ["model.layers.0"]}}, "leaf modules of its own, without LlamaDecoderLayer"),
        ("on", {"stage3_module_granularity_threshold": 10}, "leaf modules of its own, without LlamaDecoderLayer"),
    ],
)
def test_what_a_run_refuses_is_not_planned(said, zero, words, tmp_path, capsys):
    """It was planned as the ds_config has it, as if nobody had said the contrary."""
    with pytest.raises(UsageError, match=words):
        as_said(plan(zero=zero), said)
    assert as_said(plan(zero=zero), "auto") == plan(zero=zero)
    (tmp_path / "c.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero},
                                                 "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}))  # fmt: skip
    words = ["plan", "--model", "preset:llama-8b", "--gpus", "2", "--gpu_memory", "139GiB", "--host_memory", "500GiB", "--seq_len", "4096"]  # fmt: skip
    assert cli.main([*words, "--ds_config", str(tmp_path / "c.json"), "--leaf_blocks", said]) == 2
    assert f"leaf_blocks {said}, but" in capsys.readouterr().err


def test_off_and_on_beside_a_file_that_says_the_same():
    named = plan(zero={"leaf_module": {"classes": ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]}})
    assert as_said(named, "on") == named
    other = plan(zero={"leaf_module": {"names": ["model.layers.0"]}})
    assert as_said(other, "off") == other


def ladder(said, gpu=None, world=2):
    base = plan(world_size=world)
    return choose(base.but(settings=search_settings(4096)), Hardware(gpu), global_batch=4 * world,
                  leaf_blocks=said, optimizers=("adamw",))  # fmt: skip


def test_the_search_has_them_where_a_run_would():
    third = {said: [c for c in ladder(said).fitting if c.input.settings.stage == 3] for said in ("auto", "off")}
    assert len(third["auto"]) == len(third["off"]) > 3
    assert not any(c.input.settings.leaf_classes for c in third["off"])
    for c in third["auto"]:
        alone = c.input.but(leaf_classes=())
        assert c.input == with_leafs(alone, Hardware())
        assert ("leaf blocks" in c.describe()) == c.options["leaf_blocks"] == (flags(c.input)["leaf_blocks"] == "on")
        assert ("leaf_module" in config_of(c.input.settings)["zero_optimization"]) == c.options["leaf_blocks"]
    assert {c.options["leaf_blocks"] for c in third["auto"]} == {True, False}


def test_on_leaves_stage_3_alone_to_the_search():
    found = ladder("on")
    assert found.fitting and all(c.input.settings.leaf_classes == ("LlamaDecoderLayer",) for c in found.fitting)
    with pytest.raises(UsageError, match=r"leaf_blocks on needs ZeRO stage 3, and --offload_gradients 0\.5 stage 2"):
        choose(plan(world_size=1), Hardware(), leaf_blocks="on", share=0.5)


def test_plan_says_it_in_a_line(capsys):
    words = ["plan", "--model", "preset:llama-8b", "--gpus", "2", "--gpu_memory", "139GiB", "--host_memory", "500GiB", "--seq_len", "4096"]  # fmt: skip
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "\n--leaf_blocks auto: on (0.792 s a step planned" in said and ", leaf blocks, liger kernels" in said
    assert cli.main([*words, "--leaf_blocks", "off"]) == 0
    assert "leaf" not in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["leaf_blocks"]["on"] is True and found["zero"]["leaf_classes"] == ["LlamaDecoderLayer"]
    assert cli.main([*words, "--stage", "2", "--leaf_blocks", "on"]) == 2


@pytest.mark.parametrize(
    "does, name",
    [
        ("echo NVIDIA H200; echo NVIDIA L4", "NVIDIA H200"),
        ("echo NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.; exit 9", None),  # on stdout
        ("printf '\\377\\n'", "\N{REPLACEMENT CHARACTER}"),
        ("exec sleep 20", None),
        ("", None),
    ],
)
def test_nvidia_smi_may_fail_and_hang(does, name, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "LONGEST_S", 1.0)
    cards.card_name.cache_clear()
    try:
        assert cards.card_name() == name
    finally:
        cards.card_name.cache_clear()
