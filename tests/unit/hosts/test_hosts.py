"""What can be said about several hosts without them."""

import socket
from pathlib import Path

import psutil
import pytest

from bigtrain.hosts.network import choose_interface, interface_to, several
from bigtrain.hosts.rollcall import _on_one_host, roll_call, tell
from bigtrain.ranks import _only_differences
from bigtrain.run.restart import restarts
from bigtrain.run.sameness import _data_files, _flat, _model_files, differences, digest, installed, settings


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),  # torchrun
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "1"}, True),  # DeepSpeed's launcher
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, False),
        ({"WORLD_SIZE": "16", "SLURM_STEP_NUM_NODES": "2"}, True),  # srun without a launcher of its own
        ({"WORLD_SIZE": "8", "SLURM_STEP_NUM_NODES": "1"}, False),
        ({"WORLD_SIZE": "8"}, False),
    ],
)
def test_several_hosts_are_known_by_what_launchers_set(env, expected, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert several() is expected


def test_under_a_launcher_of_one_host_nobody_is_called(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert roll_call() is None
    tell(ValueError("nobody hears it"))


def test_pods_with_a_rank_and_an_address_alone_are_given_the_time_of_several_hosts(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert not _on_one_host({"MASTER_ADDR": "job-master-0", "WORLD_SIZE": "2"})
    assert _on_one_host({"MASTER_ADDR": "127.0.0.1"}) and _on_one_host({"MASTER_ADDR": "localhost"})
    assert _on_one_host({"MASTER_ADDR": "node7", "SLURM_STEP_NUM_NODES": "1"})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, 0),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, 2),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
    ],
)
def test_restarts(env, expected):
    assert restarts(env) == expected


def test_differences_name_value_and_hosts():
    told = [("a", {"x": "1", "y": "2"}), ("a", {"x": "1", "y": "2"}), ("b", {"x": "1", "y": "3"}), ("c", {"x": "1", "z": "4"})]
    assert differences(told, "absent") == ["y: 2 on a; 3 on b; absent on c", "z: absent on a, b; 4 on c"]


def test_many_hosts_are_counted():
    told = [(f"h{i}", {"x": "old" if i else "new"}) for i in range(9)]
    assert differences(told, "absent") == ["x: new on h0; old on h1, h2, h3, h4 and 4 more hosts"]


def test_a_config_is_compared_key_by_key():
    one, two = ({"zero_optimization": {"stage": s, "offload_optimizer": {"device": "cpu"}}, "bf16": {}} for s in (2, 3))
    lines = differences([("a", _flat("ds_config", one)), ("b", _flat("ds_config", two))], "absent")
    assert lines == ["ds_config.zero_optimization.stage: 2 on a; 3 on b"]


def test_arguments_that_differ_are_shown_alone():
    assert _only_differences([{"lr": 1, "seed": 2}, {"lr": 1, "seed": 3}]) == [{"seed": 2}, {"seed": 3}]
    assert _only_differences([{"lr": 1}, {"lr": 1, "seed": 3}]) == [{}, {"seed": 3}]
    assert _only_differences([1, 2]) == [1, 2]


def test_files_of_a_run(tmp_path):
    for name in ("config.json", "model.safetensors", "README.md", ".hidden.json", "sub/train.jsonl", "sub/.cache/x.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [p.name for p in _model_files(str(tmp_path))] == ["config.json", "model.safetensors"]
    assert _model_files("preset:llama-tiny") == _model_files("owner/name") == _model_files(None) == []
    assert [p.name for p in _data_files(str(tmp_path / "sub"))] == ["train.jsonl"]
    assert [p.name for p in _data_files(str(tmp_path / "s*" / "*.jsonl"))] == ["train.jsonl"]
    same = tmp_path / "copy"
    same.write_text("config.json")
    assert digest(same) == digest(tmp_path / "config.json") != digest(tmp_path / "model.safetensors")


def test_settings_that_should_be_equal():
    env = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth7", "BIGTRAIN_CONTROL_TIMEOUT_S": "60", "HOME": "/root"}
    assert settings(env) == {"NCCL_IB_DISABLE": "1", "BIGTRAIN_CONTROL_TIMEOUT_S": "60"}


def test_installed_names_what_decides_results():
    found = installed()
    assert {"Python", "package torch", "package deepspeed", "package transformers", "source of bigtrain"} <= set(found)


def test_any_other_source_of_the_package_is_seen(monkeypatch):
    read, before = Path.read_bytes, installed()["source of bigtrain"]
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "errors.py"))
    assert installed()["source of bigtrain"] != before


def test_interface_leads_outward_or_is_left_open():
    """B (trap 25): a host whose own name means 127.0.1.1 must not offer that address to other hosts."""
    for target in ("127.0.0.1", "localhost", "no such name"):
        name = interface_to(target)
        assert name is None or (name in psutil.net_if_addrs() and name != "lo")


def test_interface_of_an_address_of_this_host():
    outward = [
        (name, a.address) for name, known in psutil.net_if_addrs().items() for a in known
        if a.family == socket.AF_INET and not name.startswith(("lo", "docker", "veth", "virbr", "br-")) and psutil.net_if_stats()[name].isup
    ]  # fmt: skip
    if not outward:
        pytest.skip("this machine has no network interface but the loopback")
    name, address = outward[0]
    env = {"MASTER_ADDR": address}
    assert choose_interface(env) == name == env["GLOO_SOCKET_IFNAME"]


def test_an_interface_that_was_chosen_is_kept():
    env = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "mine"}
    assert choose_interface(env) == "mine"
