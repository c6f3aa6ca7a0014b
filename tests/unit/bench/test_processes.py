"""Ranks as real processes: what launchers tell them, exit codes, time limits, and nothing left behind."""

import json
import subprocess
import sys
import time
import uuid

import pytest

from bigtrain.bench import processes
from bigtrain.bench.processes import MARK, marked, run_ranks

NAMES = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MORE", MARK)
SAY = f"import json, os; print(json.dumps({{k: os.environ.get(k) for k in {NAMES}}}))"


def run(tmp_path, code, world=2, limit_s=20.0, **env):
    return run_ranks([sys.executable, "-c", code], world=world, logs=tmp_path, limit_s=limit_s, env=env, cwd=tmp_path)


def test_ranks_are_told_what_a_launcher_tells(tmp_path):
    ended = run(tmp_path, SAY, world=3, MORE="yes")
    told = [json.loads((tmp_path / f"rank{r}.log").read_text()) for r in range(3)]
    assert ended.exit_codes == [0, 0, 0] and [t["RANK"] for t in told] == ["0", "1", "2"]
    assert {t["WORLD_SIZE"] for t in told} == {"3"} and {t["MORE"] for t in told} == {"yes"}
    assert len({t["MASTER_PORT"] for t in told}) == 1


def test_exit_codes_of_each_and_a_failed_rank_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    begin = time.monotonic()
    ended = run(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)")
    assert ended.exit_codes == [None, 3] and not ended.timed_out and time.monotonic() - begin < 10


def test_time_limit_kills_grandchildren_in_other_sessions_too(tmp_path):
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"print(os.environ[{MARK!r}], flush=True)\n"
        "time.sleep(60)\n"
    )
    ended = run(tmp_path, code, world=1, limit_s=5.0)
    mark = (tmp_path / "rank0.log").read_text().strip()
    assert ended.timed_out and ended.exit_codes == [None] and ended.seconds < 20
    assert mark and list(marked(mark)) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes._HostWatch, "sample", interrupt)
    started = []
    monkeypatch.setattr(processes.uuid, "uuid4", lambda: type("U", (), {"hex": started.append(1) or "interrupted-cell"})())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "import time; time.sleep(60)")
    assert started and list(marked("interrupted-cell")) == []


def test_a_sweep_that_is_killed_leaves_nothing_behind(tmp_path):
    """The ranks are sessions of their own: they went on training, on cards that the next sweep took for free."""
    inner = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); time.sleep(60)"
    outer = (
        "import pathlib, sys, uuid\nfrom bigtrain.bench import processes\n"
        "processes.uuid.uuid4 = lambda: uuid.UUID(sys.argv[2])\n"
        "here = pathlib.Path(sys.argv[1])\n"
        f"processes.run_ranks([sys.executable, '-c', {inner!r}], world=2, logs=here, limit_s=60, env={{}}, cwd=here)"
    )
    mark = uuid.uuid4().hex
    sweep = subprocess.Popen([sys.executable, "-c", outer, str(tmp_path), mark])
    wait_for(lambda: len(list(marked(mark))) == 4)  # two ranks, and a child of each in a session of its own
    sweep.kill()
    sweep.wait()
    wait_for(lambda: not list(marked(mark)))


def wait_for(is_so, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_memory_is_seen_from_outside(tmp_path):
    code = "import os, time\nx = bytearray(os.urandom(1) * ((100 << 20) if os.environ['RANK'] == '1' else 1))\ntime.sleep(1)"
    ended = run(tmp_path, code)
    assert ended.rss_bytes[1] - ended.rss_bytes[0] > 95 << 20 and ended.pss_bytes[1] > 100 << 20
    assert ended.pss_bytes[1] > 195 << 20  # the bytes and the bytearray made of them: a peak between two samples counts
    assert ended.node_pss_bytes > 100 << 20


def test_ranks_together_are_what_they_hold_at_one_moment(tmp_path):
    """Rank 0 holds 200 MiB for a while; rank 1 does when that is gone: never 400."""
    code = (
        "import os, pathlib, time\n"
        "gone, second = pathlib.Path('gone'), os.environ['RANK'] == '1'\n"
        "while second and not gone.exists(): time.sleep(0.02)\n"
        "x = b'x' * (200 << 20)\ntime.sleep(0.5)\ndel x\ngone.touch()\n"
        "while not second and time.time() < gone.stat().st_mtime + 2: time.sleep(0.1)\n"
    )
    ended = run(tmp_path, code)
    assert all(ended.pss_bytes[rank] > 200 << 20 for rank in (0, 1))
    assert 200 << 20 < ended.node_pss_bytes < 300 << 20
