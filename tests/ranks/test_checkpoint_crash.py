"""Killed ranks and silent ranks: the newest checkpoint stays whole, resume is exact, survivors end and say who is gone."""

import os
import signal
import time
from pathlib import Path

from bigtrain import ranks
from bigtrain.checkpoint import confirm, save, store
from bigtrain.checkpoint.files import Disk
from bigtrain.errors import CheckpointError
from tests import ROOT, python_path
from tests.ranks import scripts
from tests.ranks.test_checkpoint import _slices


def test_B28_sigkill_at_disk_operations_and_random_moments(tmp_path):
    words = ["--limit_s", "30", "--workers", "2"]
    env = {"BIGTRAIN_CRASH_SURVIVOR_S": "60", **os.environ, "PYTHONPATH": python_path()}
    trials = scripts.Script([ROOT / "tests/ranks/crash.py", tmp_path / "work", *words], env, tmp_path / "said")
    code, said = trials.wait(280), trials.said()
    assert code == 0, "\n".join(line for line in said.splitlines() if '"wrong": []' not in line)[-6000:]
    assert said.count('"wrong": []') >= 3


class _SlowDisk(Disk):
    """Rank 1 writes its manifest only after the others lost patience."""

    def step(self, operation, path):
        if ranks.rank() == 1 and operation == "write" and path.suffix == ".json":
            time.sleep(4)


def _impatient(root: str) -> str:
    save.CONFIRM_TIMEOUT_S = 1.5
    try:
        saver = save.Saver(Path(root), disk=_SlowDisk())
    finally:
        save.CONFIRM_TIMEOUT_S = 3600.0
    saver.start(3, _slices(True), run={}, rank_state={}, layout={})
    try:
        saver.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_answer_is_named(rank_pool, tmp_path):
    first, second = rank_pool(2).run(_impatient, str(tmp_path))
    assert "step 3 was not saved" in first and "rank 1 ended, or did not answer within 2 s" in first
    assert "rank 0 ended, or did not answer" in second
    assert store.steps(tmp_path) == []


def _patient(root: str) -> None:
    before, confirm.CONNECT_TIMEOUT_S = confirm.CONNECT_TIMEOUT_S, 2.0
    try:
        saver = save.Saver(Path(root), disk=_SlowDisk())
    finally:
        confirm.CONNECT_TIMEOUT_S = before
    saver.start(3, _slices(True), run={}, rank_state={}, layout={})
    saver.wait()


def test_a_slow_disk_may_take_longer_than_ranks_to_connect(rank_pool, tmp_path):
    """A gloo group has one limit, for its making and for its messages."""
    rank_pool(2).run(_patient, str(tmp_path))
    assert store.steps(tmp_path) == [3]


_KILLED = """
import os, signal, sys
from pathlib import Path
import torch.distributed as dist
from bigtrain import ranks
from bigtrain.checkpoint import confirm, save
from bigtrain.errors import RanksDisagreeError

dist.init_process_group("gloo")
confirm.CONNECT_TIMEOUT_S = 2.0
ranks.control_group()
if ranks.rank() == 1:
    dist.new_group = lambda **told: os.kill(os.getpid(), signal.SIGKILL)
try:
    save.Saver(Path(sys.argv[1]))
except RanksDisagreeError as error:
    print(error)
"""


def test_a_rank_that_is_killed_while_the_savers_connect_is_not_waited_for(tmp_path):
    """The others waited an hour, as for a slow disk."""
    (tmp_path / "script.py").write_text(_KILLED)
    env = {**os.environ, "PYTHONPATH": python_path()}
    two = scripts.Ranks([tmp_path / "script.py", tmp_path / "out"], env, tmp_path / "said", apart=True)
    assert two.wait(30) == -signal.SIGKILL
    assert "some rank did not connect to those that save within 2 s" in two.said()
