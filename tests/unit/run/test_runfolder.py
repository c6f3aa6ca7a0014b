"""The output folder: what may be written over, which checkpoint is next, files that are whole."""

import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from bigtrain.errors import BigtrainError, UsageError
from bigtrain.run import disk
from bigtrain.run.runfolder import RunFolder
from bigtrain.versions import versions


@pytest.fixture
def folder(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "mine", "model"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-9", "checkpoint-10"):
        (tmp_path / name / "COMMIT").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    return RunFolder(tmp_path)


def test_checkpoints_are_sorted_by_number(folder):
    assert [step for step, _ in folder.checkpoints()] == [9, 10]


def test_a_run_is_not_written_over_by_accident(folder, tmp_path):
    with pytest.raises(UsageError, match=r"already holds a run .*checkpoint-10.*--resume_from_checkpoint auto"):
        folder.check(resume=None, overwrite=False)
    folder.check(resume="auto", overwrite=False)
    folder.check(resume=None, overwrite=True)
    assert (tmp_path / "metrics.jsonl").exists()  # looking changes nothing
    RunFolder(tmp_path / "new" / "deep").check(resume=None, overwrite=False)
    with pytest.raises(UsageError, match="is a file"):
        RunFolder(tmp_path / "metrics.jsonl").check(resume=None, overwrite=True)
    with pytest.raises(UsageError, match=r"metrics\.jsonl is a file"):
        RunFolder(tmp_path / "metrics.jsonl" / "out").check(resume=None, overwrite=True)
    with pytest.raises(UsageError, match="cannot be made: No such file"):
        RunFolder("/proc/no/such").open(resume=None)


def test_a_folder_that_another_process_trains_into_is_refused(folder, tmp_path):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        folder.update_run(outcome="running", process=folder.process(), started="today")
        os.write(write, b"!")
        signal.pause()
    os.read(read, 1)
    try:
        for resume, overwrite in (("auto", False), (None, True)):
            with pytest.raises(UsageError, match=rf"is in use: process {pid} trains into it since today"):
                folder.check(resume=resume, overwrite=overwrite)
        shutil.copytree(tmp_path, copy := tmp_path.with_name("copy"))  # nobody trains into that one
        RunFolder(copy).check(resume="auto", overwrite=False)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    folder.check(resume="auto", overwrite=False)


def test_starting_over_does_not_remove_what_the_run_reads(folder, tmp_path):
    for path in (tmp_path / "model", tmp_path / "checkpoint-9" / "model"):
        with pytest.raises(UsageError, match=r"is read by this run, and starting over .* would remove it"):
            folder.check(resume=None, overwrite=True, reads=[None, str(path)])
        folder.check(resume="auto", overwrite=False, reads=[str(path)])
    folder.check(resume=None, overwrite=True, reads=["preset:llama-tiny", str(tmp_path / "mine")])


def test_another_trainers_checkpoints_stop_a_resumed_run_before_it_begins(folder, tmp_path):
    (tmp_path / "checkpoint-500").mkdir()
    folder.check(resume="auto", overwrite=False)
    (tmp_path / "checkpoint-500" / "trainer_state.json").touch()
    with pytest.raises(UsageError, match="holds checkpoint-500, not bigtrain's"):
        folder.check(resume="auto", overwrite=False)


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_starting_over_removes_only_what_a_run_wrote_and_not_before_its_first_step(folder, tmp_path):
    folder.open(resume=None)
    assert names(tmp_path) == [".overwritten", "checkpoint-x", "mine", "run.json"]
    assert names(tmp_path / ".overwritten") == ["checkpoint-10", "checkpoint-9", "metrics.jsonl", "model"]
    assert folder.checkpoints() == []
    folder.forget_the_one_before()
    assert names(tmp_path) == ["checkpoint-x", "mine", "run.json"]


def test_a_run_that_fails_before_its_first_step_has_overwritten_nothing(folder, tmp_path):
    before = names(tmp_path)
    with pytest.raises(ValueError), folder.replacing():
        folder.open(resume=None)
        folder.update_run(outcome="running")
        (tmp_path / "metrics.jsonl").write_text("new")
        raise ValueError
    assert names(tmp_path) == sorted([*before, "run.json"]) and (tmp_path / "metrics.jsonl").read_text() == ""
    with pytest.raises(ValueError), folder.replacing():
        folder.open(resume=None)
        (tmp_path / "metrics.jsonl").write_text("new")
        folder.forget_the_one_before()
        raise ValueError
    assert names(tmp_path) == ["checkpoint-x", "metrics.jsonl", "mine", "run.json"]


def test_a_run_that_is_to_be_started_again_keeps_its_place(folder, tmp_path, monkeypatch):
    """The next start resumes from the newest checkpoint of the folder: the old run's must not be there."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(ValueError), folder.replacing():
        folder.open(resume=None)
        raise ValueError
    assert folder.checkpoints() == [] and (tmp_path / ".overwritten" / "checkpoint-9").is_dir()
    RunFolder(tmp_path).forget_the_one_before(always=True)
    assert names(tmp_path) == ["checkpoint-x", "mine", "run.json"]


def test_the_next_run_finds_what_a_killed_one_was_to_overwrite(folder, tmp_path):
    folder.open(resume=None)
    for name in ("hang", ".overwritten/hang"):
        (tmp_path / name).mkdir()
    (tmp_path / "hang" / "summary.txt").write_text("of the killed run")
    (tmp_path / ".overwritten" / "checkpoint-9").rename(tmp_path / "checkpoint-9")  # killed while they were put aside
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path).check(resume=None, overwrite=False)
    assert [step for step, _ in folder.checkpoints()] == [9, 10] and not (tmp_path / ".overwritten").exists()
    assert (tmp_path / "hang" / "summary.txt").read_text() == "of the killed run"


def test_resuming_removes_nothing(folder, tmp_path):
    before = names(tmp_path)
    folder.open(resume="auto")
    assert names(tmp_path) == sorted([*before, "run.json"])


def test_run_json_is_updated_key_by_key(folder, tmp_path):
    folder.update_run(a=1, b=2)
    folder.update_run(b=3)
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1, "b": 3} == folder.read_run()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["run.json", "ds_config.resolved.json"])
def test_a_full_disk_is_told_with_the_file_and_leaves_what_was_there(name, folder, tmp_path):
    folder.write_json(name, {"a": 1})
    (tmp_path / f".{name}.new").symlink_to("/dev/full")
    with pytest.raises(BigtrainError, match=rf"{re.escape(str(tmp_path / name))} cannot be written: No space left on device"):
        folder.write_json(name, {"a": 2})
    assert json.loads((tmp_path / name).read_text()) == {"a": 1} and [p.name for p in tmp_path.glob(".*.new")] == []


def test_a_folder_that_was_taken_away_and_cannot_be_made_again_is_told(tmp_path):
    folder = RunFolder(tmp_path / "disk" / "out")
    folder.open(resume=None)
    shutil.rmtree(tmp_path / "disk")
    (tmp_path / "disk").write_text("not mounted")
    with pytest.raises(BigtrainError, match=r"run\.json cannot be written: Not a directory"):
        folder.update_run(outcome="finished")


def test_versions_name_what_decides_results():
    assert {"bigtrain", "python", "torch", "deepspeed", "transformers"} <= set(versions())


def test_other_data_is_told_fact_by_fact(caplog):
    from bigtrain.run.job import Job

    mine = SimpleNamespace(data_told={"seq_len": 64, "rows": 10, "content": "a1"})
    for told in (mine.data_told, {}, {"seq_len": 64}):
        Job.tell_changed_data(mine, told)
    assert caplog.messages == []
    Job.tell_changed_data(mine, {**mine.data_told, "rows": 12})
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith(":\n  rows: 12 in the checkpoint, 10 in this run")


@pytest.mark.parametrize(("best", "more"), [(False, ""), (True, " --load_best_model_at_end compares them all the same.")])
def test_other_evaluation_data_is_told(best, more, caplog):
    """Losses of two sets stood in one file, and the lowest of them all decided what the model is, without a word."""
    from bigtrain.run.job import Job

    mine = SimpleNamespace(eval_told={"eval_content": "a1"}, args=SimpleNamespace(load_best_model_at_end=best))
    for told in (mine.eval_told, {}):
        Job.tell_changed_evaluation(mine, told)
    assert caplog.messages == []
    Job.tell_changed_evaluation(mine, {"eval_content": "b2"})
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith(f"from before are of other rows.{more}")


def test_two_runs_that_start_at_once_do_not_share_a_folder(tmp_path):
    """Both have looked before either has begun; hours of tokenising may lie between the look and the begin."""
    slow = RunFolder(tmp_path / "out")
    slow.check(resume=None, overwrite=False)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        quick = RunFolder(tmp_path / "out")
        quick.check(resume=None, overwrite=False)
        quick.open(resume=None)
        os.write(write, b"!")
        signal.pause()
    os.read(read, 1)
    try:
        with pytest.raises(UsageError, match=f"is in use: process {pid}"):
            slow.open(resume=None)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with pytest.raises(UsageError, match="already holds a run"):  # what the quick one has done is not overwritten
        slow.open(resume=None)


@pytest.mark.parametrize("left", [b"", b"[]", b"\x00\x00\xff"])
def test_a_damaged_run_json_does_not_stop_a_resumed_run(left, folder, tmp_path, caplog):
    (tmp_path / "run.json").write_bytes(left)
    folder.check(resume="auto", overwrite=False)
    folder.open(resume="auto")
    assert "run.json is damaged" in caplog.text and folder.read_run()["outcome"] == "running"


def test_a_second_place_that_cannot_be_made_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("")
    folder = RunFolder(tmp_path / "out", second=str(tmp_path / "file" / "copies"))
    with pytest.raises(UsageError, match=r"copy_checkpoints_to .*copies cannot be made: Not a directory\. Name another"):
        folder.open(resume=None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model", "checkpoint-500"])
def test_a_model_is_none_to_resume_from(tmp_path, name):
    """The second: as the Hugging Face Trainer calls what it saves."""
    model = tmp_path / name
    model.mkdir()
    for file in ("config.json", "model.safetensors"):
        (model / file).write_text("{}")
    with pytest.raises(
        UsageError, match=f"is a model folder, .*write --model_name_or_path {model} and leave --resume_from_checkpoint out"
    ):
        RunFolder(tmp_path / "out").start_point(str(model))


def test_a_model_that_no_export_may_replace_is_told_before_the_first_step(folder):
    """It was told after the last one, whose weights were lost where nothing else saved them."""
    (folder.root / "model" / "model.safetensors").write_bytes(b"of another")

    def check(resume, steps, **more):
        args = SimpleNamespace(resume_from_checkpoint=resume, **{"no_export": False, "save_total_limit": None, **more})
        job = SimpleNamespace(args=args, steps=SimpleNamespace(steps=steps), checkpoint_bytes=None, model_bytes=None)
        disk.check(job, folder, 10)

    with pytest.raises(UsageError, match=r"(?s)holds a model that no export of bigtrain wrote.* give another --output_dir"):
        check("auto", 12)
    check("auto", 10)  # nothing is left to train: the model stays
    check("auto", 12, no_export=True)
    check(None, 12)  # starting over puts it away


def test_which_step_the_exported_model_is_of(folder):
    model = folder.root / "model"
    shutil.rmtree(model, ignore_errors=True)
    folder.update_run(model_step=3)
    assert not folder.has_model(3)
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert not folder.has_model(3)
    shards = {f"model-{n}-of-00002.safetensors": {f"w{n}": torch.ones(4)} for n in ("00001", "00002")}
    index = {name: shard for shard, tensors in shards.items() for name in tensors}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for shard, tensors in shards.items():
        assert not folder.has_model(3)  # as long as a shard is missing
        save_file(tensors, model / shard)
    assert folder.has_model(3) and not folder.has_model(4)
    last = (model / shard).read_bytes()
    (model / shard).write_bytes(last[:-1])
    assert not folder.has_model(3)
    (model / shard).write_bytes(last)
    assert folder.has_model(3, str(folder.root / "checkpoint-9"))
    assert not folder.has_model(3, str(folder.root.parent / "another" / "checkpoint-3"))  # it stayed, as if of that run


def test_a_checkpoint_that_was_named_is_loaded_or_none(folder, tmp_path):
    """Damaged data is seen by the load alone, which passes it over only where it may look around."""
    whole = tmp_path / "checkpoint-10"
    assert [folder.load_from(whole, asked) for asked in ("auto", str(tmp_path))] == [tmp_path] * 2
    assert folder.load_from(whole, f"{whole}/") == whole
    assert folder.load_from(tmp_path / "mine", str(tmp_path)) == tmp_path / "mine"  # DeepSpeed's own
