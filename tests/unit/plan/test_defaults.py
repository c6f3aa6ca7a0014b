"""The same words give the same plan in `bigtrain plan` and launch/train.py; what nobody said is printed."""

import json
from types import SimpleNamespace

import pytest

from bigtrain import cli, defaults, shapes
from bigtrain import config as ds
from bigtrain.config import ModelShape
from bigtrain.config.run import DEFAULTS
from bigtrain.errors import UsageError
from bigtrain.models.source import config_from
from bigtrain.plan.families import position_limit
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.spilled import asked_share
from bigtrain.run import capacity, left_open, model_files
from bigtrain.run import job as jobs
from bigtrain.run.arguments import parse
from tests.unit.plan.family_configs import CAUSAL, OTHER

GIB = 2**30


def planned_by_training(words, folder, gpu, host):
    file = folder / "text.txt"
    file.write_text("some text")
    needed = ["--train_data", file, "--output_dir", folder / "out", "--tokenizer_name_or_path", folder]
    args = parse(list(map(str, [*words, *needed])))
    model_config = config_from(args.model_name_or_path, args.trust_remote_code)
    resolved = jobs.resolve(args, ds.load(args.ds_config), ModelShape.from_config(model_config), None)
    steps = SimpleNamespace(micro_batch=resolved.run.micro_batch, accumulation=resolved.run.accumulation)
    share = asked_share(args.offload_gradients) or 0.0
    job = jobs.Job(args=args, resolved=resolved, tokenizer=None, seq_len=model_files.choose_seq_len(args, model_config), steps=steps,
                   model_config=model_config, config_overrides={}, resize_vocab_to=None, offload_gradients=share,
                   block_classes=("LlamaDecoderLayer",))  # fmt: skip
    hardware = Hardware(gpu, host)
    return capacity.plan_of(left_open.settle(job, hardware), hardware)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 4, "--optim", "adamw_8bit"),
        ("--gradient_checkpointing", "--max_length", 512),
        ("--checkpoint_blocks", 3, "--checkpointing_policy", "selective"),
        ("--checkpoint_blocks", "auto", "--use_liger_kernel", "false"),
        ("--gradient_checkpointing", "false", "--freeze", "model.embed_tokens"),
        ("--ds_config", "zero3", "--optim", "adamw_8bit"),
        ("--ds_config", "zero3", "--optim", "adamw_8bit", "--leaf_blocks", "off"),
    ],
)
def test_the_same_words_give_the_same_plan(words, device, card, tmp_path, capsys):
    """`bigtrain plan` took sequences of 4,096 tokens, recomputed blocks, transformers' kernels and fp32 sums of one micro batch."""
    card("NVIDIA H200" if device == "cuda" else None)
    words = ("--model_name_or_path", "preset:llama-1b", "--ds_config", "zero2_offload", *map(str, words))
    run = planned_by_training(words, tmp_path, 24 * GIB if device == "cuda" else None, 64 * GIB)
    cli.main(["plan", *words, "--json", "--device", device, "--gpu_memory", "24GiB", "--host_memory", "64GiB"])
    said = json.loads(capsys.readouterr().out)
    assert {name: said[name] for name in run.to_json()} == json.loads(json.dumps(run.to_json()))


def test_without_liger_kernel_its_memory_is_not_planned(card, tmp_path):
    """On a card where it is not installed, or does not know the model, transformers' kernels run, with bigtrain's own loss."""
    words = ("--model_name_or_path", "preset:llama-1b", "--ds_config", "zero2", "--gradient_checkpointing", "false",
             "--per_device_train_batch_size", 8)  # fmt: skip
    found = {}
    for why in ("", "not installed"):
        card(why_no_liger=why)
        found[why] = planned_by_training(words, tmp_path, 80 * GIB, 64 * GIB)
    with_it, without = found[""], found["not installed"]
    assert (with_it.input.kernels, with_it.input.loss_kind) == ("liger", "fused")
    assert (without.input.kernels, without.input.loss_kind) == ("hf", "fused")
    # In a block one bf16 tensor of [tokens, feed-forward] more, and two fp32 ones of [tokens, width] in its norms; then the last norm.
    more = 16 * 8 * 1024 * (2 * 8192 + 2 * 4 * 2048)
    assert without.gpu_peak_allocated_bytes - with_it.gpu_peak_allocated_bytes == pytest.approx(more, rel=0.02)


@pytest.mark.parametrize("name", [f"preset:{name}" for name in shapes.names()])
def test_the_length_of_a_row_without_a_word(name, monkeypatch):
    args = SimpleNamespace(model_name_or_path=name, seq_len=None, trust_remote_code=False)
    there = model_files.choose_seq_len(args, config_from(args.model_name_or_path, args.trust_remote_code))
    assert defaults.seq_len(None, position_limit(shapes.config_dict(name))) == there <= defaults.SEQ_LEN == 1024


def test_positions_are_read_under_every_name():
    from transformers import AutoConfig

    from bigtrain.data.tokens import model_limits

    seen = set()
    for values in (*CAUSAL.values(), *(config for _, config in OTHER.values())):
        kind = values["model_type"]
        limit = position_limit(values)
        if limit is not None:
            seen.add(kind)
            assert limit == model_limits(AutoConfig.for_model(**values))[1], kind
    assert {"gpt2", "bert"} <= seen
    assert position_limit({"model_type": "gpt2", "max_position_embeddings": 77}) == 77
    assert position_limit({"model_type": "t5"}) is None


def test_what_was_assumed_is_said(capsys):
    words = ["plan", "--model", "preset:llama-1b", "--gpu_memory", "80GiB", "--host_memory", "99GiB"]
    assert cli.main(words) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "assumed, as launch/train.py does: seq_len 1024 (--seq_len N), micro_batch 1 (--micro_batch N), accumulation 1 "
        "(--accumulation N), checkpointing none (--gradient_checkpointing), optimizer adamw (--optim NAME), stage 3 (--stage N or "
        "--ds_config FILE)"
    )
    cli.main([*words, "--ds_config", "zero2", "--json"])
    assert set(json.loads(capsys.readouterr().out)["assumed"]) == {"seq_len", "micro_batch", "accumulation", "checkpointing"}
    said = ["--seq_len", "64", "--micro_batch", "2", "--accumulation", "1", "--checkpointing", "none", "--ds_config", "zero2"]
    cli.main([*words, *said])
    assert "assumed" not in capsys.readouterr().out
    cli.main([*words, "--ds_config", "auto", "--json"])
    assert json.loads(capsys.readouterr().out)["assumed"] == {"seq_len": 1024, "rows a step and rank": 8}


def test_more_tokens_than_the_model_has_positions_for_are_told(capsys):
    words = ["plan", "--model", "preset:llama-tiny", "--gpu_memory", "80GiB", "--host_memory", "99GiB", "--seq_len"]
    limit = shapes.config_dict("llama-tiny")["max_position_embeddings"]
    assert cli.main([*words, str(limit + 1)]) == 0
    assert f"seq_len {limit + 1} is above the model's max_position_embeddings {limit}" in capsys.readouterr().err
    cli.main([*words, str(limit)])
    assert not capsys.readouterr().err


def test_a_size_that_is_said_twice_is_told(tmp_path, capsys):
    sizes = {"model_type": "gpt2", "n_embd": 64, "hidden_size": 128, "n_head": 4, "n_layer": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert cli.main(["plan", "--model", str(tmp_path), "--gpu_memory", "80GiB", "--host_memory", "99GiB"]) == 0
    assert capsys.readouterr().err.startswith("warning: the model config has hidden_size = 128 and n_embd = 64")


def test_one_table_of_defaults():
    assert (DEFAULTS.optim, DEFAULTS.gradient_checkpointing) == (defaults.OPTIM, defaults.GRADIENT_CHECKPOINTING)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--checkpointing", "full", "--gradient_checkpointing"), "--checkpointing says what"),
        (("--checkpointing", "full", "--checkpointing_policy", "full"), "--checkpointing says what"),
        (("--kernels", "hf", "--use_liger_kernel"), "say one thing"),
        (
            ("--gradient_checkpointing", "false", "--checkpointing_policy", "offload"),
            "contradicts --gradient_checkpointing false",
        ),
        (("--checkpoint_blocks", "some"), "'some': a whole number of at least 1, or auto"),
        (("--auto", "--checkpoint_blocks", "0"), "'0': a whole number of at least 1"),  # launch/train.py takes none either
    ],
)
def test_two_words_for_one_thing_are_refused(words, said):
    with pytest.raises(UsageError, match=said):
        cli._run(["plan", "--model", "preset:llama-1b", *words])
