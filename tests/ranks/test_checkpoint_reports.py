"""Public reports of kind d on memory, writers and background saves, each by its id."""

import contextlib
import errno
import time
from pathlib import Path

import pytest

from bigtrain.checkpoint import load, store
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.verify import verify
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from tests.ranks.test_checkpoint_engine import _engine, _load, _save_after, _state, _step
from tests.ranks.tiny import TinyLM, config


def _opened_while_loading(root):
    """(data files opened, bytes read, bytes of this rank's own slices) of one load."""
    engine = _engine(3, seed=99)
    opened, counted = set(), []
    real_open, real_load = load._Sources.open, load.load_slices

    def open_file(self, path, size):
        opened.add(path.name)
        return real_open(self, path, size)

    def load_slices(folder, slices, **options):
        counted.append((real_load(folder, slices, **options), sum(s.tensor.numel() * s.tensor.element_size() for s in slices)))
        return counted[-1][0]

    load._Sources.open = open_file
    load.load_slices = load_slices
    try:
        engine.load_checkpoint(root)
    finally:
        load._Sources.open, load.load_slices = real_open, real_load
    engine.close()
    return opened, [read for read, _ in counted], [own for _, own in counted]


def test_B22_each_rank_opens_its_own_file_only(rank_pool, tmp_path):
    rank_pool(2).run(_save_after, str(tmp_path), 3, "adamw_torch")
    (files_0, read_0, own_0), (files_1, read_1, own_1) = rank_pool(2).run(_opened_while_loading, str(tmp_path))
    assert len(files_0) == len(files_1) == 1 and files_0 != files_1
    assert (read_0, read_1) == (own_0, own_1)


def _two_saves_at_once(root):
    """Save after step 2, save again after step 3 while the first is being written, and train on."""
    engine, states = _engine(2), []
    for step in range(6):
        _step(engine, step)
        if step in (2, 3):
            states.append(_state(engine))
            engine.save_checkpoint(root, wait=False)
    engine.close()  # whatever is in flight is finished
    back = []
    for tag in ("checkpoint-3", "checkpoint-4"):
        engine = _engine(2, seed=99)
        engine.load_checkpoint(root, tag=tag)
        back.append(_state(engine))
        engine.close()
    return states, back


def test_B34_what_is_written_beside_training_is_the_step_of_the_save(rank_pool, tmp_path):
    for states, back in rank_pool(2).run(_two_saves_at_once, str(tmp_path)):
        assert states == back and states[0] != states[1]


class _FailsWhenTold(Disk):
    on = False

    def step(self, operation, path):
        if self.on:
            raise OSError(errno.EIO, "Input/output error")


def _writer_fails(root):
    engine = _engine(2)
    engine.checkpoints.disk = disk = _FailsWhenTold()
    _step(engine, 0)
    engine.save_checkpoint(root)
    _step(engine, 1)
    disk.on = True
    said = []
    try:
        engine.save_checkpoint(root, wait=False)
    except BigtrainError as error:
        said.append(str(error))
    _step(engine, 2)  # the update of the step after it needs the copies, not the writer
    disk.on = False
    try:
        engine.save_checkpoint(root)
    except BigtrainError as error:
        said.append(str(error))
    before = _state(engine)
    engine.save_checkpoint(root)
    engine.close()
    engine = _engine(2, seed=99)
    engine.load_checkpoint(root)
    after = _state(engine)
    engine.close()
    return said, before == after


def test_B34_a_writers_error_is_raised_at_the_next_call_and_training_goes_on(rank_pool, tmp_path):
    for said, same in rank_pool(2).run(_writer_fails, str(tmp_path)):
        assert len(said) == 1 and "Input/output error" in said[0]
        assert same
    assert store.steps(Path(tmp_path)) == [1, 3]


def _save_with_the_flag_left_on(root):
    cfg = {**config(3, bf16=True, micro=1, accumulation=1), "checkpoint": {"load_universal": True}}
    model = build_model(lambda: TinyLM(width=34, dropout=0.0), ds_config=cfg, seed=1)
    engine = Engine(
        model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, total_steps=20, warmup_steps=2, hang_s=None
    )
    _step(engine, 0)
    engine.save_checkpoint(root)
    state = _state(engine)
    engine.close()
    return state


@pytest.mark.parametrize("world", [1, 3])
def test_B35_a_save_is_whole_with_load_universal_left_on(rank_pool, tmp_path, world):
    saved = rank_pool(2).run(_save_with_the_flag_left_on, str(tmp_path))
    assert verify(tmp_path)[1] == []
    for state, *_ in rank_pool(world).run(_load, str(tmp_path), 3, "adamw_torch"):
        assert state == saved[0]


class _SlowDisk(Disk):
    """Gives the data file so late that an update would find nothing written."""

    @contextlib.contextmanager
    def doing(self, what, path):
        if what == "create" and path.suffix == ".safetensors":
            time.sleep(0.3)
        with super().doing(what, path):
            yield


def _held_after_waiting(root):
    engine = _engine(0)
    _step(engine, 0)
    engine.checkpoints.disk = _SlowDisk()
    engine.save_checkpoint(root)
    held = engine.checkpoints.copied()["held_bytes"]
    engine.close()
    return held, verify(Path(root))[1]


def test_a_save_that_is_waited_for_copies_nothing(rank_pool, tmp_path):
    """Nothing changes the state meanwhile."""
    assert rank_pool(1).run(_held_after_waiting, str(tmp_path)) == [(0, [])]
