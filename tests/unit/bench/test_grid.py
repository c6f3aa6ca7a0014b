"""Grid files: axes, parts, exclusions, and every mistake named before anything runs."""

import json

import pytest

from bigtrain.bench.grid import Cell, expand, labels, read_grid
from bigtrain.errors import ConfigError, UsageError

LEAST = {"model": "preset:llama-tiny", "ds_config": "zero2"}


def test_lists_are_axes_and_fixed_values_are_not():
    cells = expand({**LEAST, "micro_batch": [1, 2], "seq_len": [64, 128, 256], "steps": 5, "warmup": 1})
    assert len(cells) == 6 and {c.seq_len for c in cells} == {64, 128, 256} and {c.steps for c in cells} == {5}
    assert {c.arguments["per_device_train_batch_size"] for c in cells} == {1, 2}


def test_defaults():
    (cell,) = expand(LEAST)
    assert (cell.runner, cell.num_gpus, cell.steps, cell.warmup, cell.seq_len) == ("bigtrain", 1, 8, 3, 1024)


def test_parts_come_on_top_and_equal_cells_appear_once():
    cells = expand({**LEAST, "seq_len": 64, "cells": [{"optim": ["adamw", "muon"]}, {"optim": "muon"}, {"seq_len": 128}]})
    assert [(c.arguments.get("optim"), c.seq_len) for c in cells] == [("adamw", 64), ("muon", 64), (None, 128)]


def test_exclude_matches_all_values_of_an_entry():
    grid = {
        **LEAST,
        "runner": ["bigtrain", "hf_trainer"],
        "micro_batch": [1, 2],
        "exclude": [{"runner": "hf_trainer", "micro_batch": 2}],
    }
    assert len(expand(grid)) == 3
    with pytest.raises(UsageError, match="no cell is left"):
        expand({**LEAST, "runner": "bigtrain", "exclude": [{"runner": "bigtrain"}]})


def test_list_values_need_a_list_of_lists_to_be_an_axis():
    assert expand({**LEAST, "freeze": ["model.norm"]})[0].arguments["freeze"] == ["model.norm"]
    assert [c.arguments["freeze"] for c in expand({**LEAST, "freeze": [[], ["model.norm"]]})] == [[], ["model.norm"]]


def test_ds_config_by_preset_mapping_and_single_values(tmp_path):
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 1}}')
    grid = {"model": "preset:llama-tiny", "ds_config": ["zero3_offload", "mine.json", {"zero_optimization": {"stage": 0}}]}
    cells = expand({**grid, "ds_config.zero_optimization.reduce_bucket_size": 1000}, tmp_path)
    assert [c.ds_config["zero_optimization"]["stage"] for c in cells] == [3, 1, 0]
    assert all(c.ds_config["zero_optimization"]["reduce_bucket_size"] == 1000 for c in cells)
    assert cells[1].ds_name == "mine reduce_bucket_size=1000"


@pytest.mark.parametrize(
    "wrong, word",
    [
        ({"seq_lenn": 64}, "did you mean seq_len"),
        ({"output_dir": "x"}, "decided by the sweep"),
        ({"micro_batch": 1, "per_device_train_batch_size": 1}, "given twice"),
        ({"runner": "nemo"}, "runner is 'nemo'"),
        ({"steps": 3}, "leaves none of 3 steps"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"max_cell_s": 0}, "max_cell_s"),
        ({"cells": {"a": 1}}, "list of mappings"),
        ({"ds_config": None}, "are needed"),
        ({"ds_config": "auto", "ds_config.zero_optimization.stage": 2}, "auto chooses everything"),
        ({"ds_config.bf16.enabled.x": 2}, "cannot be set"),
        ({"ds_config": [["zero2"]]}, "ds_config is \\['zero2'\\]"),
        ({"gpu_memory_cap": -3}, "gpu_memory_cap must be a positive number of GiB, got -3$"),
        ({"gpu_memory_cap": "much"}, "gpu_memory_cap is 'much'; it must be a number$"),
        (
            {"seq_len": [64, [512]]},
            r"seq_len is \[512\]; it must be a whole number; a list in a list is no axis \(in the cell of seq_len \[512\]\)$",
        ),
        ({"micro_batch": True}, "per_device_train_batch_size is True; it must be a whole number"),
        ({"micro_batch": [1, 0]}, r"must be at least 1, got 0 \(in the cell of per_device_train_batch_size 0\)$"),
        (
            {"micro_batch": 10**9},
            r"per_device_train_batch_size 1000000000 makes 1,024,000,000,000 tokens .* at most 262,144 rows",
        ),
        ({"freeze": {"a": 1}}, "freeze is {'a': 1}; it must be a list of texts"),
        ({"packing": "some"}, "packing is 'some'; it must be one of isolated, concatenate, none"),
        ({"bf16": "yes"}, "bf16 is 'yes'; it must be true or false"),
        ({"eval_steps": 5}, "eval_steps without anything to evaluate on"),
        ({"env": {"A": [1]}}, "env is "),
        ({"env": {"A=B": 1}}, "env is "),
        ({"env": {"A": True}}, "env is {'A': True}; it must be a mapping of variables"),
        ({"attn_implementation": 5}, "attn_implementation '5': expected auto, sdpa,"),
        ({"attn_implementation": "bigtrain_varlen"}, "attn_implementation 'bigtrain_varlen': expected auto, sdpa,"),
        ({"runner": "hf_trainer", "freeze": ["lm_head"]}, "freeze is bigtrain's own: runner hf_trainer would pass over it"),
        ({"runner": "raw_deepspeed", "packing": "isolated"}, "packing is bigtrain's own"),
        ({"runner": "raw_deepspeed", "attn_implementation": "auto"}, "attn_implementation auto is bigtrain's own"),
        ({"runner": "raw_deepspeed", "ds_config": "auto"}, "runner raw_deepspeed cannot choose a ds_config by itself"),
        (
            {"seq_len": [8, 16], "cells": [{}, {"optim": "muon", "lr": "big"}]},
            r"learning_rate is 'big'; .* \(in the cell of seq_len 8, optim 'muon', learning_rate 'big'\)$",
        ),
    ],
)
def test_mistakes_are_named(wrong, word):
    with pytest.raises(UsageError, match=word):
        expand({**LEAST, **wrong})


def test_unknown_preset_is_a_config_error():
    with pytest.raises(ConfigError, match="zero33"):
        expand({"model": "preset:llama-tiny", "ds_config": "zero33"})


def test_key_names_what_was_measured():
    (a,), (b,) = expand(LEAST), expand({**LEAST, "max_cell_s": 5})
    assert a.key("code", "card") == b.key("code", "card")  # the time limit does not matter
    assert len({a.key("code", "card"), a.key("other", "card"), a.key("code", "H100")}) == 3
    (c,) = expand({**LEAST, "ds_config": {"zero_optimization": {"stage": 2}}})
    assert c.key("code", "card") != a.key("code", "card")


def test_labels_say_only_what_differs():
    cells = expand({**LEAST, "micro_batch": [1, 2], "gradient_checkpointing": [True, False]})
    assert labels(cells) == ["mb 1, ckpt", "mb 1, no ckpt", "mb 2, ckpt", "mb 2, no ckpt"]
    assert labels(expand(LEAST)) == ["zero2"]


@pytest.mark.parametrize("name", ["cpu_smoke", "memory_vs_throughput", "plan_8b", "long_sequence", "plan_held_out_2"])
def test_shipped_grids_are_readable(name):
    assert all(isinstance(cell, Cell) for cell in read_grid(f"launch/grids/{name}.yaml"))


@pytest.mark.parametrize(
    "values, said",
    [
        ({"checkpoint_blocks": "some"}, "checkpoint_blocks must be .* got 'some'"),
        ({"checkpoint_blocks": 0}, "checkpoint_blocks must be .* got '0'"),
        ({"checkpoint_blocks": True}, "checkpoint_blocks is True"),
        ({"checkpoint_blocks": [2, -1]}, "checkpoint_blocks must be .* got '-1'"),
        ({"checkpointing_policy": "half"}, "checkpointing_policy is 'half'"),
        (
            {"checkpoint_blocks": 2, "gradient_checkpointing": False},
            "checkpoint_blocks 2 goes with gradient_checkpointing, which is false",
        ),
    ],
)
def test_recomputing_is_checked_before_the_first_cell(tmp_path, values, said):
    file = tmp_path / "grid.yaml"
    file.write_text(json.dumps({"model": "preset:llama-tiny", "ds_config": "zero2", **values}))
    with pytest.raises(UsageError, match=f"^{file}: {said}"):
        read_grid(file)


def test_every_kind_of_value_that_a_grid_may_say():
    said = {
        "warmup_steps": 0.1, "run_name": 12, "freeze": ["a", "b"], "checkpoint_blocks": 2, "learning_rate": 1, "leaf_blocks": True,
        "offload_gradients": 0.5, "lr_scheduler_kwargs": {"min_ratio": 0.1}, "gradient_checkpointing": True, "seed": 3,
    }  # fmt: skip
    (cell,) = expand({**LEAST, **said})
    assert cell.arguments == {
        "model_name_or_path": "preset:llama-tiny", "seq_len": 1024, **said, "leaf_blocks": "on", "lr_scheduler_kwargs": '{"min_ratio": 0.1}'
    }  # fmt: skip
