"""What a save may not replace, what a load may not drop, and that a load that is refused has changed nothing."""

import errno
import functools
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bigtrain import ranks
from bigtrain.checkpoint import files, store
from bigtrain.checkpoint.files import Disk
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError, CheckpointError
from bigtrain.models import build_model
from bigtrain.run.runfolder import RunFolder
from bigtrain.run.saving import Saving
from bigtrain.weights import lock
from tests.ranks.test_checkpoint_engine import _state, _step
from tests.ranks.tiny import TinyLM, config
from tests.unit.checkpoint.test_unreadable import saved


def _engine(stage, blocks=2, width=34, seed=1, buffers=None, freeze=(), optimizer="adamw_torch"):
    def make():
        model = TinyLM(width=width, blocks=blocks)
        for name, value in (buffers or {}).items():
            model.register_buffer(name, value)
        return model

    cfg = config(stage)
    model = build_model(make, ds_config=cfg, seed=seed, freeze=freeze)
    return Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-3, total_steps=20, hang_s=None)


def _said(action) -> str:
    try:
        action()
    except BigtrainError as error:
        return str(error)
    return ""


def _refused(root, stage):
    """Loads of other models, and whether the run that asked goes on as if it had not."""
    engine = _engine(stage, blocks=3)
    _step(engine, 0)
    engine.save_checkpoint(root)
    engine.close()
    said, states = [], []
    for asked in (False, True):
        engine = _engine(stage, seed=3)
        if asked:
            said.append(_said(functools.partial(engine.load_checkpoint, root)))
        losses = [_step(engine, i).loss for i in range(2)]
        states.append((losses, _state(engine)))
        engine.close()
    for other in (_engine(stage, blocks=3, width=32), _engine(stage, blocks=3, freeze=("embed",))):
        said.append(_said(functools.partial(other.load_checkpoint, root)))
        _step(other, 0)  # with half of its state, such as moments without a step count, the optimizer would fail
        other.close()
    return said, states[0] == states[1]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_another_model_is_refused_and_nothing_has_changed(rank_pool, tmp_path, stage):
    for (fewer, narrower, frozen), same in rank_pool(2).run(_refused, str(tmp_path), stage):
        assert "holds 10 tensors that this one lacks (blocks.2." in fewer
        assert "shape (64, 34) in the checkpoint, (64, 32) in the model" in narrower
        assert "trained in the checkpoint and frozen in this run, first embed.weight" in frozen
        assert same


def _from_the_start(root, stage):
    engine = _engine(stage)
    engine.save_checkpoint(root)
    runs = []
    for _ in range(2):
        runs.append(([_step(engine, i).loss for i in range(3)], _state(engine)))
        engine.load_checkpoint(root, tag=0)
    engine.close()
    return runs


@pytest.mark.parametrize("stage", [0, 2])
def test_a_checkpoint_of_step_0_comes_back_into_a_run_that_went_on(rank_pool, tmp_path, stage):
    first, again = rank_pool(2).run(_from_the_start, str(tmp_path), stage)[0]
    assert first == again


def _odd_buffers() -> dict[str, torch.Tensor]:
    values = torch.arange(24, dtype=torch.float32).view(4, 6)
    return {
        "turned": values.t(), "spread": values[:1].expand(4, 6), "angle": torch.tensor(1 + 2j), "angles": torch.polar(values, -values),
        "words": values.to(torch.uint32), "long": values.to(torch.uint64), "small": values.to(torch.float8_e4m3fn),
    }  # fmt: skip


def _keep_buffers(root):
    engine = _engine(1, buffers=_odd_buffers())
    engine.save_checkpoint(root)
    engine.close()
    engine = _engine(1, buffers={name: torch.zeros_like(value) for name, value in _odd_buffers().items()})
    engine.load_checkpoint(root)
    got = {name: getattr(engine.module, name).clone() for name in _odd_buffers()}
    engine.close()
    odd = _engine(1)
    odd.module.register_buffer(
        "wide", torch.tensor(1 + 2j, dtype=torch.complex128)
    )  # the engine itself refuses one that is there before
    said = _said(lambda: odd.save_checkpoint(root))
    odd.close()
    return got, said


def test_buffers_of_any_type_and_order_come_back_and_others_are_named_on_every_rank(rank_pool, tmp_path):
    for got, said in rank_pool(2).run(_keep_buffers, str(tmp_path)):
        for name, want in _odd_buffers().items():
            assert got[name].shape == want.shape and got[name].tolist() == want.tolist(), name
        assert "buffer wide is torch.complex128, which a checkpoint cannot hold" in said


def _narrower_buffers(root):
    """A checkpoint from before buffers took the model's dtype: tables of sines in fp32 beside weights in bf16."""
    values, told = torch.linspace(-1, 1, 2048 * 3), _Told()
    engine = _engine(1, buffers={"table": values, "count": torch.tensor(7)})
    engine.save_checkpoint(root)
    engine.close()
    engine = _engine(1, buffers={"table": torch.zeros(2048 * 3, dtype=torch.bfloat16), "count": torch.tensor(0)})
    logging.getLogger("bigtrain").addHandler(told)
    engine.load_checkpoint(root)
    logging.getLogger("bigtrain").removeHandler(told)
    same = torch.equal(engine.module.table, values.bfloat16()) and engine.module.count == 7
    engine.save_checkpoint(root, tag="narrow")
    engine.close()
    engine = _engine(1, buffers={"table": values, "count": torch.tensor(0.0)})
    said = _said(lambda: engine.load_checkpoint(root, tag="narrow")), _said(lambda: engine.load_checkpoint(root))
    engine.close()
    return bool(same), told.lines, said


class _Told(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_wider_buffers_of_a_checkpoint_are_rounded_and_other_ones_refused(rank_pool, tmp_path):
    results = rank_pool(2).run(_narrower_buffers, str(tmp_path))
    for rank, (same, told, (narrow, other)) in enumerate(results):
        assert same
        rounded = "table is torch.float32 in the checkpoint and rounded to torch.bfloat16, which this run's model has"
        assert any(rounded in line for line in told) == (rank == 0)
        assert "buffer of table is torch.bfloat16 in the checkpoint and torch.float32 in this run" in narrow
        assert "buffer of count is torch.int64 in the checkpoint and torch.float32 in this run" in other
        assert "precision settings" not in narrow + other


def _save_as(root, tags):
    engine = _engine(1)
    said = [_said(lambda tag=tag: engine.save_checkpoint(root, tag=tag)) for tag in tags]
    said.append(_said(lambda: engine.save_deepspeed_checkpoint(root, tag="good")))
    engine.close()
    return said


def test_a_save_stays_in_its_folder_and_replaces_checkpoints_only(rank_pool, tmp_path):
    root = tmp_path / "root"
    for name in ("notes/mine.txt", "checkpoint-0/trainer_state.json", ".config.old/mine.txt"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("precious")
    tags = ["../out", "a/b", str(tmp_path / "out"), "7", "notes", None, "good", "good"]
    words = ["cannot be"] * 3 + ["taken for a step"] + ["no checkpoint of bigtrain's"] * 2 + ["", "", "exists already"]
    for said in rank_pool(2).run(_save_as, str(root), tags):
        assert all((word in text) if word else not text for word, text in zip(words, said)), said
    kept = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and p.read_bytes() == b"precious"}
    assert kept == {"notes/mine.txt", "checkpoint-0/trainer_state.json", ".config.old/mine.txt"}
    assert not (tmp_path / "out").exists() and not (root / "a").exists() and (root / "good" / "COMMIT").exists()


def test_a_claim_ends_with_its_save_although_a_data_worker_was_forked_meanwhile(tmp_path):
    held = files.claim(tmp_path)
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    try:
        with pytest.raises(CheckpointError, match="another run is writing"):
            files.claim(tmp_path)
        lock.release(held)
        again = files.claim(tmp_path)
        assert held >= 0 and again >= 0
        lock.release(again)
    finally:
        os.kill(worker, 9)
        os.waitpid(worker, 0)


def test_a_checkpoint_that_was_moved_elsewhere_is_let_go_of_and_not_deleted(tmp_path):
    saved(tmp_path / "elsewhere", 1, 2)
    for moved in (tmp_path / "elsewhere").iterdir():
        Path(tmp_path / moved.name).symlink_to(moved)
    assert store.retire(Disk(), tmp_path, keep_last=1, keep_every=None, protect=frozenset()) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "elsewhere"]
    assert (tmp_path / "elsewhere" / "checkpoint-1" / "COMMIT").exists()


def test_what_is_not_a_manifest_is_refused_without_doing_what_it_says():
    from bigtrain.checkpoint import manifest

    commit = manifest.Commit(step=1, world_size=10**15, files={"run.json": (1, "00"), "rank-00000-of-00001.json": (1, "00")})
    with pytest.raises(CheckpointError, match="2 files for 1000000000000000 ranks"):
        manifest.parse_commit(commit.to_json(), "COMMIT")
    with pytest.raises(CheckpointError, match="not JSON"):
        manifest.parse_run(b"[" * 100_000, "run.json")
    with pytest.raises(CheckpointError, match="'state' is not an object"):
        manifest.parse_run(b'{"format": "bigtrain-run-state", "version": 1}', "run.json")
    rank = manifest.RankManifest(rank=0, world_size=1, data_name="d", data_bytes=64, slices=(), header_bytes=10**15)
    with pytest.raises(CheckpointError, match="a header of 1000000000000000 bytes in a file of 64"):
        manifest.parse_manifest(rank.to_json(), "d")


def _in_turns(root):
    """Saves into two folders in turns; open files after the first ones and after ten more."""
    engine = _engine(1)
    opened = []
    for turns in (2, 10):
        for turn in range(turns):
            engine.save_checkpoint(f"{root}/{turn % 2}", tag="best")
        opened.append(len(os.listdir("/proc/self/fd")))
    engine.close()
    return opened


def test_saving_into_two_folders_in_turns_leaves_nothing_open(rank_pool, tmp_path):
    for before, after in rank_pool(2).run(_in_turns, str(tmp_path)):
        assert after <= before + 4


class _FullOnce(Disk):
    """Rank 1's disk is full for a moment."""

    def __init__(self, operation: str = "write") -> None:
        self.operation, self.times = operation, 1

    def step(self, operation, path):
        if operation == self.operation and self.times and ranks.rank() == 1:
            self.times -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fails_once(root):
    engine = _engine(1)
    engine.checkpoints.disk = _FullOnce()
    said = []
    for step in range(2):
        _step(engine, step)
        said.append(str(engine.checkpoints.failure() or ""))
        engine.save_checkpoint(root, wait=bool(said[-1]))
    engine.close()
    return said


def test_after_a_save_that_failed_the_next_one_is_made(rank_pool, tmp_path):
    for said in rank_pool(2).run(_fails_once, str(tmp_path)):
        assert said[0] == "" and "step 1 was not saved" in said[1] and "rank 1" in said[1]
    assert store.steps(tmp_path) == [2]


def _by_another_name(root):
    """An optimizer's alias, in the Engine and in a checkpoint."""
    engine = _engine(1, optimizer="adamw_hf")
    _step(engine, 0)
    engine.save_checkpoint(root)
    engine.load_checkpoint(root)
    step = engine.global_step
    engine.close()
    return step


def test_an_alias_of_an_optimizer_saves_and_loads(rank_pool, tmp_path):
    assert rank_pool(1).run(_by_another_name, str(tmp_path)) == [1]


def _best(root):
    engine = _engine(1, seed=4)
    engine.load_checkpoint(root, tag="best")
    engine.close()


def test_a_tag_whose_replacement_was_interrupted_is_loaded(rank_pool, tmp_path):
    rank_pool(2).run(_save_as, str(tmp_path), ["best", None])
    (tmp_path / "best").rename(tmp_path / ".best.old")  # as a crash between the two renames leaves it
    (tmp_path / "checkpoint-0").rename(tmp_path / ".checkpoint-0.old")
    assert RunFolder(tmp_path).resume_point("auto") == tmp_path / "checkpoint-0"
    rank_pool(2).run(_best, str(tmp_path))
    assert (tmp_path / "best" / "COMMIT").exists()


def _without_its_tag(root):
    engine = _engine(2)
    engine.save_checkpoint(root, tag="last")
    said = _said(lambda: engine.load_checkpoint(root))
    engine.load_checkpoint(root, tag="last")
    engine.close()
    return said


def test_where_only_tagged_checkpoints_are_the_tags_are_named(rank_pool, tmp_path):
    for said in rank_pool(2).run(_without_its_tag, str(tmp_path)):
        assert "no complete checkpoint" in said and "by that only (tag, or path): last" in said


class _NoMemory(Disk):
    """Rank 1 has none, for an error that is not of the disk."""

    def step(self, operation, path):
        if operation == "create" and ranks.rank() == 1:
            raise MemoryError("no memory")


def _told_or_ended(root, disk):
    engine = _engine(1)
    engine.checkpoints.disk = disk
    args = SimpleNamespace(
        copy_checkpoints_to=None, save_only_model=False, load_best_model_at_end=False, save_total_limit=None, keep_every=None
    )
    saving = Saving(args, engine, SimpleNamespace(global_batch=6, steps=9), Path(root), {})
    _step(engine, 0)
    try:
        return saving.save().split("(")[0], saving.step
    except (BigtrainError, MemoryError) as error:
        return type(error).__name__, saving.step
    finally:
        engine.close()


def test_a_save_that_cannot_begin_is_told_on_all_ranks_or_ends_all(rank_pool, tmp_path):
    """Rank 1 ended, and rank 0 said that training went on."""
    assert rank_pool(2).run(_told_or_ended, str(tmp_path), _FullOnce("create")) == [("step 1 was not saved ", -1)] * 2
    ended = rank_pool(2).run(_told_or_ended, str(tmp_path), _NoMemory())
    assert [how for how, _ in ended] == ["RanksDisagreeError", "MemoryError"]
