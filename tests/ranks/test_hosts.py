"""Runs over several hosts: two processes that take each other for hosts, and two hosts made of namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time

import pytest

from bigtrain.hosts.ports import free_port
from tests import ROOT, python_path
from tests.ranks import scripts, two_hosts

# A host name of its own needs a namespace, which Linux gives to everybody or, by its settings, to root alone.
UNSHARE = ["unshare", "--user", "--map-root-user", "--uts", "--mount"]
# The same from inside: util-linux's unshare, for a process that has been forked with everything imported.
APART = """
import ctypes, os, socket
_ids, _libc = (os.getuid(), os.getgid()), ctypes.CDLL(None, use_errno=True)
assert _libc.unshare(0x10000000 | 0x04000000 | 0x00020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWUSER, NEWUTS, NEWNS
for _file, _text in (("uid_map", f"0 {_ids[0]} 1"), ("setgroups", "deny"), ("gid_map", f"0 {_ids[1]} 1")):
    with open(f"/proc/self/{_file}", "w") as _out:
        _out.write(_text)
assert _libc.mount(b"none", b"/", None, ctypes.c_ulong(0x44000), None) == 0, os.strerror(ctypes.get_errno())  # MS_REC | MS_PRIVATE
socket.sethostname("host-" + "ab"[int(os.environ["RANK"])])
"""


def _can_unshare() -> bool:
    tried = shutil.which("unshare") and subprocess.run([*UNSHARE, "hostname", "host-x"], capture_output=True, check=False)
    return bool(tried) and tried.returncode == 0


def begin(code, tmp_path, ranks=(0, 1), words=("", "")):
    """Start `code` on host-a and host-b, one rank each; the processes of the ranks that were asked for."""
    port = free_port()
    script = tmp_path / "script.py"
    script.write_text(APART + code)
    started = []
    for rank in ranks:
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": python_path(),
        }  # fmt: skip
        told = [script, tmp_path, *filter(None, [words[rank]])]
        started.append(scripts.Script(told, env, tmp_path / f"said.{port}.{rank}"))
    return started


def pair(code, tmp_path, limit_s=100, words=("", "")):
    """Run `code` on both to the end: [(exit code, output)]."""
    return [(process.wait(limit_s), process.said()) for process in begin(code, tmp_path, words=words)]


MEET = """
import os, sys, json
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from bigtrain import errors, ranks
from bigtrain.hosts import rollcall
from bigtrain.run import restart, sameness
here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def attempt(function):
    try:
        function()
        print("PASSED")
    except errors.BigtrainError as error:
        print("REFUSED", error.exit_code, error)
"""
TOLD = (
    MEET
    + """
if rank == 1:
    rollcall.tell(errors.ConfigError("ds_config.json: no such file"))
    sys.exit(2)
attempt(lambda: rollcall.roll_call(60))
"""
)
AGAIN = (
    MEET
    + """
import datetime
# torchrun's store outlives the ranks: what those of the first attempt left there must not be taken for the second one's.
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, datetime.timedelta(seconds=60), wait_for_workers=False)
rollcall._store = lambda limit_s: store
for attempt_number in range(3):
    rollcall._called = False
    if rank == attempt_number % 2:
        import time; time.sleep(1.0)
    met = rollcall.roll_call(60)
    met.set(f"mine/{rank}", str(attempt_number))
    met.wait([f"mine/{1 - rank}"])
    print("MET", attempt_number, met.get(f"mine/{1 - rank}").decode())
store.add("done", 1)
while store.add("done", 0) < 2: time.sleep(0.05)
"""
)
# Rank 0, which serves the store, is killed while the other waits for its answer.
KILLED = (
    MEET
    + """
if rank == 0:
    import signal, time
    rollcall._call = lambda *_: (time.sleep(1.0), os.kill(os.getpid(), signal.SIGKILL))
attempt(lambda: rollcall.roll_call(60))
"""
)
# The other's own look at rank 0's seat comes late, when rank 0 has seen that the command lines differ.
LATE = (
    MEET
    + """
if rank == 1:
    import time
    answer = rollcall._answer
    rollcall._answer = lambda *args: (time.sleep(1.0), answer(*args))[1]
attempt(lambda: rollcall.roll_call(60))
"""
)
ALONE = MEET + "attempt(lambda: rollcall.roll_call(1.0))"
SAME = (
    MEET
    + """
dist.init_process_group("gloo", store=rollcall.roll_call(60), rank=rank, world_size=2)
shared, own = here / "shared.jsonl", here / "own.jsonl"
def args(**data):
    return SimpleNamespace(model_name_or_path="preset:llama-tiny", tokenizer_name_or_path=None, **{"train_data": None, "eval_data": None, **data})
attempt(lambda: sameness.refuse_different(args(train_data=str(shared)), {"a": {"b": 1}}))
attempt(lambda: sameness.refuse_different(args(), {"a": {"b": rank, "c": 2}}))
ranks.barrier("before the files differ")
# What a mount does on a real host: one path, another content of the same size.
import subprocess
subprocess.run(["mount", "--bind", str(here / f"disk{rank}"), str(here / "disk")], check=True)
attempt(lambda: sameness.refuse_different(args(train_data=str(here / "disk" / "t.jsonl")), {}))
attempt(lambda: sameness.refuse_different(args(train_data=str(here / "disk" / "u.jsonl"), eval_data=str(here / "disk")), {}))
attempt(lambda: sameness.refuse_different(args(train_data=str(here / "disk" / "w.jsonl")), {}))
attempt(lambda: sameness.refuse_split_output(here / "shared-out", saves=True))
attempt(lambda: sameness.refuse_split_output(here / "disk" / "out", saves=True))
attempt(lambda: sameness.refuse_split_output(here / "disk" / "out", saves=False))
os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # rank 0's agent has just joined
from dataclasses import make_dataclass
A = make_dataclass("A", ["output_dir", "resume_from_checkpoint", "overwrite_output_dir"])
print(restart.after_restart(A(str(here / "shared-out"), None, True)))
print(restart.after_restart(A(str(here / "shared-out"), "elsewhere", False)))
sys.stdout.flush()
os._exit(0)  # gloo's threads can abort the interpreter's own end ("terminate called without an active exception")
"""
)


@pytest.mark.skipif(not _can_unshare(), reason="this machine gives no name spaces: `unshare --user --uts` fails")
class TestTwoHostNames:
    """Real processes with host names and mounts of their own on one network."""

    def test_a_host_that_cannot_start_tells_the_others(self, tmp_path):
        (code, said), (other, _) = pair(TOLD, tmp_path)
        assert code == 0 and other == 2
        assert "REFUSED 2 1 of 2 ranks cannot start" in said and "rank 1 on host-b: ConfigError: ds_config.json" in said

    def test_a_rank_that_does_not_come_is_named(self, tmp_path):
        alone = [begin(ALONE, tmp_path, ranks=(rank,))[0] for rank in (0, 1)]  # on ports of their own: neither meets the other
        for process in alone:
            process.wait(100)
        assert "ranks that came: 0 on host-a; ranks that did not: 1" in alone[0].said()
        said = alone[1].said()
        assert "rank 1 on host-b could not meet the others at 127.0.0.1:" in said and "nc -vz" in said

    def test_ranks_that_are_restarted_meet_anew_in_a_store_that_remembers(self, tmp_path):
        for code, said in pair(AGAIN, tmp_path):
            assert code == 0 and said.split("MET")[1:] == [" 0 0\n", " 1 1\n", " 2 2\n"], said

    def test_a_port_that_another_job_has_is_not_joined(self, tmp_path):
        for _, said in pair(LATE, tmp_path, words=("--seed=1", "--seed=2")):
            assert "met a rank with another command line at 127.0.0.1:" in said and "another job has that port" in said
            assert "--seed=1" in said and "--seed=2" in said

    def test_a_store_that_dies_is_said(self, tmp_path):
        _, (_, said) = pair(KILLED, tmp_path)
        assert "rank 1 on host-b lost the store at 127.0.0.1:" in said and "its output says why" in said

    def test_what_differs_is_refused_with_the_hosts_names(self, tmp_path):
        (tmp_path / "shared.jsonl").write_text("x\n")
        for name in ("disk", "disk0", "disk1", "shared-out"):
            (tmp_path / name).mkdir()
        for rank in (0, 1):
            disk = tmp_path / f"disk{rank}"
            (disk / "t.jsonl").write_text(f"{rank}\n")
            (disk / "u.jsonl").write_text("1\n" * (rank + 1))
            (disk / "w.jsonl").write_text("equal copies\n")
        (tmp_path / "disk0" / "out").mkdir()
        results = pair(SAME, tmp_path)
        assert [code for code, _ in results] == [0, 0], "\n".join(said for _, said in results)
        for _, said in results:
            parts = ["REFUSED" + p if i else p for i, p in enumerate(said.split("REFUSED"))]
            assert parts[0].strip().endswith("PASSED")  # one file on a shared disk
            assert parts[1].startswith("REFUSED 2 the hosts differ:\n  ds_config.a.b: 0 on host-a; 1 on host-b\n")
            assert f"train_data: {tmp_path}/disk/t.jsonl: content " in parts[2] and " on host-a; content " in parts[2]
            assert "u.jsonl: 2 bytes on host-a; 4 bytes on host-b" in parts[3]
            assert parts[3].count("PASSED") == 2  # equal copies; an output folder that both see
            assert "host-b does not see --output_dir" in parts[4] and "--save_steps" in parts[4]
            assert "PASSED" in parts[4]  # without checkpoints
            assert "resume_from_checkpoint='auto', overwrite_output_dir=False" in parts[4]
            assert "resume_from_checkpoint='elsewhere', overwrite_output_dir=False" in parts[4]


# What a rank of one host goes through before the process group: parsing, refusing, telling.
BEFORE = """
import sys
from bigtrain import train
from bigtrain.hosts import rollcall
from bigtrain.stopping import end_process
rollcall.NOTICE_ON_ONE_HOST_S, rollcall.ON_ONE_HOST_S, rollcall.TELL_ON_ONE_HOST_S = 0.3, 2.0, 2.0
end_process(train.main())
"""


REFUSED = "--train_data: README.md does not exist"


def ranks_by_hand(tmp_path, folders):
    """Processes without a launcher, one for each rank of two that has a folder to start in: [(exit code, output)]."""
    script, port, started = tmp_path / "script.py", str(free_port()), []
    script.write_text(BEFORE)
    flags = [
        "--ds_config=zero2",
        "--model_name_or_path=preset:llama-tiny",
        "--tokenizer_name_or_path=x/y",
        "--train_data=README.md",
    ]
    for rank, folder in folders.items():
        kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        env = {
            **kept, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "PYTHONPATH": python_path(),
        }  # fmt: skip
        words = [script, *flags, f"--output_dir={tmp_path}/out"]
        started.append(scripts.Script(words, env, tmp_path / f"said.{rank}", folder))
    return [(process.wait(60), process.said()) for process in started]


class TestOneHostWithoutALauncher:
    """srun, or processes by hand: nobody ends the other ranks where one of them ends before the process group is there."""

    def test_a_rank_that_died_is_named_to_the_others(self, tmp_path):
        ((code, said),) = ranks_by_hand(tmp_path, {0: ROOT})
        assert code == 1
        came = f"ranks that came: 0 on {socket.gethostname()}; ranks that did not: 1. "
        assert f"waiting for other ranks; {came}This ends 2 s" in said
        assert f"RanksDisagreeError: waited 2 s for the other ranks. {came}Look at" in said

    def test_so_is_rank_0_which_would_have_spoken(self, tmp_path):
        ((code, said),) = ranks_by_hand(tmp_path, {1: ROOT})
        assert code == 1
        assert "[rank 1] waiting for rank 0, which has not come to 127.0.0.1:" in said
        assert f"[rank 1] RanksDisagreeError: rank 1 on {socket.gethostname()} could not meet the others at 127.0.0.1:" in said

    def test_a_refusal_on_one_rank_ends_all_with_its_words(self, tmp_path):
        (code, said), (other, _) = ranks_by_hand(tmp_path, {0: ROOT, 1: tmp_path})
        assert (code, other) == (2, 2)
        assert "1 of 2 ranks cannot start, so none does" in said and REFUSED in said

    def test_a_rank_that_refuses_alone_says_it_itself(self, tmp_path):
        ((code, said),) = ranks_by_hand(tmp_path, {1: tmp_path})
        assert code == 2 and said.count(REFUSED) == 1

    def test_a_loop_of_ones_own_hears_the_same(self, tmp_path):
        """It waited in torch's rendezvous, for half an hour and without a word. Its ranks may have command lines of their own."""
        script = tmp_path / "script.py"
        script.write_text(
            "import sys\nfrom bigtrain import ranks, zero\nfrom bigtrain.hosts import rollcall\nrollcall.NOTICE_ON_ONE_HOST_S = 0.3\n"
            "zero.init_distributed(meet_s=float(sys.argv[1]))\nprint('met', ranks.world_size())"
        )

        def begin(rank, port, seconds):
            kept = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
            env = {
                **kept,
                "RANK": rank,
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "PYTHONPATH": python_path(),
            }
            return scripts.Script([script, seconds], env, tmp_path / f"said.{port}.{rank}")

        ports = [str(free_port()) for _ in range(3)]
        alone = [begin("0", ports[0], "1"), begin("1", ports[1], "1")]
        both = [begin(rank, ports[2], f"6{rank}") for rank in "01"]
        assert [process.wait(60) for process in alone + both] == [1, 1, 0, 0], [process.said() for process in alone + both]
        came = f"ranks that came: 0 on {socket.gethostname()}; ranks that did not: 1. "
        assert f"waiting for other ranks; {came}This ends 1 s" in alone[0].said()
        assert f"RanksDisagreeError: waited 1 s for the other ranks. {came}Look at" in alone[0].said()
        assert "waiting for rank 0, which has not come to 127.0.0.1:" in alone[1].said()
        assert "could not meet the others at 127.0.0.1:" in alone[1].said()
        assert all("met 2" in process.said() for process in both)

    def test_a_local_rank_need_not_be_given(self, tmp_path):
        """DeepSpeed's engine asks for the variable by an assertion."""
        script = tmp_path / "script.py"
        script.write_text(
            "import os\nfrom bigtrain.zero import init_distributed as i\ni()\nprint('local', os.environ['LOCAL_RANK'])"
        )
        env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        assert "local 0" in scripts.run([script], {**env, **place, "PYTHONPATH": python_path()})


@pytest.mark.skipif(bool(two_hosts.why_not()), reason=str(two_hosts.why_not()))
def test_hostfile_with_a_cable_that_is_pulled_for_a_moment(tmp_path):
    """Two hosts by DeepSpeed's launcher: the curve of one host, bit for bit, though the network is gone for three seconds."""
    bench = two_hosts.Bench(tmp_path, steps=6)
    expected = bench.reference()
    with two_hosts.TwoHosts(tmp_path / "lab") as hosts:
        job = two_hosts.Job(hosts, "hostfile", tmp_path / "out", bench.flags(save_steps=6))
        job.until_step(2)
        hosts.do("cut", "b")
        time.sleep(3.0)
        hosts.do("heal", "b")
        _, codes = job.finish()
    assert codes == {"a": 0}, job.output()
    assert two_hosts.curve(job.rows()) == expected
    assert (tmp_path / "out" / "checkpoint-6" / "COMMIT").exists()
    assert "2 hosts: same versions, configs and files" in job.output()
