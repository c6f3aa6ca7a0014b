"""The command: exit codes, JSON, limits of the machine, speed without torch."""

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys

import pytest

from bigtrain import cli as verbs
from bigtrain import shapes
from bigtrain.errors import ConfigError, UsageError
from bigtrain.plan import cli
from bigtrain.plan.flags import add_flags
from bigtrain.plan.machine import HostMemory, cgroup_limit, gpu_memory, host_memory, parse_bytes, show_bytes
from bigtrain.plan.zero_settings import settings_from_config
from bigtrain.run.arguments import parse

GIB = 2**30


def run(*words):
    return verbs._run(["plan", *map(str, words)])


LIMITS = ("--gpu_memory", "80GB", "--host_memory", "1TB")


def test_exit_codes_say_whether_it_fits(capsys):
    assert run("--model", "preset:llama-1b", *LIMITS) == 0
    assert "what would fit" not in capsys.readouterr().out
    assert run("--model", "preset:llama-1b", "--gpu_memory", "4GiB", "--host_memory", "1TB") == 3
    assert run("--model", "preset:llama-1b", "--offload", "all", "--gpu_memory", "80GB", "--host_memory", "8GiB") == 3
    out = capsys.readouterr().out
    assert "GPU: needs" in out and "DOES NOT FIT, short by" in out
    ways = [line.removeprefix("what would fit: ") for line in out.splitlines() if line.startswith("what would fit")]
    assert ways == [
        "bigtrain plan --auto --model preset:llama-1b --gpu_memory 4GiB --host_memory 1TB",
        "bigtrain plan --auto --model preset:llama-1b --gpu_memory 80GB --host_memory 8GiB",
    ]
    assert [verbs._run(shlex.split(way)[1:]) for way in ways] == [3, 0]  # 4 GiB hold 1 B in no way


@pytest.mark.parametrize(
    ("words", "kept", "anew"),
    [
        (("--optim", "muon", "--micro_batch", 4, "--accumulation", 2, "--stage", 2), "--optim muon --global_batch 8", "--stage 2, --micro_batch 4, --accumulation 2"),
        (("--gradient_checkpointing", "false", "--kernels", "hf", "--calibration", "none"), "--kernels hf --calibration none", "--gradient_checkpointing False"),
        (("--seq_len", "max", "--gpus", 2, "--global_batch", 4), "--gpus 2 --seq_len 1024 --global_batch 4", None),
    ],
)  # fmt: skip
def test_what_would_fit_keeps_what_was_said_or_tells_what_it_chooses_anew(capsys, words, kept, anew):
    assert run("--model", "preset:llama-8b", "--gpu_memory", "8GiB", "--host_memory", "1TB", *words) == 3
    out = capsys.readouterr().out
    way, *told = out.split("what would fit: ")[1].splitlines()
    assert all(word in shlex.split(way) for word in kept.split())
    assert f"chooses anew what you said with {anew})" in told[0] if anew else "anew" not in out
    assert verbs._run(shlex.split(way)[1:]) in (0, 3)  # nothing in it is refused


@pytest.mark.parametrize(
    ("words", "said", "not_said"),
    [
        (("--optim", "adamw", "--host_memory", "12GiB"), "another optimizer: ZeRO-2, offload none, adamw_8bit", "left open"),
        (("--micro_batch", 512, "--host_memory", "1TB"), "with micro batch and checkpointing left open: ZeRO-2, offload optimizer, adamw, checkpointing", "more ranks"),
    ],
)  # fmt: skip
def test_what_would_help_names_first_what_was_fixed(capsys, words, said, not_said):
    assert run("--model", "preset:llama-1b", "--auto", "--gpu_memory", "16GiB", *words) == 3
    out = capsys.readouterr().out
    assert said in out and not_said not in out


def test_a_wrong_flag_is_told_in_two_lines(capsys):
    """All flags of `plan` and `config generate` as usage above an error were 20 lines."""
    for words in (
        ["plan", "--model", "preset:llama-1b", "--auto", "--ds_config", "zero2"],
        ["config", "generate", "--stage", "7"],
    ):
        with pytest.raises(SystemExit) as ended:
            verbs.main(words)
        assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 2


def test_memory_that_nobody_gave_is_said_to_be_this_machines(capsys, monkeypatch):
    monkeypatch.setattr(cli, "host_memory", lambda: HostMemory(machine_bytes=24 * GIB, limit_bytes=None))
    monkeypatch.setattr(cli, "gpu_memory", lambda: [47 * GIB])
    model = ("--model", "preset:llama-1b", "--stage", 2)
    run(*model)
    here = "this machine's memory, for want of a flag: "
    assert f"{here}--gpu_memory 47.00 GiB, --host_memory 24.00 GiB\n" in capsys.readouterr().out
    run(*model[:2], "--gpu_memory", "80GB", "--auto")
    assert f"{here}--host_memory 24.00 GiB\n" in capsys.readouterr().out
    run(*model, "--device", "cpu")
    assert f"{here}--host_memory 24.00 GiB\n" in capsys.readouterr().out
    run(*model, *LIMITS)
    assert here not in capsys.readouterr().out


def test_parts_of_a_step_that_its_host_is_the_limit_of(capsys):
    """Stage 3's hooks take longer than a small micro batch's products: the line must not leave them out."""
    run("--model", "preset:llama-8b", "--gpus", 2, "--leaf_blocks", "off", *LIMITS, "--calibration", "none")
    said = capsys.readouterr().out.split("speed (roofline): ")[1]
    numbers = [float(n) for n in re.findall(r"(?:^|card |host |communication |optimizer )([0-9.]+)", said.splitlines()[0])]
    total, card, host, communication, optimizer = numbers
    assert card < 0.2 * total and host + communication + optimizer == pytest.approx(
        total, rel=0.08
    )  # card and host wait for each other


def test_the_longest_sequence_says_what_bounds_it(capsys):
    for model, why in (
        ("preset:llama-8b", "8,192 tokens, as many positions as the model has"),
        ("preset:llama-8b-1m", "as many as fit"),
    ):
        run(
            "--model",
            model,
            "--stage",
            2,
            "--optim",
            "adamw_split_8bit",
            "--seq_len",
            "max",
            "--gradient_checkpointing",
            "--gpu_memory",
            "140GiB",
        )
        assert why in capsys.readouterr().err


def test_json_has_rows_that_sum(capsys):
    assert run("--model", "preset:llama-8b", "--gpus", 8, "--json", *LIMITS) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    for tree in plan["trees"]:
        assert sum(row["bytes"] for row in tree["rows"]) == tree["bytes"]


def test_json_and_text_say_the_same(capsys):
    words = ("--model", "preset:llama-1b", "--gpus", 3, "--gpus_per_node", 2, "--offload", "all", *LIMITS)
    run(*words, "--json")
    plan = json.loads(capsys.readouterr().out)
    run(*words)
    text = capsys.readouterr().out
    assert plan["host_node_bytes"] == 2 * plan["host_peak_bytes"]  # three ranks on hosts of two: the fuller one counts
    for name in ("gpu_peak_allocated_bytes", "gpu_reserved_bytes", "gpu_used_bytes", "host_node_bytes", "host_need_bytes"):
        assert show_bytes(plan[name]) in text, name
    assert f"{plan['seconds_per_step']:.2f} s a step, {plan['tokens_per_s']:,.0f} tokens/s" in text
    assert all(row["name"] in text and show_bytes(row["bytes"]) in text for tree in plan["trees"] for row in tree["rows"])


@pytest.mark.parametrize("how", [("--offload", "optimizer"), ("--auto",)])
def test_a_plan_for_cpus_tells_no_speed(capsys, how):
    """The rates are a card's: 3,000,000 tokens/s were promised to two CPU ranks."""
    words = ("--model", "preset:llama-tiny", "--gpus", 2, "--device", "cpu", "--host_memory", "16GiB", *how)
    assert run(*words) == 0
    said = capsys.readouterr().out
    assert "tokens/s" not in said and "MFU" not in said and "GPU" not in said and "not planned" in said
    run(*words, "--json")
    said = json.loads(capsys.readouterr().out)
    rows = said["fitting"] if how == ("--auto",) else [said]
    assert rows and {row[name] for row in rows for name in ("seconds_per_step", "tokens_per_s", "mfu")} == {None}


def test_what_would_help_on_cpus_is_no_card(capsys):
    assert run("--model", "preset:llama-8b", "--gpus", 2, "--device", "cpu", "--host_memory", "16GiB", "--auto") == 3
    said = capsys.readouterr().out
    assert "least host memory: " in said and "card" not in said and "GPU" not in said


def test_model_can_be_a_folder_or_a_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(shapes.config_dict("llama-tiny")))
    assert run("--model", tmp_path, *LIMITS) == run("--model", tmp_path / "config.json", *LIMITS) == 0
    with pytest.raises(UsageError, match="no folder or file"):
        run("--model", tmp_path / "nothing", *LIMITS)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json' is not JSON"):
        run("--model", tmp_path, *LIMITS)


@pytest.mark.parametrize(
    "block, said",
    [
        ({"offload_optimizer": {"device": "cpu", "buffer_count": "auto"}}, "buffer_count is 'auto'"),
        ({"offload_optimizer": {"device": "cpu", "buffer_count": -3}}, "buffer_count is -3"),
        ({"offload_optimizer": {"device": "cpu", "buffer_count": True}}, "buffer_count is True"),
        ({"offload_optimizer": {"device": "cpu", "ratio": "x"}}, "ratio is 'x'"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio is 1.5"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer is 'cpu'"),
    ],
)
def test_values_that_mean_nothing_are_named(block, said):
    with pytest.raises(UsageError, match=said):
        settings_from_config({"zero_optimization": {"stage": 2, **block}}, 2048)


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"zero_optimization": {"stage": 2, "offload_optimiser": {"device": "cpu"}}}', "offload_optimiser"),
        ('{"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}', "train_batch_size 7"),
        ('{"zero_optimization": {"stage": 2}, "zero_optimization": {"stage": 3}}', "stands twice"),
        ('{"zero_optimization": {"stage": 2}}', "bf16 is not enabled"),
        ('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', "without loss scaling"),
    ],
)
def test_what_training_would_refuse_is_not_planned_nor_is_another_precision(tmp_path, text, said):
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        run("--model", "preset:llama-1b", "--ds_config", tmp_path / "ds.json", *LIMITS)
    with pytest.raises(ConfigError, match="Did you mean zero2"):
        run("--model", "preset:llama-1b", "--ds_config", "zeroo2", *LIMITS)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--auto", "--offload_gradients", "0.5", "--gpus", 2), "offload_gradients 0.5 needs one rank on a GPU"),
        (("--auto", "--offload_gradients", "0.5", "--optim", "adamw"), "adamw_split optimizer; this is 1 rank.* with adamw:"),
        (("--auto", "--offload_gradients", "most"), "got 'most'"),
        (("--checkpointing", "none", "--checkpoint_blocks", 3), "contradicts --checkpointing none"),
        (("--auto", "--stage", 2), "--stage 2: --auto decides that"),
        (("--ds_config", "zero2", "--offload", "all"), "--offload all: --ds_config decides that"),
        (("--stage", 2, "--offload", "all"), "--offload all needs --stage 3, not 2"),
        (("--stage", 0, "--offload", "optimizer"), "--offload optimizer needs --stage 1, 2 or 3, not 0"),
        (("--auto", "--global_batch", 8, "--micro_batch", 3), "leave --micro_batch and"),
        (("--auto", "--measure", 0), "--measure 0"),
        (("--global_batch", 0), "--global_batch is 0"),
        (("--auto", "--global_batch", 10**12), "more than 2,147,483,648 for each"),
        (("--optimizers", "adamw"), "--optimizers says what --auto may choose"),
        (("--auto", "--optimizers", "adamw", "--optim", "muon"), "give one of them"),
        (("--gpus", 10**9), "world_size is 1000000000"),
        (("--gpus", 0), "world_size is 0"),
        (("--gpus_per_node", -2), "gpus_per_node is -2"),
        (("--micro_batch", 10**400), "micro_batch is 1000"),
        (("--gpu_memory", "1e400"), "no memory is that large"),
        (("--host_memory", "nan"), "write a number with a unit"),
        (("--seq_len", 10**9), "more than 1e[+]15 bytes"),
        (("--gpu_memory", ""), "the value after --gpu_memory is empty"),
    ],
)
def test_what_would_be_ignored_is_refused(words, said):
    with pytest.raises(UsageError, match=said):
        run("--model", "preset:llama-1b", *LIMITS, *words)


def test_shapes_file(tmp_path, capsys):
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps([["a.0.weight", [64, 64]], ["a.0.bias", [64]]]))
    assert run("--shapes", file, *LIMITS) == 0
    assert "an estimate" in capsys.readouterr().out
    assert run("--shapes", file, "--auto", *LIMITS) == 0  # without a vocabulary a gradient came before the backward
    assert run("--shapes", file, "--stage", 2, "--accumulation", 2, *LIMITS) == 0


def test_ds_config_with_comments(tmp_path, capsys):
    file = tmp_path / "zero.json"
    file.write_text(
        '{"zero_optimization": {"stage": 2}, // two\n "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": 4,}'
    )
    assert run("--model", "preset:llama-tiny", "--ds_config", file, "--json", *LIMITS) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["zero"]["stage"], plan["accumulation"]) == (2, 4)


def test_the_batch_of_a_ds_config_is_completed_as_training_does(tmp_path, capsys):
    file = tmp_path / "batch.json"
    file.write_text(json.dumps({"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    seen = {}
    for words in ((), ("--micro_batch", 4), ("--accumulation", 2)):
        run("--model", "preset:llama-tiny", "--gpus", 2, "--ds_config", file, "--json", *words, *LIMITS)
        plan = json.loads(capsys.readouterr().out)
        seen[words] = plan["micro_batch"], plan["accumulation"]
    assert list(seen.values()) == [(32, 1), (4, 8), (16, 2)]
    with pytest.raises(ConfigError, match="64"):
        run("--model", "preset:llama-tiny", "--gpus", 3, "--ds_config", file, *LIMITS)


def test_auto_prints_the_ladder_and_the_plan(capsys):
    assert run("--model", "preset:llama-8.36b", "--gpus", 2, "--auto", "--gpu_memory", "47.4GiB", "--host_memory",
               "256GiB", "--global_batch", 4) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "chosen:" in out and "rejected" in out and "short by" in out
    assert run("--model", "preset:llama-405b", "--auto", "--gpu_memory", "24GiB", "--host_memory", "64GiB") == 3
    assert "NOTHING FITS" in capsys.readouterr().out


@pytest.mark.parametrize("how", [("--auto",), ("--ds_config", "zero2_offload")])
def test_buffers_that_the_run_will_take_are_in_the_plan(capsys, how):
    words = ("--model", "preset:llama-8b", "--optim", "adamw_split_8bit", "--gpu_memory", "78GiB", "--host_memory", "126GiB", "--seq_len", 4096,
             "--kernels", "hf")  # fmt: skip
    assert run(*words, *how, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    plan = said["plan"] if "--auto" in how else said
    assert plan["zero"]["buffers"] > 4 and plan["gpu_used_bytes"] <= 78 * GIB
    run(*words, *how)
    assert show_bytes(plan["gpu_used_bytes"]) in capsys.readouterr().out


def test_global_batch_becomes_accumulation(capsys):
    assert run("--model", "preset:llama-tiny", "--gpus", 2, "--micro_batch", 2, "--global_batch", 16, "--json", *LIMITS) == 0
    assert json.loads(capsys.readouterr().out)["accumulation"] == 4
    with pytest.raises(UsageError, match="--global_batch 15"):
        run("--model", "preset:llama-tiny", "--gpus", 2, "--micro_batch", 2, "--global_batch", 15, *LIMITS)


@pytest.mark.parametrize("name", ["llama-405b", "llama-70b", "llama-8b", "qwen2.5-7b", "mixtral-8x7b", "qwen2.5-vl-7b"])
def test_a_plan_takes_less_than_a_second_without_torch(name):
    code = (
        "import sys, argparse; from bigtrain.plan import cli; p = argparse.ArgumentParser(); "
        "cli.add_parsers(p.add_subparsers()); a = p.parse_args(sys.argv[1:]); a.run(a); "
        "print([m for m in ('torch', 'numpy', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code, "plan", "--model", f"preset:{name}", "--gpus", "8", *LIMITS]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.splitlines()[-1] == "[]"
    # About 0.2-0.5 s of a processor; a busy machine's takes longer.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


@pytest.mark.parametrize("text, size", [("47.4GiB", int(47.4 * GIB)), ("80GB", 80 * 10**9), ("128G", 128 * GIB),
                                        ("1.5 TiB", 3 * 2**39), ("2000000", 2000000), ("1e12", 10**12)])  # fmt: skip
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-3GiB", "1.2.3GB", "nan", "inf", "1e400", "0GiB", "9e9TB"])
def test_wrong_sizes(text):
    with pytest.raises(UsageError, match="size is"):
        parse_bytes(text)


def test_a_forgotten_unit_is_noticed():
    with pytest.raises(UsageError, match="for example 80GiB"):
        parse_bytes("80", "--gpu_memory")
    assert show_bytes(3 * GIB) == "3.00 GiB" and show_bytes(2**20) == "1.0 MiB"


def fake(tmp_path, meminfo_kb=64 * 2**20, cgroup="0::/a/b\n", files=()):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {meminfo_kb} kB\nMemFree: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in dict(files).items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory(tmp_path)


def test_the_lowest_limit_above_the_process_counts(tmp_path):
    files = {"a/memory.max": str(32 * GIB), "a/b/memory.max": "max\n", "memory.max": str(48 * GIB)}
    memory = fake(tmp_path, files=files)
    assert memory.machine_bytes == 64 * GIB and memory.limit_bytes == memory.usable_bytes == 32 * GIB
    assert "container limit" in memory.describe()


def test_version_1_limits_and_no_limit(tmp_path):
    files = {"memory/job/memory.limit_in_bytes": str(8 * GIB), "memory/memory.limit_in_bytes": "9223372036854771712"}
    assert fake(tmp_path, cgroup="5:cpu:/\n4:memory:/job\n", files=files).usable_bytes == 8 * GIB
    assert fake(tmp_path / "none").usable_bytes == 64 * GIB
    assert cgroup_limit(tmp_path / "nowhere") is None and host_memory(tmp_path / "nowhere") is None


def test_B46_pinned_memory_above_the_lock_limit_is_named(capsys, monkeypatch):
    monkeypatch.setattr(cli, "host_memory", lambda: HostMemory(2**40, None, lockable_bytes=2**19))
    run("--model", "preset:llama-1b", "--offload", "optimizer", *LIMITS)
    assert "the lock limit here (ulimit -l) is 0.5 MiB, with which some drivers pin nothing" in capsys.readouterr().out
    run("--model", "preset:llama-1b", *LIMITS)
    assert "lock limit" not in capsys.readouterr().out
    monkeypatch.setattr(
        cli, "host_memory", lambda: HostMemory(2**40, None, lockable_bytes=2**23)
    )  # Linux's default: CUDA pins beyond it
    run("--model", "preset:llama-1b", "--offload", "optimizer", *LIMITS)
    assert "lock limit" not in capsys.readouterr().out


def test_what_the_driver_keeps_is_not_the_cards(tmp_path, monkeypatch, capsys):
    smi = tmp_path / "nvidia-smi"
    asked = "--query-gpu=memory.total,memory.reserved"
    smi.write_text(f"#!/bin/sh\n[ $1 = {asked} ] && printf '81559, 551\\n81559, [N/A]\\n[N/A], 5\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert gpu_memory() == ((81559 - 551) * 2**20, 81559 * 2**20)
    assert not capsys.readouterr().err
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver'\nexit 9\n")
    assert gpu_memory() == () and "cards there are: NVIDIA-SMI has failed" in capsys.readouterr().err


def test_host_default_is_this_machine(capsys):
    memory = host_memory()
    assert memory is not None and 0 < memory.usable_bytes <= memory.machine_bytes
    run("--model", "preset:llama-tiny", "--device", "cpu", "--json")
    assert json.loads(capsys.readouterr().out)["host_memory_bytes"] == memory.usable_bytes


def test_rates_that_doctor_stored_are_used(tmp_path, monkeypatch, capsys):
    from bigtrain.plan.roofline import Rates, rates_file, stored_rates

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored_rates() is None and rates_file() == tmp_path / "bigtrain/machine.json"
    rates_file().parent.mkdir()
    rates_file().write_text('{"host_bytes_s": 1e9}')
    assert stored_rates() is None  # measured where there is no card: a login node
    assert stored_rates("cpu").host_bytes_s == 1e9
    rates_file().write_text('{"matmul_flops": 1e12, "host_bytes_s": 1e9}')
    assert stored_rates() == Rates(matmul_flops=1e12, host_bytes_s=1e9)
    seconds = {}
    for name in ("stored", "none"):
        run("--model", "preset:llama-1b", *LIMITS, *(["--calibration", "none"] if name == "none" else []))
        said = capsys.readouterr().out
        seconds[name] = float(said.split("speed (roofline): ")[1].split(" s a step")[0])
    assert seconds["stored"] > 5 * seconds["none"]
    rates_file().write_text("{broken")
    assert stored_rates() is None


def test_measure_goes_with_auto_and_a_model():
    with pytest.raises(UsageError, match="--measure goes with --auto"):
        run("--model", "preset:llama-1b", "--measure", "3", *LIMITS)


def test_the_fastest_that_was_measured_is_chosen(capsys):
    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers())
    words = ["plan", "--model", "preset:llama-1b", *LIMITS, "--auto", "--measure", "2", "--optimizers", "adamw"]
    args = parser.parse_args(words)
    seen = []

    def measurer(model, candidates):
        seen.extend(candidates)
        rows = [{"candidate": at, "what": c.describe(), "status": "ok", "error": "", "tokens_per_s": speed, "command": "train",
                 "planned_tokens_per_s": c.time.tokens_per_s} for at, (c, speed) in enumerate(zip(candidates, (10.0, 20.0)))]  # fmt: skip
        return rows[::-1]

    args.measurer = measurer
    assert args.run(args) == 0
    said = capsys.readouterr().out
    assert len(seen) == 2 and f"chosen: {seen[1].describe()}" in said and "to train with it: train" in said


def test_what_auto_chose_comes_with_the_command_that_trains_so(capsys):
    assert run("--model", "preset:llama-1b", *LIMITS, "--auto", "--optim", "adamw_8bit", "--global_batch", 16) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == (
        "deepspeed --num_gpus 1 launch/train.py --ds_config auto --model_name_or_path preset:llama-1b --seq_len 1024 --optim adamw_8bit "
        "--per_device_train_batch_size 16 --gradient_accumulation_steps 1 --tokenizer_name_or_path TOKENIZER --train_data DATA --output_dir OUT"
    )


def test_formulas_stand_behind_the_rows_where_they_are_asked_for(capsys):
    """Each row had 100 to 200 characters of them: on a terminal a plan filled two screens, and the verdict was lost in it."""
    assert run("--model", "llama-1b", *LIMITS) == 0
    said = capsys.readouterr().out
    assert "deepspeed 0.19.8" not in said and max(map(len, said.split("\nGPU: ")[1].split("most in")[0].splitlines())) < 80
    assert run("--model", "llama-1b", *LIMITS, "--formulas") == 0
    assert " 2 P (stages 0-2) | 2 p (stage 3)   [deepspeed 0.19.8 " in capsys.readouterr().out


def test_the_command_that_trains_so_has_all_that_the_choice_was_bound_by(tmp_path, capsys):
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shapes.config_dict("llama-1b")))
    (folder / "tokenizer.json").touch()
    bound = ["--gradient_checkpointing", "false", "--mlp_tile_tokens", "512", "--offload_gradients", "0"]
    bound += ["--use_liger_kernel", "false", "--freeze", "model.embed_tokens", "model.layers"]
    assert run("--model", folder / "config.json", *LIMITS, "--auto", "--optim", "adamw", *bound) == 0
    words = flags_of(capsys.readouterr().out)
    args = parse([*words, "--train_data", str(folder), "--output_dir", str(tmp_path / "out")])
    assert args.model_name_or_path == str(folder) and args.freeze == ["model.embed_tokens", "model.layers"]
    assert (args.gradient_checkpointing, args.use_liger_kernel, args.mlp_tile_tokens) == (False, False, 512)
    assert args.offload_gradients == "0"
    assert run("--model", "Llama-1B", *LIMITS, "--auto", "--checkpoint_blocks", 3, "--checkpointing_policy", "selective") == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert " preset:llama-1b " in said and " --checkpointing_policy selective --checkpoint_blocks 3 --tokenizer" in said


def flags_of(said):
    """Those of the command that --auto prints last, but for the words that are the user's."""
    words = shlex.split(said.splitlines()[-1])
    assert words[:2] == ["DS_ACCELERATOR=cpu", "deepspeed"] or words[0] == "deepspeed"
    words = words[words.index("launch/train.py") + 1 :]
    for mine in ("DATA", "OUT", "TOKENIZER"):
        if mine in words:
            at = words.index(mine)
            del words[at - 1 : at + 1]
    return words


@pytest.mark.parametrize(
    "model, gpus, card, seq_len, what",
    [
        ("llama-1b", 1, "8GiB", 8192, "and 72% of the gradients"),
        ("llama-3b", 2, "24GiB", 1024, "43 buffers, checkpointing of 22 of 28 blocks"),
        ("llama-8b", 1, "24GiB", 1024, "72% of the gradients, adamw_split_8bit, checkpointing of 30 of 32 blocks"),
        ("llama-3b", 1, "80GiB", 1024, "no checkpointing"),
    ],
)
def test_planning_the_command_that_auto_printed_gives_the_same_plan(model, gpus, card, seq_len, what, capsys):
    """The number of blocks stood in it: fixed, it left room for 28 buffers instead of 43, and the plan said 3 % less speed."""
    limits = "--gpus", gpus, "--gpu_memory", card, "--host_memory", "64GiB"
    assert run("--model", f"preset:{model}", *limits, "--auto", "--seq_len", seq_len) == 0
    first = capsys.readouterr().out
    assert what in first.split("\nchosen: ")[1].splitlines()[0]
    assert run(*flags_of(first), *limits) == 0
    assert capsys.readouterr().out.split("\nchosen: ")[1] == first.split("\nchosen: ")[1]


def test_the_command_has_the_launcher_of_its_ranks(capsys):
    hosts = "--gpus", 16, "--gpus_per_node", 8, "--gpu_memory", "80GiB", "--host_memory", "1TiB"
    assert run("--model", "llama-1b", *hosts, "--auto", "--optim", "adamw") == 0
    assert "\ndeepspeed --num_gpus 8 --hostfile HOSTFILE launch/train.py --ds_config auto " in capsys.readouterr().out
    assert run("--model", "llama-tiny", "--device", "cpu", "--gpus", 2, "--auto") == 0
    assert "\nDS_ACCELERATOR=cpu deepspeed --num_accelerators 2 launch/train.py " in capsys.readouterr().out


def test_what_a_plan_cannot_tell_apart_is_said(capsys):
    assert run("--model", "preset:llama-3b", *LIMITS, "--auto") == 0
    said = capsys.readouterr().out
    assert "  the first 3 are within 1% of each other" in said
    assert run("--model", "llama-8b", "--gpu_memory", "24GiB", "--host_memory", "64GiB", "--auto") == 0
    said = capsys.readouterr().out
    rates = [float(rate.replace(",", "")) for rate in re.findall(r"fits +([\d,]+) tokens/s", said)]
    alike = sum(rate >= rates[0] / 1.01 for rate in rates)
    assert (f"the first {alike} are within 1%" in said) == (alike > 1)


# Of each flag that changes what --auto chooses, words that do so.
BINDING = {
    "seq_len": ["--seq_len 512"],
    "micro_batch": ["--micro_batch 2"],
    "accumulation": ["--accumulation 3"],
    "global_batch": ["--global_batch 16"],
    "offload_gradients": ["--offload_gradients 0.5 --optim adamw_split", "--offload_gradients 0"],
    "optim": ["--optim muon"],
    "optimizers": ["--optimizers adamw_8bit,muon"],
    "checkpointing": ["--checkpointing none", "--checkpointing selective"],
    "gradient_checkpointing": ["--gradient_checkpointing", "--gradient_checkpointing false"],
    "checkpointing_policy": ["--checkpointing_policy attention"],
    "checkpoint_blocks": ["--checkpoint_blocks 2", "--checkpoint_blocks auto"],
    "mlp_tile_tokens": ["--mlp_tile_tokens 256"],
    "leaf_blocks": ["--leaf_blocks on", "--leaf_blocks off"],
    "freeze": ["--freeze model.embed_tokens model.norm"],
    "kernels": ["--kernels hf", "--device cpu --kernels liger"],
    "use_liger_kernel": ["--use_liger_kernel false", "--device cpu --use_liger_kernel"],
    "device": ["--device cpu"],
}
# The machine, which the command is planned and run on, and what is shown.
ELSEWHERE = {
    "model",
    "gpus",
    "gpus_per_node",
    "gpu_memory",
    "host_memory",
    "calibration",
    "formulas",
    "json",
    "measure",
    "auto",
}
NOT_WITH_AUTO = {"shapes", "ds_config", "stage", "offload", "loss"}  # the first ends in no command, the others are refused


def test_each_flag_of_the_plan_is_looked_at():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert {action.dest for action in parser._actions} - {"help"} == BINDING.keys() | ELSEWHERE | NOT_WITH_AUTO
    for name in ("ds_config", "stage", "offload", "loss"):
        value = {"ds_config": "zero2", "stage": "2", "offload": "all", "loss": "full"}[name]
        with pytest.raises((UsageError, SystemExit)):
            run("--model", "preset:llama-tiny", *LIMITS, "--auto", f"--{name}", value)


@pytest.mark.parametrize("words", [one for each in BINDING.values() for one in each])
def test_the_command_has_each_flag_that_the_choice_was_bound_by(words, tmp_path, capsys):
    """--loss and what --use_liger_kernel says on a CPU were lost on the way."""
    machine = ["--gpu_memory", "2GiB", "--host_memory", "16GiB", *(["--device", "cpu"] if "--device cpu" in words else [])]
    assert run("--model", "preset:llama-tiny", *machine, "--auto", *words.split()) == 0
    first = capsys.readouterr().out
    flags = flags_of(first)
    assert run(*flags, *machine) == 0
    again = capsys.readouterr().out
    assert again.split("\nchosen: ")[1] == first.split("\nchosen: ")[1]
    run("--model", "preset:llama-tiny", *machine, "--auto")
    assert flags_of(capsys.readouterr().out) != flags or words in ("--checkpoint_blocks auto", "--device cpu")
    (tmp_path / "tokenizer.json").touch()
    parse([*flags, "--train_data", ".", "--output_dir", "out", "--tokenizer_name_or_path", str(tmp_path)])
