"""Arguments: names, aliases, run files, and refusals that say what to write instead."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from bigtrain.errors import UsageError
from bigtrain.run.arguments import TrainArguments, make_parser, parse
from tests import ROOT


@pytest.fixture
def base(tmp_path):
    """The least that a run needs, as flags."""
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "text.txt").write_text("text")
    flags = {
        "--ds_config": tmp_path / "ds.json", "--model_name_or_path": "preset:llama-tiny", "--tokenizer_name_or_path": tmp_path,
        "--train_data": tmp_path / "text.txt", "--output_dir": tmp_path / "out",
    }  # fmt: skip
    return [str(part) for pair in flags.items() for part in pair]


# `ds_config` is also what the file is called.
BARE = re.compile(
    rf"(?<![\w./=-])({'|'.join(f.name for f in fields(TrainArguments) if '_' in f.name and f.name != 'ds_config')})(?![\w./=])"
)


def refusal(flags):
    with pytest.raises(UsageError) as caught:
        parse(flags)
    assert caught.value.exit_code == 2
    said = str(caught.value)
    assert BARE.findall(said) == [], said  # flags are spelled as they are written
    return said


def test_unsaid_values_stay_unsaid(base):
    args = parse(base)
    said_by_default = ("learning_rate", "per_device_train_batch_size", "optim", "max_grad_norm", "bf16", "warmup_steps")
    assert all(getattr(args, name) is None for name in said_by_default)


@pytest.mark.parametrize("flag", ["--ds_config", "--deepspeed_config", "--deepspeed", "--ds-config", "--deepspeed-config"])
def test_names_of_the_ds_config_flag(base, flag):
    rest = base[2:]
    assert parse([flag, base[1], *rest]).ds_config == base[1]


@pytest.mark.parametrize("flag", ["--seq_len", "--max_length", "--max_seq_length", "--cutoff_len", "--seq-len", "--cutoff-len"])
def test_names_of_the_length_flag(base, flag):
    assert parse([*base, flag, "77"]).seq_len == 77


def test_num_steps_is_max_steps(base):
    assert parse([*base, "--num_steps", "5"]).max_steps == 5


@pytest.mark.parametrize("given", [["--local_rank=1"], ["--local-rank=1"], ["--local_rank", "1"], ["--local-rank", "1"]])
def test_B63_launcher_flag_is_accepted_in_both_spellings(base, given, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert parse([*given, *base]) == parse(base)
    assert os.environ["LOCAL_RANK"] == "1"


def test_B63_the_environment_wins_over_the_launcher_flag(base, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    parse(["--local_rank=1", *base])
    assert os.environ["LOCAL_RANK"] == "3"


def test_B63_unknown_flags_are_refused_with_the_nearest_name(base):
    text = refusal([*base, "--learning-rat", "1", "--seqlen", "3"])
    assert "--learning-rat: did you mean --learning_rate" in text
    assert "--seqlen: did you mean --seq_len" in text


def test_flags_of_others_get_a_remedy(base):
    text = refusal([*base, "--fp16", "--num_gpus", "2"])
    assert "--fp16: bigtrain trains in bf16" in text
    assert "deepspeed --num_gpus N launch/train.py" in text
    text = refusal([*base, "--evaluation_strategy", "steps"])
    assert "eval_strategy steps: evaluation comes with --eval_data PATH or --eval_fraction 0.05: every --eval_steps N" in text


PASTED = [
    "--do_train", "--do_eval", "True", "--eval_strategy", "steps", "--save_strategy=steps", "--logging_strategy", "steps",
    "--logging_first_step", "True", "--fp16", "False", "--tf32", "True", "--remove_unused_columns", "False", "--dataloader_pin_memory",
    "True", "--save_safetensors", "True", "--push_to_hub", "False", "--group_by_length", "False", "--max_steps", "-1",
    "--ddp_find_unused_parameters", "False", "--torch_dtype", "bfloat16", "--average_tokens_across_devices", "True",
]  # fmt: skip


def test_flags_that_say_what_a_run_does_anyway_are_left_out_with_a_word(base, caplog):
    real = ["--eval_fraction", "0.1", "--eval_steps", "5", "--save_steps", "5"]
    with caplog.at_level("INFO", "bigtrain"):
        assert parse([*base, *PASTED, *real]) == parse([*base, *real])
    assert "left out, because a run does so anyway: --do_train, --do_eval True, --eval_strategy steps" in caplog.text


def test_the_same_in_a_run_file(base, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps({"do_train": True, "save_strategy": "no", "gradient_checkpointing_kwargs": {"use_reentrant": False}})
    )
    assert parse(["--config", str(file), *base]) == parse(base)
    file.write_text(json.dumps({"save_strategy": "no", "save_steps": 5}))
    assert "save_strategy no: checkpoints come with --save_steps N" in refusal(["--config", str(file), *base])


def test_warmup_steps_below_one_are_a_share_as_in_transformers_5(base, tmp_path):
    assert parse([*base, "--warmup_steps", "0.03"]) == parse([*base, "--warmup_ratio", "0.03"])
    assert parse([*base, "--warmup_steps", "3"]).warmup(100) == 3
    file = tmp_path / "run.yaml"
    file.write_text("warmup_steps: 0.1")
    assert parse(["--config", str(file), *base]).warmup(100) == 10
    assert "two ways to say one thing" in refusal([*base, "--warmup_steps", "0.03", "--warmup_ratio", "0.1"])
    assert "--warmup_steps 10 is more than --max_steps 8: shorten" in refusal(
        [*base, "--warmup_steps", "10", "--max_steps", "8"]
    )
    for wrong in ("1.5", "many"):
        assert f"--warmup_steps: '{wrong}' is neither" in refusal([*base, "--warmup_steps", wrong])


@pytest.mark.parametrize(
    ("pasted", "remedy"),
    [
        ("--save_strategy best", "the best of them: --load_best_model_at_end"),
        ("--save_strategy epoch --save_steps 5", "--save_strategy epoch and --save_steps 5 are two ways to say one thing"),
        ("--save_strategy epoch --save_total_limit 1 --keep_every 2", "keep_every counts steps"),
        ("--eval_strategy epoch", "eval_strategy epoch without anything to evaluate on"),
        (
            "--evaluation_strategy epoch --eval_fraction 0.1 --eval_steps 2",
            "--eval_strategy epoch and --eval_steps 2 are two ways",
        ),
        (
            "--save_steps 4 --eval_strategy epoch --eval_fraction 0.1 --load_best_model_at_end",
            "give --eval_strategy and --save_strategy the same value",
        ),
        (
            "--save_strategy epoch --eval_steps 4 --eval_fraction 0.1 --load_best_model_at_end",
            "give --eval_strategy and --save_strategy the same value",
        ),
        ("--logging_strategy no", "use --logging_steps N or --logging_strategy epoch"),
        ("--save_strategy steps", "checkpoints come with --save_steps N"),  # but when?
        (
            "--save_strategy no --save_steps 5",
            "checkpoints come with --save_steps N or --save_strategy epoch, and without them there are none",
        ),
        ("--eval_strategy no --eval_fraction 0.1", "evaluation comes with --eval_data PATH or --eval_fraction 0.05"),
        ("--do_eval", "evaluation comes with --eval_data PATH or --eval_fraction 0.05"),
        ("--do_train False", "launch/train.py always trains"),
        ("--push_to_hub", "hf upload OWNER/NAME OUT/model"),
        ("--torch_compile_mode max-autotune", "--torch_compile compiles each block"),
        ("--torch_compile --checkpointing_policy selective", "torch_compile does not go with --checkpointing_policy selective"),
        ("--torch_compile --ds_config ds_configs/zero3.json", "torch_compile does not go with ZeRO stage 3"),
        ('--torch_compile --ds_config {"zero_optimization":{"stage":3}}', "torch_compile does not go with ZeRO stage 3"),
        ("--torch_compile --mlp_tile_tokens 64", "torch_compile does not go with --mlp_tile_tokens"),
        ("--torch_compile --ds_config auto", "torch_compile does not go with --ds_config auto"),
        ("--lora_r 8", "see launch/examples/lora.py"),
        ("--block_size 8", "use --seq_len N"),
        ("--zero_stage 3", "the ZeRO stage and offloading come from --ds_config"),
        ("--save_steps 0", "leave it out for none"),
        ("--save_steps 0.1", "a share of all steps is not taken; write a number of steps"),
        ("--hub_model_id x/y", "hf upload OWNER/NAME OUT/model"),
        ("--adafactor True", "use --optim adamw_8bit"),
        ("--log_level debug", "--logging_steps N says how often"),
        ("--eval_data imdb", "load_dataset('imdb', split='train').to_json('train.jsonl')"),
    ],
)
def test_the_remedy_for_a_pasted_flag(base, pasted, remedy):
    assert remedy in refusal([*base, *pasted.split()])


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("--save_only_model", "save_only_model without --save_steps"),
        ("--copy_checkpoints_to /elsewhere", "copy_checkpoints_to without --save_steps"),
        ("--save_steps 2 --keep_every 4", "keep_every without --save_total_limit: all checkpoints are kept"),
        ("--load_best_model_at_end --save_steps 2", "load_best_model_at_end without anything to evaluate on"),
        ("--load_best_model_at_end --save_steps 2 --eval_fraction 0.1", "write for example --eval_steps 2"),
        (
            "--load_best_model_at_end --save_steps 3 --eval_fraction 0.1 --eval_steps 2",
            "--save_steps (3) must be a multiple of --eval_steps (2)",
        ),
        (
            "--load_best_model_at_end --save_steps 2 --eval_fraction 0.1 --eval_steps 2 --save_only_model",
            "leave one of them out",
        ),
    ],
)
def test_what_is_saved_must_be_possible(base, said, problem):
    text = refusal([*base, *said.split()])
    assert text.startswith("1 problem(s)") and problem in text


def test_no_flag_of_others_is_one_of_ours_and_every_remedy_names_flags_that_there_are():
    import re

    from bigtrain.run.foreign import FOREIGN

    known = make_parser()._option_string_actions
    launchers = {"--num_gpus", "--num_accelerators", "--nproc_per_node", "--master_port"}
    assert not {f"--{name}" for name in FOREIGN} & known.keys()
    for name, flag in FOREIGN.items():
        assert set(re.findall(r"--\w+", flag.instead)) - launchers <= known.keys(), name


def test_no_abbreviations(base):
    assert "--learning" in refusal([*base, "--learning", "1"])


def test_two_names_of_one_setting(base, caplog):
    assert "two names of one setting" in refusal([*base, "--seq_len", "8", "--max_length", "16"])
    assert caplog.text == ""
    assert parse([*base, "--seed", "1", "--seed=2"]).seed == 2
    assert (
        "--seed is given twice: what stands last is taken" in caplog.text
    )  # of --train_data, one would think that both are read


def test_every_problem_in_one_report(base):
    text = refusal(
        [*base, "--seq_len", "0", "--adam_beta1", "1.5", "--learning_rate", "-1", "--eval_steps", "5", "--report_to", "excel"]
    )
    assert text.startswith("5 problem(s)")
    for part in ("seq_len must be at least 2, got 0", "adam_beta1", "learning_rate", "eval_steps without", "report_to 'excel'"):
        assert part in text


def test_not_a_number_is_refused(base):
    assert "learning_rate must not be negative, got nan" in refusal([*base, "--learning_rate", "nan"])
    assert "learning_rate must be a finite number, got inf" in refusal([*base, "--learning_rate", "inf"])
    assert "seed must be below 2**64" in refusal([*base, "--seed", str(2**64)])


def test_an_empty_path_is_not_the_folder_that_one_stands_in(base):
    for name in ("output_dir", "train_data", "resume_from_checkpoint", "ds_config"):
        assert f"{name} is empty" in refusal([*base, f"--{name}", ""])


def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "smollm2").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "out" / "smollm2" / name).write_text("{}")
    said = refusal([*base, "--model_name_or_path", "out/smolm2", "--tokenizer_name_or_path", "path/to/tokenizer"])
    assert "model_name_or_path: there is no folder out/smolm2; did you mean out/smollm2?" in said
    assert "tokenizer_name_or_path: there is no folder path/to/tokenizer" in said
    for name in ("out/smollm2", "owner/name", "gpt2"):
        assert parse([*base, "--model_name_or_path", name]).model_name_or_path == name


def test_a_folder_without_a_model_or_tokenizer_is_named_before_anything_is_loaded(base, tmp_path):
    """Transformers said of an empty folder that sentencepiece or tiktoken must be installed."""
    base = base[: base.index("--tokenizer_name_or_path")] + base[base.index("--tokenizer_name_or_path") + 2 :]
    model = tmp_path / "model"
    model.mkdir()
    wanted = [*base, "--model_name_or_path", str(model)]
    assert f"model_name_or_path: {model} holds no config.json: a Hugging Face model folder is needed; it is empty" in refusal(
        wanted
    )
    (tmp_path / "COMMIT").touch()
    assert f"bigtrain export {tmp_path} MODEL_DIR" in refusal([*base, "--model_name_or_path", str(tmp_path)])
    (tmp_path / "COMMIT").unlink()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    assert f"the folder of a run: did you mean {model}?" in refusal([*base, "--model_name_or_path", str(tmp_path)])
    said = refusal(wanted)
    assert f"{model} holds no tokenizer (such as tokenizer.json); it holds config.json, model.safetensors. Copy" in said
    assert f"tokenizer_name_or_path: {model} holds no tokenizer" in refusal([*wanted, "--tokenizer_name_or_path", str(model)])
    (model / "vocab.txt").touch()
    assert parse(wanted).model_name_or_path == str(model)


def test_all_problems_of_a_command_line_are_listed_at_once(base):
    wrong = [
        "--learning_rat",
        "1",
        "--seq_len",
        "1",
        "--max_length",
        "8",
        "--eval_data",
        "nothing.jsonl",
        "--save_total_limit",
        "2",
    ]
    said = refusal([*base, *wrong])
    for part in ("4 problem(s) in", "--learning_rat: did you mean --learning_rate", "two names of one setting", "nothing.jsonl does not exist",
                 "save_total_limit without --save_steps"):  # fmt: skip
        assert part in said, said
    *problems, hint = said.splitlines()[1:]
    assert len(problems) == 4 and all(line.startswith("  - ") for line in problems)
    assert hint == "Run launch/train.py --help for the list of flags."  # none of the problems
    said = refusal([*base, "--learning_rat", "1", "--max_steps", "many"])
    assert "2 problem(s)" in said and "did you mean --learning_rate" in said and "invalid int value: 'many'" in said
    assert "required" not in refusal(["--model", "x"]) and "use --model_name_or_path" in refusal(["--model", "x"])


def test_going_on_and_starting_over_is_a_contradiction(base):
    said = refusal([*base, "--resume_from_checkpoint", "auto", "--overwrite_output_dir"])
    assert "contradict each other" in said


def test_a_limit_of_checkpoints_that_nobody_writes(base):
    assert "save_total_limit without --save_steps" in refusal([*base, "--save_total_limit", "2"])


def test_missing_files_are_named(base, tmp_path):
    flags = [*base, "--eval_data", str(tmp_path / "no.jsonl"), "--resume_from_checkpoint", str(tmp_path / "checkpoint-9")]
    text = refusal(flags)
    assert "no.jsonl does not exist" in text and "checkpoint-9 is no directory" in text


def test_data_that_is_not_there_says_what_to_write_instead(base, tmp_path):
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text("{}")
    two = [str(tmp_path / "train.jsonl"), str(tmp_path / "validation.jsonl")]
    for path, hint in {
        "s3://bucket/a.jsonl": "data is read from disk; download it first",
        ",".join(two): "it is one path; for several files give their folder, or a pattern in quotes",
        str(tmp_path / "trian.jsonl"): f"did you mean {two[0]}?",
    }.items():
        assert f"{path} does not exist" in refusal([*base, "--eval_data", path]) and hint in refusal(
            [*base, "--eval_data", path]
        )
    said = refusal([*base, "--eval_data", *two])  # a pattern that the shell has written out
    assert two[1] in said and "write a pattern in quotes ('data/*.jsonl')" in said
    said = refusal([*base, "--eval_data", *two, *(f"part-{n}" for n in range(9))])
    assert "part-0 part-1 and 7 more: a flag takes one value" in said
    assert "text by every token" in refusal([*base, "--assistant_only_loss", "True"])


def test_a_ds_config_is_a_file_or_a_preset(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(["--ds_config=~/ds.json", *base[2:]]).ds_config == str(tmp_path / "ds.json")
    assert parse(["--ds_config", "zero3", *base[2:]]).ds_config == "zero3"
    assert "is a folder" in refusal(["--ds_config", str(tmp_path), *base[2:]])
    assert "Did you mean zero3_offload" in refusal(["--ds_config", "zero3_ofload.json", *base[2:]])
    os.mkfifo(tmp_path / "pipe")  # <(COMMAND), /dev/stdin: no such file, it said
    for name in (tmp_path / "pipe", "/dev/null"):
        assert "is no file but a pipe or a device, of which each rank" in refusal(["--ds_config", str(name), *base[2:]])


@pytest.mark.parametrize("path", ["x" * 300, "/tmp/" + "d/" * 2500])
def test_a_path_that_no_file_can_have_is_named(base, path):
    text = refusal([*base, "--output_dir", path, "--eval_data", path])
    assert "output_dir: '" in text and text.count("cannot be a path: File name too long") == 2


def test_unknown_preset(base):
    base[base.index("preset:llama-tiny")] = "preset:llama-tinny"
    assert "did you mean llama-tiny" in refusal(base)


def test_uninstalled_tracker_says_how_to_install(base, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "report_to wandb: the package is not installed; run: pip install wandb" in refusal([*base, "--report_to", "wandb"])


def test_no_tracker_beside_another_is_a_contradiction(base):
    assert "report_to none tensorboard: none beside others" in refusal([*base, "--report_to", "none", "tensorboard"])
    assert parse([*base, "--report_to", "none"]).trackers == ()


def test_bare_switches(base):
    args = parse([*base, "--bf16", "--gradient_checkpointing", "--no-plan", "--overwrite_output_dir"])
    assert args.bf16 and args.gradient_checkpointing and args.no_plan and args.overwrite_output_dir


def test_blocks_and_policy_imply_checkpointing(base):
    assert parse(base).recomputes is None and parse([*base, "--checkpointing_policy", "offload"]).recomputes is True
    args = parse([*base, "--checkpoint_blocks", "3"])
    assert (args.recomputes, args.recomputed_blocks) == (True, 3)
    assert parse([*base, "--checkpoint_blocks", "auto"]).recomputed_blocks is None
    for wrong in ("0", "-1", "some", "1.5"):
        assert f"checkpoint_blocks must be a whole number of at least 1, or auto, got '{wrong}'" in refusal(
            [*base, f"--checkpoint_blocks={wrong}"]
        )
    off = [*base, "--gradient_checkpointing", "false", "--checkpoint_blocks", "2", "--checkpointing_policy", "selective"]
    assert "checkpoint_blocks 2 goes with" in refusal(off) and "checkpointing_policy selective goes with" in refusal(off)


def test_tiles_are_a_number_of_tokens(base):
    assert parse(base).mlp_tile_tokens is None and parse([*base, "--mlp_tile_tokens", "0"]).mlp_tile_tokens == 0
    assert "mlp_tile_tokens must not be negative, got -1" in refusal([*base, "--mlp_tile_tokens=-1"])


def test_warmup_ratio_rounds_up():
    values = dict(model_name_or_path="m", train_data="d", output_dir="o", ds_config="c")
    assert TrainArguments(**values, warmup_ratio=0.1).warmup(101) == 11
    assert TrainArguments(**values, warmup_steps=0).warmup(101) == 0
    assert TrainArguments(**values).warmup(101) is None


def as_mapping(base):
    return {flag.lstrip("-"): value for flag, value in zip(base[::2], base[1::2])}


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_run_file(base, tmp_path, kind):
    values = {
        **as_mapping(base),
        "learning_rate": 1e-5,
        "freeze": ["a", "b"],
        "bf16": True,
        "max_length": 64,
        "eval_steps": None,
    }
    file = tmp_path / f"run.{kind}"
    if kind == "json":
        file.write_text(json.dumps(values))
    else:
        yaml = pytest.importorskip("yaml")
        file.write_text(yaml.safe_dump(values))
    alone = parse([str(file)])
    assert (alone.learning_rate, alone.freeze, alone.bf16, alone.seq_len) == (1e-5, ["a", "b"], True, 64)
    assert parse(["--config", str(file), "--learning_rate", "2e-5"]).learning_rate == 2e-5


def test_a_name_that_looks_like_a_number_is_taken_as_it_is_written(base, tmp_path):
    """`12e34567`, a short commit id, became `inf`, and `12e4` `120000.0`."""
    rest = "".join(f"{k}: {v}\n" for k, v in as_mapping(base).items() if k not in ("output_dir", "learning_rate"))
    (tmp_path / "run.yaml").write_text(rest + "output_dir: 12e4\nrun_name: 12e34567\nlearning_rate: 1e-3\n")
    args = parse([str(tmp_path / "run.yaml")])
    assert (args.output_dir, args.run_name, args.learning_rate) == ("12e4", "12e34567", 1e-3)


def test_no_tracker_in_a_run_file_is_none(base, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({**as_mapping(base), "report_to": []}))
    assert parse([str(tmp_path / "run.json")]).trackers == ()


def test_run_file_with_an_inline_ds_config(base, tmp_path):
    values = {**as_mapping(base), "ds_config": {"zero_optimization": {"stage": 2}}}
    (tmp_path / "run.json").write_text(json.dumps(values))
    assert json.loads(parse([str(tmp_path / "run.json")]).ds_config) == values["ds_config"]


def test_run_file_faults(base, tmp_path):
    (tmp_path / "typo.yaml").write_text("learnin_rate: 1")
    assert "unknown key in" in refusal([str(tmp_path / "typo.yaml")])
    assert "did you mean --learning_rate" in refusal([str(tmp_path / "typo.yaml")])
    (tmp_path / "list.yaml").write_text("- a")
    assert "must be a mapping" in refusal([str(tmp_path / "list.yaml")])
    (tmp_path / "torn.json").write_text("{")
    assert "cannot be parsed" in refusal([str(tmp_path / "torn.json")])
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9")
    assert "no UTF-8 text" in refusal([str(tmp_path / "latin.yaml")])
    for name, text in (("twice.yaml", "seed: 1\nseed: 2"), ("twice.json", '{"seed": 1, "seed": 2}')):
        (tmp_path / name).write_text(text)
        assert "key 'seed' stands twice" in refusal([str(tmp_path / name)])
    (tmp_path / "loop.yaml").write_text("lr_scheduler_kwargs: &all\n  decay: *all\n")
    assert "an alias (*name) stands inside" in refusal([str(tmp_path / "loop.yaml")])
    assert "cannot be read" in refusal([str(tmp_path / "none.yaml")])
    assert "expected a name that ends in" in refusal([str(tmp_path / "run.toml")])
    assert "--config needs the path" in refusal([*base, "--config"])


def test_the_help_can_be_read():
    """Each flag had its spellings with hyphens beside those with underscores, and "(default: None)" behind its default."""
    said = " ".join(make_parser().format_help().split())
    assert "None" not in said and "--seq-len" not in said and "--max_seq_length, --cutoff_len N" in said
    assert said.startswith("usage: launch/train.py --ds_config FILE|auto --model_name_or_path")
    assert "--bf16 [true|false]" in said and "--learning_rate, --lr X" in said
    places = [
        said.index(words) for words in ("needed by every run: --model_name_or_path", "optimizer and learning rate: --optim")
    ]
    assert places == sorted(places) and len(make_parser()._optionals._group_actions) == 1  # every flag has its group
    assert "(default: 3.0)" in said and "(default: tensorboard)" in said and said.count("(default: isolated)") == 1


def test_the_help_has_the_default_of_every_flag():
    """Some stood nowhere, such as the rows of a micro step."""
    parser = make_parser()
    texts = {a.dest: parser._get_formatter()._get_help_string(a) for a in parser._actions if a.dest != "help"}
    assert [name for name, text in texts.items() if text.count("(default") != 1] == [
        "model_name_or_path", "train_data", "output_dir", "ds_config",
    ]  # fmt: skip
    for name, default in {"learning_rate": "5e-05", "warmup_steps": "0", "weight_decay": "0.0", "optim": "adamw", "resize_vocab": "false",
                          "per_device_train_batch_size": "1", "gradient_checkpointing": "false", "freeze": "none"}.items():  # fmt: skip
        assert texts[name].endswith(f"(default: {default})"), texts[name]


def test_what_is_missing_is_named_once():
    with pytest.raises(UsageError, match=r"required: --model_name_or_path, --train_data, --output_dir, --ds_config$"):
        parse(["--seed", "1"])
    with pytest.raises(UsageError, match=r"^nothing to train was given. usage: launch/train.py --ds_config FILE"):
        parse([])


def test_a_bare_flag_is_yes(base):
    for name in ("bf16", "gradient_checkpointing", "use_liger_kernel"):
        assert getattr(make_parser().parse_args([*base, f"--{name}"]), name) is True
        assert getattr(make_parser().parse_args([*base, f"--{name}", "false"]), name) is False
        assert getattr(make_parser().parse_args(base), name) is None


def test_every_flag_has_a_help_text():
    bare = [a.option_strings[0] for a in make_parser()._actions if not a.help and not a.option_strings[0].startswith("--no_")]
    assert bare == []


def test_parsing_needs_no_torch():
    code = "import sys; from bigtrain.run.arguments import make_parser; make_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lr_scheduler_kwargs_are_json(base, tmp_path):
    assert parse([*base, "--lr_scheduler_kwargs", '{"min_ratio": 0.1}']).scheduler_kwargs == {"min_ratio": 0.1}
    (tmp_path / "run.yaml").write_text("lr_scheduler_kwargs: {min_ratio: 0.2, decay: cosine}")
    assert parse(["--config", str(tmp_path / "run.yaml"), *base]).scheduler_kwargs == {"min_ratio": 0.2, "decay": "cosine"}
    for wrong in ("{min_ratio: 0.1}", "[1]"):
        assert "must be a JSON object" in refusal([*base, "--lr_scheduler_kwargs", wrong])


def test_patterns_of_allowed_names(base):
    args = parse([*base, "--allow_missing", "lm_head.*", "score.*", "--allow_unexpected", "*.inv_freq"])
    assert (args.allow_missing, args.allow_unexpected) == (["lm_head.*", "score.*"], ["*.inv_freq"])


def test_once_an_epoch_is_said_in_the_words_of_transformers(base):
    strategies = [f"--{what}_strategy=epoch" for what in ("eval", "save", "logging")]
    args = parse([*base, *strategies, "--eval_fraction", "0.1", "--load_best_model_at_end"])
    assert (args.eval_strategy, args.save_strategy, args.logging_strategy, args.saves) == ("epoch", "epoch", "epoch", True)
    assert not parse(base).saves


def test_a_tokenizer_with_more_tokens_than_the_model_is_told_with_the_other_problems(base, tmp_path):
    """It was told after the ranks had met and the machine was looked at. A token that is added and in the vocabulary counts once."""
    vocabulary = {
        "model": {"vocab": {f"t{n}": n for n in range(99)}},
        "added_tokens": [{"content": "t0"}, {"content": "<end>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()

    def size(rows, **more):
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows, **more}))

    flags = [*base, "--model_name_or_path", str(model)]
    size(99)
    said = refusal([*flags, "--seq_len", "1"])
    assert "2 problem(s)" in said and "the tokenizer has 100 tokens, the model's embedding 99: pass --resize_vocab" in said
    parse([*flags, "--resize_vocab"])
    size(99, text_config={"vocab_size": 100})
    parse(flags)
    unigram = {"model": {"vocab": [[f"t{n}", -1.0] for n in range(101)]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert "has 101 tokens" in refusal(flags)
    for damaged in ("{}", "[" * 100_000):  # told where it is loaded
        (tmp_path / "tokenizer.json").write_text(damaged)
        parse(flags)


def test_data_and_an_output_folder_that_cannot_serve_are_told_with_the_flags(base, tmp_path):
    """All at once, before torch is loaded."""
    (tmp_path / "t.csv").write_text("text\na\n")
    (tmp_path / "e.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    flags = [*base, "--train_data", str(tmp_path / "t.csv"), "--eval_data", str(tmp_path / "e.jsonl"), "--seed", "-1"]
    code = (
        "import sys; from bigtrain.errors import UsageError; from bigtrain.run.arguments import parse\n"
        "try: parse(sys.argv[1:])\nexcept UsageError as error: print(error)\n"
        "print({'torch', 'datasets'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    head, *problems, heavy = said.splitlines()
    assert head == "4 problem(s) in the arguments:" and heavy == "set()"
    seed, train, evaluated, out = problems
    assert (
        seed.startswith("  - --seed must not be negative")
        and f"--train_data: {tmp_path}/t.csv would be read as one text" in train
    )
    assert "--eval_data: the samples have the columns ['question', 'answer']; needed is one of" in evaluated
    assert f"--output_dir {tmp_path}/out already holds a run (run.json)" in out


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"])
def test_a_job_that_is_started_again_finds_its_own_run_there(base, tmp_path, monkeypatch, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    assert "already holds a run" in refusal(base)
    monkeypatch.setenv(name, "1")
    assert parse(base).output_dir == str(tmp_path / "out")
