"""Save and resume through DeepSpeed's files: exact, agreed, complete, and without code in them."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from bigtrain import ranks
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from tests.ranks.tiny import TinyLM, config, rows, share, whole_weights

STAGES = [0, 1, 2, 3]


def _engine(stage, *, bf16=True, zero=None):
    torch.manual_seed(0)
    ds_config = config(stage, bf16=bf16, accumulation=2, **(zero or {}))
    return Engine(TinyLM(dropout=0.2), ds_config=ds_config, learning_rate=1e-2, warmup_steps=2, total_steps=10)


def _go(engine, first, last):
    out = []
    for step in range(first, last):
        engine.data_position = 12 * (step + 1)
        result = engine.train_step(share(rows(step), engine.rank, engine.world_size, 2))
        out.append((result.step, result.loss, result.grad_norm, result.lr))
    return out


def _resume(stage, bf16, offload, folder):
    zero = {"offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 100} if offload else None
    engine = _engine(stage, bf16=bf16, zero=zero)
    _go(engine, 0, 3)
    path = engine.save_deepspeed_checkpoint(folder, state={"note": "hello"})
    straight = _go(engine, 3, 6)
    weights = whole_weights(engine.module)
    engine.close()
    engine = _engine(stage, bf16=bf16, zero=zero)
    state = engine.load_checkpoint(folder)
    counters = (engine.global_step, engine.updates, engine.data_position, engine.tokens > 0)
    resumed = _go(engine, 3, 6)
    same = all(bool((w == weights[n]).all()) for n, w in whole_weights(engine.module).items())
    engine.close()
    return straight, resumed, same, state, counters, path.name


@pytest.mark.parametrize(
    "stage,bf16,offload", [(s, b, False) for s in STAGES for b in (True, False)] + [(2, True, True), (3, True, True)]
)
def test_resume_is_bit_exact_with_dropout(rank_pool, tmp_path, stage, bf16, offload):
    for straight, resumed, same, state, counters, name in rank_pool(2).run(_resume, stage, bf16, offload, str(tmp_path)):
        assert straight == resumed and same
        assert state == {"note": "hello"} and counters == (3, 3, 36, True) and name == "checkpoint-3"
    assert (tmp_path / "latest").read_text() == "checkpoint-3"
    assert not list(tmp_path.glob(".writing*"))


def _save_two(stage, folder):
    engine = _engine(stage)
    _go(engine, 0, 1)
    engine.save_deepspeed_checkpoint(folder, tag="early")
    early = whole_weights(engine.module)
    _go(engine, 1, 2)
    engine.save_deepspeed_checkpoint(folder, tag="late")
    engine.close()
    engine = _engine(stage)
    engine.load_checkpoint(folder, tag="early")
    same = all(bool((w == early[n]).all()) for n, w in whole_weights(engine.module).items())
    engine.close()
    return same


@pytest.mark.parametrize("stage", [2, 3])
def test_B25_the_tag_asked_for_is_the_tag_loaded(rank_pool, tmp_path, stage):
    assert rank_pool(2).run(_save_two, stage, str(tmp_path)) == [True, True]


def _load(stage, folder, tag=None, trust=False):
    engine = _engine(stage)
    try:
        engine.load_checkpoint(folder, tag=tag, trust=trust)
        return "loaded"
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()


def _save(stage, folder, tag="t"):
    engine = _engine(stage)
    _go(engine, 0, 1)
    try:
        return str(engine.save_deepspeed_checkpoint(folder, tag=tag if isinstance(tag, str) else tag[engine.rank]))
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()


def test_B26_another_number_of_ranks_or_stage_loads(rank_pool, tmp_path):
    rank_pool(2).run(_save, 2, str(tmp_path))
    assert rank_pool(1).run(_load, 2, str(tmp_path)) == ["loaded"]
    assert rank_pool(2).run(_load, 3, str(tmp_path)) == ["loaded"] * 2


def test_B26_deepspeeds_layout_of_stage_0_fits_the_same_run_only(rank_pool, tmp_path):
    rank_pool(2).run(_save, 0, str(tmp_path))
    assert "2 ranks at ZeRO stage 0, this run has 1 at stage 2" in rank_pool(1).run(_load, 2, str(tmp_path))[0]


def test_B30_a_missing_folder_or_tag_is_an_error_that_lists_what_there_is(rank_pool, tmp_path):
    rank_pool(2).run(_save, 2, str(tmp_path))
    assert all("does not exist" in m for m in rank_pool(2).run(_load, 2, str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    assert all("no complete checkpoint" in m for m in rank_pool(2).run(_load, 2, str(tmp_path / "empty")))
    assert all("Complete checkpoints here: t" in m for m in rank_pool(2).run(_load, 2, str(tmp_path), "other"))
    (tmp_path / "latest").unlink()
    assert rank_pool(2).run(_load, 2, str(tmp_path)) == ["loaded"] * 2


def test_a_missing_or_short_shard_stops_all_ranks(rank_pool, tmp_path):
    rank_pool(2).run(_save, 3, str(tmp_path))
    shard = next((tmp_path / "t").glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert all("damaged" in m and shard.name in m for m in rank_pool(2).run(_load, 3, str(tmp_path)))
    shard.write_bytes(whole[:-200] + bytes(200))
    assert all("damaged" in m and shard.name in m for m in rank_pool(2).run(_load, 3, str(tmp_path)))
    shard.unlink()
    assert all("missing" in m for m in rank_pool(2).run(_load, 3, str(tmp_path)))


class Marker:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_B27_code_in_a_checkpoint_is_refused_and_not_run(rank_pool, tmp_path):
    rank_pool(2).run(_save, 2, str(tmp_path))
    file = tmp_path / "t" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["evil"] = Marker(tmp_path / "ran")
    torch.save(content, file)
    listing = json.loads((tmp_path / "t" / "COMPLETE").read_text())
    listing[file.name] = file.stat().st_size
    (tmp_path / "t" / "COMPLETE").write_text(json.dumps(listing))
    messages = rank_pool(2).run(_load, 2, str(tmp_path))
    assert all(file.name in m and "trust=True" in m for m in messages) and not (tmp_path / "ran").exists()
    assert rank_pool(2).run(_load, 2, str(tmp_path), None, True) == ["loaded"] * 2 and (tmp_path / "ran").exists()
    assert pickle.dumps(Marker("x"))


def test_ranks_that_disagree_on_the_tag_stop(rank_pool, tmp_path):
    assert all("differs between ranks" in m for m in rank_pool(2).run(_save, 2, str(tmp_path), ("a", "b")))


def _disk_full(folder):
    engine = _engine(2)
    _go(engine, 0, 1)
    engine.save_deepspeed_checkpoint(folder, tag="good")
    if engine.rank == 1:

        def fail(*_, **__):
            raise OSError(28, "No space left on device")

        engine.deepspeed.checkpoint_engine.save = fail
    try:
        engine.save_deepspeed_checkpoint(folder, tag="bad")
    except BigtrainError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()


def test_B28_a_rank_that_cannot_write_stops_all_and_latest_stays(rank_pool, tmp_path):
    for message in rank_pool(2).run(_disk_full, str(tmp_path), limit_s=60):
        assert "No space left" in message
    assert (tmp_path / "latest").read_text() == "good" and not (tmp_path / "bad").exists()
    assert rank_pool(2).run(_load, 2, str(tmp_path)) == ["loaded"] * 2


def _alone(folder):
    from bigtrain import meeting

    meeting.MEET_S = 4.0
    engine = _engine(2)
    try:
        if engine.rank == 0:
            engine.save_deepspeed_checkpoint(folder)
        else:
            import time

            time.sleep(10)
    except BigtrainError as error:
        return str(error)
    finally:
        meeting.MEET_S = 120.0
        engine.close()


def test_B24_saving_on_rank_0_only_names_who_did_not_come(tmp_path):
    from tests.ranks.pool import RankPool

    pool = RankPool(2)  # its own: the control group is of no use after a time-out
    try:
        message = pool.run(_alone, str(tmp_path))[0]
        assert "rank 1 did not come" in message and "save_checkpoint" in message
    finally:
        pool.stop()


def _frozen(folder, seed):
    torch.manual_seed(seed)
    model = TinyLM()
    model.embed.weight.requires_grad_(False)
    engine = Engine(model, ds_config=config(3), learning_rate=1e-2)
    if seed == 0:
        engine.train_step(share(rows(0), engine.rank, ranks.world_size(), 1))
        engine.save_deepspeed_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    weights = {n: w.tolist() for n, w in whole_weights(engine.module).items()}
    engine.close()
    return weights


def test_B36_frozen_weights_come_back(rank_pool, tmp_path):
    saved = rank_pool(2).run(_frozen, str(tmp_path), 0)
    assert rank_pool(2).run(_frozen, str(tmp_path), 1) == saved
    shutil.rmtree(tmp_path / "checkpoint-1")
    assert os.listdir(tmp_path) == ["latest"]
