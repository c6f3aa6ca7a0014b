"""Ports and devices: what a second job, one visible card, and Slurm do to them."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from bigtrain.errors import BigtrainError, StoppedError, UsageError
from bigtrain.hosts import placement
from bigtrain.hosts.placement import Place, device_index, explain_port, refuse_shared_cards, scheduler_conflict
from bigtrain.hosts.ports import free_port
from bigtrain.stopping import EXIT_INTERRUPTED, StopSignal
from tests import ROOT


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


LAUNCHED = """
import os, sys, time
from bigtrain.hosts import placement
placement._deepspeed_launcher = lambda: "{launcher}"
with placement.meeting_port(os.environ, wait_s=20) as port:
    time.sleep(1)
    print(os.environ["MASTER_PORT"])
"""


def test_B53_ranks_of_one_host_move_to_a_free_port_together(tmp_path):
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        busy = server.getsockname()[1]
        code = LAUNCHED.format(launcher=f"test-{os.getpid()}-{time.time()}")
        env = {
            **os.environ,
            "TMPDIR": str(tmp_path),
            "WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(busy),
        }
        env.pop("TORCHELASTIC_RUN_ID", None)
        ranks = [
            subprocess.Popen([sys.executable, "-c", code], env={**env, "RANK": r}, stdout=subprocess.PIPE, text=True)
            for r in "01"
        ]
        ports = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    assert ports[0] == ports[1] != str(busy)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_B53_a_free_port_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "_deepspeed_launcher", lambda: "keep")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    port = str(free_port())
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with placement.meeting_port(env):
        assert env["MASTER_PORT"] == port


@pytest.mark.parametrize(
    "env",
    [
        {}, {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"},
    ],
)  # fmt: skip
def test_B53_several_hosts_and_torchrun_are_left_alone(env, monkeypatch):
    monkeypatch.setattr(placement, "_deepspeed_launcher", lambda: "never")
    before = dict(env)
    with placement.meeting_port(env) as port:
        assert port is None and env == before


def test_B53_a_rank_does_not_wait_forever_for_the_port(tmp_path):
    with pytest.raises(BigtrainError, match="rank 0 did not say"):
        placement._await(tmp_path / "none.port", 0.1)


def test_B53_the_message_of_an_occupied_port():
    error = RuntimeError("The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE")
    said = explain_port(error)
    assert said is not None and "--master_port" in str(said) and said.exit_code == 2
    assert explain_port(RuntimeError("out of memory")) is None


def test_first_signal_is_a_wish_and_its_echo_too():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher's copy of the same Ctrl-C
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_leaves_at_once():
    code = (
        "import os, signal, time\nfrom bigtrain import stopping\nstopping.ECHO_S = 0.05\n"
        "with stopping.StopSignal():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert done.returncode == EXIT_INTERRUPTED and b"second Ctrl-C" in done.stderr


ONE_OF_TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'"), ({"RANK": ""}, "RANK is ''"), ({"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"), ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"), ({"RANK": None}, "WORLD_SIZE is '2', but RANK is not set"),
    ],
)  # fmt: skip
def test_variables_of_a_launcher_that_cannot_be_are_refused_by_name(change, words):
    env = {name: value for name, value in {**ONE_OF_TWO, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=words), placement.meeting_port(env):
        pass


def test_variables_of_a_launcher_that_can_be():
    assert (
        placement.launch_problems(ONE_OF_TWO)
        == placement.launch_problems({})
        == placement.launch_problems({"WORLD_SIZE": "1"})
        == []
    )


@pytest.mark.parametrize(("rank", "world"), [("x", "1"), ("5", None)])
def test_whatever_is_wrong_is_said_by_a_rank_that_cannot_be(rank, world):
    """Its own number decides who speaks: there was a traceback for one, and no word at all for the other."""
    env = {k: v for k, v in {**os.environ, "RANK": rank, "WORLD_SIZE": world}.items() if v is not None and k != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, "-m", "launch.train"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "UsageError" in done.stderr and "Traceback" not in done.stderr


MEETING = """
import datetime, sys, torch.distributed as dist
from bigtrain.stopping import StopSignal
with StopSignal() as stop, stop.leaving_at_once():
    print("ready", flush=True)
    dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, datetime.timedelta(seconds=60))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_the_others_can_be_stopped(number):
    """It waits in C++, where no handler of Python's runs: Ctrl-C and SIGTERM went unheard for --ddp_timeout, half an hour."""
    rank = subprocess.Popen(
        [sys.executable, "-c", MEETING, str(free_port())], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert rank.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    rank.send_signal(number)
    said = rank.communicate(timeout=20)[1]
    assert rank.returncode == StoppedError.exit_code and b"while the ranks were meeting" in said


def test_after_the_meeting_a_signal_is_a_wish_again():
    with StopSignal() as stop:
        with stop.leaving_at_once():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert stop.requested == "SIGTERM" and signal.set_wakeup_fd(-1) == -1
