"""Signals that ask a rank to stop: what the first and the second do, while ranks meet, and once stderr has been closed."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from bigtrain.errors import StoppedError
from bigtrain.hosts.ports import free_port
from bigtrain.stopping import EXIT_INTERRUPTED, StopSignal
from tests import ROOT, python_path

CODE = """
import os, signal, sys, time
from bigtrain.stopping import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    time.sleep(0.5)  # the reader hangs up
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    open(sys.argv[1], "w").write(str(stop.requested))
"""


def test_a_stop_is_heard_though_nobody_reads_what_is_said(tmp_path):
    """Ctrl-C at `deepspeed --hostfile` ends the ssh connections before the ranks hear of it."""
    said = tmp_path / "said"
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(said)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PYTHONPATH": python_path(), "RANK": "0"},
    )  # fmt: skip
    assert process.stdout.readline() == b"ready\n"
    process.stderr.close()
    assert process.wait(30) == 0
    process.stdout.close()
    assert said.read_text() == "SIGTERM"


END = """
import atexit, concurrent.futures, gc, sys, threading, time
from bigtrain.stopping import end_process

class Late:
    def __del__(self):  # what an interpreter does that is taken apart
        open(sys.argv[1], "a").write("late ")

def note(word):
    time.sleep(0.2)
    open(sys.argv[1], "a").write(word)

late = Late()
atexit.register(note, "atexit ")
threading.Thread(target=note, args=("thread ",)).start()
concurrent.futures.ThreadPoolExecutor().submit(note, "executor ")
print("said")
end_process(7)
"""


def test_a_process_ends_when_its_threads_and_exit_functions_are_done(tmp_path):
    said = tmp_path / "said"
    ended = subprocess.run(
        [sys.executable, "-c", END, str(said)], cwd=ROOT, env={"PYTHONPATH": python_path()}, capture_output=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"said\n", b"")
    words = said.read_text().split()
    assert sorted(words) == ["atexit", "executor", "thread"] and words[-1] == "atexit"


HEARD = """
import os, signal, sys
from bigtrain.stopping import StopSignal
number = signal.Signals[sys.argv[1]]
# nohup ignores it; the tests themselves may run under that.
signal.signal(number, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.SIG_DFL)
with StopSignal() as stop:
    os.kill(os.getpid(), number)
    print(stop.requested)
"""


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("before", ["default", "ignored"])
def test_what_would_kill_stops_after_the_step_unless_it_was_ignored(name, before):
    ended = subprocess.run(
        [sys.executable, "-c", HEARD, name, before], cwd=ROOT, env={"PYTHONPATH": python_path(), "RANK": "0"}, capture_output=True,
        timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, b"None\n" if before == "ignored" else name.encode() + b"\n")


CLOSED = """
import signal, sys, time
from bigtrain.stopping import StopSignal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests run under
end = time.monotonic() + 60
with StopSignal() as stop:
    print("ready", flush=True)
    while stop.requested is None and time.monotonic() < end:
        time.sleep(0.01)
    print("saved", flush=True)
    print("saved", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write(stop.requested)
"""


def test_what_is_said_to_a_closed_terminal_fails_nothing(tmp_path):
    said = tmp_path / "said"
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", CLOSED, str(said)], {"PYTHONPATH": python_path(), "RANK": "0"})
    told = b""
    while b"ready" not in told:
        told += os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert said.read_text() == "SIGHUP"


NOTHING_OPEN = """
import os, sys
from bigtrain.stopping import end_process, open_what_is_closed
open_what_is_closed()
with open(sys.argv[1], "w") as file:
    os.write(2, b"said")
    print("said")
    print("said", file=sys.stderr)
    print(file.fileno(), sys.stdin.read(), file=file, end="")
end_process(7)
"""


def test_a_program_without_standard_streams_writes_into_no_file(tmp_path):
    """The shell closes them: subprocess would always give some."""
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", NOTHING_OPEN, str(tmp_path / "said")]
    assert (
        subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": python_path(), "PATH": "/bin:/usr/bin"}, timeout=60).returncode
        == 7
    )
    assert (tmp_path / "said").read_text() == "3 "


def test_first_signal_is_a_wish_and_its_echo_too():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the launcher's copy of the same Ctrl-C
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("state", "number", "words"),
    [
        ("trains", signal.SIGTERM, "stopping after this step"),
        ("neither", signal.SIGINT, "stopping; Ctrl-C again"),
        ("neither", signal.SIGTERM, ""),
        ("over", signal.SIGTERM, ""),
        ("over", signal.SIGINT, ""),
    ],
)
def test_a_stop_is_told_where_there_is_something_to_finish(state, number, words, capfd, monkeypatch):
    """Launchers send SIGTERM when another rank has failed: "stopping after this step" stood below the error."""
    monkeypatch.setenv("RANK", "0")
    with StopSignal() as stop:
        setattr(stop, state, True)
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.requested == number.name
    said = capfd.readouterr().err
    assert words in said and bool(said) == bool(words)


def test_second_ctrl_c_leaves_at_once():
    code = (
        "import os, signal, time\nfrom bigtrain import stopping\nstopping.ECHO_S = 0.05\n"
        "with stopping.StopSignal():\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.2)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)
    assert done.returncode == EXIT_INTERRUPTED and b"second Ctrl-C" in done.stderr


MEETING = """
import datetime, sys, torch.distributed as dist
from bigtrain.stopping import StopSignal
with StopSignal() as stop, stop.leaving_at_once():
    print("ready", flush=True)
    dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, datetime.timedelta(seconds=60))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_the_others_can_be_stopped(number):
    """It waits in C++, where no handler of Python's runs: Ctrl-C and SIGTERM went unheard for --ddp_timeout, half an hour."""
    rank = subprocess.Popen(
        [sys.executable, "-c", MEETING, str(free_port())], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert rank.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    rank.send_signal(number)
    said = rank.communicate(timeout=20)[1]
    assert rank.returncode == StoppedError.exit_code and b"while the ranks were meeting" in said


def test_after_the_meeting_a_signal_is_a_wish_again():
    with StopSignal() as stop:
        with stop.leaving_at_once():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert stop.requested == "SIGTERM" and signal.set_wakeup_fd(-1) == -1
