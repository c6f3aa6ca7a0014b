"""A sweep whose cells do what cells do: print garbage, write what is no row, die, hang; and a folder that was left half-written."""

import json
import subprocess
import sys

import pytest

from bigtrain import shapes
from bigtrain.bench import cli, machine, refusals, report, sweep
from bigtrain.bench import rows as rows_file
from bigtrain.bench.grid import expand, read_grid
from bigtrain.bench.machine import Machine, this_machine
from bigtrain.errors import UsageError

MACHINE = Machine(device="cpu", card="CPU", gpu_bytes=None, host_bytes=64 << 30)
ROW = '{"step": 1, "loss": 1.0, "step_time_s": 0.1, "tokens": 8}'
# What a cell does in place of training, by its seed.
DEEDS = {
    1: "import os; os.write(1, bytes(range(256)) * 20000)",
    2: "open('out/metrics.jsonl', 'w').write('5\\n[]\\n')",
    3: "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    4: "import time; time.sleep(60)",
    5: f"open('out/metrics.jsonl', 'w').write({ROW!r} + '\\n' + {ROW!r}.replace('loss', 'lost'))",
    6: f"open('out/metrics.jsonl', 'w').write(2 * ({ROW!r} + '\\n'))",
    7: "open('out/metrics.jsonl', 'wb').write(bytes(range(128, 256)))",
}


class Deeds(sweep.Sweep):
    def _command(self, cell, folder):
        return [sys.executable, "-c", DEEDS[cell.arguments["seed"]]]


def cells(**more):
    grid = {"model": "preset:llama-tiny", "ds_config": "zero2", "seq_len": 8, "steps": 2, "warmup": 1, **more}
    return expand(grid)


def deeds(out, **more):
    return Deeds(out=out, machine=MACHINE, code="c", **more)


def test_whatever_a_cell_does_it_becomes_a_row(tmp_path):
    grid = cells(seed=list(DEEDS), max_cell_s=15)
    grid = [*grid[:3], *cells(seed=4, max_cell_s=0.5), *grid[4:]]
    rows = list(deeds(tmp_path).run(grid))
    said = [row["status"] for row in rows]
    assert said == ["crash", "crash", "killed", "timeout", "crash", "ok", "crash"], rows
    assert "0 of 2 steps in 1 s: max_cell_s 0.5 was over before the end of the first" in rows[3]["error"]
    assert [row["status"] for row in rows_file.latest_rows(tmp_path)] == said
    assert report.write(tmp_path, rows_file.latest_rows(tmp_path)).exists()
    assert list(deeds(tmp_path).run(grid)) == []


def test_a_torn_last_line_swallows_no_row(tmp_path):
    out, grid = tmp_path, cells(seed=[6, 3])
    list(deeds(out).run(grid))
    file = out / "rows.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    for torn in (second[:40], b"\0\0\0\0", second.rstrip(b"\n")):
        file.write_bytes(first + torn)
        ran = [row["status"] for row in deeds(out).run(grid)]
        assert ran == ([] if torn.startswith(second[:41]) else ["killed"])
        assert [row["status"] for row in rows_file.latest_rows(out)] == ["ok", "killed"]
        assert list(deeds(out).run(grid)) == []


def test_a_line_that_is_no_row_is_named(tmp_path, capsys):
    """A KeyError of the report, or of launch/bench_plan.py."""
    from bigtrain import cli as verbs
    from launch import bench_plan

    (row,) = deeds(tmp_path).run(cells(seed=6))
    file, whole = tmp_path / "rows.jsonl", json.dumps(row)
    for line, why in (
        ("12", "a JSON object is needed, not 12"),
        ('{"cell": "x", "foo": 1}', "it has no label, runner, model, num_gpus, card"),
        (json.dumps({**row, "settings": {}}), "its settings have no seq_len"),
        (json.dumps({**row, "predicted": 3}), "predicted is 3"),
        (json.dumps({k: v for k, v in row.items() if k != "step_time_s"}), "it has no step_time_s"),
    ):
        file.write_text(f"{whole}\n{{torn\n{line}\n")
        for command in (verbs.main, lambda words: bench_plan.main(["accuracy", str(file)])):
            assert command(["bench", "--output_dir", str(tmp_path)]) == 2
            assert f"{file}, line 3 is no row of a sweep: {why}." in capsys.readouterr().err
        with pytest.raises(UsageError, match="line 3 is no row"):
            list(deeds(tmp_path).run(cells(seed=6)))


def test_a_report_of_no_sweep_is_an_error(tmp_path, capsys):
    """`--output_dir TYPO` ended well."""
    from bigtrain import cli as verbs
    from launch import bench_plan

    for out, why in ((tmp_path / "typo", "there is no such folder"), (tmp_path, "it holds no rows.jsonl with a row")):
        assert verbs.main(["bench", "--output_dir", str(out)]) == 2
        assert f"--output_dir {out}: {why}" in capsys.readouterr().err
        assert verbs.main(["bench", "--output_dir", str(out), "--dry_run"]) == 2
        assert "name a GRID" in capsys.readouterr().err
        assert bench_plan.main(["host", str(out / "rows.jsonl")]) == 2
        assert f"no rows in {out}/rows.jsonl" in capsys.readouterr().err


def test_two_sweeps_do_not_share_a_folder(tmp_path):
    holder = (
        "import sys; from pathlib import Path; from bigtrain.bench.sweep import alone_in\n"
        "with alone_in(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"another sweep is at work in {tmp_path}"):
            list(deeds(tmp_path).run(cells(seed=6)))
        other.kill()
    assert len(list(deeds(tmp_path).run(cells(seed=6)))) == 1  # whoever is gone holds nothing


@pytest.mark.parametrize("flag", ["--max_cell_s", "--total_s", "--gpu_memory_cap"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_limits_that_are_none_are_refused(flag, value, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_parsers(parser.add_subparsers())
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["bench", "--output_dir", "x", f"{flag}={value}"])
    assert ended.value.code == 2 and flag in capsys.readouterr().err


def test_a_report_of_one_row_and_of_none_that_ran(tmp_path):
    (row,) = deeds(tmp_path).run(cells(seed=6))
    for rows in ([row], [{**row, "status": "oom", "predicted": {"none": "x"}}], [json.loads(json.dumps(row))] * 2):
        page = report.write(tmp_path, rows)
        assert "<svg" in page.read_text() and (tmp_path / "pareto.png").stat().st_size > 1000


def test_a_model_named_from_here_is_found_by_ranks_that_run_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = shapes.config_dict("llama-tiny")
    (tmp_path / "models/mine").mkdir(parents=True)
    (tmp_path / "models/mine/config.json").write_text(json.dumps(model))
    (cell,) = cells(model="models/mine")
    (tmp_path / "out/cell").mkdir(parents=True)
    command = sweep.Sweep(out=tmp_path / "out", machine=MACHINE, code="c")._command(cell, tmp_path / "out/cell")
    assert command[command.index("--model_name_or_path") + 1] == str(tmp_path / "models/mine")
    assert cell.settings()["model_name_or_path"] == "models/mine"  # what the row says is what the grid said


@pytest.mark.parametrize("data", ["../rows.jsonl", "../*.jsonl"])
def test_data_named_from_here_is_found_by_ranks_that_run_elsewhere(tmp_path, monkeypatch, data):
    (tmp_path / "here/out/cell").mkdir(parents=True)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path / "here")
    (cell,) = cells(model="preset:llama-tiny", train_data=data)
    command = sweep.Sweep(out=tmp_path / "here/out", machine=MACHINE, code="c")._command(cell, tmp_path / "here/out/cell")
    assert command[command.index("--train_data") + 1] == str(tmp_path / "here" / data)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path, capsys):
    from bigtrain import cli as verbs

    (tmp_path / "file").touch()
    (tmp_path / "grid.yaml").write_text("{model: preset:llama-tiny, ds_config: zero2}")
    for out in ("file", "file/x"):
        assert verbs.main(["bench", str(tmp_path / "grid.yaml"), "--output_dir", str(tmp_path / out)]) == 2
        assert f"{tmp_path / out} cannot be made" in capsys.readouterr().err


def test_a_number_without_a_point_is_a_number(tmp_path, capsys):
    from bigtrain import cli as verbs

    grid = tmp_path / "grid.yaml"
    grid.write_text("{model: preset:llama-tiny, ds_config: zero2, learning_rate: [1e-3, 2E+1, 3.e-4], run_name: 12e}")
    assert [(c.arguments["learning_rate"], c.arguments["run_name"]) for c in read_grid(grid)] == [
        (x, "12e") for x in (1e-3, 20.0, 3e-4)
    ]
    assert verbs.main(["bench", str(grid), "--output_dir", str(tmp_path), "--dry_run"]) == 0
    assert "no plan" not in capsys.readouterr().out  # TypeError: '>=' between str and int


SMI = """#!/bin/sh
case $1 in
--query-gpu=memory.total,memory.reserved) printf '81559, 551\\n40960, 0\\n24576, 0\\n' ;;
--query-gpu=index,uuid*) for i in 0 1 2; do echo "$i, GPU-$i$i, NVIDIA Card $i, 81559, 0, 570, Default, 9.0, Disabled"; done ;;
esac
"""


@pytest.mark.parametrize(
    "variable, cards, name, size",
    [
        (None, (0, 1, 2), "NVIDIA Card 0", 24576),
        ("1,0", (1, 0), "NVIDIA Card 1", 40960),
        ("GPU-22", (2,), "NVIDIA Card 2", 24576),
        ("MIG-5", (), "NVIDIA First", 24576),
    ],
)
def test_the_machine_is_what_its_ranks_see(tmp_path, monkeypatch, variable, cards, name, size):
    """The first card's name and the smallest of all, whatever CUDA_VISIBLE_DEVICES said."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(machine, "card_name", lambda: "NVIDIA First")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = this_machine()
    assert (found.cards, found.card, found.gpu_bytes) == (cards, name, size * 2**20)
    four = cells(num_gpus=4)
    refusals.refuse_impossible(four, found, run=False)  # planned, for a machine of more cards
    if not cards:
        refusals.refuse_impossible(four, found)
        return
    with pytest.raises(UsageError, match=rf"cell zero2: num_gpus 4: its ranks see {len(cards)} GPU.*one for each is needed"):
        refusals.refuse_impossible(four, found)
    refusals.refuse_impossible(cells(num_gpus=len(cards)), found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="hides every GPU from the cells: unset it, or name some of 0,1,2"):
        this_machine()


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"model": "nowhere"}, "cell zero2: there is no folder or file 'nowhere'"),
        ({"optim": ["adamw", "adamm"]}, "cell adamm: unknown optimizer 'adamm'"),
        ({"lr_scheduler_type": "cosin"}, "cosin"),
        ({"ds_config.zero_optimization.stagee": [2]}, "cell zero2 stagee=2: .*\n.*zero_optimization.stagee"),
        ({"num_gpus": 2, "ds_config": {"train_batch_size": 3}}, "train_batch_size 3 .* ranks 2"),
        ({"seq_len": [8, 2000]}, "cell seq 2000: seq_len 2000 is above the max_position_embeddings 1024 of preset:llama-tiny"),
        ({"checkpoint_blocks": 7}, "checkpoint_blocks is 7, but the model has 6 blocks"),
        ({"freeze": ["model.no"]}, "frozen names 'model.no'"),
        ({"keep_in_fp32": ["norm"]}, r"keep_in_fp32=\['norm'\] at ZeRO stage 2"),
        ({"offload_gradients": 0.5}, "offload_gradients 0.5 needs one rank"),
        ({"leaf_blocks": True}, "cell zero2: leaf_blocks on needs zero_optimization.stage 3"),
        ({"lr_scheduler_kwargs": {"decay_step": 1}}, "'decay_step' is unknown"),
        (
            {"lr_scheduler_type": "wsd", "lr_scheduler_kwargs": {"decay_steps": 3}},
            "decay_steps is 3: it must lie between 0 and .* 2",
        ),
        ({"warmup_steps": 3}, "warmup_steps is 3, more than the run's 2 updates"),
        ({"ds_config.optimizer.type": "Lamb"}, "unknown optimizer 'lamb'"),
        ({"num_gpus": 10**6}, "world_size is 1000000"),
        (
            {"ds_config": "auto", "offload_gradients": 0.5, "optim": "adamw"},
            "cell auto: offload_gradients 0.5 needs one rank on a GPU and an",
        ),
        ({"ds_config": "auto", "keep_in_fp32": ["norm"]}, r"cell auto: keep_in_fp32=\['norm'\] at ZeRO stage"),
        ({"ds_config": "auto", "checkpoint_blocks": 7}, "checkpoint_blocks is 7, but the model has 6 blocks"),
    ],
)
def test_what_no_cell_can_run_with_is_told_before_the_first(wrong, words):
    with pytest.raises(UsageError, match=words):
        refusals.refuse_impossible(cells(**wrong), MACHINE)


@pytest.mark.parametrize("name", ["memory_vs_throughput", "offload", "compile"])
def test_of_grids_that_are_there_no_cell_is_refused(name):
    machine = Machine(device="cuda", card="NVIDIA H200", gpu_bytes=140 << 30, host_bytes=1 << 40)
    found = read_grid(f"launch/grids/{name}.yaml")
    assert len(found) > 3
    refusals.refuse_impossible(found, machine)  # raises with each cell that it refuses
