"""What a killed export leaves behind goes with the next one to the same place; what is being written does not."""

import os
import signal
import socket

import pytest
import torch

from bigtrain.errors import UsageError
from bigtrain.weights import export_model, partial


def _other(out, then=None):
    """A process that has begun an export to `out` and waits: (its id, its folder)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        temporary = partial.begin(str(out))
        open(f"{temporary}/model.safetensors", "w").close()
        if then:
            then(temporary)
        os.write(write, temporary.encode())
        signal.pause()
    return pid, os.read(read, 4096).decode()


def _kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["model", "ein Modell " + "ü" * 118])
def test_only_what_dead_writers_left_is_removed(tmp_path, name):
    out = tmp_path / name
    dead, left = _other(out)
    living, being_written = _other(out)
    elsewhere = tmp_path / f"{os.path.basename(left).replace(socket.gethostname(), 'another-host')}"
    other_name = tmp_path / f".another.partial-{dead}-{socket.gethostname()}"
    elsewhere.mkdir()
    other_name.mkdir()
    _kill(dead)
    try:
        mine = partial.begin(str(out))
        assert not os.path.exists(left) and all(os.path.isdir(p) for p in (mine, being_written, elsewhere, other_name))
        partial.publish(mine, str(out))
        assert out.is_dir() and not os.path.exists(mine)
    finally:
        _kill(living)
    partial.drop(partial.begin(str(out)))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, elsewhere.name, other_name.name])


def test_an_export_killed_between_its_renames_is_undone(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("old")
    dead, _ = _other(out, then=lambda temporary: os.rename(out, f"{temporary}.old"))
    _kill(dead)
    assert not out.exists()
    partial.drop(partial.begin(str(out)))
    assert (out / "config.json").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["m" * 300, "file/model", "/proc/no/such", "/proc/model"])
def test_a_folder_that_cannot_be_is_refused_before_anything_is_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made: "):
        partial.begin(str(tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_linked_folder_is_written_where_the_link_points_to(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "model")
    for text in ("one", "two"):
        temporary = partial.begin(str(tmp_path / "model"))
        assert os.path.dirname(temporary) == str(tmp_path / "disk")
        with open(f"{temporary}/config.json", "w") as file:
            file.write(text)
        partial.publish(temporary, str(tmp_path / "model"))
        assert (tmp_path / "disk" / "model" / "config.json").read_text() == text and (tmp_path / "model").is_symlink()
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["model"]


def test_an_empty_name_does_not_mean_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "letter.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is empty"):
        partial.begin("")  # it was replaced, with all that it held
    assert (tmp_path / "letter.txt").read_text() == "mine"


def test_a_mount_point_is_refused_before_anything_is_written():
    with pytest.raises(UsageError, match="mount point"):
        partial.begin("/dev/shm")


def test_what_came_while_an_export_was_written_stays(tmp_path):
    model = torch.nn.Linear(2, 2)
    out, begin = tmp_path / "model", partial.begin

    def late(path):
        temporary = begin(path)
        out.mkdir()
        (out / "letter.txt").write_text("mine")
        return temporary

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UsageError, match=r"letter\.txt"):
        patch.setattr(partial, "begin", late)
        export_model(model, out, dtype="float32")
    assert [p.name for p in tmp_path.iterdir()] == ["model"] and (out / "letter.txt").read_text() == "mine"
