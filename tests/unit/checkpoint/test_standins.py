"""Checkpoints whose writing or copying did not end, and what a clone left in the place of their files."""

import json
import os

import pytest

from bigtrain import cli
from bigtrain.checkpoint import files, store
from bigtrain.errors import CheckpointError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
RANK = "rank-00000-of-00001.json"


def refused(capsys, verb, *words):
    code = cli.main([verb, *map(str, words)])
    assert code != 0
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["inspect", "verify", "export"])
def test_a_checkpoint_that_was_not_finished_is_told_as_one(tmp_path, capsys, verb):
    """`Download the weights`, or `no checkpoint of bigtrain or DeepSpeed: 0 *_model_states.pt`, said inspect and export."""
    root, out = tmp_path / "run", [tmp_path / "out"] if verb == "export" else []
    for name in ("checkpoint-3", "mine"):
        (root / name).mkdir(parents=True)
        (root / name / RANK).write_text("{}")
        assert f"{name} is not a complete checkpoint (it has no COMMIT)" in refused(capsys, verb, root / name, *out)
    said = refused(capsys, verb, root, *out)
    assert f"there is no complete checkpoint in {root}." in said
    assert "checkpoint-3 has no COMMIT: its writing, or copying, did not end" in said


def test_folders_of_other_trainers_are_none_of_ours(tmp_path, capsys):
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint-500" / "trainer_state.json").write_text("{}")
    assert store.unfinished(tmp_path) == [] and not store.is_one(tmp_path / "checkpoint-500")
    assert "holds none of model.safetensors" in refused(capsys, "inspect", tmp_path / "checkpoint-500")


def test_what_a_clone_left_is_told(tmp_path, capsys):
    (tmp_path / "COMMIT").write_bytes(LFS)
    assert f"{tmp_path}/COMMIT is a git-lfs pointer" in refused(capsys, "verify", tmp_path)
    (tmp_path / "run.json").write_bytes(LFS)
    commit = {"run.json": {"bytes": 4000, "xxh3": "0" * 32}}
    with pytest.raises(CheckpointError, match=r"run.json is a git-lfs pointer.*git lfs pull"):
        files.read_checked(tmp_path / "run.json", commit["run.json"]["bytes"], commit["run.json"]["xxh3"])
    (tmp_path / "run.json").write_text(json.dumps(commit))
    with pytest.raises(CheckpointError, match=r"run.json is damaged: it has \d+ bytes, 4000 were written"):
        files.read_checked(tmp_path / "run.json", 4000, "0" * 32)


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()
    assert f"{tmp_path}/config.json is no plain file" in refused(capsys, "inspect", tmp_path)
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(CheckpointError, match=r"run.json is no plain file"):
        files.read_small(tmp_path / "run.json")


@pytest.mark.parametrize("verb", ["inspect", "verify", "export"])
def test_an_empty_name_is_not_the_working_folder(verb, capsys):
    assert cli.main([verb, "", *(["out"] if verb == "export" else [])]) == 2
    assert "is empty (a shell variable that is not set?)" in capsys.readouterr().err


def test_what_may_not_be_read_is_not_called_damaged(tmp_path, capsys, monkeypatch):
    (tmp_path / "COMMIT").touch()

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.Path, "read_bytes", denied)  # root may read everything
    said = refused(capsys, "verify", tmp_path)
    assert said == f"cannot read {tmp_path}/COMMIT: Permission denied\n"
