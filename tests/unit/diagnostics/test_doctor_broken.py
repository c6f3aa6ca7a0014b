"""Environments broken on purpose: the command finds each, names it, and what it prints as remedy mends it."""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from bigtrain.diagnostics.doctor import examine
from tests import ROOT
from tests.unit.diagnostics.test_doctor import MEMORY, TREES, one, tree

COMMAND = f"{sys.executable} -m bigtrain doctor --quick --json"


def doctor(*steps, args="", private_mounts=False, **env):
    """Findings by name and the exit code of the command, run by a shell after `steps`."""
    script = "; ".join([*steps, f"{COMMAND} {args}"])
    words = [*(["unshare", "-m"] if private_mounts else []), "/bin/sh", "-c", script]
    values = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    done = subprocess.run(words, capture_output=True, text=True, env=values, timeout=60, check=False)
    table = json.loads(done.stdout)
    assert table["exit_code"] == done.returncode
    record(table["findings"])
    return {f["name"]: f for f in table["findings"]}, done.returncode


def record(findings):
    """For launch/bench_doctor.py, which writes a table of what was found here."""
    if "BIGTRAIN_DOCTOR_RECORD" in os.environ:
        with open(os.environ["BIGTRAIN_DOCTOR_RECORD"], "a") as file:
            file.write(json.dumps({"test": os.environ["PYTEST_CURRENT_TEST"].split(" ")[0], "findings": findings}) + "\n")


def mends(finding):
    """The part of a remedy that is a shell command."""
    return re.match(r"(export \S+|unset \w+|ulimit -[a-z] \w+)", finding["remedy"]).group()


def can_mount():
    if os.getuid() != 0 or shutil.which("unshare") is None:
        return False
    test = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(test, capture_output=True, check=False).returncode == 0


mounts = pytest.mark.skipif(not can_mount(), reason="needs the right to mount in a namespace of its own")


@pytest.fixture
def tools_without(tmp_path):
    """A PATH folder with everything from /usr/bin and /bin but some names."""

    def make(*names):
        folder = tmp_path / "bin"
        folder.mkdir()
        for source in (Path(sys.executable).parent, Path("/usr/bin"), Path("/bin")):
            for file in source.iterdir():
                if file.name not in names and not (folder / file.name).exists():
                    (folder / file.name).symlink_to(file)
        return folder

    return make


def test_B65_no_compiler(tools_without):
    folder = tools_without("c++", "g++")
    found, code = doctor(PATH=str(folder), CXX="")
    assert code == 1 and found["compiler"]["status"] == "broken" and "not on PATH" in found["compiler"]["measured"]
    assert "export CXX=/path/to/g++" in found["compiler"]["remedy"]
    mended, _ = doctor(f"export CXX={shutil.which('g++')}", PATH=str(folder))
    assert mended["compiler"]["status"] == "ok"


def test_B65_no_ninja(tools_without):
    folder = tools_without("ninja")
    found, code = doctor(PATH=str(folder))
    assert code == 1 and found["ninja"]["status"] == "broken" and "pip install ninja" in found["ninja"]["remedy"]
    (folder / "ninja").symlink_to(shutil.which("ninja"))
    assert doctor(PATH=str(folder))[0]["ninja"]["status"] == "ok"


@mounts
def test_B55_small_shared_memory():
    steps = ["mount -t tmpfs -o size=16m tmpfs /dev/shm"]
    found, code = doctor(*steps, private_mounts=True)
    assert code == 1 and found["/dev/shm"]["status"] == "broken" and "16.0 MiB" in found["/dev/shm"]["measured"]
    remedy = re.search(r"mount -o remount,size=8G /dev/shm", found["/dev/shm"]["remedy"]).group()
    assert doctor(*steps, remedy, private_mounts=True)[0]["/dev/shm"]["status"] == "ok"


@mounts
def test_B55_full_shared_memory():
    steps = ["mount -t tmpfs -o size=256m tmpfs /dev/shm", "head -c 250000000 /dev/zero > /dev/shm/left_over"]
    found, code = doctor(*steps, private_mounts=True)
    assert code == 1 and "failed" in found["/dev/shm"]["what"] and "ls -la /dev/shm" in found["/dev/shm"]["remedy"]
    assert doctor(*steps, "rm /dev/shm/left_over", private_mounts=True)[0]["/dev/shm"]["status"] == "warning"


def test_B46_little_lockable_memory():
    found, code = doctor("ulimit -S -l 64")
    assert code == 1 and found["lockable memory"]["status"] == "broken" and "0.1 MiB" in found["lockable memory"]["measured"]
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != 64 * 1024:
        assert doctor("ulimit -S -l 64", mends(found["lockable memory"]))[0]["lockable memory"]["status"] == "ok"


def test_few_open_files():
    found, code = doctor("ulimit -S -n 128")
    assert code == 1 and found["open files"]["status"] == "broken"
    assert doctor("ulimit -S -n 128", mends(found["open files"]))[0]["open files"]["status"] == "ok"


def test_B53_port_taken():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        found, code = doctor(MASTER_PORT=port)
        assert code == 1 and found["meeting port"]["status"] == "broken" and port in found["meeting port"]["measured"]
        assert doctor(mends(found["meeting port"]).rstrip(";"), MASTER_PORT=port)[0]["meeting port"]["status"] == "ok"


def test_B54_two_ranks_on_one_device(tmp_path):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\ncase $1 in --query-gpu*) "
        "echo '0, GPU-aaa, NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06, Default, 9.0, Disabled';; esac\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found, code = doctor(args="--world_size 2", PATH=path)
    assert code == 1 and "ranks 0, 1 on GPU-aaa" in found["rank placement"]["what"]
    assert "Start fewer ranks" in found["rank placement"]["remedy"]
    assert doctor(args="--world_size 1", PATH=path)[0]["rank placement"]["status"] == "ok"


def test_architecture_list_that_stops_builds():
    found, code = doctor(TORCH_CUDA_ARCH_LIST="9.0 10.0a")
    finding = found["TORCH_CUDA_ARCH_LIST"]
    assert code == 1 and finding["status"] == "broken" and "10.0a" in finding["what"]
    assert doctor(mends(finding), TORCH_CUDA_ARCH_LIST="9.0 10.0a")[0]["TORCH_CUDA_ARCH_LIST"]["status"] == "ok"


@pytest.mark.parametrize("kind", sorted(TREES))
def test_container_with_2_gib(kind, tmp_path):
    root = tree(tmp_path, {"proc/meminfo": MEMORY, **TREES[kind]})
    finding = one(examine.examine(examine.Request(quick=True, root=str(root), folder=str(tmp_path))), "host memory")
    record([asdict(finding)])
    assert finding.status == "broken" and "2.00 GiB (container limit" in finding.measured and "--memory" in finding.remedy
    for file in root.rglob("memory.*"):
        file.write_text(str(16 * 2**30))
    finding = one(examine.examine(examine.Request(quick=True, root=str(root), folder=str(tmp_path))), "host memory")
    record([asdict(finding)])
    assert finding.status == "ok"


@mounts
def test_read_only_extension_cache(tmp_path):
    step = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    found, code = doctor(step, private_mounts=True, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert code == 1 and found["extension cache"]["status"] == "broken" and "Read-only" in found["extension cache"]["measured"]
    remedy = mends(found["extension cache"])
    assert doctor(step, remedy, private_mounts=True, TORCH_EXTENSIONS_DIR=str(tmp_path))[0]["extension cache"]["status"] == "ok"


def test_wrong_interface_name():
    found, code = doctor(GLOO_SOCKET_IFNAME="nope0")
    assert code == 1 and found["interfaces"]["status"] == "broken" and "nope0" in found["interfaces"]["what"]
    assert doctor(mends(found["interfaces"]), GLOO_SOCKET_IFNAME="nope0")[0]["interfaces"]["status"] == "ok"


def test_version_pair(tmp_path):
    folder = tmp_path / "torch-2.2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.2.0\n")
    found, code = doctor(PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert code == 1 and found["version pairs"]["status"] == "broken" and "torch 2.2.0" in found["version pairs"]["measured"]
    assert found["version of torch"]["status"] == "broken" and "pip install" in found["version pairs"]["remedy"]
    shutil.rmtree(folder)
    assert doctor(PYTHONPATH=f"{ROOT}:{tmp_path}")[0]["version pairs"]["status"] == "ok"


@mounts
def test_full_disk(tmp_path):
    steps = [f"mount -t tmpfs -o size=8m tmpfs {tmp_path}", f"head -c 9000000 /dev/zero > {tmp_path}/x 2>/dev/null"]
    found, code = doctor(*steps, args=f"--dir {tmp_path}", private_mounts=True)
    assert code == 1 and found["disk space"]["status"] == "broken" and "No space left" in found["disk space"]["what"]
    assert "--dir" in found["disk space"]["remedy"]
    assert doctor(*steps, args=f"--dir {tmp_path.parent}", private_mounts=True)[0]["disk space"]["status"] == "ok"
