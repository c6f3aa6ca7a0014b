"""Devices of ranks: what one visible card and Slurm do to them."""

import pytest

from bigtrain.errors import UsageError
from bigtrain.hosts.placement import Place, device_index, refuse_shared_cards, scheduler_conflict


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(0, 8, 0), (7, 8, 7), (1, 1, 0), (3, 1, 0), (5, 4, 1)])
def test_B54_local_rank_modulo_visible_cards(local_rank, visible, index):
    assert device_index(local_rank, visible) == index


def test_B54_no_visible_card():
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        device_index(0, 0)


def place(rank, physical, host="host-a", visible=None):
    return Place(rank=rank, host=host, local_rank=rank, device="H100", physical=physical, visible=visible)


def test_B54_two_ranks_on_one_card_are_refused_and_named():
    refuse_shared_cards(
        [place(0, "GPU-1"), place(1, "GPU-2"), place(2, "GPU-1", host="host-b"), place(3, None), place(4, None)]
    )
    with pytest.raises(UsageError) as caught:
        refuse_shared_cards([place(0, "GPU-1", visible="0"), place(1, "GPU-1", visible="0"), place(2, "GPU-2")])
    text = str(caught.value)
    assert "rank 0: host-a, H100 GPU-1 (CUDA_VISIBLE_DEVICES=0)" in text and "rank 1" in text and "rank 2" not in text


@pytest.mark.parametrize(
    ("env", "conflict"),
    [
        ({}, False), ({"CUDA_VISIBLE_DEVICES": "4,5"}, False),
        ({"SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, False),
        ({"SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1,2"}, True), ({"SLURM_JOB_GPUS": "4"}, False),
        ({"SLURM_STEP_GPUS": "4", "SLURM_JOB_GPUS": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"}, True),
    ],
)  # fmt: skip
def test_B64_more_cards_than_slurm_gave(env, conflict):
    said = scheduler_conflict(env)
    assert (said is not None) == conflict
    if said:
        assert env["CUDA_VISIBLE_DEVICES"] in said and "launcher flag" in said
