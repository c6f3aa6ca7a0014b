"""What a rank knows of its host from its launcher."""

import os

import pytest

from bigtrain import meeting, ranks


@pytest.mark.parametrize(
    ("env", "here"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),  # torchrun
        ({"LOCAL_SIZE": "3"}, 3),  # DeepSpeed's launcher
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "3"}, 3),  # nobody says that there are other hosts
        ({"WORLD_SIZE": "5", "SLURM_STEP_NUM_NODES": "2"}, 3),  # srun without a launcher of its own
    ],
)
def test_ranks_of_a_host_share_its_cores_under_every_launcher(env, here, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    assert (ranks.local_world_size(), ranks.cores()) == (here, 10 // here)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert ranks.cores() == 1


@pytest.mark.parametrize(
    ("ends", "advice"),
    [
        (["ended without a word, last seen after step 5: engine.backward()"], "killed from outside (kill -9"),
        (
            ["its program came to its end after step 3", "ended without a word, last seen after step 5: starting"],
            "same number of batches",
        ),
        (["failed: DataError: line 3"], "its own message says why"),
    ],
)
def test_what_to_do_about_a_lost_rank_depends_on_how_it_ended(ends, advice):
    assert advice in meeting._advice(ends)
    assert ("--resume_from_checkpoint auto" in meeting._advice(ends)) is ("killed" in advice)
