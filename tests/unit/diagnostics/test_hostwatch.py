"""The thread that watches host memory: one warning, one stop, and nothing after its end."""

import threading

from bigtrain.diagnostics.hostwatch import HostWatch
from bigtrain.plan.room import Room


def test_warns_once_then_stops_once():
    shares, said, done = iter([None, 0.9, 0.93, 0.93, 0.98, 0.99]), [], threading.Event()

    def look():
        share = next(shares)
        return None if share is None else Room(int(share * 1000), 1000, "container limit")

    def full(use):
        said.append(("full", use.used_bytes))
        done.set()

    watch = HostWatch(lambda use: said.append(("warning", use.used_bytes)), full, look, interval_s=0.001)
    watch.start()
    assert done.wait(30)
    watch.stop()
    assert said == [("warning", 930), ("full", 980)]


def test_a_jump_past_both_marks_is_answered_at_once():
    said, done = [], threading.Event()
    watch = HostWatch(lambda use: said.append("warning"), lambda use: (said.append("full"), done.set()),
                      lambda: Room(99, 100, "the machine's memory"), interval_s=0.001)  # fmt: skip
    watch.start()
    assert done.wait(30)
    assert said == ["full"]
    watch.stop()


def test_a_fine_run_hears_nothing():
    looked, said = threading.Event(), []
    watch = HostWatch(said.append, said.append, lambda: (looked.set(), Room(10, 100, ""))[1], interval_s=0.001)
    watch.start()
    assert looked.wait(30)
    watch.stop()
    assert not said and not watch._thread.is_alive()
