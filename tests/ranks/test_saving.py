"""What a run keeps on the way: the newest, every N-th and the best checkpoint; models alone."""

from __future__ import annotations

import errno
import json
import shutil

import pytest

from bigtrain.checkpoint import second, store
from bigtrain.checkpoint.files import Disk
from bigtrain.cli import main
from bigtrain.data.demo import stdlib_corpus, train_tokenizer
from bigtrain.errors import CheckpointError
from tests import ROOT
from tests.ranks.test_train import TRAIN, flags, rows_of, run_forked


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A small corpus and its tokenizer."""
    folder = tmp_path_factory.mktemp("demo")
    corpus = stdlib_corpus(folder, max_bytes=200_000, validation_every=10)
    train_tokenizer(corpus.train_path, folder / "tokenizer", vocab_size=512)
    return folder


def checkpoints(out):
    return sorted(int(path.name.split("-")[1]) for path in out.glob("checkpoint-*"))


def test_the_best_checkpoint_is_kept_and_becomes_the_model(demo, tmp_path):
    """A rate that ruins the model: the first evaluation stays the best, long after `save_total_limit` would have removed its step."""
    out = tmp_path / "out"
    run_forked(
        [TRAIN, *flags(demo, out, max_steps=6, learning_rate=3.0, warmup_steps=0, lr_scheduler_type="constant", save_steps=1, eval_steps=1,
                       eval_data=demo / "validation.jsonl", save_total_limit=1, keep_every=4, load_best_model_at_end=True)],
        world=2,
    )  # fmt: skip
    losses = {row["step"]: row["eval_loss"] for row in map(json.loads, (out / "eval.jsonl").read_text().splitlines())}
    best = min(losses, key=losses.get)
    assert best < 4, losses  # else the test shows nothing
    assert checkpoints(out) == [best, 4, 6]
    assert main(["export", str(out / f"checkpoint-{best}"), str(tmp_path / "best")]) == 0
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == (out / "model" / "model.safetensors").read_bytes()
    said = run_forked(
        [TRAIN, *flags(demo, out, max_steps=7, learning_rate=3.0, warmup_steps=0, lr_scheduler_type="constant", save_steps=1, eval_steps=1,
                       eval_data=demo / "validation.jsonl", save_total_limit=1, load_best_model_at_end=True, resume_from_checkpoint="auto")],
        world=1,
    )  # fmt: skip
    assert checkpoints(out) == [best, 7] and f"the model is that of step {best}" in said


def test_a_second_place_has_whole_copies_and_a_lost_disk_is_no_end(demo, tmp_path):
    out, far = tmp_path / "out", tmp_path / "far"
    same = {"save_steps": 1, "save_total_limit": 2, "copy_checkpoints_to": far}
    run_forked([TRAIN, *flags(demo, out, max_steps=3, **same)], world=2)
    assert sorted(p.name for p in far.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert main(["verify", str(far / "checkpoint-2")]) == main(["verify", str(far / "checkpoint-3")]) == 0
    assert (far / "checkpoint-3" / "model" / "tokenizer.json").exists()
    data = out / "checkpoint-3" / "rank-00000-of-00002.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")  # which only reading it shows
    said = run_forked([TRAIN, *flags(demo, out, max_steps=3, no_export=True, **same, resume_from_checkpoint="auto")], world=2)
    assert f"checkpoint-3 is skipped: {data} is damaged" in said and f"resumed from {far / 'checkpoint-3'} at step 3" in said
    shutil.rmtree(out)
    said = run_forked([TRAIN, *flags(demo, out, max_steps=3, **same)], expect=2, world=1)
    assert f"copy_checkpoints_to {far} holds checkpoints of another run (step 3)" in said
    said = run_forked([TRAIN, *flags(demo, out, max_steps=4, **same, resume_from_checkpoint="auto")], world=2)
    assert f"resumed from {far / 'checkpoint-3'} at step 3" in said
    assert checkpoints(out) == [4] and checkpoints(far) == [3, 4]


def test_a_copy_that_cannot_be_written_leaves_nothing_behind(tmp_path, golden):
    class Full(Disk):
        def step(self, operation, path):
            if operation == "fsync" and path.name == "COMMIT":
                raise OSError(errno.ENOSPC, "No space left on device")

    second.prepare(Disk(), tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot copy to .*COMMIT: No space left"):
        second.copy(Full(), golden, tmp_path)
    assert not list(tmp_path.iterdir())
    assert store.open_checkpoint(second.copy(Disk(), golden, tmp_path)).step == 12


@pytest.fixture
def golden():
    """A checkpoint that is part of the tests."""
    return ROOT / "tests" / "unit" / "checkpoint" / "golden" / "checkpoint-12"


def test_models_alone(demo, tmp_path):
    out = tmp_path / "out"
    said = run_forked(
        [TRAIN, *flags(demo, out, max_steps=5, save_steps=1, save_total_limit=2, keep_every=2, save_only_model=True)], world=2
    )
    assert f"saved {out / 'model-2'}" in said
    assert sorted(path.name for path in out.glob("model*")) == ["model", "model-2", "model-4", "model-5"]
    assert not checkpoints(out)
    weights = [(out / name / "model.safetensors").read_bytes() for name in ("model", "model-5", "model-4")]
    assert weights[0] == weights[1] != weights[2] and (out / "model-4" / "tokenizer.json").exists()
    run_forked([TRAIN, *flags(demo, out, max_steps=1, overwrite_output_dir=True)], world=1)
    assert not list(out.glob("model-*"))  # they belonged to the run that was overwritten


def test_once_an_epoch_also_after_a_resume(demo, tmp_path):
    """Epochs end inside of steps: a step is due that takes an epoch's last row."""
    out, train = tmp_path / "out", tmp_path / "train.jsonl"
    train.write_text("".join(line[:400] + '"}\n' for line in (demo / "train.jsonl").read_text().splitlines()[:3]))
    same = {"train_data": train, "max_steps": None, "num_train_epochs": 2, "per_device_train_batch_size": 4,
            "ds_config": "ds_configs/zero1.json", "eval_data": train, "no_export": True,
            **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "epoch")}  # fmt: skip
    said = run_forked([TRAIN, *flags(demo, out, **same)], world=1)
    epochs = [0.0] + [row["epoch"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())]
    due = [step for step in range(1, len(epochs)) if int(epochs[step]) > int(epochs[step - 1])]
    assert len(due) == 2 and due[-1] == len(epochs) - 1 and epochs[due[0]] > 1.0, epochs
    evaluated = (out / "eval.jsonl").read_text()
    assert [json.loads(line)["step"] for line in evaluated.splitlines()] == checkpoints(out) == due
    assert [step for step in range(1, len(epochs)) if f"step {step}/{len(epochs) - 1}  loss" in said] == due
    for step in due[1:]:
        shutil.rmtree(out / f"checkpoint-{step}")
    said = run_forked([TRAIN, *flags(demo, out, **same, resume_from_checkpoint="auto")], world=1)
    assert f"at step {due[0]}" in said and checkpoints(out) == due
    again = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
    assert [(row["step"], row["eval_loss"]) for row in again] == [
        (row["step"], row["eval_loss"]) for row in map(json.loads, evaluated.splitlines())
    ]
    # Stopped by a signal after that step, a run has no time to evaluate it; one row a step then begins beyond the epoch's end.
    (out / "eval.jsonl").unlink()
    shutil.rmtree(out / f"checkpoint-{due[1]}")
    (out / "report.png").unlink()
    (out / "report.png").symlink_to("/dev/full")
    said = run_forked([TRAIN, *flags(demo, out, **{**same, "max_steps": due[0] + 1, "per_device_train_batch_size": 1, "save_strategy": None},
                                     resume_from_checkpoint="auto")], world=1)  # fmt: skip
    assert "no report: [Errno 28] No space left on device" in said  # which is no reason for a run that is done to fail
    assert due[0] in [json.loads(line)["step"] for line in (out / "eval.jsonl").read_text().splitlines()]


def test_a_chat_models_export_ends_with_the_turn_and_is_written_once(demo, tmp_path):
    """Generation ran on after the answer: the end of a text was all that its config knew. And a finished run that was resumed exported again."""
    out, train = tmp_path / "out", tmp_path / "train.jsonl"
    turn = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three " * 20}]
    train.write_text((json.dumps({"messages": turn}) + "\n") * 8)
    same = {"train_data": train, "max_steps": 2, "save_steps": 2, "ds_config": "ds_configs/zero1.json"}
    run_forked([TRAIN, *flags(demo, out, **same)], world=1)
    ids = {
        token["content"]: token["id"] for token in json.loads((out / "model" / "tokenizer.json").read_text())["added_tokens"]
    }
    wanted = [ids["<|eos|>"], ids["<|turn_end|>"]]
    for folder in (out / "model", out / "checkpoint-2" / "model"):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == wanted
    (out / "model" / "mine").touch()
    said = run_forked([TRAIN, *flags(demo, out, **same, resume_from_checkpoint="auto")], world=1)
    assert (
        f"{out / 'model'} is there: nothing was trained" in said
        and (out / "model" / "mine").exists()
        and "exported" not in said
    )


FULL = """
import errno, json, sys
from pathlib import Path
from bigtrain.checkpoint import files
from bigtrain.diagnostics.metrics import RowLog
from bigtrain.train import main

free, rows = files.free_bytes, Path(sys.argv[sys.argv.index("--output_dir") + 1], "metrics.jsonl")
done = lambda: len(rows.read_text().splitlines()) if rows.exists() else 0
files.free_bytes = lambda path: 0 if done() in (2, 6, 8) else free(path)
take, refused = RowLog._append, [4, 5]

def append(log):
    if done() == 3 and refused:
        refused.pop()
        raise OSError(errno.ENOSPC, "No space left on device")
    take(log)

RowLog._append = append
sys.exit(main())
"""


def test_a_disk_that_is_full_for_a_while_ends_no_run_and_at_the_end_leaves_the_model(demo, tmp_path):
    """Full when steps 2, 6 and 8 are saved, and for the rows of steps 4 and 5.

    It ended the run after step 2, or with the first such row; and after the last one, a second failure in a row, without a model.
    """
    (tmp_path / "full.py").write_text(FULL)
    out = tmp_path / "out"
    said = run_forked([tmp_path / "full.py", *flags(demo, out, max_steps=8, save_steps=2)], expect=1)
    assert (
        "step 2 was not saved (a second failure in a row ends the run)" in said
        and "CheckpointError: the checkpoint needs" in said
        and "takes no rows from step 4 on" in said
    )
    assert checkpoints(out) == [4] and [row["step"] for row in rows_of(out)] == list(range(1, 9))
    told = json.loads((out / "run.json").read_text())
    assert told["model_step"] == 8 and (out / "model" / "model.safetensors").exists()
    run_forked([TRAIN, *flags(demo, out, max_steps=5, save_steps=2, resume_from_checkpoint="auto")])
    assert checkpoints(out) == [4, 5]
