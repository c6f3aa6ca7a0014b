"""Runs of launch/train.py over two hosts, real as far as one machine goes: `python -m tests.ranks.two_hosts`.

`launch/two_hosts.sh` makes the hosts: namespaces with their own address, host name, processes, sshd and disk. Each scenario trains
a tiny model on one rank a host, does something to it, and looks at what every process did. Needs root; see `why_not`.

    python -m tests.ranks.two_hosts --work /tmp/hosts --results docs/results/hosts.md            all of them
    python -m tests.ranks.two_hosts --work /tmp/hosts hostfile off                               some
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.diagnostics.pages import put_table
from tests import ROOT, python_path

SCRIPT = ROOT / "launch" / "two_hosts.sh"
BIN = Path(sys.executable).parent
LIMIT_S = 700.0
NAMES = ("a", "b")


def why_not() -> str | None:
    """Why this machine cannot play two hosts, None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for tool in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "pdsh"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: apt-get install iproute2 util-linux openssh-server pdsh)"
    if shutil.which("sshd") is None and not Path("/usr/sbin/sshd").exists():
        return "sshd is not installed (Debian: apt-get install openssh-server)"
    tried = subprocess.run(["ip", "netns", "add", f"bt-probe-{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"bt-probe-{os.getpid()}"], check=False)
    return None


class TwoHosts:
    """host-a and host-b for the length of a `with` block.

    Args:
        work: folder for keys, logs and the hosts' own disks; each host sees its own one as `disk`.
        mounts: (host, file of this machine, path on that host): what that host sees at the path instead.
    """

    def __init__(self, work: Path, mounts: Sequence[tuple[str, Path, Path]] = ()):
        self.work, self.disk = work, work / "disk"
        work.mkdir(parents=True, exist_ok=True)
        keep = ("TORCH_EXTENSIONS_DIR", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
        values = {
            "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "HF_HOME": self.disk / "hf", "TMPDIR": self.disk, **{k: os.environ[k] for k in keep if k in os.environ},
        }  # fmt: skip
        (work / "env").write_text("".join(f"{k}={v}\n" for k, v in values.items()))
        (work / "mounts").write_text("".join(f"{host} {source} {target}\n" for host, source, target in mounts))

    def __enter__(self) -> TwoHosts:
        try:
            self.do("up")
        except BaseException:
            self.do("down")
            raise
        number = (self.work / "id").read_text().strip()
        self.address = {"a": f"10.77.{number}.1", "b": f"10.77.{number}.2"}
        return self

    def __exit__(self, *_: object) -> None:
        self.do("down")

    def do(self, verb: str, *words: str) -> None:
        """`up`, `cut b`, `heal b`, `off b`, `down`."""
        done = subprocess.run([SCRIPT, verb, self.work, *words], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"two_hosts.sh {verb} failed:\n{done.stdout}{done.stderr}")

    def start(self, host: str, command: Sequence[object], log: Path, **env: str) -> subprocess.Popen[bytes]:
        """A command on a host; its output goes to `log`."""
        words = [SCRIPT, "exec", self.work, host, "env", *[f"{k}={v}" for k, v in env.items()], *command]
        with open(log, "wb") as out:
            return subprocess.Popen([str(w) for w in words], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def rank(self, host: str) -> int | None:
        """Process number, as this machine counts, of the rank on a host."""
        return min((p for p in _processes(host, self.work) if _is_rank(_command(p))), default=None)

    def ranks(self, host: str) -> list[int]:
        """Ranks that live on a host."""
        return [p for p in _processes(host, self.work) if _is_rank(_command(p))]

    def kill_torchrun(self, host: str) -> None:
        """End torchrun's own processes on a host."""
        for pid in _processes(host, self.work):
            if re.search(r"torchrun|torch\.distributed", _command(pid)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def busy(self) -> bool:
        """True while any launcher or rank lives on either host."""
        return any("train.py" in _command(p) for host in NAMES for p in _processes(host, self.work))


def _is_rank(command: str) -> bool:
    return "launch/train.py" in command and not re.search(r"deepspeed|torchrun|torch\.distributed|pdsh|ssh |env -C", command)


def _processes(host: str, work: Path) -> list[int]:
    """All processes of a host, by its process namespace."""
    try:
        space = os.readlink(f"/proc/{(work / f'pid.{host}').read_text().strip()}/ns/pid")
    except OSError:
        return []
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/ns/pid") == space:
                    found.append(int(entry))
            except OSError:
                continue
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


# ---------------------------------------------------------------- one run


@dataclass
class Row:
    """What a scenario showed.

    Attributes:
        seconds: from the event (else from the start) until no process of the run was left on any living host.
        codes: exit codes of the launchers. said: the message. curve: against the one-host run of two ranks.
    """

    scenario: str
    launcher: str
    seconds: float
    codes: str
    said: str
    curve: str
    good: bool


class Job:
    """One training run over both hosts.

    Args:
        hosts: the two.
        launcher: "hostfile": one `deepspeed` on host-a; "torchrun": one on each host; "torchrun.sh": launch/torchrun.sh on each.
        words: flags of train.py. agent: flags of torchrun.
    """

    def __init__(self, hosts: TwoHosts, launcher: str, out: Path, words: Sequence[object], agent: Sequence[object] = ()):
        self.hosts, self.launcher, self.out = hosts, launcher, out
        self.logs = {name: hosts.work / f"{out.name}.{name}.log" for name in NAMES}
        train = ["launch/train.py", *words, "--output_dir", out]
        self.began = time.monotonic()
        if launcher == "hostfile":
            command = ["deepspeed", "--hostfile", hosts.work / "hostfile", "--master_addr", hosts.address["a"], *train]
            self.launchers = {"a": hosts.start("a", command, self.logs["a"])}
        elif launcher == "torchrun":
            meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "host-a:29400", "--rdzv_id", out.name]
            meet += ["--nproc_per_node", 1, *(agent or ["--nnodes", 2])]
            self.launchers = {n: hosts.start(n, ["torchrun", *meet, *train], self.logs[n]) for n in NAMES}
        elif launcher == "slurm.sbatch":
            env = {"PATH": f"{fake_slurm(hosts.work)}:{BIN}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host-[a-b]"}
            env |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "1"}
            self.launchers = {"a": hosts.start("a", ["bash", "launch/slurm.sbatch", *train[1:]], self.logs["a"], **env)}
        else:
            command = ["launch/torchrun.sh", *train[1:]]
            env = {"NNODES": "2", "RANKS": "1", "MASTER_ADDR": hosts.address["a"]}
            self.launchers = {n: hosts.start(n, command, self.logs[n], NODE_RANK=str(i), **env) for i, n in enumerate(NAMES)}

    def rows(self) -> list[dict[str, object]]:
        """metrics.jsonl so far, without a line that is being written."""
        try:
            lines = (self.out / "metrics.jsonl").read_text().split("\n")[:-1]
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    def until_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        """Wait until a step has been made."""
        self._until(lambda: any(int(str(r["step"])) >= step for r in self.rows()), f"step {step}", limit_s)

    def until(self, words: str, host: str = "a", limit_s: float = LIMIT_S) -> None:
        """Wait until the output of a host holds `words`."""
        self._until(lambda: words in self.output(host), repr(words), limit_s)

    def _until(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end or all(p.poll() is not None for p in self.launchers.values()):
                raise RuntimeError(f"{self.out.name}: no {what}\n{self.output()[-5000:]}")
            time.sleep(0.05)

    def output(self, host: str | None = None) -> str:
        """What was printed, by the launcher of a host or by all."""
        return "\n".join(self.logs[n].read_text(errors="replace") for n in NAMES if host in (None, n) and self.logs[n].exists())

    def no_rank_left(self, host: str, limit_s: float = LIMIT_S) -> float:
        """Wait until no rank lives on a host: the time then."""
        self._until(lambda: not self.hosts.ranks(host), f"end of the ranks on host-{host}", limit_s)
        return time.monotonic()

    def finish(self, living: Sequence[str] = NAMES, limit_s: float = LIMIT_S) -> tuple[float, dict[str, int]]:
        """Wait until nothing of it is left on the `living` hosts: (the time then, exit codes by host)."""
        end = time.monotonic() + limit_s
        while any(p.poll() is None for n, p in self.launchers.items() if n in living) or self.hosts.busy():
            if time.monotonic() > end:
                raise RuntimeError(f"{self.out.name} did not end within {limit_s:.0f} s:\n{self.output()[-5000:]}")
            time.sleep(0.1)
        now = time.monotonic()
        return now, {n: p.wait() for n, p in self.launchers.items() if n in living}


def fake_slurm(work: Path) -> Path:
    """A folder with `scontrol` and `srun` that do for host-a and host-b what Slurm's do for one task a node."""
    folder = work / "slurm"
    folder.mkdir(exist_ok=True)
    (folder / "scontrol").write_text("#!/bin/sh\necho host-a\necho host-b\n")
    (folder / "srun").write_text(
        """#!/bin/sh
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
carried=$(env | grep -E '^(SLURM_|TORCH_ELASTIC)' | tr '\\n' ' ')
ssh host-b "cd $PWD && exec env $carried $*" &
ssh host-a "cd $PWD && exec env $carried $*" && wait $!
"""
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


class Bench:
    """Corpus, reference curve and flags that all scenarios share.

    Args:
        work: an empty folder. steps: of the runs that are compared.
    """

    def __init__(self, work: Path, steps: int = 12):
        from bigtrain.data.demo import stdlib_corpus, train_tokenizer

        self.work, self.steps = work, steps
        self.demo = work / "demo"
        if not (self.demo / "tokenizer").exists():
            corpus = stdlib_corpus(self.demo, max_bytes=600_000, validation_every=10)
            train_tokenizer(corpus.train_path, self.demo / "tokenizer", vocab_size=512)
        self._reference: list[object] | None = None

    def flags(self, **more: object) -> list[object]:
        """Flags of a tiny run; None leaves one out."""
        values: dict[str, object] = {
            "ds_config": ROOT / "ds_configs/zero3_offload.json", "model_name_or_path": "preset:llama-tiny",
            "tokenizer_name_or_path": self.demo / "tokenizer", "train_data": self.demo / "train.jsonl", "seq_len": 64,
            "per_device_train_batch_size": 2, "max_steps": self.steps, "learning_rate": 3e-3, "warmup_steps": 1,
            "report_to": "none", "lr_scheduler_type": "constant", **more,
        }  # fmt: skip
        return [w for name, value in values.items() if value is not None for w in (f"--{name}", value)]

    def out(self, name: str) -> Path:
        """A new output folder on the disk that both hosts share."""
        number = 1
        while (out := self.work / f"{name}-{number}").exists():
            number += 1
        out.mkdir()
        return out

    def reference(self) -> list[object]:
        """Losses of two ranks on this one host."""
        kept = self.work / f"reference-{self.steps}.json"
        if self._reference is None and kept.exists():
            self._reference = [tuple(row) for row in json.loads(kept.read_text())]
        if self._reference is None:
            out = self.out("one-host")
            command = ["torchrun", "--standalone", "--nproc_per_node", "2", "launch/train.py", *self.flags(output_dir=out)]
            env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu"}
            done = subprocess.run(
                [str(c) for c in command], cwd=ROOT, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
            self._reference = curve([json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()])
            kept.write_text(json.dumps(self._reference))
        return self._reference

    def compare(self, job: Job) -> str:
        """Whether the losses and gradient norms are those of the reference, bit for bit."""
        mine, other = curve(job.rows()), self.reference()
        if mine == other:
            return "equal"
        apart = next((i for i, (a, b) in enumerate(zip(mine, other)) if a != b), min(len(mine), len(other)))
        return f"DIFFERENT from step {apart + 1} on ({len(mine)} steps)"


def curve(rows: Sequence[dict[str, object]]) -> list[object]:
    """What must be the same bit for bit."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in rows]


def pick(text: str, pattern: str) -> str:
    """The part of the output that matters, on one line."""
    found = re.search(pattern, text, re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"(?m)^host-[ab]: ", "", found.group(0)))[:600] if found else "NOTHING"


GONE = r"(?m)^[^\n]*(?:Error:|run ends:)[^\n]*rank {}\b[^\n]*"  # the line that says which rank is lost


def refused(job: Job, found: dict[str, int]) -> bool:
    """Ended with exit code 2 on every rank (torchrun itself ends with 1 and prints it), before the first step."""
    asked = job.output().count("exitcode  : 2")
    return not job.rows() and (set(found.values()) == {2} or (set(found.values()) == {1} and asked >= len(found)))


def codes(found: dict[str, int]) -> str:
    """Exit codes for the table."""
    return ", ".join(f"{code} (host-{host})" for host, code in found.items())


# ---------------------------------------------------------------- scenarios

SCENARIOS: dict[str, Callable[[Bench], list[Row]]] = {}


def scenario(function: Callable[[Bench], list[Row]]) -> Callable[[Bench], list[Row]]:
    """Put a scenario into the table, under its name."""
    SCENARIOS[function.__name__] = function
    return function


def unbroken(bench: Bench, launcher: str, name: str) -> list[Row]:
    """Two hosts, nothing happens: the curve of one host."""
    with TwoHosts(bench.work / "lab") as hosts:
        job = Job(hosts, launcher, bench.out(name), bench.flags(save_steps=bench.steps))
        end, found = job.finish()
        same = bench.compare(job)
        whole = (job.out / f"checkpoint-{bench.steps}" / "COMMIT").exists() and (job.out / "model" / "config.json").exists()
        said = pick(job.output(), r"2 hosts: same versions[^\n]*")
        good = same == "equal" and whole and set(found.values()) == {0} and said != "NOTHING"
        return [Row("nothing happens", launcher, end - job.began, codes(found), said, same, good)]


@scenario
def hostfile(bench: Bench) -> list[Row]:
    """DeepSpeed's launcher over ssh."""
    return unbroken(bench, "hostfile", "hostfile")


@scenario
def torchrun(bench: Bench) -> list[Row]:
    """torchrun's rendezvous."""
    return unbroken(bench, "torchrun", "torchrun")


@scenario
def torchrun_sh(bench: Bench) -> list[Row]:
    """launch/torchrun.sh on each host."""
    return unbroken(bench, "torchrun.sh", "torchrun-sh")


@scenario
def different(bench: Bench) -> list[Row]:
    """host-b has another transformers, another training file, another tokenizer and another ds_config under the same names."""
    import transformers

    other = bench.work / "other"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    site = Path(transformers.__file__).parents[1]
    metadata = site / f"transformers-{transformers.__version__}.dist-info" / "METADATA"
    data, config = bench.demo / "train.jsonl", bench.work / "ds_config.json"
    shutil.copy(ROOT / "ds_configs/zero3_offload.json", config)
    pairs = [
        (metadata, re.sub(r"(?m)^Version: .*$", "Version: 5.0.0", metadata.read_text())),
        (config, config.read_text().replace('"stage": 3', '"stage": 2')),
    ]
    mounts = []
    for number, (path, text) in enumerate(pairs):
        (other / f"{number}").write_text(text)
        mounts.append(("b", other / f"{number}", path))
    swapped = bytearray(data.read_bytes())
    at = swapped.index(b"return")
    swapped[at : at + 6] = b"RETURN"  # same size, other content
    (other / "data").write_bytes(swapped)
    rows = []
    for what, more, expected in (
        ("another version and ds_config", mounts, r"the hosts differ:.*?Nothing was built"),
        ("another file content of the same size", [("b", other / "data", data)], r"the hosts differ:.*?Nothing was built"),
    ):
        with TwoHosts(bench.work / "lab", more) as hosts:
            job = Job(hosts, "torchrun", bench.out("different"), bench.flags(ds_config=config))
            end, found = job.finish()
            said = pick(job.output(), expected)
            good = refused(job, found) and "on host-a; " in said and "on host-b" in said
            rows.append(Row(f"host-b has {what}", "torchrun", end - job.began, codes(found), said, "not begun", good))
    return rows


@scenario
def missing(bench: Bench) -> list[Row]:
    """A file of the command line is on host-a only."""
    with TwoHosts(bench.work / "lab") as hosts:
        shutil.copy(ROOT / "ds_configs/zero3_offload.json", hosts.work / "a" / "mine.json")
        job = Job(hosts, "torchrun", bench.out("missing"), bench.flags(ds_config=hosts.disk / "mine.json"))
        end, found = job.finish()
        said = pick(job.output(), r"1 of 2 ranks cannot start.*?mine\.json[^\n]*")
        good = refused(job, found) and "rank 1 on host-b" in said
        return [Row("the ds_config is missing on host-b", "torchrun", end - job.began, codes(found), said, "not begun", good)]


@scenario
def own_output(bench: Bench) -> list[Row]:
    """Each host has an output folder of its own."""
    rows = []
    with TwoHosts(bench.work / "lab") as hosts:
        job = Job(hosts, "torchrun", hosts.disk / "saving", bench.flags(save_steps=4))
        end, found = job.finish()
        said = pick(job.output(), r"host-b does not see --output_dir.*?--save_steps")
        good = refused(job, found) and said != "NOTHING"
        rows.append(Row("own output folders, --save_steps", "torchrun", end - job.began, codes(found), said, "not begun", good))
        before = time.time()
        job = Job(hosts, "torchrun", hosts.disk / "plain", bench.flags())
        end, found = job.finish()
        job.out = hosts.work / "a" / "plain"
        same = bench.compare(job)
        said = pick(job.output(), r"host-b does not see --output_dir[^\n]*")
        good = set(found.values()) == {0} and same == "equal" and (job.out / "model" / "model.safetensors").exists()
        good = good and not (hosts.work / "b" / "plain").exists()
        rows.append(Row("own output folders, no --save_steps", "torchrun", end - job.began, codes(found), said, same, good))
        caches = {n: list((hosts.work / n / "hf").rglob("tokens-*.arrow")) for n in NAMES}
        kept = all(p.stat().st_mtime < before for found in caches.values() for p in found)
        text = ", ".join(f"{len(found)} token file(s) in the cache of host-{n}" for n, found in caches.items())
        text += ", written by the first of two runs" if kept else ", written anew by the second run"
        good = kept and [len(found) for found in caches.values()] == [1, 1]
        rows.append(Row("each host has a cache of its own", "torchrun", 0.0, "", text, "", good))
    return rows


@scenario
def killed(bench: Bench) -> list[Row]:
    """kill -9 of the rank on host-b in the middle of a step."""
    rows = []
    for launcher in ("hostfile", "torchrun"):
        with TwoHosts(bench.work / "lab") as hosts:
            job = Job(hosts, launcher, bench.out("killed"), bench.flags(max_steps=4000, save_steps=3))
            job.until_step(4)
            began = time.monotonic()
            os.kill(hosts.rank("b") or 0, 9)
            end, found = job.finish()
            said = pick(job.output("a"), GONE.format(1))
            good = 0 not in found.values() and said != "NOTHING" and end - began < 30
            rows.append(Row("kill -9 of the rank on host-b", launcher, end - began, codes(found), said, "", good))
    return rows


@scenario
def off(bench: Bench) -> list[Row]:
    """host-b loses power: no process says goodbye, no packet comes any more."""
    return gone(bench, "off", "off-b", "power of host-b fails")


def gone(bench: Bench, verb: str, name: str, what: str) -> list[Row]:
    """Nothing comes from host-b any more."""
    with TwoHosts(bench.work / "lab") as hosts:
        job = Job(hosts, "hostfile", bench.out(name), bench.flags(max_steps=4000, save_steps=3, **WATCH))
        job.until_step(4)
        began = time.monotonic()
        hosts.do(verb, "b")
        end, found = job.finish()
        said = pick(job.output("a"), GONE.format(1))
        good = 0 not in found.values() and said != "NOTHING"
        return [Row(what, "hostfile", end - began, codes(found), said, "", good)]


@scenario
def off_first(bench: Bench) -> list[Row]:
    """The host of rank 0 loses power, which also serves the store."""
    with TwoHosts(bench.work / "lab") as hosts:
        job = Job(hosts, "torchrun", bench.out("off-a"), bench.flags(max_steps=4000, save_steps=3, **WATCH))
        job.until_step(4)
        began = time.monotonic()
        hosts.do("off", "a")
        end = job.no_rank_left("b")
        # torchrun's own process goes on asking the rendezvous store, which is gone with host-a, for some minutes: Slurm ends it.
        hosts.kill_torchrun("b")
        _, found = job.finish(living=("b",))
        said = pick(job.output("b"), GONE.format(0)) + "; then torchrun itself was ended"
        good = 0 not in found.values() and not said.startswith("NOTHING")
        return [Row("power of host-a (rank 0) fails", "torchrun", end - began, codes(found), said, "", good)]


@scenario
def cut(bench: Bench) -> list[Row]:
    """The cable of host-b is pulled for ten seconds."""
    with TwoHosts(bench.work / "lab") as hosts:
        job = Job(hosts, "hostfile", bench.out("cut"), bench.flags())
        job.until_step(4)
        began = time.monotonic()
        hosts.do("cut", "b")
        time.sleep(10.0)
        still = len(job.rows())
        hosts.do("heal", "b")
        job.until_step(still + 1)
        again_s = time.monotonic() - began
        _, found = job.finish()
        same = bench.compare(job)
        good = same == "equal" and found == {"a": 0}
        said = f"stood still at step {still}, went on {again_s - 10:.1f} s after the cable was back"
        return [Row("cable of host-b out for 10 s", "hostfile", again_s, codes(found), said, same, good)]


@scenario
def cut_for_good(bench: Bench) -> list[Row]:
    """The cable of host-b is pulled and stays out."""
    return gone(bench, "cut", "cut-for-good", "cable of host-b out for good")


@scenario
def restarted(bench: Bench) -> list[Row]:
    """torchrun --max_restarts: the rank on host-b is killed, both start again from the newest checkpoint."""
    with TwoHosts(bench.work / "lab") as hosts:
        flags = bench.flags(save_steps=3, overwrite_output_dir="true")
        job = Job(hosts, "torchrun", bench.out("restarted"), flags, ["--nnodes", 2, "--max_restarts", 2])
        job.until_step(5)
        began = time.monotonic()
        os.kill(hosts.rank("b") or 0, 9)
        end, found = job.finish()
        same = bench.compare(job)
        said = pick(job.output(), r"resumed from [^\n]*")
        good = same == "equal" and set(found.values()) == {0} and "at step" in said
        return [Row("kill -9 on host-b, --max_restarts 2", "torchrun", end - began, codes(found), said, same, good)]


def shrink(bench: Bench, verb: str, what: str, **more: object) -> list[Row]:
    """torchrun --nnodes 1:2: host-a goes on alone from the newest checkpoint."""
    with TwoHosts(bench.work / "lab") as hosts:
        flags = bench.flags(save_steps=3, max_steps=2 * bench.steps, **more)
        agent = ["--nnodes", "1:2", "--max_restarts", 2, "--rdzv_conf", "last_call_timeout=5,join_timeout=120"]
        job = Job(hosts, "torchrun", bench.out(f"fewer-{verb}"), flags, agent)
        job.until_step(5)
        began = time.monotonic()
        hosts.do(verb, "b")
        end, found = job.finish(living=("a",))
        said = pick(job.output("a"), r"resumed from [^\n]*")
        steps = [r["step"] for r in job.rows()]
        kept = curve(job.rows())[:3] == bench.reference()[:3]
        good = found == {"a": 0} and "at step" in said and steps == list(range(1, 2 * bench.steps + 1)) and kept
        text = f"{said}; rows of steps 1 to {len(steps)} once each"
        return [Row(f"{what}, --nnodes 1:2", "torchrun", end - began, codes(found), text, "steps before: equal", good)]


@scenario
def fewer(bench: Bench) -> list[Row]:
    """Every process of host-b ends."""
    return shrink(bench, "crash", "all processes of host-b end")


@scenario
def fewer_off(bench: Bench) -> list[Row]:
    """host-b loses power."""
    return shrink(bench, "off", "power of host-b fails", **WATCH)


@scenario
def interrupted(bench: Bench) -> list[Row]:
    """Ctrl-C at the launcher on host-a."""
    with TwoHosts(bench.work / "lab") as hosts:
        job = Job(hosts, "hostfile", bench.out("interrupted"), bench.flags(max_steps=4000, save_steps=1000))
        job.until_step(4)
        began = time.monotonic()
        launcher = min(p for p in _processes("a", hosts.work) if "bin/deepspeed" in _command(p))
        os.kill(launcher, 2)
        end, found = job.finish()
        said = "run.json: " + str(json.loads((job.out / "run.json").read_text()).get("outcome"))  # the launcher has hung up
        good = "stopped by SIG" in said and any(job.out.glob("checkpoint-*/COMMIT"))
        return [Row("Ctrl-C at the launcher", "hostfile", end - began, codes(found), said, "", good)]


@scenario
def slurm(bench: Bench) -> list[Row]:
    """launch/slurm.sbatch with stand-ins for srun and scontrol: SIGTERM to all processes of the step, then the same line again."""
    with TwoHosts(bench.work / "lab") as hosts:
        out, flags = bench.out("slurm"), bench.flags(save_steps=1000)
        job = Job(hosts, "slurm.sbatch", out, flags)
        job.until_step(4)
        began = time.monotonic()
        for pid in (
            p for host in NAMES for p in _processes(host, hosts.work) if re.search(r"bin/torchrun|^\S*python", _command(p))
        ):
            os.kill(pid, signal.SIGTERM)
        end, found = job.finish()
        said = pick(job.output(), r"stopped by SIGTERM[^\n]*")
        saved = list(out.glob("checkpoint-*/COMMIT"))
        job = Job(hosts, "slurm.sbatch", out, flags)
        _, again = job.finish()
        same = bench.compare(job)
        said += "; then: " + pick(job.output(), r"resumed from [^\n]*")
        good = 0 not in found.values() and bool(saved) and set(again.values()) == {0} and same == "equal"
        return [Row("SIGTERM, then submitted again", "slurm.sbatch", end - began, codes(found), said, same, good)]


WATCH: dict[str, object] = {"hang_s": 30}


def main() -> int:
    """Run scenarios and write the table; called again with the same folder, those that went well are kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SCENARIOS)}; all of them if none is named")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path)
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit must not leave namespaces behind
    why = why_not()
    if why:
        print(why, file=sys.stderr)
        return 2
    bench = Bench(told.work.resolve())
    kept = bench.work / "rows.json"
    done: dict[str, list[dict[str, object]]] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in told.names or SCENARIOS:
        if done.get(name) and all(row["good"] for row in done[name]):
            continue
        try:
            done[name] = [row.__dict__ for row in SCENARIOS[name](bench)]
        except Exception as error:
            done[name] = [Row(name, "", 0.0, "", f"{type(error).__name__}: {error}"[-3000:], "", False).__dict__]
        print(*done[name], sep="\n", flush=True)
        kept.write_text(json.dumps(done))
    rows = [Row(**row) for name in SCENARIOS for row in done.get(name, [])]  # type: ignore[arg-type]
    if told.results:
        put_table(told.results, table(rows, [name for name in SCENARIOS if name not in done]))
    return 0 if all(row.good for row in rows) else 1


def table(rows: Sequence[Row], absent: Sequence[str] = ()) -> str:
    """docs/results/hosts.md.

    Args:
        rows: what was seen. absent: names of scenarios that were not run.
    """
    lines = [
        "Two hosts on one machine of two cores (namespaces with their own address, host name, processes, sshd and disk;",
        "launch/two_hosts.sh), one CPU rank each, ZeRO-3 with the optimizer in host memory, real launchers:",
        "`python -m tests.ranks.two_hosts --work DIR --results FILE`. Seconds are from the event, or else the start, until no process was",
        "left on a living host; other work kept the machine busy. The curve is loss, gradient norm and learning rate of every step",
        "against two ranks on one host, bit for bit.",
        "",
        "| what happens | launcher | as promised | seconds | exit codes | said | curve |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = row.said.replace("|", "/")
        promised, seconds = "yes" if row.good else "NO", f"{row.seconds:.1f}" if row.seconds else ""
        lines.append(f"| {row.scenario} | {row.launcher} | {promised} | {seconds} | {row.codes} | {said} | {row.curve} |")
    if absent:
        lines += ["", "Not run for this table:", *[f"- {name}: {SCENARIOS[name].__doc__}" for name in absent]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
