"""The watch's thread against a real line to another rank, with the end of the process replaced by a note."""

import json
import threading
import time

import pytest

from bigtrain.watch import current, verdict, watcher
from bigtrain.watch.watcher import FACTOR, FIRST_S, LEARNED, LEAST_S, MOST_S, Watcher
from bigtrain.whereabouts import HERE
from tests.unit.watch.test_mesh import connected, meshes


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """A watcher of rank 0, the bare line of rank 1, and the exit codes so far."""
    monkeypatch.setattr(verdict, "GRACE_S", 0.5)
    monkeypatch.setattr(HERE, "folder", str(tmp_path))
    mine, other = meshes(2)
    connected(mine, other)
    codes = []

    def end(code):
        codes.append(code)
        watch._quit.set()

    watch = Watcher(mine, mine._everyone, 0, threading.get_ident(), 60.0, end=end)
    watch.start()
    yield watch, other, codes
    watch._quit.set()
    watch._thread.join(5)


def until(condition, limit_s=20.0):
    end = time.monotonic() + limit_s
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    assert condition()


def test_a_line_that_closes_without_a_farewell_ends_the_process_with_a_report(pair, tmp_path, capfd):
    watch, other, codes = pair
    other.close()
    until(lambda: codes)
    assert codes == [watcher.EXIT_HANG] and watch.lost()[1].startswith("ended without a word")
    assert "rank 1 ended" in capfd.readouterr().err
    assert (tmp_path / "hang" / "summary.txt").read_text().startswith("rank 1 ended")
    told = (tmp_path / "hang" / "rank-0.txt").read_text()
    assert "test_watcher.py" in told and "--- thread bigtrain-watch" in told and "last collectives" in told


def test_a_farewell_is_no_death(pair):
    watch, other, codes = pair
    other.say({"ended": "left", "step": 4})
    other.close()
    until(lambda: watch.lost())
    time.sleep(1.5)
    assert codes == [] and watch.lost() == {1: "its program came to its end after step 4"}


def test_the_error_of_another_rank_is_known_and_a_later_farewell_does_not_hide_it(pair, capfd):
    watch, other, codes = pair
    other.say({"ended": "failed", "why": "DataError: row 3", "step": 4})
    other.say({"ended": "left", "step": 4})
    other.close()
    until(lambda: codes)
    assert watch.lost() == {1: "failed: DataError: row 3"} and "rank 1 failed: DataError: row 3" in capfd.readouterr().err


def test_whether_another_rank_fails_alike(pair, monkeypatch):
    watch, other, _ = pair
    monkeypatch.setattr(current, "_current", (watch, None))
    assert not current.fails_alike(1, ValueError("row 3"), wait_s=0.1)
    threading.Timer(0.3, other.say, ({"ended": "failed", "why": "ValueError: row 3", "step": 0},)).start()
    assert current.fails_alike(1, ValueError("row 3\nand more"), wait_s=20.0)
    assert not current.fails_alike(1, ValueError("row 4")) and not current.fails_alike(1, KeyError("row 3"))


def test_what_another_rank_decided_is_taken_over(pair, capfd):
    _, other, codes = pair
    other.say({"verdict": {"behind": [1], "text": "rank 1 is late", "grace_s": 0.0}})
    until(lambda: codes)
    assert "the run ends: rank 1 is late" in capfd.readouterr().err


def test_a_rank_that_has_failed_itself_reports_no_hang(pair, tmp_path, monkeypatch):
    """What all ranks fail at alike may be that another run has the folder, which is no place for reports then."""
    watch, other, codes = pair
    monkeypatch.setattr(current, "_current", (watch, None))
    current.failed(ValueError("the folder is in use"))
    other.say({"verdict": {"behind": [0], "text": "rank 0 failed: ValueError: the folder is in use", "grace_s": 30.0}})
    until(lambda: watch.verdict)
    time.sleep(0.3)
    assert codes == [] and not (tmp_path / "hang").exists()


def test_nothing_moves(pair, tmp_path, capfd):
    watch, other, codes = pair
    watch.limit = 3.0
    beat = {
        "idle_s": 9.0,
        "step": 2,
        "place": "between steps",
        "waiting": False,
        "patient": False,
        "longest_s": 0.0,
        "started": True,
    }
    stop = threading.Event()

    def other_rank():
        while not stop.wait(0.3):
            other.say({**beat, "module": "", "lines": ["torch/utils/data/dataloader.py:7 next"], "collective": ""})

    thread = threading.Thread(target=other_rank)
    thread.start()
    with HERE.together("engine.step()"):
        done = threading.Event()
        threading.Timer(12.0, done.set).start()
        threading.Thread(target=lambda: (until(lambda: codes), done.set())).start()
        done.wait()  # this thread stands still in here, as in a collective
    stop.set()
    thread.join()
    assert codes == [1]
    said = capfd.readouterr().err
    assert "no rank has moved" in said and "rank 1, after step 2, waits in the data loader" in said and "engine.step()" in said
    assert (tmp_path / "hang" / "rank-0.txt").exists()


def test_a_learned_limit_follows_the_longest_pause_within_bounds(pair, monkeypatch):
    watch, _, _ = pair
    watch.limit = LEARNED
    assert watch.limit_s == FIRST_S
    watch._all_started = True
    for longest_s, expected in ((0.1, LEAST_S), (10.0, FACTOR * 10.0), (1e4, MOST_S)):
        watch._longest_s = longest_s
        assert watch.limit_s == expected


def test_a_gap_of_this_process_itself_is_nobodys_fault(pair):
    watch, _, _ = pair
    heard, since = watch._heard_at[1], watch._pulse.since
    watch._forgive(100.0)
    assert watch._heard_at[1] == heard + 100 and watch._pulse.since >= since + 100
    assert json.dumps(watch._beat())
