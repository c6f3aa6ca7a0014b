"""The port on which the ranks of a launch meet: what a second job and a launcher's variables do to it."""

import os
import socket
import subprocess
import sys
import time

import pytest

from bigtrain.errors import BigtrainError, UsageError
from bigtrain.hosts import meeting
from bigtrain.hosts.ports import free_port
from tests import ROOT

LAUNCHED = """
import os, sys, time
from bigtrain.hosts import meeting
meeting._deepspeed_launcher = lambda: "{launcher}"
with meeting.meeting_port(os.environ, wait_s=20) as port:
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
    monkeypatch.setattr(meeting, "_deepspeed_launcher", lambda: "keep")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    port = str(free_port())
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with meeting.meeting_port(env):
        assert env["MASTER_PORT"] == port


@pytest.mark.parametrize(
    "env",
    [
        {}, {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"},
    ],
)  # fmt: skip
def test_B53_several_hosts_and_torchrun_are_left_alone(env, monkeypatch):
    monkeypatch.setattr(meeting, "_deepspeed_launcher", lambda: "never")
    before = dict(env)
    with meeting.meeting_port(env) as port:
        assert port is None and env == before


def test_B53_a_rank_does_not_wait_forever_for_the_port(tmp_path):
    with pytest.raises(BigtrainError, match="rank 0 did not say"):
        meeting._await(tmp_path / "none.port", 0.1)


def test_B53_the_message_of_an_occupied_port():
    error = RuntimeError("The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE")
    said = meeting.explain_port(error)
    assert said is not None and "--master_port" in str(said) and said.exit_code == 2
    assert meeting.explain_port(RuntimeError("out of memory")) is None


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
    with pytest.raises(UsageError, match=words), meeting.meeting_port(env):
        pass


def test_variables_of_a_launcher_that_can_be():
    assert (
        meeting.launch_problems(ONE_OF_TWO) == meeting.launch_problems({}) == meeting.launch_problems({"WORLD_SIZE": "1"}) == []
    )


@pytest.mark.parametrize(("rank", "world"), [("x", "1"), ("5", None)])
def test_whatever_is_wrong_is_said_by_a_rank_that_cannot_be(rank, world):
    """Its own number decides who speaks: there was a traceback for one, and no word at all for the other."""
    env = {k: v for k, v in {**os.environ, "RANK": rank, "WORLD_SIZE": world}.items() if v is not None and k != "LOCAL_RANK"}
    done = subprocess.run(
        [sys.executable, "-m", "launch.train"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "UsageError" in done.stderr and "Traceback" not in done.stderr
