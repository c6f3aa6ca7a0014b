"""Which checkpoint a run goes on from, and which are deleted, where some are damaged and some cannot be read."""

import errno
import os
from pathlib import Path

import pytest

from bigtrain.checkpoint import datafile, files, native, store
from bigtrain.checkpoint.datafile import DataSource
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.manifest import RUN_FORMAT, RankManifest, stem
from bigtrain.checkpoint.verify import verify
from bigtrain.errors import CheckpointError, UnreadableError
from bigtrain.run.runfolder import RunFolder

DATA = f"{stem(0, 1)}.safetensors"


def saved(root: Path, *steps: int) -> None:
    """Checkpoints of one rank without any state."""
    for step in steps:
        scratch, disk = store.scratch_folder(store.folder_for(root, step), "01234567"), Disk()
        scratch.mkdir(parents=True)
        (scratch / DATA).write_bytes(b"0" * 64)
        rank = RankManifest(
            rank=0, world_size=1, data_name=DATA, data_bytes=64, slices=(), header_bytes=0, header_xxh3="", state={}
        )
        told = {f"{stem(0, 1)}.json": disk.write_file(scratch / f"{stem(0, 1)}.json", rank.to_json())}
        run = b'{"format": "%s", "version": 1, "step": %d, "state": {}, "layout": {}}' % (RUN_FORMAT.encode(), step)
        store.commit(disk, scratch, store.folder_for(root, step), step, run, told, 1)


def retired(root: Path, keep: int, **more) -> list[int]:
    return store.retire(Disk(), root, keep_last=keep, **{"keep_every": None, "protect": frozenset(), **more})


def test_a_damaged_checkpoint_is_none_of_those_to_keep(tmp_path, caplog):
    """With two to keep, a newer one that was cut short pushed out the only other that a run could go on from."""
    saved(tmp_path, 10, 15, 20, 25)
    os.truncate(tmp_path / "checkpoint-20" / DATA, 7)
    assert retired(tmp_path, 2) == [10]
    assert store.steps(tmp_path) == [15, 20, 25] and "checkpoint-20 is none of the 2 to keep" in caplog.text
    assert retired(tmp_path, 2, damaged={tmp_path / "checkpoint-25"}) == []
    saved(tmp_path, 30)
    assert retired(tmp_path, 2, protect=frozenset({15})) == [20]
    assert retired(tmp_path, 1, keep_every=15) == [25] and store.steps(tmp_path) == [15, 30]


def test_what_was_whole_is_opened_again_only_if_it_has_changed(tmp_path, monkeypatch):
    saved(tmp_path, 1, 2)
    known, opened, real = {}, [], store.open_checkpoint
    monkeypatch.setattr(store, "open_checkpoint", lambda folder: opened.append(folder.name) or real(folder))
    for _ in range(2):
        assert retired(tmp_path, 2, whole=known) == []
    assert opened == ["checkpoint-2", "checkpoint-1"]
    os.truncate(tmp_path / "checkpoint-2" / DATA, 7)
    assert retired(tmp_path, 1, whole=known) == [] and opened[2:] == ["checkpoint-2"]


def test_where_all_newer_ones_are_damaged_the_last_good_one_stays(tmp_path):
    saved(tmp_path, 1, 2, 3)
    for step in (2, 3):
        (tmp_path / f"checkpoint-{step}" / "run.json").unlink()
    assert retired(tmp_path, 1) == [] and store.find(tmp_path).step == 1


def failing(monkeypatch, name: str, times: int, number: int = errno.EIO) -> list[float]:
    """Let the disk fail so often at what is under `name`; the seconds that were waited."""
    waited: list[float] = []
    left = [times]
    read, pread = Path.read_bytes, os.preadv

    def fail() -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))

    def read_bytes(path):
        if name in str(path):
            fail()
        return read(path)

    def preadv(handle, *rest):
        if name in os.readlink(f"/proc/self/fd/{handle}"):
            fail()
        return pread(handle, *rest)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(files.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("name", ["checkpoint-20/COMMIT", f"checkpoint-20/{stem(0, 1)}.json"])
def test_a_disk_that_comes_back_is_waited_for(tmp_path, monkeypatch, caplog, name):
    saved(tmp_path, 10, 20)
    waited = failing(monkeypatch, name, 2)
    assert store.find(tmp_path).step == 20
    assert waited == [1.0, 3.0] and "Input/output error; it is tried again in 1 s" in caplog.text


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_what_cannot_be_read_is_not_skipped(tmp_path, monkeypatch, number):
    """`auto` trained on from step 10, as if the disk's failure were damage of the file."""
    saved(tmp_path, 10, 20)
    waited = failing(monkeypatch, "checkpoint-20", 100, number)
    with pytest.raises(UnreadableError, match=rf"(?s){os.strerror(number)}.*no older one.*move checkpoint-20 away"):
        RunFolder(tmp_path).resume_point("auto")
    assert len(waited) == (3 if number == errno.EIO else 0)
    with pytest.raises(UnreadableError):
        verify(tmp_path)
    assert retired(tmp_path, 1) == []


def test_the_copy_of_what_cannot_be_read_is_taken(tmp_path, monkeypatch):
    own, second = tmp_path / "own", tmp_path / "second"
    saved(own, 10, 20)
    saved(second, 10, 20)
    folder = RunFolder(own, second=str(second))
    failing(monkeypatch, "own/checkpoint-20", 1000)
    assert folder.resume_point("auto") == second / "checkpoint-20"
    (second / "checkpoint-20").rename(tmp_path / "elsewhere")
    with pytest.raises(UnreadableError, match="no older one"):
        folder.resume_point("auto")


def test_a_copy_that_cannot_be_read_matters_only_where_it_is_needed(tmp_path, monkeypatch):
    own, second = tmp_path / "own", tmp_path / "second"
    saved(own, 10, 20)
    saved(second, 20)
    failing(monkeypatch, "second/checkpoint-20", 1000)
    assert RunFolder(own, second=str(second)).resume_point("auto") == own / "checkpoint-20"
    os.truncate(own / "checkpoint-20" / DATA, 1)
    with pytest.raises(UnreadableError, match="second/checkpoint-20"):
        RunFolder(own, second=str(second)).resume_point("auto")


def test_in_the_place_of_unreadable_data_comes_its_copy_and_nothing_older(tmp_path, monkeypatch):
    own, second = tmp_path / "own", tmp_path / "second"
    saved(own, 10, 20)
    saved(second, 20)
    newest = own / "checkpoint-20"
    assert native.instead_of(newest, own, None, damaged=False) is None
    assert native.instead_of(newest, own, second, damaged=False) == str(second / "checkpoint-20")
    assert native.instead_of(newest, own, None, damaged=True) == str(own / "checkpoint-10")
    failing(monkeypatch, "second/checkpoint-20", 1000)
    with pytest.raises(UnreadableError, match="second/checkpoint-20"):
        native.instead_of(newest, own, second, damaged=True)


def test_data_is_read_again_past_the_page_cache_and_through_it(tmp_path, monkeypatch):
    (tmp_path / DATA).write_bytes(b"1" * 8192)
    source, waited = DataSource(tmp_path / DATA, 8192), failing(monkeypatch, DATA, 1)
    whole = memoryview(datafile.aligned_buffer(16384))
    assert bytes(source.read_block(whole, 0, 8192)) == b"1" * 8192 and waited == [1.0]
    waited = failing(monkeypatch, DATA, 99)
    for read in (lambda: source.read_block(whole, 0, 8192), lambda: source.read_hashed(whole[:100], 0)):
        with pytest.raises(UnreadableError, match=f"cannot read {tmp_path / DATA} at byte 0: Input/output error"):
            read()
    source.close()


def test_a_newer_format_is_not_skipped_for_an_older_step(tmp_path):
    saved(tmp_path, 10, 20)
    commit = tmp_path / "checkpoint-20" / "COMMIT"
    commit.write_text(commit.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UnreadableError, match=r"(?s)format version 2; this bigtrain reads 1.*no older one"):
        store.find(tmp_path)


def test_what_is_missing_is_damage(tmp_path):
    saved(tmp_path, 10, 20)
    (tmp_path / "checkpoint-20" / DATA).unlink()
    assert store.find(tmp_path).step == 10
    with pytest.raises(CheckpointError) as told:
        files.read_small(tmp_path / "none")
    assert not isinstance(told.value, UnreadableError)
