"""The look before each run: what would fail is refused on every rank alike, with the remedy."""

import os
import subprocess
import sys

from bigtrain import ranks
from bigtrain.diagnostics.doctor.collectives import COLLECTIVES
from bigtrain.errors import RanksDisagreeError
from bigtrain.run import preflight
from tests.ranks.test_train import ALONE, ROOT, demo, environment, flags  # noqa: F401
from tests.unit.diagnostics.test_doctor_broken import mounts


def _talk():
    preflight.communicate()
    return True


def test_the_collectives_of_a_run_are_checked_on_its_own_ranks(rank_pool):
    assert rank_pool(2).run(_talk) == [True, True]
    assert rank_pool(3).run(_talk) == [True, True, True]


def _failing():
    def broken(limit_s):
        before(limit_s)
        if ranks.rank() == 1:
            raise ValueError("wrong values")

    before = COLLECTIVES["all-gather"]
    COLLECTIVES["all-gather"] = broken
    try:
        preflight.communicate()
    except RanksDisagreeError as error:
        return str(error)
    finally:
        COLLECTIVES["all-gather"] = before


def test_a_collective_that_fails_on_one_rank_stops_all_with_the_way_to_settings_that_help(rank_pool):
    for message in rank_pool(2).run(_failing):
        assert "the all-gather of 2 ranks over gloo fails" in message and "rank 1: ValueError: wrong values" in message
        assert "bigtrain doctor" in message and "--no_preflight" in message


@mounts
def test_B55_a_run_with_data_workers_does_not_start_on_a_small_shm(demo, tmp_path):  # noqa: F811
    """The same command goes on where the remedy it printed has been applied, or without data workers."""
    script = 'mount -t tmpfs -o size=16m tmpfs /dev/shm; {} exec "$@"'
    command = [*ALONE, *flags(demo, tmp_path / "out", dataloader_num_workers=1, max_steps=1, no_export=True)]

    def run(before):
        words = ["unshare", "-m", "/bin/sh", "-c", script.format(before), "sh", *map(str, command)]
        return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False)

    done = run("")
    assert done.returncode == 2 and "this run would fail" in done.stderr and not (tmp_path / "out").exists()
    remedy = "mount -o remount,size=8G /dev/shm"
    assert remedy in done.stderr and "--no_preflight" in done.stderr
    assert run(f"{remedy};").returncode == 0


def test_what_a_run_does_not_use_does_not_stop_it(tmp_path):
    """64 KiB of lockable memory, as containers have it, matter to RDMA and not to a run on the CPU."""
    code = f"from bigtrain.run import preflight; print([f.name for f in preflight.facts({str(tmp_path / 'a' / 'b')!r}, 0)])"
    words = ["/bin/sh", "-c", 'ulimit -S -l 64; ulimit -S -n 200; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(words, env={**os.environ, **environment()}, capture_output=True, text=True, timeout=120, check=False)
    assert "open files" in done.stdout and "lockable memory" not in done.stdout, done.stderr


@mounts
def test_a_full_disk_stops_a_run_and_a_small_one_is_a_warning(tmp_path):
    """The disk of the output folder, by really writing there."""
    code = f"from bigtrain.run import preflight; print([(f.name, f.status) for f in preflight.facts({str(tmp_path / 'out')!r}, 0)])"
    mount = f"mount -t tmpfs -o size=8m tmpfs {tmp_path}; "
    fill = f"head -c 9000000 /dev/zero > {tmp_path}/x 2>/dev/null; "
    for before, status in ((mount, "warning"), (mount + fill, "broken")):
        words = ["unshare", "-m", "/bin/sh", "-c", before + 'exec "$@"', "sh", sys.executable, "-c", code]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120, check=False)
        assert f"('disk space', '{status}')" in done.stdout, done.stdout + done.stderr
