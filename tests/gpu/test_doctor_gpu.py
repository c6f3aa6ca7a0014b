"""The doctor on real cards: NCCL's health, its rate, and the ladder of settings when a transport is broken on purpose."""

import os

import pytest
import torch

from bigtrain.diagnostics.doctor import comm, network

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def climb(**env):
    """The attempts that the doctor makes with such an environment."""
    values = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", *env)} | env

    def attempt(number, extra):
        return comm.measure_attempt(comm.Launch.local(2), number, extra, env={**values, **extra})

    return comm.climb(attempt, list(network.interfaces_up()))


def test_two_cards_talk_over_nccl():
    (only,) = climb()
    assert only.passed, [s.describe() for s in only.stories]
    assert {s.backend for s in only.stories} == {"nccl"}
    # PCIe gen4 moves 20e9 bytes/s a direction, through the host's memory half of that; NVLink ten times as much.
    assert min(s.link_bytes_s for s in only.stories) > 2e9
    places = comm.places_found(only)
    assert len({p.physical for p in places}) == 2


def test_a_wrong_interface_for_nccl_is_mended_by_pinning_a_right_one():
    attempts = climb(NCCL_SOCKET_IFNAME="=nope0")
    assert not attempts[0].passed and attempts[-1].passed
    *_, finding = comm.check_comm(attempts)
    assert finding.status == "broken" and "export NCCL_SOCKET_IFNAME=" in finding.remedy and "tested" in finding.remedy
    assert "NCCL_SHM_DISABLE=1: fails" in finding.details


def test_every_transport_that_can_be_switched_off_is_tried_in_fresh_processes():
    """Each variation by itself, on healthy cards: none of them breaks anything, so each may be printed as a remedy."""
    interfaces = list(network.interfaces_up())
    for extra in comm.variations("nccl", interfaces[:1]):
        attempt = comm.measure_attempt(comm.Launch.local(2), 0, extra, env={**os.environ, **extra})
        assert attempt.passed, (extra, [s.describe() for s in attempt.stories])
