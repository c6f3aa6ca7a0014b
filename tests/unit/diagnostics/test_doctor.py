"""Each check of the doctor, judged on facts of machines that are not at hand."""

import configparser
import dataclasses
import json
import re
import socket
from pathlib import Path

import pytest

from bigtrain import cli
from bigtrain.diagnostics.doctor import (
    calibration,
    comm,
    devices,
    examine,
    limits,
    native,
    network,
    show,
    storage,
    tools,
    versions,
)
from bigtrain.diagnostics.doctor.finding import broken, exit_code, ok, warning
from bigtrain.hosts.placement import Place
from tests import ROOT

GIB = 2**30


def one(findings, name):
    found = [f for f in findings if f.name == name]
    assert len(found) == 1, [f.name for f in findings]
    return found[0]


def changed(facts, **values):
    return dataclasses.replace(facts, **values)


# ---------------------------------------------------------------- findings


def test_exit_code_is_that_of_the_worst():
    fine, odd, bad = ok("a", "b", 1), warning("a", "b", 1, "2", "c"), broken("a", "b", 1, "2", "c")
    assert [exit_code(f) for f in ([], [fine], [fine, odd], [odd, bad, fine])] == [0, 0, 0, 1]


def test_report_has_a_line_a_finding_and_remedies_below():
    bad = broken("b", "is wrong", "3", "4", "do this", details="stack of rank 0")
    lines = show.text([ok("long name", "fine", "1", advice="try that"), bad], 2.0).splitlines()
    assert lines[:2] == ["ok       long name  fine: 1", "BROKEN   b          is wrong: 3"]
    assert "  b          do this (needed: 4)" in lines and "    stack of rank 0" in lines
    assert lines[-1] == "1 broken, 0 warnings, 1 fine; 2 s"
    assert show.text([warning("a", "b", 1, "2", "c")], 2.0).splitlines()[-1] == "0 broken, 1 warning, 0 fine; 2 s"


# ---------------------------------------------------------------- versions


def test_tested_versions_are_those_of_the_project():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    lowest = dict(re.findall(r"^(\w+)[>=]=([\d.]+)", metadata["options"]["install_requires"], re.MULTILINE))
    assert {t.package: (t.lowest, t.highest) for t in versions.TESTED} == {
        t.package: (lowest[t.package], pins[t.package]) for t in versions.TESTED
    }


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.13.0+cu130", "ok"), ("torch", "2.11.0", "ok"), ("torch", "2.10.1", "broken"),
        ("torch", "2.14.0", "warning"),
        ("deepspeed", "0.19.8+abc", "ok"), ("deepspeed", "0.19.7", "broken"), ("deepspeed", "0.20.0", "broken"),
        ("transformers", None, "broken"), ("bitsandbytes", None, "warning"),
    ],
)  # fmt: skip
def test_package_versions(package, version, status):
    tested = next(t for t in versions.TESTED if t.package == package)
    finding = versions.check_package(tested, version)
    assert finding.status == status
    assert status == "ok" or finding.remedy == f"pip install '{package}=={tested.highest}'"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"cuda": "13.0", "driver": "570.86.10"}, "driver of 580"),
        ({"cuda": "12.8", "driver": "515.1"}, "driver of 525"),
        ({"cuda": "13.0", "nvcc": "12.4"}, "nvcc of another major"),
        ({"nvcc": "12.4", "gcc": "14.2.0"}, "refuses gcc 14"),
        ({"cuda": "13.0", "bitsandbytes": "0.46.0"}, "no library for CUDA 13"),
        ({"numpy": "2.1.0", "torch": "2.2.2"}, "compiled for numpy 1"),
    ],
)
def test_B65_version_pairs_that_fail(found, why):
    (finding,) = versions.check_pairs(versions.Versions(found=found))
    assert finding.status == "broken" and why in finding.what and finding.remedy
    assert all(v in finding.measured for v in found.values())


def test_version_pairs_that_work():
    found = {
        "cuda": "13.0",
        "driver": "580.65.06",
        "nvcc": "13.0",
        "gcc": "13.2",
        "numpy": "2.4",
        "torch": "2.13.0",
        "python": None,
    }
    assert [f.status for f in versions.check_pairs(versions.Versions(found=found))] == ["ok"]


def test_what_packages_ask_of_each_other_is_compared():
    facts = versions.Versions(found={}, unmet=("torch 2.13 needs triton==3.6, found 3.1",))
    assert versions.check_requirements(facts).status == "broken"
    assert versions.check_requirements(versions.Versions(found={})).status == "ok"


def test_a_gpu_with_a_cpu_build_of_torch():
    facts = versions.Versions(found={"torch": "2.13.0+cpu", "cuda": None, "driver": "580.1"}, gpu_present=True)
    assert versions.check_cuda(facts).status == "broken"
    assert versions.check_cuda(changed(facts, found={"torch": "2.13.0", "cuda": "13.0", "driver": "580.1"})).status == "warning"


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("arch", ["", "9.0", "9.0 10.0", "8.0;9.0+PTX"])
def test_architectures_that_can_be_read(arch):
    assert tools.bad_architectures(arch) == []


@pytest.mark.parametrize(("arch", "bad"), [("10.0a", "10.0a"), ("8.0;9.0a+PTX", "9.0a+PTX"), ("Hopper", "Hopper"), ("9", "9")])
def test_architectures_that_stop_the_builder(arch, bad):
    assert tools.bad_architectures(arch) == [bad]


def test_the_architecture_remedy_names_the_card_here():
    facts = tools.measure_tools({"PATH": "", "TORCH_CUDA_ARCH_LIST": "10.0a"})
    assert tools.check_arch_list(facts, ("9.0",)).remedy == "export TORCH_CUDA_ARCH_LIST='9.0'"
    assert tools.check_arch_list(facts).remedy == "unset TORCH_CUDA_ARCH_LIST"
    assert tools.check_arch_list(changed(facts, arch_list="8.0"), ("9.0",)).status == "broken"
    assert tools.check_arch_list(changed(facts, arch_list="8.0+PTX"), ("9.0",)).status == "ok"


def test_looking_at_a_cache_leaves_no_trace(tmp_path):
    facts = tools.measure_tools({"PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path / "a" / "b")})
    assert tools.check_cache(facts).status == "ok" and list(tmp_path.iterdir()) == []
    assert tools.check_cache(changed(facts, cache_noexec=True)).status == "broken"
    assert tools.check_cache(changed(facts, cache_free_bytes=10**6)).status == "broken"


def test_a_compiler_that_does_not_work(tmp_path):
    (tmp_path / "c++").write_text("#!/bin/sh\necho 'c++: fatal error: cannot execute cc1plus' >&2; exit 1\n")
    (tmp_path / "c++").chmod(0o755)
    finding = tools.check_compiler(tools.measure_tools({"PATH": f"{tmp_path}:/bin:/usr/bin"}))
    assert finding.status == "broken" and "cc1plus" in finding.measured


# ---------------------------------------------------------------- limits

FINE = limits.Limits(
    shm_bytes=8 * GIB, shm_free_bytes=8 * GIB, shm_error=None, lockable_bytes=None, lockable_hard=None,
    files=65536, files_hard=65536, machine_bytes=128 * GIB, memory_limit_bytes=None, available_bytes=100 * GIB,
    cores=16, core_quota=None, numa_nodes=("0-15",), numactl=True, omp_threads=None, infiniband=(), ranks=2, gpu=True,
)  # fmt: skip


def test_a_fine_host():
    assert {f.status for f in limits.check_limits(FINE)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "facts", "status", "remedy"),
    [
        ("/dev/shm", {"shm_bytes": 64 * 2**20}, "broken", "--shm-size"),
        ("/dev/shm", {"shm_bytes": 512 * 2**20}, "warning", "--shm-size"),
        ("/dev/shm", {"shm_error": "no space left after 3 MiB"}, "broken", "remove what fills it"),
        ("/dev/shm", {"shm_bytes": None, "shm_error": "missing"}, "broken", "mount"),
        ("lockable memory", {"lockable_bytes": 65536}, "broken", "ulimit -l unlimited"),
        ("lockable memory", {"lockable_bytes": 65536, "lockable_hard": 2**23}, "broken", "ulimit -l 8192;"),
        ("lockable memory", {"lockable_bytes": 65536, "lockable_hard": 65536}, "broken", "'memlock unlimited' in"),
        ("lockable memory", {"lockable_bytes": 8 * 2**20}, "ok", ""),
        ("lockable memory", {"lockable_bytes": 8 * 2**20, "infiniband": ("mlx5_0",)}, "broken", "ulimit -l unlimited"),
        ("open files", {"files": 128}, "broken", "ulimit -n 65536"),
        ("open files", {"files": 512}, "warning", "ulimit -n 65536"),
        ("open files", {"files": 512, "files_hard": 512}, "warning", "limits.conf"),
        ("host memory", {"memory_limit_bytes": 2 * GIB}, "broken", "docker run --memory"),
        ("host memory", {"memory_limit_bytes": 3 * GIB, "gpu": False}, "warning", "export MAX_JOBS=1"),
        ("host memory", {"available_bytes": GIB}, "warning", "ps aux"),
        ("host memory", {"machine_bytes": 4 * GIB, "available_bytes": 3 * GIB}, "broken", "fewer ranks"),
        ("cores", {"core_quota": 4.0}, "warning", "export OMP_NUM_THREADS=2"),
        ("cores", {"cores": 1}, "warning", "export OMP_NUM_THREADS=1"),
        ("cores", {"omp_threads": "16"}, "warning", "export OMP_NUM_THREADS=8"),
        ("NUMA", {"numa_nodes": ("0-7", "8-15"), "numactl": False}, "warning", "apt-get install numactl"),
        ("NUMA", {"numa_nodes": ("0-7", "8-15")}, "ok", "--bind_cores_to_rank"),
    ],
)  # fmt: skip
def test_B46_B55_limits(name, facts, status, remedy):
    finding = one(limits.check_limits(changed(FINE, **facts)), name)
    assert finding.status == status and remedy in finding.remedy


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True, exist_ok=True)
    return root


MEMORY = "MemTotal:       134217728 kB\nMemAvailable:   100000000 kB\n"
TREES = {
    "v2": {"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": str(2 * GIB),
           "sys/fs/cgroup/job/cpu.max": "150000 100000", "sys/fs/cgroup/job/step/cpu.max": "max 100000"},
    "v1": {"proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n",
           "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
           "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n"},
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(TREES))
def test_limits_of_a_container_are_read(kind, tmp_path):
    nodes = {"sys/devices/system/node/node0/cpulist": "0-1\n", "sys/devices/system/node/node1/cpulist": "\n"}
    root = tree(tmp_path, {"proc/meminfo": MEMORY, **TREES[kind], **nodes})
    facts = limits.measure_limits(2, False, root)
    assert (facts.memory_limit_bytes, facts.core_quota, facts.numa_nodes) == (2 * GIB, 1.5, ("0-1",))
    assert one(limits.check_limits(facts), "host memory").status == "broken"


# ---------------------------------------------------------------- devices

CARDS = """0, GPU-aaa, NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06, Default, 9.0, Disabled
1, GPU-bbb, NVIDIA H100 80GB HBM3, 81559, 70000, 580.65.06, Default, 9.0, Disabled
"""
APPS = "GPU-bbb, 4242, python, 69000\n"
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31
GPU1\tNV18\t X \tSYS\t0-31
NIC0\tPIX\tSYS\t X \t
"""


def cards(variable=None, **env):
    gpus = devices.parse_gpus(CARDS, APPS)
    return devices.Devices(
        gpus=gpus, visible=devices.visible_gpus(gpus, variable), smi_error=None, nodes=2, links=devices.parse_links(TOPOLOGY),
        env={**({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}), **env}, host="h",
    )  # fmt: skip


def test_gpus_and_who_holds_them():
    findings = devices.check_devices(cards())
    assert [f.status for f in findings] == ["ok", "ok", "warning", "ok"]
    busy = one(findings, "gpu 1")
    assert "process 4242 (python" in busy.what and "CUDA_VISIBLE_DEVICES=0" in busy.remedy
    assert one(findings, "gpu links").measured == "GPU0-GPU1 NV18"


@pytest.mark.parametrize(
    ("variable", "uuids"), [("1", "bbb"), ("1,0", "bbb aaa"), ("0,7,1", "aaa"), ("", ""), ("GPU-b", "bbb")]
)
def test_B64_visible_devices(variable, uuids):
    assert [g.uuid.removeprefix("GPU-") for g in cards(variable).visible] == uuids.split()


def test_B64_hidden_and_missing_cards_are_named():
    assert devices.check_seen(cards("")).status == "broken"
    assert devices.check_seen(cards("0,7")).remedy == "export CUDA_VISIBLE_DEVICES=0"
    assert one(devices.check_devices(cards("0,1", SLURM_STEP_GPUS="0")), "scheduler").status == "warning"


def test_a_driver_that_fails():
    facts = changed(cards(), gpus=(), visible=(), smi_error="Failed to initialize NVML: Driver/library version mismatch")
    assert devices.check_seen(facts).status == "broken"
    assert devices.check_seen(changed(facts, smi_error=None)).status == "warning"
    assert devices.check_seen(changed(facts, smi_error=None, nodes=0)).status == "ok"


def test_B54_two_ranks_on_one_card_are_named():
    finding = devices.check_places(devices.planned_places(cards(), 3))
    assert finding.status == "broken" and "ranks 0, 2 on GPU-aaa of h" in finding.what and "Start fewer ranks" in finding.remedy
    assert devices.check_places(devices.planned_places(cards(), 2)).status == "ok"


# ---------------------------------------------------------------- network

NET = network.Network(
    host="node1", address="10.0.0.5", resolve_error=None, interfaces={"eth0": "10.0.0.5", "lo": "127.0.0.1"}, variables={},
    port=29500, port_free=True, port_asked=False, port_holder="", other_port=40000, master=None, master_error=None,
)  # fmt: skip


def test_a_fine_network():
    assert {f.status for f in network.check_network(NET)} == {"ok"}


@pytest.mark.parametrize(
    ("name", "facts", "status", "remedy"),
    [
        (
            "host name",
            {"address": "127.0.1.1"},
            "warning",
            "bigtrain finds the interface itself; other scripts on several hosts: export GLOO_SOCKET_IFNAME=eth0",
        ),
        ("host name", {"address": None, "resolve_error": "unknown"}, "warning", "/etc/hosts"),
        ("host name", {"address": "127.0.1.1", "variables": {"GLOO_SOCKET_IFNAME": "eth0"}}, "ok", ""),
        ("interfaces", {"variables": {"GLOO_SOCKET_IFNAME": "eth1"}}, "broken", "export GLOO_SOCKET_IFNAME=eth0"),
        ("interfaces", {"variables": {"NCCL_SOCKET_IFNAME": "ib"}}, "broken", "export NCCL_SOCKET_IFNAME=eth0"),
        ("interfaces", {"variables": {"NCCL_SOCKET_IFNAME": "=eth"}}, "broken", "export NCCL_SOCKET_IFNAME=eth0"),
        ("interfaces", {"variables": {"NCCL_SOCKET_IFNAME": "eth"}}, "ok", ""),
        ("interfaces", {"variables": {"NCCL_SOCKET_IFNAME": "^docker,lo"}}, "ok", ""),
        ("interfaces", {"interfaces": {}}, "broken", "ip link set lo up"),
        ("meeting port", {"port_free": False}, "warning", "--master_port 40000"),
        ("meeting port", {"port_free": False, "port_asked": True}, "broken", "export MASTER_PORT=40000"),
        ("MASTER_ADDR", {"master": "nohost", "master_error": "unknown"}, "broken", "export MASTER_ADDR"),
    ],
)
def test_B53_names_interfaces_ports(name, facts, status, remedy):
    finding = one(network.check_network(changed(NET, **facts)), name)
    assert finding.status == status and remedy in finding.remedy


def test_B53_the_holder_of_a_port_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        facts = network.measure_network({"MASTER_PORT": str(taken.getsockname()[1])})
    assert not facts.port_free and re.match(r"process \d+ \(", facts.port_holder)


# ---------------------------------------------------------------- disk, rates, calibration


@pytest.mark.parametrize(
    ("facts", "name", "status"),
    [
        ({}, "disk write", "ok"), ({"write_bytes_s": 5e6}, "disk write", "warning"),
        ({"read_bytes_s": 5e6}, "disk cold read", "warning"),
        ({"fsync_s": 0.5}, "disk fsync", "warning"), ({"damaged": True}, "disk", "broken"),
    ],
)  # fmt: skip
def test_disk_speeds(facts, name, status):
    fine = storage.Storage(folder="/x", free_bytes=10**12, write_bytes_s=1e9, read_bytes_s=1e9, fsync_s=1e-3)
    assert one(storage.check_disk(changed(fine, **facts)), name).status == status


def test_the_disk_is_really_tried(tmp_path):
    facts = storage.measure_storage(tmp_path / "not" / "yet", size=2**23)
    assert (
        facts.folder == str(tmp_path) and not facts.damaged and min(facts.write_bytes_s, facts.read_bytes_s, facts.fsync_s) > 0
    )
    assert storage.check_space(facts).status == "ok" and list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder_that_runs_write_to(tmp_path, capsys):
    """The disk of its folder was tried and found fine: a run would fail."""
    from bigtrain import cli

    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("link")
    for name, why in (("file", "a file"), ("file/out", "a file"), ("link", "a link to link, which leads back to itself")):
        assert cli.main(["doctor", "--quick", "--dir", str(tmp_path / name)]) == 2
        assert f"{tmp_path / name.split('/')[0]} is {why}, no folder" in capsys.readouterr().err


def test_B46_pinned_memory_that_cannot_be_had_is_told_as_such():
    probed = native.Probed(
        rates={"host": {"host_bytes_s": 5e10}, "device": {"error": "RuntimeError: CUDA error: out of memory"}}
    )
    finding = one(native.check_rates(probed), "pinned memory and GPU")
    assert finding.status == "broken" and "pin_memory false" in finding.remedy


def test_a_slow_bus_is_a_warning():
    probed = native.Probed(rates={"device": {"h2d_bytes_s": 3e9, "d2h_bytes_s": 5e10, "matmul_flops": 7e14}})
    assert [f.status for f in native.check_rates(probed)] == ["warning", "ok", "ok"]


def test_B65_native_parts():
    probed = native.Probed(ops={"cpu_adam": {"error": "no C++ compiler"}, "fused_adam": {"error": "x"}}, died=None)
    assert [native.check_op(op, probed).status for op in ("cpu_adam", "fused_adam")] == ["broken", "warning"]
    died = native.Probed(died="signal 11: x", during="cpu_adam")
    assert (
        native.check_op("cpu_adam", died).measured == "signal 11: x" and native.check_op("async_io", died).what == "not tried"
    )


def attempt(*stages, error=None, **extra):
    stories = tuple(
        comm.RankStory(
            rank=r, stage=s, error=None if s == "done" else error, backend="nccl", link_bytes_s=2e11, output="last words",
            stack="File x, line 3", places=(Place(rank=r, host="h", local_rank=r, device="H100", physical=f"GPU-{r}"),),
        )
        for r, s in enumerate(stages)
    )  # fmt: skip
    return comm.Attempt(world=len(stages), extra=extra, stories=stories, seconds=1.0)


def test_rates_go_to_the_planner(tmp_path, capsys):
    probed = native.Probed(
        rates={"host": {"host_bytes_s": 5e10}, "device": {"error": "x"}}, ops={"cpu_adam": {"cpu_adam_s_per_elem": 1e-9}}
    )
    file = tmp_path / "a" / "machine.json"
    assert calibration.save(calibration.rates_found(probed, attempt("done", "done")), file).status == "ok"
    want = {"cpu_adam_8bit_s_per_elem": 2e-9, "cpu_adam_s_per_elem": 1e-9, "host_bytes_s": 5e10, "link_bytes_s": 2e11}
    assert json.loads(file.read_text()) == want
    assert calibration.save({"host_bytes_s": 6e10}, file).status == "ok"  # others are kept
    assert json.loads(file.read_text()) == {**want, "host_bytes_s": 6e10}
    plan = ["plan", "--model", "preset:llama-tiny", "--gpu_memory", "80GB", "--host_memory", "64GB", "--calibration", str(file)]
    assert cli.main(plan) == 0
    assert calibration.save(want, Path("/proc/nowhere/machine.json")).status == "warning"


def test_rates_without_a_card_are_not_said_to_change_plans(tmp_path, monkeypatch):
    """`stored_rates` leaves them alone for GPUs: a laptop says nothing of the machine with the cards."""
    monkeypatch.setattr(calibration, "rates_file", lambda: tmp_path / "machine.json")
    assert "no GPU is among them" in calibration.save({"host_bytes_s": 6e10}, tmp_path / "machine.json").remedy
    assert calibration.save({"matmul_flops": 6e14}, tmp_path / "machine.json").remedy == "bigtrain plan uses them"


# ---------------------------------------------------------------- ladder


def test_the_ladder_stops_at_what_works():
    def try_it(number, extra):
        tried.append(dict(extra))
        return (
            attempt("done", "done", **extra) if extra.get("NCCL_P2P_DISABLE") else attempt("all-reduce", "all-reduce", **extra)
        )

    tried = []
    findings = comm.check_comm(comm.climb(try_it, ["eth0", "lo"]))
    assert tried == [{}, {"NCCL_SHM_DISABLE": "1"}, {"NCCL_P2P_DISABLE": "1"}]
    finding = one(findings, "communication")
    assert finding.status == "broken" and finding.remedy.startswith("export NCCL_P2P_DISABLE=1 ")
    assert "NCCL_SHM_DISABLE=1: fails; NCCL_P2P_DISABLE=1: works" in finding.details
    assert "rank 1: in all-reduce: no answer" in finding.details and "File x, line 3" in finding.details


def test_the_ladder_ends_with_everything_off_and_is_not_climbed_in_vain():
    def never(number, extra):
        return attempt("all-reduce", "all-reduce", **extra)

    attempts = comm.climb(never, ["eth0"])
    assert set(attempts[-1].extra) == {
        "NCCL_SHM_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_IB_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
    }
    assert "none of the known settings" in one(comm.check_comm(attempts), "communication").remedy
    assert len(comm.climb(lambda n, e: attempt("ZeRO-3 step", "leave", error="the loss does not fall"), ["eth0"])) == 1
    assert len(comm.climb(never, ["eth0"], ladder=False)) == 1


def test_a_launcher_is_recognised():
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "29500",
    }
    launch = comm.Launch.from_launcher(env)
    assert (launch.world, launch.mine, launch.first_local, launch.master, launch.port) == (4, (3,), 1, "h", 29501)
    assert comm.Launch.from_launcher({}) is None


def test_preflight_only_complains(tmp_path):
    names = {f.name for f in examine.preflight(str(tmp_path), 1, {"GLOO_SOCKET_IFNAME": "nope0", "PATH": ""})}
    assert "interfaces" in names
    assert "interfaces" not in {f.name for f in examine.preflight(str(tmp_path), 1, {"PATH": ""})}
