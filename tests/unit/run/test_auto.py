"""`--ds_config auto`: what is chosen is what is planned, and what the user said stands."""

from dataclasses import replace

import pytest

from bigtrain import config as ds
from bigtrain import shapes
from bigtrain.config import ModelShape, RunValues
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.models.source import config_from
from bigtrain.plan.choose import rows_per_rank
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.inputs import plan_input
from bigtrain.plan.zero_settings import settings_from_config
from bigtrain.run import capacity, left_open, search
from bigtrain.run import job as jobs
from bigtrain.run.arguments import TrainArguments
from bigtrain.run.auto import config_of, pick

GIB = 2**30
LLAMA_3B = shapes.config_dict("llama-3b")


def choose(run=None, gpu=80.0, host=126.0, world=1, **more):
    run = run or RunValues()
    base = plan_input(LLAMA_3B, world_size=world, seq_len=4096, optimizer=run.optim or "adamw")
    return pick(base, run, Hardware(int(gpu * GIB), int(host * GIB)), **more)


@pytest.mark.parametrize("gpu", [80.0, 47.4, 24.0])
def test_the_config_reads_back_as_the_settings_that_were_planned(gpu):
    picked = choose(gpu=gpu)
    planned = picked.candidate.input.settings
    assert settings_from_config(picked.config, 3072) == planned
    done = ds.resolve(picked.config, run=picked.run, model=ModelShape.from_config(LLAMA_3B), world_size=1)
    assert done.run.micro_batch == picked.candidate.input.micro_batch and done.run.optim == picked.candidate.input.optimizer


def test_every_candidate_has_a_config_that_reads_back():
    for candidate in choose().choice.fitting:
        settings = candidate.input.settings
        assert settings_from_config(config_of(settings), 3072) == settings


def test_what_the_user_said_stands():
    said = RunValues(optim="adamw", micro_batch=2, accumulation=3, gradient_checkpointing=True)
    run = choose(said).run
    assert (run.optim, run.micro_batch, run.accumulation, run.gradient_checkpointing) == ("adamw", 2, 3, True)


@pytest.mark.parametrize("gpu, share", [(80.0, 0.25), (80.0, 1.0), (24.0, 0.6), (12.0, 0.0)])
def test_the_share_of_the_gradients_that_the_user_said_stands(gpu, share):
    """The search looked for the best share, and the user's was put in its place afterwards: another plan than the one that was ranked."""
    found = choose(gpu=gpu, share=share).choice
    assert found.fitting and {c.input.settings.offload_gradients for c in (*found.fitting, *found.rejected)} == {share}
    if share:
        assert all(c.input.alone and c.input.leaving for c in found.fitting)


def test_a_share_that_cannot_leave_is_refused():
    with pytest.raises(UsageError, match=r"offload_gradients 0.5 needs one rank .*; this is 2 rank\(s\) on cuda"):
        choose(world=2, share=0.5)
    with pytest.raises(UsageError, match=r"an adamw_split optimizer; this is .* with adamw: leave it out"):
        choose(RunValues(optim="adamw"), share=0.5)
    assert choose(world=2, share=0.0).choice.fitting


def test_what_auto_chose_is_said_to_be_its_choice(card, monkeypatch):
    """run.json called the share that the search had chosen a flag, and the values of its config a file's."""
    card()
    hardware = Hardware(24 * GIB, 126 * GIB)
    monkeypatch.setattr(capacity, "hardware", lambda cap: hardware)
    asked = TrainArguments(
        model_name_or_path="preset:llama-8b", ds_config="auto", train_data="x", output_dir="y", gradient_accumulation_steps=2,
        learning_rate=1e-4, seq_len=2048,
    )  # fmt: skip
    args, config = search.choose(asked)
    model = config_from(args.model_name_or_path, args.trust_remote_code)
    resolved = jobs.resolve(args, config, ModelShape.from_config(model), 10)
    job = jobs.Job(args=args, resolved=resolved, tokenizer=None, seq_len=2048, rows=None, eval_rows=None, steps=None, model_config=model,
                   config_overrides={}, resize_vocab_to=None, offload_gradients=float(args.offload_gradients))  # fmt: skip
    job = left_open.settle(job, hardware)
    assert job.offload_gradients > 0
    told = {d.path: d.source for d in search.named_auto(job, asked).resolved.decisions}
    assert told["offload_gradients"] == told["train_micro_batch_size_per_gpu"] == told["gradient_checkpointing"] == "auto"
    assert told["gradient_accumulation_steps"] == told["learning_rate"] == "flag"
    assert "file" not in told.values() and told["optimizer.type"] == "auto"
    unchanged = replace(asked, ds_config="zero2")
    assert search.named_auto(job, unchanged) is job


def test_rows_per_rank():
    assert rows_per_rank(None, None) == 8 and rows_per_rank(3, None) == 3
    assert rows_per_rank(None, 3) == 6 and rows_per_rank(None, 16) == 16
    assert rows_per_rank(2, 5) == 10


def test_nothing_fits_says_what_would():
    with pytest.raises(DoesNotFitError, match="NOTHING FITS"):
        choose(gpu=4, host=8)
    with pytest.raises(DoesNotFitError, match="values on the command line allow"):
        choose(RunValues(micro_batch=8, gradient_checkpointing=False), gpu=47.4, host=126)
