"""Killed ranks and silent ranks: the newest checkpoint stays whole, resume is exact, survivors end and say who is gone."""

import os
import time
from pathlib import Path

from bigtrain import ranks
from bigtrain.checkpoint import save, store
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.verify import verify
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
    finally:
        ranks._groups = None  # gloo gives a group up with the first message that does not come
    return ""


def test_a_rank_that_does_not_answer_is_named(rank_pool, tmp_path):
    first, second = rank_pool(2).run(_impatient, str(tmp_path))
    assert "step 3 was not saved" in first and "rank 1 ended, or did not answer within 2 s" in first
    assert "rank 0 ended, or did not answer" in second
    assert store.steps(tmp_path) == []


class _SlowOn(Disk):
    def __init__(self, rank: int):
        self.rank = rank

    def step(self, operation, path):
        if ranks.rank() == self.rank and operation == "write" and path.suffix == ".json":
            time.sleep(1)


def _side_by_side(root: str) -> None:
    """Rank 0 asks for what the second saver's ranks said while rank 1 has said what the first saver's did."""
    savers = [save.Saver(Path(root) / name, disk=_SlowOn(i)) for i, name in enumerate("ab")]
    for step, saver in enumerate(savers, 3):
        saver.start(step, _slices(True), run={}, rank_state={}, layout={})
    for saver in savers:
        saver.wait()


def test_savers_of_two_engines_do_not_take_each_others_words(rank_pool, tmp_path):
    rank_pool(2).run(_side_by_side, str(tmp_path))
    for step, name in enumerate("ab", 3):
        assert store.steps(tmp_path / name) == [step]
        assert verify(store.folder_for(tmp_path / name, step))[1] == []
