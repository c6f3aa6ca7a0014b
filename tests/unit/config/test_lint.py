"""Linting: silence on what peers ship, one named problem for every kind of mistake."""

from __future__ import annotations

import copy

import pytest

from bigtrain.config import ModelShape, RunValues, check, lint, report
from bigtrain.errors import ConfigError
from tests.unit.config.peers import BROKEN, CLEAN
from tests.unit.config.wrong_configs import BASE, ROWS, wrong


def find(problems, path, severity=None):
    return [p for p in problems if p.path == path and severity in (None, p.severity)]


def test_a_good_config_has_no_problems():
    assert lint(BASE) == []
    assert lint(BASE, world_size=4, model=ModelShape(hidden_size=64), run=RunValues()) == []
    assert report([], "x.json") == "x.json: no problems found"


@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm_on_what_peers_ship(name):
    for world_size in (None,):
        assert [str(p) for p in lint(CLEAN[name], world_size=world_size) if p.severity != "note"] == []


@pytest.mark.parametrize("name", BROKEN)
def test_shipped_but_refused_by_deepspeed_itself(name):
    config, path = BROKEN[name]
    assert find(lint(config), path, "error")


@pytest.mark.parametrize(("change", "severity", "path", "words"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS])
def test_wrong_config_is_caught(change, severity, path, words):
    config = wrong(change)
    before = copy.deepcopy(config)
    found = lint(config)
    assert repr(config) == repr(before), "linting must not change the file"
    hits = find(found, path, severity)
    assert hits, [str(p) for p in found]
    assert words in " ".join(str(p) for p in hits), [str(p) for p in hits]
    others = {p.path for p in found if p.severity == "error"} - {path}
    unrelated = {p for p in others if not p.startswith(path.split(".")[0]) and p.split(".")[0] not in str(change)}
    assert not unrelated, f"errors elsewhere: {unrelated}"


def test_every_row_is_its_own_kind():
    assert len({r[0] for r in ROWS}) == len(ROWS) >= 100


@pytest.mark.parametrize("name", ["gradient_clipp1ng", "gradient_cliping", "gradientclipping", "gradient_clippin"])
def test_B01_misspelt_key_is_refused(name):
    config = wrong({name: 0.3})
    del config["gradient_clipping"]
    with pytest.raises(ConfigError) as caught:
        check(config)
    [problem] = [p for p in caught.value.problems if p.severity == "error"]
    assert problem.path == name and "write gradient_clipping" in problem.fix


def test_B01_at_every_depth_all_in_one_report():
    config = wrong({
        "gradient_clipp1ng": 1, "zero_optimization.stag": 2, "optimizer.params.lrr": 1, "scheduler.params.warmup": 1,
        "checkpoint.tag_validatoin": "Warn", "zero_optimization.offload_param": {"device": "none", "pin": 1},
    })  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check(config, name="my.json")
    paths = {p.path for p in caught.value.problems if p.severity == "error"}
    assert paths == {
        "gradient_clipp1ng", "zero_optimization.stag", "optimizer.params.lrr", "scheduler.params.warmup",
        "checkpoint.tag_validatoin", "zero_optimization.offload_param.pin",
    }  # fmt: skip
    assert str(caught.value).startswith("my.json: 6 errors")


def test_B02_numbers_sources_and_a_valid_choice():
    config = wrong({"train_batch_size": 3, "gradient_accumulation_steps": 1})
    [problem] = find(lint(config, world_size=2), "train_batch_size", "error")
    for part in (
        "train_batch_size 3 (file)",
        "train_micro_batch_size_per_gpu 1 (file)",
        "gradient_accumulation_steps 1 (file)",
        "ranks 2 (launcher) = 2",
        "One valid choice: train_batch_size 2",
    ):
        assert part in problem.why
    assert not find(lint(config, world_size=3), "train_batch_size", "error")


@pytest.mark.parametrize("path", ["train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer.params.lr",
                                  "zero_optimization.reduce_bucket_size"])  # fmt: skip
def test_B03_a_number_in_quotes_is_refused_by_name(path):
    [problem] = find(lint(wrong({path: "1e-4" if "lr" in path else "4"})), path, "error")
    assert "in quotes" in problem.why


def test_B08_equal_values_pass_and_different_ones_stop():
    config = wrong({"gradient_accumulation_steps": 4})
    assert lint(config, run=RunValues(accumulation=4)) == []
    [problem] = lint(config, run=RunValues(accumulation=2))
    assert problem.severity == "error" and problem.path == "gradient_accumulation_steps"
    assert "the file says 4" in problem.why and "--gradient_accumulation_steps says 2" in problem.why


@pytest.mark.parametrize(
    ("run", "path"),
    [
        (RunValues(learning_rate=2e-4), "optimizer.params.lr"),
        (RunValues(adam_beta2=0.999), "optimizer.params.betas"),
        (RunValues(adam_epsilon=1e-6), "optimizer.params.eps"),
        (RunValues(weight_decay=0.0), "optimizer.params.weight_decay"),
        (RunValues(max_grad_norm=0.5), "gradient_clipping"),
        (RunValues(warmup_steps=5), "scheduler.params.warmup_num_steps"),
        (RunValues(total_steps=99), "scheduler.params.total_num_steps"),
        (RunValues(bf16=False), "bf16.enabled"),
        (RunValues(optim="muon"), "optimizer.type"),
        (RunValues(lr_scheduler_type="cosine"), "scheduler.type"),
        (RunValues(micro_batch=2), "train_micro_batch_size_per_gpu"),
    ],
)
def test_B06_B08_file_and_flag_never_silently_differ(run, path):
    assert find(lint(BASE, run=run), path, "error")


def test_same_values_in_other_words_pass():
    run = RunValues(learning_rate=1e-4, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.1,
                    optim="adamw_torch_fused", lr_scheduler_type="linear", warmup_steps=10, total_steps=100,
                    max_grad_norm=1.0, bf16=True, micro_batch=1, accumulation=2)  # fmt: skip
    assert lint(BASE, run=run) == []


def test_no_activation_checkpointing_against_a_block():
    config = wrong({"activation_checkpointing": {"partition_activations": False}})
    assert find(lint(config, run=RunValues(gradient_checkpointing=False)), "activation_checkpointing", "error")
    assert not find(lint(config, run=RunValues(gradient_checkpointing=True)), "activation_checkpointing", "error")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        ({"tensor_parallel": {"autotp_size": 3}}, "tensor_parallel.autotp_size"),
        ({"sequence_parallel_size": 8}, "sequence_parallel_size"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 3}}, "expert_parallel.autoep_size"),
        ({"sequence_parallel_size": 2, "data_parallel_size": 4}, "data_parallel_size"),
    ],
)
def test_group_sizes_against_the_world(change, path):
    assert find(lint(wrong(change), world_size=4), path, "error")
    assert not find(lint(wrong(change)), path, "error")


def test_threshold_that_switches_stage_3_off():
    config = wrong({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10**9}})
    shape = ModelShape.from_config({"hidden_size": 64, "vocab_size": 1000})
    [problem] = find(lint(config, model=shape), "zero_optimization.stage3_param_persistence_threshold")
    assert problem.severity == "warning" and "64000" in problem.why


def test_B38_fp16_leftovers_are_a_note_not_silence():
    config = wrong({"fp16": {"enabled": False, "loss_scale": 1024, "loss_scale_window": 500}})
    [problem] = lint(config)
    assert problem.severity == "note" and "loss_scale_window" in problem.why


def test_B66_gpu_only_options_get_a_note_on_cpu():
    config = wrong({"zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True}})
    assert lint(config) == []
    paths = {p.path for p in lint(config, device="cpu") if p.severity == "note"}
    assert paths == {"zero_optimization.overlap_comm", "zero_optimization.offload_optimizer.pin_memory"}


def test_not_an_object():
    assert lint([1])[0].severity == "error"  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adamw_split", "adamw_split_8bit"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_offloads_its_own_state_may_keep_a_part_at_any_stage(optimizer, stage):
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    }  # fmt: skip
    about = [p for p in lint(config, world_size=2, run=RunValues(optim=optimizer)) if "ratio" in p.path]
    assert about == []


@pytest.mark.parametrize("more", [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}])
def test_gradients_are_not_divided_before_where_stage_1_is_run_as_stage_2(more):
    (name,) = more

    def told(optimizer, zero=(), **data_types):
        config = {**BASE, **more, "data_types": data_types, "zero_optimization": {"stage": 1, **dict(zero)}}
        return [p.why for p in find(lint(config, world_size=2, run=RunValues(optim=optimizer)), name, "error")]

    as_2 = ["not possible with reduce_scatter at stage 2, as which this optimizer runs stage 1"]
    assert told("adamw_split") == told("adamw_split_8bit", grad_accum_dtype="fp32") == as_2
    assert told("adamw") == told("adamw_split", grad_accum_dtype="bf16") == told("adamw_split", {"reduce_scatter": False}) == []


@pytest.mark.parametrize("writer", [{"type": "python"}, {"type": "fast", "decoupled": True}])
def test_B33_a_writer_whose_files_cannot_be_read_back_is_refused(writer):
    (problem,) = find(lint({**BASE, "checkpoint": {"writer": writer}}), "checkpoint.writer", "error")
    assert "cannot be read back" in problem.fix


def test_a_key_without_a_name_is_no_key():
    """It was taken for the second spelling of the first key that has none."""
    assert [p.severity for p in lint({**BASE, "": 1}) if "no such key" in p.why] == ["error"]
