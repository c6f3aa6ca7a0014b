"""The doctor's own ranks: real processes that talk, fail, hang and die, and native parts that load or do not."""

import contextlib
import json
import os
import shutil
import threading
import time
from pathlib import Path

import psutil

from bigtrain.diagnostics.doctor import comm, native


def test_a_wrong_interface_is_found_by_trying_the_right_one():
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "nope0"}

    def attempt(number, extra):
        return comm.measure_attempt(comm.Launch.local(2), number, extra, env={**env, **extra})

    attempts = comm.climb(attempt, ["lo"])
    assert [a.passed for a in attempts] == [False, True]
    placement, finding = comm.check_comm(attempts)
    assert finding.status == "broken" and "fails in meet" in finding.what and "nope0" in finding.what
    assert finding.remedy == "export GLOO_SOCKET_IFNAME=lo   (tested: with this it works)"
    assert "rank 1: in meet" in finding.details and placement.status == "ok"
    good = comm.check_comm(attempts[1:])  # two ranks: values of the collectives, a ZeRO-3 step, where they are
    assert [f.status for f in good] == ["ok", "ok"] and "GB/s a link" in good[1].measured
    assert good[0].measured.count("rank ") == 2 and all(s.link_bytes_s > 0 for s in attempts[1].stories)


def test_a_rank_that_never_comes_gives_stacks_within_the_limit():
    launch = comm.Launch(world=2, mine=(0,), first_local=0, local_world=2, master="127.0.0.1", port=None)
    begun = time.monotonic()
    attempt = comm.measure_attempt(launch, 0, {}, limit_s=4.0)
    assert not attempt.passed and time.monotonic() - begun < 100  # with what Python takes to import
    finding = comm.check_comm([attempt])[-1]
    assert finding.status == "broken" and "in meet" in finding.what and "ranks that did not: 1." in finding.what
    assert "Timeout (0:00:03.6" in finding.details and "in init_distributed" in finding.details


def _kill(rank, seen):
    """Kill -9 the rank once it has begun to meet the others."""
    end = time.monotonic() + 60
    while time.monotonic() < end and not seen:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                words = child.cmdline()
                if "bigtrain.diagnostics.doctor.rank" in words and child.environ()["RANK"] == str(rank):
                    told = Path(words[words.index("bigtrain.diagnostics.doctor.rank") + 1], f"rank.{rank}.json")
                    if json.loads(told.read_text())["stage"] != "start":
                        child.kill()
                        seen.append(child.pid)
        time.sleep(0.002)


def test_a_killed_rank_is_named():
    seen = []
    killer = threading.Thread(target=_kill, args=(1, seen))
    killer.start()
    attempt = comm.measure_attempt(comm.Launch.local(2), 0, {})
    killer.join()
    finding = comm.check_comm([attempt])[-1]
    assert seen and finding.status == "broken" and attempt.seconds < 40
    assert "rank 1" in finding.details and "ended with signal 9" in finding.details and not psutil.pid_exists(seen[0])


def test_B65_cpu_adam_runs_here_and_its_speed_is_known():
    probed = native.measure_native(rates=True, ops=["cpu_adam"], scratch=False)
    finding = native.check_op("cpu_adam", probed)
    assert finding.status == "ok", finding
    assert {f.status for f in native.check_rates(probed)} == {"ok"}
    assert 1e8 < probed.rates["host"]["host_bytes_s"] < 1e13 and 1e-12 < probed.ops["cpu_adam"]["cpu_adam_s_per_elem"] < 1e-7


def test_B65_the_first_error_of_a_failed_build_is_shown(tmp_path):
    real, failing = shutil.which("c++"), "echo 'x.cpp:1:2: error: no such header' >&2; exit 1"
    (tmp_path / "c++").write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {failing};; esac\nexec {real} "$@"\n')
    (tmp_path / "c++").chmod(0o755)
    env = {**os.environ, "CXX": str(tmp_path / "c++")}
    finding = native.check_op("cpu_adam", native.measure_native(rates=False, ops=["cpu_adam"], scratch=True, env=env))
    assert finding.status == "broken" and "torch's AdamW" in finding.what
    assert "no such header" in finding.measured, finding
