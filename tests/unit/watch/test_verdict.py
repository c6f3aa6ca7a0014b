"""Who is behind, and why: the decision by itself."""

from bigtrain.watch.verdict import GRACE_S, Known, judge, what_it_does

LIMIT, SILENT = 60.0, 20.0


def at(rank, step=5, waiting=True, idle_s=0.0, place="engine.step()", **more):
    return Known(rank=rank, step=step, waiting=waiting, idle_s=idle_s, place=place, **more)


def verdict(*ranks):
    return judge(ranks, LIMIT, SILENT)


def test_nothing_is_said_while_any_rank_moves_or_nobody_waits():
    assert verdict(at(0), at(1)) is None
    assert verdict(at(0, idle_s=300), at(1, waiting=False, idle_s=59)) is None
    assert verdict(at(0, waiting=False, idle_s=900), at(1, waiting=False, idle_s=900)) is None


def test_a_wait_that_is_meant_to_be_long_is_none():
    assert verdict(at(0, waiting=False, idle_s=900), at(1, idle_s=900, patient=True)) is None


def test_fewer_steps():
    found = verdict(at(0, step=5, idle_s=61), at(1, step=4, idle_s=70))
    assert found.behind == (1,) and "rank 1 made 4 steps and others 5: different numbers of steps" in found.text
    assert found.grace_s == 0.0


def test_a_rank_elsewhere_is_behind_and_its_place_is_told():
    here = {"place": "between steps", "waiting": False, "idle_s": 61.0}
    loader = verdict(at(0, idle_s=61), at(1, **here, lines=("train.py:10 loop", "torch/utils/data/dataloader.py:1 _get_data")))
    assert loader.behind == (1,) and "waits in the data loader (torch/utils/data/dataloader.py" in loader.text
    assert "different numbers" not in loader.text  # both have made as many
    ahead = verdict(at(0, idle_s=61), at(1, **here, step=4, lines=("torch/utils/data/dataloader.py:1 _get_data",)))
    assert "different numbers of steps" in ahead.text
    barrier = verdict(
        at(0, idle_s=61), at(1, **here, lines=("torch/distributed/x.py:1 barrier",))
    )  # of its own, after its last step
    assert "different numbers of steps" in barrier.text
    saving = verdict(at(0, idle_s=61), at(1, **here, lines=("train.py:10 f", "bigtrain/checkpoint/files.py:1 write")))
    assert "is saving" in saving.text
    alone = verdict(
        at(0, idle_s=61, place="engine.save_checkpoint()", script="own.py:7"), at(1, **here, lines=("mine.py:3 <module>",))
    )
    assert (
        alone.behind == (1,)
        and "'if rank == 0' around it at own.py:7" in alone.text
        and "is between steps (mine.py:3 <module>)" in alone.text
    )


def test_different_places_and_the_same_place():
    found = verdict(at(0, idle_s=61, module="b"), at(1, idle_s=61, module="c"))
    assert found.behind == (0, 1) and "different branches" in found.text and "module b" in found.text
    assert "a collective is stuck" in verdict(at(0, idle_s=61), at(1, idle_s=61)).text


def test_ends_come_first():
    dead = verdict(at(0), at(1, ended="died"))
    assert dead.behind == (1,) and dead.grace_s == GRACE_S and "kill -9" in dead.text
    failed = verdict(at(0), at(1, ended="failed", why="DataError: row 3"), at(2, ended="died"))
    assert failed.behind == (1,) and failed.text.startswith("rank 1 failed: DataError: row 3")


def test_a_rank_that_has_left_is_no_fault_until_another_waits_for_it():
    assert verdict(at(0, waiting=False, idle_s=50), at(1, ended="left")) is None
    assert verdict(at(0, idle_s=1), at(1, ended="left")) is None
    found = verdict(at(0, idle_s=4), at(1, step=4, ended="left"))
    assert found.behind == (1,) and "same number of steps" in found.text


def test_stopped_and_silent():
    assert verdict(at(0, idle_s=5), at(1, stopped=True, silent_s=5)) is None
    assert verdict(at(0, waiting=False, idle_s=50), at(1, stopped=True, silent_s=50)) is None
    found = verdict(at(0, idle_s=13), at(1, stopped=True, silent_s=13, idle_s=13))
    assert found.behind == (1,) and "SIGSTOP" in found.text
    short = judge([at(0, idle_s=8), at(1, stopped=True, silent_s=8, idle_s=8, step=4)], 8.0, SILENT)
    assert "SIGSTOP" in short.text  # with a short limit too, and not taken for a rank with fewer steps
    assert verdict(at(0, idle_s=19), at(1, silent_s=19)) is None
    assert "unreachable" in verdict(at(0, idle_s=21), at(1, silent_s=21)).text


def test_words_for_what_a_rank_does():
    assert what_it_does(at(0, place="starting")) == "is starting"
    # The innermost frame that says something, not the outermost.
    lines = ("bigtrain/data/loader.py:1 over", "torch/distributed/x.py:1 barrier")
    assert what_it_does(at(0, lines=lines)).startswith("is in a collective of its own")
