"""A rank whose launcher was killed ends by itself; one that was started by hand outlives its shell."""

import os
import signal
import subprocess
import sys

import pytest

from bigtrain.hosts.launcher import is_launcher
from tests import ROOT, python_path

LAUNCHER = """
import subprocess, sys
subprocess.run(["sh", "-c", '"$@"; exit 1', "sh", sys.executable, "-c", *sys.argv[1:]])
"""

RANK = """
import sys, time
from bigtrain.hosts import launcher
from bigtrain.stopping import StopSignal
with StopSignal() as stop:
    launcher.watch(stop)
    stop.trains = sys.argv[1] == "trains"
    print("ready", flush=True)
    end = time.monotonic() + (60 if sys.argv[2] == "torchrun" else 2)
    while stop.requested is None and time.monotonic() < end:
        time.sleep(0.02)
    print("saved, stopped by", stop.requested, flush=True)
"""


@pytest.mark.parametrize(
    ("phase", "name", "said"),
    [
        ("meets", "torchrun", "stopped by the end of the launcher (process {pid}) before anything was trained"),
        ("trains", "torchrun", "saved, stopped by the end of the launcher (process {pid})"),
        ("trains", "start.py", "saved, stopped by None"),
    ],
)
def test_a_rank_ends_with_its_launcher_and_with_nothing_else(phase, name, said, tmp_path):
    """The shell between them stays."""
    (tmp_path / name).write_text(LAUNCHER)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / name), RANK, phase, name], cwd=ROOT, env={"PYTHONPATH": python_path(), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    if name == "torchrun":
        os.kill(process.pid, signal.SIGSTOP)
        assert process.stdout.readline().startswith(f"the launcher (process {process.pid}) is stopped")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    told = process.stdout.read()  # until the rank has ended
    assert told.splitlines()[-1] == said.format(pid=process.pid)


SCRIPT = """
import signal, sys, time
asked = []
if sys.argv[1] == "engine":
    import torch
    from bigtrain.engine import Engine
    Engine(torch.nn.Linear(2, 1), ds_config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}, learning_rate=1e-2)
else:
    from bigtrain.hosts import launcher
    launcher.watch()
if sys.argv[1] == "saves":
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("ready", flush=True)
end = time.monotonic() + (60 if sys.argv[2] == "torchrun" else 2)
while time.monotonic() < end and not asked:
    time.sleep(0.02)
print("saved", flush=True)
"""


@pytest.mark.parametrize(
    ("what", "name", "rank", "said"),
    [
        ("engine", "torchrun", {"LOCAL_RANK": "0"}, ["SIGTERM for the end of the launcher (process {pid})"]),
        ("saves", "torchrun", {"LOCAL_RANK": "0"}, ["SIGTERM for the end of the launcher (process {pid})", "saved"]),
        ("nothing", "start.py", {"LOCAL_RANK": "0"}, ["saved"]),
        ("engine", "deepspeed", {}, ["saved"]),  # a program that a rank started for itself
    ],
)
def test_a_script_of_ones_own_ends_with_its_launcher_and_with_nothing_else(what, name, rank, said, tmp_path):
    (tmp_path / name).write_text(LAUNCHER)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / name), SCRIPT, what, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **rank},
    )  # fmt: skip
    before = iter(process.stdout.readline, "ready\n")
    assert "" not in before  # it would have ended
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    told = process.stdout.read().splitlines()  # until the rank has ended
    assert [line for line in told if "SIGTERM" in line or line == "saved"] == [line.format(pid=process.pid) for line in said]


LEFT = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: who adopts orphans is this process, not whatever the machine has for it
libc.prctl(15, sys.argv[1].encode())  # PR_SET_NAME
adopter = os.getpid()
starter = os.fork()
if starter:
    os.waitpid(starter, 0)
    os.wait()
    os._exit(0)
if os.fork():
    os._exit(0)
while os.getppid() != adopter:
    time.sleep(0.01)
sys.argv[1:] = ["meets", "nohup"]
"""


@pytest.mark.parametrize(
    ("launched", "adopter", "leaves"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "systemd", True),
        ({"CROSS_RANK": "0", "LOCAL_SIZE": "2"}, "systemd", True),
        ({}, "systemd", False),
        ({"TORCHELASTIC_RUN_ID": "none"}, "python3", False),  # it may have started the rank itself
        ({"TORCHELASTIC_RUN_ID": "none"}, "bash", False),
        ({"TORCHELASTIC_RUN_ID": "none"}, "tune", False),  # a console script has the name of its file
        ({"TORCHELASTIC_RUN_ID": "none"}, "slurmstepd", False),
    ],
)
def test_a_rank_whose_launcher_is_gone_before_it_looks_leaves_at_once(launched, adopter, leaves):
    done = subprocess.run(
        [sys.executable, "-c", LEFT + RANK, adopter], cwd=ROOT, env={"PYTHONPATH": python_path(), **launched}, capture_output=True, text=True,
        timeout=60, start_new_session=True,
    )  # fmt: skip
    assert done.stdout == ("" if leaves else "ready\nsaved, stopped by None\n"), done.stderr


@pytest.mark.parametrize(("words", "leaves"), [((), True), (("--node_rank=1",), False)], ids=["one host", "started by ssh"])
def test_ranks_begin_nothing_where_deepspeed_was_killed_while_it_started_them(words, leaves, tmp_path):
    """`deepspeed` was gone before its second process had imported torch: that one started ranks, and they trained to the end."""
    second = tmp_path / "deepspeed" / "launcher" / "launch.py"
    second.parent.mkdir(parents=True)
    for package in (tmp_path / "deepspeed", second.parent):
        (package / "__init__.py").touch()
    second.write_text(
        "import os, subprocess, sys, time\nwhile os.getppid() != int(os.environ['ADOPTER']):\n    time.sleep(0.01)\n"
        f"env = {{**os.environ, 'CROSS_RANK': '0', 'LOCAL_SIZE': '1'}}\n"
        f"subprocess.run([sys.executable, '-c', {RANK!r}, 'meets', 'nohup'], env=env)\n"
    )
    call = "os.environ['ADOPTER'] = str(adopter)\nos.execv(sys.executable, [sys.executable, '-u', '-m', 'deepspeed.launcher.launch', *sys.argv[2:]])"
    begins = LEFT.split("while os.getppid()")[0]
    done = subprocess.run(
        [sys.executable, "-c", begins + call, "systemd", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{python_path()}"}, start_new_session=True,
    )  # fmt: skip
    assert done.stdout == ("" if leaves else "ready\nsaved, stopped by None\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "launches"),
    [
        ("/v/bin/python3.11 /v/bin/torchrun --standalone train.py", True),
        ("/v/bin/python -u -m deepspeed.launcher.launch --world_info=x train.py", True),
        ("python /v/bin/deepspeed train.py", True),
        ("torchrun train.py", True),
        ("python -m deepspeed.launcher.runner train.py", True),
        ("timeout 5 deepspeed train.py", False),
        ("bash -c torchrun", False),
        ("python -m pytest tests deepspeed torchrun", False),
        ("python launch/train.py --report_to deepspeed", False),
        ("", False),
    ],
)
def test_which_command_lines_are_launchers(words, launches):
    assert is_launcher(words.split()) is launches


INIT = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"docker-init")
sys.exit(subprocess.run(sys.argv[sys.argv.index("--") + 1:]).returncode)
"""


def test_what_the_first_process_of_a_container_has_started_is_no_orphan():
    done = subprocess.run(
        [sys.executable, "-c", INIT, "--", sys.executable, "-c", RANK, "meets", "nohup"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": python_path(), "TORCHELASTIC_RUN_ID": "none"}, start_new_session=True,
    )  # fmt: skip
    assert done.stdout == "ready\nsaved, stopped by None\n", done.stderr
