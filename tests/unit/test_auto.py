"""`--ds_config auto`: what is chosen is what is planned, and what the user said stands."""

import pytest

from bigtrain import config as ds
from bigtrain import shapes
from bigtrain.auto import config_of, pick
from bigtrain.config import ModelShape, RunValues
from bigtrain.errors import DoesNotFitError
from bigtrain.plan.choose import rows_per_rank
from bigtrain.plan.inputs import settings_from_config

GIB = 2**30
LLAMA_3B = shapes.config_dict("llama-3b")


def choose(run=None, gpu=80.0, host=126.0, world=1):
    return pick(
        LLAMA_3B, run or RunValues(), world_size=world, ranks_per_node=world, seq_len=4096, gpu_memory_bytes=int(gpu * GIB),
        host_memory_bytes=int(host * GIB),
    )  # fmt: skip


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


def test_rows_per_rank():
    assert rows_per_rank(None, None) == 8 and rows_per_rank(3, None) == 3
    assert rows_per_rank(None, 3) == 6 and rows_per_rank(None, 16) == 16
    assert rows_per_rank(2, 5) == 10


def test_nothing_fits_says_what_would():
    with pytest.raises(DoesNotFitError, match="NOTHING FITS"):
        choose(gpu=4, host=8)
    with pytest.raises(DoesNotFitError, match="values on the command line allow"):
        choose(RunValues(micro_batch=8, gradient_checkpointing=False), gpu=47.4, host=126)
