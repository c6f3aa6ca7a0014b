"""Save and load of named slices on real ranks and real files."""

import contextlib
import dataclasses
import errno
import functools
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from bigtrain import ranks
from bigtrain.checkpoint import copying, datafile, files, save, snapshot, store
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.load import load_slices
from bigtrain.checkpoint.save import Saver
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.checkpoint.verify import verify
from bigtrain.errors import BigtrainError, CheckpointError, UsageError
from bigtrain.plan.room import Room
from bigtrain.run.runfolder import RunFolder
from bigtrain.weights import lock

SHAPES = {"a": (7, 5), "b": (1,), "c": (1031,), "d": (3, 2_000_003)}


@functools.cache
def _value(name: str, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Not to be written to."""
    seed = sum(map(ord, name + kind))
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)).flatten().to(dtype)


def _slices(fill: bool, sharded: bool = True) -> list[LocalSlice]:
    out = []
    for kind, dtype in (("master", torch.float32), ("exp_avg", torch.bfloat16)):
        for name, shape in SHAPES.items():
            whole = _value(name, kind, dtype)
            size = -(-whole.numel() // ranks.world_size())
            begin = min(size * ranks.rank(), whole.numel()) if sharded else 0
            end = min(begin + size, whole.numel()) if sharded else whole.numel()
            mine = whole[begin:end].clone() if fill else torch.zeros(end - begin, dtype=dtype)
            out.append(LocalSlice(param=name, kind=kind, shape=shape, start=begin, tensor=mine, replicated=not sharded))
    return out


@contextlib.contextmanager
def _image(wanted: bool) -> Iterator[None]:
    """Savers made inside copy first, to an image of the file, as those of state on GPUs do; in blocks that cut the slices, hashed and
    written a few at a time."""
    block, ready = snapshot.BLOCK_BYTES, datafile.READY_BYTES
    if wanted:
        Saver.always_imaged, snapshot.BLOCK_BYTES = True, 1 << 20
        datafile.READY_BYTES = save.READY_BYTES = 1 << 20
    try:
        yield
    finally:
        Saver.always_imaged, snapshot.BLOCK_BYTES = False, block
        datafile.READY_BYTES = save.READY_BYTES = ready


def _save(root: str, step: int, sharded: bool = True, then_change: bool = True, imaged: bool = False, **kwargs):
    with _image(imaged):
        _save_and_change(Saver(Path(root), **kwargs), step, _slices(True, sharded), then_change)


def _save_and_change(saver: Saver, step: int, slices: list[LocalSlice], then_change: bool):
    saver.start(step, slices, run={"n": step}, rank_state={"rank": ranks.rank()}, layout={})
    saver.before_update()
    if then_change:
        for s in slices:
            s.tensor.fill_(99.0)  # the next update: must not reach the file
    saver.wait()


def _load(folder: str, sharded: bool = True) -> bool:
    opened = store.open_checkpoint(Path(folder))
    got = _slices(False, sharded)
    load_slices(opened, got)
    return all(torch.equal(g.tensor, w.tensor) for g, w in zip(got, _slices(True, sharded)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_world_size_reads_what_any_other_wrote(rank_pool, world, tmp_path):
    for sharded in (True, False):
        root = tmp_path / str(sharded)
        rank_pool(world).run(_save, str(root), 7, sharded)
        assert all(rank_pool(world).run(_load, str(root / "checkpoint-7"), not sharded))
        other = 2 if world != 2 else 3
        assert all(rank_pool(other).run(_load, str(root / "checkpoint-7")))
        opened, problems = verify(root)
        assert problems == [] and opened.step == 7 and opened.ranks[0].state == {"rank": 0}
        assert sorted(p.name for p in root.iterdir()) == ["checkpoint-7"]


@pytest.mark.parametrize("world", [1, 2])
def test_an_image_of_the_file_is_the_file(rank_pool, world, tmp_path):
    """Twice with one saver in the same memory; what was copied first is what is written, byte for byte as without an image."""
    rank_pool(world).run(_save, str(tmp_path / "plain"), 1)
    rank_pool(world).run(_save_steps, str(tmp_path / "image"), [2, 1], imaged=True)
    plain, image = (tmp_path / name / "checkpoint-1" for name in ("plain", "image"))
    names = sorted(p.name for p in plain.iterdir())
    assert sorted(p.name for p in image.iterdir()) == names and len(names) == 2 * world + 2
    for name in names:
        if name.startswith("rank") and name.endswith(".safetensors"):
            assert (plain / name).read_bytes() == (image / name).read_bytes()
    assert verify(image)[1] == [] and all(rank_pool(world).run(_load, str(image)))


def test_the_data_file_is_plain_safetensors(rank_pool, tmp_path):
    rank_pool(2).run(_save, str(tmp_path), 1)
    with safe_open(tmp_path / "checkpoint-1" / "rank-00000-of-00002.safetensors", "pt") as file:
        got = file.get_tensor("master/a/0")
    assert torch.equal(got, _value("a", "master")[:18])


def _save_steps(root: str, steps: list[int], imaged: bool = False, **kwargs) -> list[int]:
    with _image(imaged):
        saver = Saver(Path(root), **kwargs)
        for step in steps:
            slices = _slices(True)
            saver.start(step, slices, run={}, rank_state={}, layout={})
            saver.before_update()
            for s in slices:
                s.tensor.fill_(99.0)
        saver.wait()
    return store.steps(Path(root))


def test_retention_keeps_the_last_and_every_nth(rank_pool, tmp_path):
    left = rank_pool(2).run(_save_steps, str(tmp_path), [1, 2, 3, 4, 5, 6], keep_last=2, keep_every=3)
    assert left == [[3, 5, 6]] * 2
    assert rank_pool(2).run(_save_steps, str(tmp_path), [6, 6], keep_last=2)[0] == [5, 6]  # saving a step again replaces it


class _FullDisk(Disk):
    """Fails on one rank at the n-th operation."""

    def __init__(self, at: int, code: int, on: int):
        self.at, self.code, self.on, self.count = at, code, on, 0

    def step(self, operation, path):
        self.count += 1
        if ranks.rank() == self.on and self.count == self.at:
            raise OSError(self.code, "No space left on device")


def _save_on_full_disk(root: str, at: int, on: int = 1, imaged: bool = False) -> list[str]:
    _save(root, 1)
    with _image(imaged):
        return _save_over(root, at, on)


def _save_over(root: str, at: int, on: int) -> list[str]:
    disk = _FullDisk(at, 28, on)
    saver = Saver(Path(root), disk=disk)
    said = ""
    slices = _slices(True)
    try:
        saver.start(2, slices, run={}, rank_state={}, layout={})
        saver.before_update()
        saver.wait()
    except BigtrainError as error:
        said = str(error)
    untouched = all(torch.equal(a.tensor, b.tensor) for a, b in zip(slices, _slices(True)))
    return [said, store.newest(Path(root))[0].step, untouched, disk.count]


@pytest.mark.parametrize(("on", "imaged"), [(0, False), (1, False), (1, True)])
def test_B28_full_disk_at_every_point_keeps_the_last_good_checkpoint(rank_pool, tmp_path, on, imaged):
    points = rank_pool(2).run(_save_on_full_disk, str(tmp_path / "count"), 10**9, on, imaged)[on][3]
    assert points >= (15 if imaged else 6)
    for at in range(1, points + 1):
        answers = rank_pool(2).run(_save_on_full_disk, str(tmp_path / f"at{at}"), at, on, imaged)
        assert verify(tmp_path / f"at{at}")[1] == []
        for said, newest, untouched, _ in answers:
            assert untouched, (at, answers)
            if newest == 1:
                assert f"rank {on}" in said or "No space left" in said, (at, answers)
            else:  # the disk failed after the rename: whole and visible
                assert (newest, said, on) == (2, "", 0) and at == points, (at, answers)


def _save_says(root: str) -> str:
    try:
        _save(root, 5)
    except BigtrainError as error:
        return str(error)
    return ""


def test_two_runs_in_one_folder_do_not_delete_each_others(rank_pool, tmp_path):
    rank_pool(2).run(_save, str(tmp_path), 1)
    held = files.claim(tmp_path)
    assert all("another run is writing a checkpoint into" in said for said in rank_pool(2).run(_save_says, str(tmp_path)))
    lock.release(held)
    assert rank_pool(2).run(_save_says, str(tmp_path)) == ["", ""] and store.steps(tmp_path) == [1, 5]


def _load_error(folder: str) -> str:
    try:
        _load(folder)
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_B28_a_flipped_bit_is_named_on_every_rank(rank_pool, tmp_path):
    rank_pool(2).run(_save, str(tmp_path), 3)
    folder = tmp_path / "checkpoint-3"
    data = folder / "rank-00001-of-00002.safetensors"
    raw = bytearray(data.read_bytes())
    raw[-100] ^= 4
    data.write_bytes(raw)
    first, second = rank_pool(2).run(_load_error, str(folder))
    assert "exp_avg of d" in first and "rank-00001-of-00002.safetensors is damaged" in first
    assert second.startswith("CheckpointError") and first.startswith("RanksDisagreeError")
    assert "exp_avg of d" in verify(folder)[1][0]


def test_B30_nothing_there_lists_what_is(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        store.find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        store.find(tmp_path)


def _resume_auto(root: str):
    opened, skipped = store.newest(Path(root))
    return opened.step, skipped


def test_B28_auto_takes_the_newest_whole_one_and_says_why(rank_pool, tmp_path):
    rank_pool(2).run(_save_steps, str(tmp_path), [1, 2, 3])
    (tmp_path / "checkpoint-3" / "rank-00001-of-00002.safetensors").unlink()
    (tmp_path / "checkpoint-2" / "COMMIT").unlink()
    step, skipped = _resume_auto(str(tmp_path))
    assert step == 1 and len(skipped) == 1 and "rank-00001-of-00002.safetensors is missing" in skipped[0]


def test_a_newer_checkpoint_is_never_passed_over_without_a_word(rank_pool, tmp_path, caplog):
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere" / "2"
    rank_pool(2).run(_save_steps, str(root), [1, 2, 3])
    shutil.copytree(root / "checkpoint-2", elsewhere)  # a name that is no step's
    (root / "checkpoint-3" / "rank-00001-of-00002.safetensors").unlink()
    folder = RunFolder(root)
    for asked in ("auto", str(root)):
        caplog.clear()
        assert folder.resume_point(asked) == root / "checkpoint-2" and "checkpoint-3 is skipped" in caplog.text
    assert "rank-00001-of-00002.safetensors is missing" in verify(root)[1][0]
    for asked in (elsewhere, root / "checkpoint-1"):  # a later "auto" would go on from step 3
        with pytest.raises(UsageError, match=r"checkpoint-3, newer than step [12] "):
            folder.resume_point(str(asked))
    assert RunFolder(tmp_path / "new").resume_point(str(elsewhere)) == elsewhere
    for step in (1, 2):
        (root / f"checkpoint-{step}" / "run.json").unlink()
    with pytest.raises(CheckpointError, match="there is no complete checkpoint"):  # and not from the start, over them
        folder.resume_point("auto")


def test_auto_takes_the_whole_copy_of_a_damaged_checkpoint(rank_pool, tmp_path, caplog):
    root, far = tmp_path / "run", tmp_path / "far"
    rank_pool(2).run(_save_steps, str(root), [1, 2])
    shutil.copytree(root, far)
    folder = RunFolder(root, second=str(far))
    assert folder.resume_point("auto") == root / "checkpoint-2" and not caplog.text
    (root / "checkpoint-2" / "rank-00001-of-00002.safetensors").unlink()
    for asked in ("auto", str(root)):
        assert folder.resume_point(asked) == far / "checkpoint-2"
    assert "checkpoint-2 is skipped: " in caplog.text and f"the copy {far / 'checkpoint-2'} is whole" in caplog.text
    shutil.rmtree(root / "checkpoint-2")  # who removes it goes back
    assert folder.resume_point("auto") == root / "checkpoint-1"


class _Late(Disk):
    """A disk that takes its time before the first byte."""

    @contextlib.contextmanager
    def doing(self, what: str, path: Path) -> Iterator[None]:
        if what == "create":
            time.sleep(0.3)
        with super().doing(what, path):
            yield


def _save_while_forward_goes_on(root: str, imaged: bool):
    with _image(imaged):
        _save_while_it_changes(Saver(Path(root), disk=_Late()))


def _save_while_it_changes(saver: Saver):
    slices = [dataclasses.replace(s, volatile=True) for s in _slices(True)]
    saver.start(1, slices, run={"n": 1}, rank_state={"rank": ranks.rank()}, layout={})
    for s in slices:
        s.tensor.fill_(99.0)  # a BatchNorm's statistics in the next forward, before any update
    saver.before_update()
    saver.wait()


@pytest.mark.parametrize("imaged", [False, True])
def test_buffers_are_saved_as_they_were_when_the_save_began(rank_pool, tmp_path, imaged):
    rank_pool(2).run(_save_while_forward_goes_on, str(tmp_path), imaged)
    assert all(rank_pool(2).run(_load, str(tmp_path / "checkpoint-1")))


def _fail_to_copy_buffers(root: str) -> tuple[str, int, bool]:
    """(what a save raises of whose buffers rank 1 cannot make a copy, bytes of copies still in use, whether the next one can be loaded)"""
    saver, patch = Saver(Path(root)), pytest.MonkeyPatch()
    slices = [dataclasses.replace(s, volatile=True) for s in _slices(True)]

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        if ranks.rank() == 1 and source.numel() == slices[2].tensor.numel():
            raise MemoryError("no memory for a buffer")
        target.copy_(source)

    patch.setattr(copying, "copy_host", copy)
    try:
        with pytest.raises((BigtrainError, MemoryError)) as told:
            saver.start(1, slices, run={}, rank_state={}, layout={})
    finally:
        patch.undo()
    used = sum(saver.copier._host._users)
    _save_while_it_changes(saver)
    return str(told.value), used, _load(str(Path(root) / "checkpoint-1"))


def test_a_save_that_cannot_begin_is_told_to_all_ranks_and_leaves_nothing(rank_pool, tmp_path):
    """It was raised on that rank alone: the others waited an hour for what it wrote, and no later save had the folder to itself."""
    for text, used, loaded in rank_pool(2).run(_fail_to_copy_buffers, str(tmp_path)):
        assert "no memory for a buffer" in text and used == 0 and loaded
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1"]


def _fail_to_start_a_thread(root: str) -> tuple[str, bool, bool]:
    """(what a save raises where rank 1 may start no thread for it, whether one still runs, whether the next one can be loaded)"""
    saver, patch, start = Saver(Path(root)), pytest.MonkeyPatch(), threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if ranks.rank() == 1 and thread.name == "save-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refused)
    try:
        with pytest.raises(BigtrainError) as told:
            saver.start(1, _slices(True), run={}, rank_state={}, layout={})
    finally:
        patch.undo()
    _join("save-1")
    saver.wait()  # nothing is in flight
    _save_while_it_changes(saver)
    return str(told.value), saver.writing, _load(str(Path(root) / "checkpoint-1"))


def test_a_save_for_which_no_thread_starts_is_told_to_all_ranks_and_leaves_nothing(rank_pool, tmp_path):
    """The container's limit of processes counts threads. "cannot join thread before it is started" was all that a run said of it."""
    for text, writing, loaded in rank_pool(2).run(_fail_to_start_a_thread, str(tmp_path), limit_s=60.0):
        assert "can't start new thread" in text and "ulimit -u" in text and not writing and loaded
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1"]


class _OnCard(torch.Tensor):
    """Stands for a tensor on a GPU, where there is none."""

    @property
    def is_cuda(self) -> bool:
        return True


def _save_where_memory_is_short(root: str, on_card: bool) -> tuple[bool, int, int]:
    """(whether it can be loaded, bytes held for copies, bytes saved) of a save of which one block has room."""
    slices = _slices(True)
    if on_card:
        slices = [dataclasses.replace(s, tensor=s.tensor.as_subclass(_OnCard)) for s in slices]
    patch = pytest.MonkeyPatch()
    patch.setattr(snapshot, "room", lambda: Room(95, 100, "here"))
    patch.setattr(copying, "_beside", lambda job: contextlib.nullcontext())
    patch.setattr(torch.cuda, "Event", mock.MagicMock())
    patch.setattr(torch.cuda, "current_stream", mock.MagicMock())
    patch.setattr(snapshot, "threads_on", lambda device, count: ThreadPoolExecutor(count))
    try:
        with _image(True):
            saver = Saver(Path(root), disk=_Late())
            saver.start(1, slices, run={"n": 1}, rank_state={"rank": ranks.rank()}, layout={})
            saver.before_update()
            for s in slices:
                s.tensor.fill_(99.0)
            saver.wait()
    finally:
        patch.undo()
    return _load(str(Path(root) / "checkpoint-1")), saver.copier.held_bytes, sum(s.tensor.nbytes for s in slices)


@pytest.mark.parametrize("on_card", [False, True])
def test_a_save_that_the_host_has_no_room_for_waits_for_the_disk(rank_pool, tmp_path, on_card):
    """It failed: state on a GPU was copied to the host as a whole or not saved at all."""
    for loaded, held, saved in rank_pool(2).run(_save_where_memory_is_short, str(tmp_path), on_card):
        assert loaded and held <= 4 << 20 < 16 << 20 < saved


def _save_after_preparing(root: str, short: bool) -> tuple[int, int, int, bool]:
    """(bytes of the file, of host memory made before the save, held after it, whether it can be loaded)"""
    slices, patch = _slices(True), pytest.MonkeyPatch()
    with _image(True):
        saver = Saver(Path(root), disk=_Late())
        if short:  # more than saving needs, less than keeping wants
            patch.setattr(snapshot, "room", lambda: Room(80, 100, "here"))
        saver.prepare(slices)
        _join("save-prepare")
        made = saver.copier.held_bytes
        patch.undo()
        _save_and_change(saver, 1, slices, then_change=True)
        held = saver.copier.held_bytes
    size = next(Path(root).glob(f"checkpoint-1/rank-{ranks.rank():05d}*.safetensors")).stat().st_size
    return size, made, held, _load(str(Path(root) / "checkpoint-1"))


def _join(name: str):
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


@pytest.mark.parametrize("short", [False, True])
def test_host_memory_of_a_first_save_can_be_made_before_it(rank_pool, tmp_path, short):
    """A first save's update waited for it to be made: 5 to 12 times as long as for the copy (3B on one H200)."""
    for size, made, held, loaded in rank_pool(2).run(_save_after_preparing, str(tmp_path), short):
        wanted = -(-size // 2**20) * 2**20
        assert made == (0 if short else wanted) and held == wanted and loaded


def _save_while_preparing(root: str) -> tuple[int, int, bool]:
    """As above, but the save begins while the memory is being made."""
    slices, patch, make = _slices(True), pytest.MonkeyPatch(), snapshot.HostMemory._new_block
    patch.setattr(snapshot.HostMemory, "_new_block", lambda self: time.sleep(0.01) or make(self))
    with _image(True):
        saver = Saver(Path(root))
        saver.prepare(slices)
        early = any(thread.name == "save-prepare" for thread in threading.enumerate())
        _save_and_change(saver, 1, slices, then_change=True)
        held = saver.copier.held_bytes
    patch.undo()
    size = next(Path(root).glob(f"checkpoint-1/rank-{ranks.rank():05d}*.safetensors")).stat().st_size
    return -(-size // 2**20) * 2**20 * early, held, _load(str(Path(root) / "checkpoint-1"))


def test_a_save_that_begins_meanwhile_makes_no_memory_twice(rank_pool, tmp_path):
    for wanted, held, loaded in rank_pool(2).run(_save_while_preparing, str(tmp_path)):
        assert held == wanted and loaded


def _no_more_pages(root: str) -> tuple[int, bool]:
    """(bytes held for copies, whether it can be loaded) of a save of which the system gives one block."""
    slices, patch, make = _slices(True), pytest.MonkeyPatch(), snapshot.HostMemory._new_block

    def block(self: snapshot.HostMemory) -> torch.Tensor:
        if self.nbytes:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return make(self)

    patch.setattr(snapshot.HostMemory, "_new_block", block)
    with _image(True):
        saver = Saver(Path(root))
        _save_and_change(saver, 1, slices, then_change=True)
        held = saver.copier.held_bytes
    patch.undo()
    return held, _load(str(Path(root) / "checkpoint-1"))


def test_a_save_for_which_the_system_gives_no_pages_waits_for_the_disk(rank_pool, tmp_path):
    for held, loaded in rank_pool(2).run(_no_more_pages, str(tmp_path)):
        assert held <= 2 << 20 and loaded
