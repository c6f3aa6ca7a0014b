"""What a machine that cannot compile DeepSpeed's CPU Adam is told."""

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from bigtrain import builds, zero


@pytest.fixture
def no_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def _tool(folder, name):
    (folder / name).write_text("#!/bin/sh\nexit 1\n")
    (folder / name).chmod(0o755)


def test_B65_the_missing_compiler_is_named_first(no_tools):
    assert "'c++'" in zero.why_no_cpu_adam()
    _tool(no_tools, "c++")
    assert "ninja" in zero.why_no_cpu_adam()


def test_B65_torchs_adamw_steps_in(no_tools, caplog):
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = zero.cpu_adam([{"params": [param]}], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    assert type(optimizer) is torch.optim.AdamW and "no C++ compiler" in caplog.text


def test_B65_the_first_cause_of_a_chain_is_shown():
    try:
        try:
            raise RuntimeError("ninja: build stopped\nfoo.cpp:3:1: error: no such header\nmore")
        except RuntimeError as inner:
            raise RuntimeError("DeepSpeedCPUAdam requires the cpu_adam op") from inner
    except RuntimeError as outer:
        assert builds.first_cause(outer) == "RuntimeError: foo.cpp:3:1: error: no such header"


def test_it_is_compiled_without_debug_information_unless_another_program_did_with(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    class Builder:
        name = "cpu_adam"

        def cxx_args(self):
            return ["-O3", "-g", "-Wall"]

    assert builds.without_symbols(Builder()).cxx_args() == ["-O3", "-Wall"]
    assert "-g" in zero.deepspeed.ops.op_builder.CPUAdamBuilder().cxx_args()  # else it is for nothing
    (tmp_path / "cpu_adam" / "build.ninja").write_text("cflags = -O3 -g -Wall")
    assert builds.without_symbols(Builder()).cxx_args() == ["-O3", "-g", "-Wall"]


def test_a_compile_is_said_as_it_begins_and_not_where_there_is_none(monkeypatch, tmp_path, capfd):
    """To a script that has set up no logging too; also where what is there is out of date, which ninja alone sees."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(builds, "TELL_S", 0.3)
    monkeypatch.setattr(builds.log, "propagate", False)  # pytest's own handlers
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "cpu_adam.so").touch()
    (tmp_path / "ninja").symlink_to(shutil.which("sleep"))
    said = {}

    class Builder:
        name = "cpu_adam"

        def __init__(self, program, limit_s):
            self.program, self.limit_s = program, limit_s

        def cxx_args(self):
            return []

        def load(self, verbose):
            process, end, told = subprocess.Popen([self.program, "60"], cwd=folder), time.monotonic() + self.limit_s, ""
            while "still compiling cpu_adam, for " not in told and time.monotonic() < end:
                time.sleep(0.05)
                told += capfd.readouterr().err
            process.kill()
            process.wait()
            said[self.program.name] = told

    builds.load_op(Builder(tmp_path / "ninja", 0.5))
    builds.load_op(Builder(Path(shutil.which("sleep")), 30.0))
    assert said["ninja"] == "" and said["sleep"].startswith(f"compiling cpu_adam into {folder}, once")
    assert said["sleep"].count("\n") == 2


def test_the_lock_of_a_killed_build_is_removed_and_a_live_one_is_waited_for(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder, now = tmp_path / "cpu_adam", time.time()
    lock = folder / "lock"

    def leave(age_s):
        lock.touch()
        for path in (lock, folder):
            os.utime(path, (time.time() - age_s,) * 2)

    assert builds.wait_for_build("cpu_adam") is False
    leave(400)
    compiler = subprocess.Popen(["sleep", "0.6"], cwd=folder)  # writes nothing, and is there
    assert builds.wait_for_build("cpu_adam", poll_s=0.05) is True and not lock.exists()
    assert compiler.wait() == 0 and time.time() - now >= 0.5
    leave(0)
    threading.Timer(0.5, lock.unlink).start()  # its owner is done
    assert builds.wait_for_build("cpu_adam", poll_s=0.05) is False
    leave(299.6)  # killed, and started again at once: torch alone would wait without end
    assert builds.wait_for_build("cpu_adam", poll_s=0.05) is True and not lock.exists()
    leave(-3600)  # the clock was set back since
    threading.Timer(5.0, lambda: lock.unlink(missing_ok=True)).start()
    assert builds.wait_for_build("cpu_adam", idle_s=0.5, poll_s=0.05) is True and not lock.exists()
    assert caplog.text.count("waiting for another process that builds cpu_adam") == 4
