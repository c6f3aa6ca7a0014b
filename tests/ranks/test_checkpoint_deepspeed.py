"""Folders that DeepSpeed's own engine wrote, and universal checkpoints, go on in bigtrain on any number of ranks."""

import argparse

import pytest
import torch

from bigtrain.checkpoint import live
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from tests.ranks.test_checkpoint_engine import _engine, _state, _step
from tests.ranks.test_engine_checkpoint import Marker
from tests.ranks.tiny import TinyLM, config


def _save(root, stage, universal=False, optimizer="adamw_torch"):
    """Three steps, and DeepSpeed's own save; hashes of every logical tensor."""
    engine = _engine(stage, optimizer)
    for step in range(3):
        _step(engine, step)
    engine.deepspeed.save_checkpoint(root, tag="global_step3")
    state, samples = _state(engine), engine.deepspeed.global_samples
    loss = _step(engine, 3).loss
    if universal and engine.rank == 0:
        from deepspeed.checkpoint.ds_to_universal import main

        main(argparse.Namespace(
            input_folder=f"{root}/global_step3", output_folder=f"{root}/universal", num_extract_workers=1, num_merge_workers=1,
            keep_temp_folder=False, strict=True, inject_missing_state=True,
        ))  # fmt: skip
    engine.close()
    return state, samples, loss


def _load(root, stage, tag=None, optimizer="adamw_torch"):
    engine = _engine(stage, optimizer, seed=99)
    try:
        user = engine.load_checkpoint(root, tag=tag)
        counters = (engine.global_step, engine.updates, engine.data_position, user)
        state, loss = _state(engine), _step(engine, 3).loss
        return state, counters, loss
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()


# (ranks, stage) that wrote, and those that read: each stage written by 1 and 2 ranks, read at each stage by 1 to 3.
PAIRS = [
    ((1, 1), (2, 2)),
    ((2, 1), (3, 3)),
    ((1, 2), (2, 0)),
    ((2, 2), (1, 3)),
    ((1, 3), (2, 1)),
    ((2, 3), (3, 2)),
    ((2, 3), (2, 3)),
]


@pytest.mark.parametrize("saved,now", PAIRS)
def test_weights_masters_moments_and_counts_come_back(rank_pool, tmp_path, saved, now):
    want, samples, loss = rank_pool(saved[0]).run(_save, str(tmp_path), saved[1])[0]
    for state, counters, again in rank_pool(now[0]).run(_load, str(tmp_path), now[1]):
        assert state == want, [k for k in want if want[k] != state.get(k)]
        assert counters == (3, 3, samples, {})
        # Only the order of bf16 gradient sums and partial losses differs with the number of ranks, 2^-8 relative each.
        assert abs(again - loss) < 0.01 * loss


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints_come_back(rank_pool, tmp_path, stage):
    want = rank_pool(2).run(_save, str(tmp_path), stage, True)[0][0]
    for world, now in ((2, 3), (1, 2)):
        state, counters, _ = rank_pool(world).run(_load, str(tmp_path), now, "universal")[0]
        assert state == want and counters[:2] == (3, 3)
    (tmp_path / "latest").unlink()
    assert rank_pool(1).run(_load, str(tmp_path), 2)[0][0] == want  # by latest_universal
    assert rank_pool(1).run(_load, str(tmp_path / "universal"), 2)[0][0] == want


def _save_twice(root, stage):
    engine = _engine(stage)
    for tag in ("one", "two"):
        _step(engine, 0)
        engine.deepspeed.save_checkpoint(root, tag=tag)
    engine.close()


@pytest.mark.parametrize("stage,kind", [(1, "optim"), (3, "optim"), (3, "model")])
def test_files_of_two_saves_are_not_taken_for_one(rank_pool, tmp_path, stage, kind):
    rank_pool(2).run(_save_twice, str(tmp_path), stage)
    (name,) = [p.name for p in (tmp_path / "two").glob(f"*zero_pp_rank_1_*{kind}_states.pt")]
    (tmp_path / "two" / name).write_bytes((tmp_path / "one" / name).read_bytes())
    assert all(name in m and "files of two saves are mixed" in m for m in rank_pool(2).run(_load, str(tmp_path), 2, "two"))
    (tmp_path / "two" / name).rename(tmp_path / "two" / name.replace("rank_1", "rank_2"))
    assert all("files of the ranks [0, 2]" in m for m in rank_pool(2).run(_load, str(tmp_path), 2, "two"))


def _split(root, optimizer):
    engine = _engine(2, optimizer, seed=99)
    engine.load_checkpoint(root)
    inner, out = engine.deepspeed.optimizer.optimizer, {}
    for flat in live.flat_tensors(engine):
        master = inner.master(flat.key) if optimizer == "adamw_split" else flat.key.detach().view(-1)
        moment = flat.state["exp_avg_sq"].abs()
        for name, _, start, at, count in flat.pieces:
            out[name, start] = master[at : at + count].clone(), moment.view(-1)[at : at + count].clone()
    loss = _step(engine, 3).loss
    engine.close()
    return out, loss


def test_a_split_master_is_made_from_deepspeeds(rank_pool, tmp_path):
    rank_pool(2).run(_save, str(tmp_path), 3)
    whole, split = (rank_pool(2).run(_split, str(tmp_path), name) for name in ("adamw_torch", "adamw_split"))
    for (want, loss), (got, again) in zip(whole, split):
        assert want.keys() == got.keys() and loss == again
        assert all(torch.equal(a, b) for key in want for a, b in zip(want[key], got[key]))


def _load_into(root, blocks):
    cfg = config(2, bf16=True, micro=1, accumulation=1)
    model = build_model(lambda: TinyLM(width=34, blocks=blocks), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", hang_s=None)
    try:
        engine.load_checkpoint(root)
        return "loaded"
    except BigtrainError as error:
        return str(error)
    finally:
        engine.close()


def test_what_does_not_fit_is_said_and_no_code_runs(rank_pool, tmp_path):
    rank_pool(2).run(_save, str(tmp_path), 2)
    assert all(
        "optimizer state exp_avg, exp_avg_sq; optimizer 'muon' keeps" in m
        for m in rank_pool(2).run(_load, str(tmp_path), 2, None, "muon")
    )
    for blocks, words in ((1, "of another model: it holds"), (3, "is not in the checkpoint")):
        assert all(words in m and f"blocks.{min(blocks, 2)}" in m for m in rank_pool(2).run(_load_into, str(tmp_path), blocks))
    folder = tmp_path / "global_step3"
    file = folder / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "evil": Marker(tmp_path / "ran")}, file)
    assert all(file.name in m and "would run code" in m for m in rank_pool(1).run(_load, str(tmp_path), 3))
    assert not (tmp_path / "ran").exists()
    torch.save(content, file)
    next(folder.glob("*zero_pp_rank_1*")).unlink()
    assert all("a rank's file is missing" in m for m in rank_pool(2).run(_load, str(tmp_path), 3))


def _dealt_round(root, saved, loaded):
    """Hashes of every logical tensor, before a save by an engine with `saved`, and after its load by one with `loaded`."""
    states = []
    for rounds in (saved, loaded):
        ds_config = config(2, bf16=True, round_robin_gradients=rounds)
        engine = Engine(
            build_model(lambda: TinyLM(width=34), ds_config=ds_config), ds_config=ds_config, optimizer="adamw_torch"
        )
        if not states:
            _step(engine, 0)
            engine.save_deepspeed_checkpoint(root)
        else:
            engine.load_checkpoint(root)
        states.append(_state(engine))
        engine.close()
    return states


@pytest.mark.parametrize("saved", [True, False])
def test_partitions_that_were_dealt_in_another_order_are_read_by_name(rank_pool, tmp_path, saved):
    """DeepSpeed's own load takes a partition as it lies: with round_robin_gradients on one side only, state was another parameter's."""
    for before, after in rank_pool(2).run(_dealt_round, str(tmp_path), saved, not saved):
        assert before == after
