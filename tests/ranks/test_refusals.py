"""Calls that would hang, fail in words of others, or lose something: refused by name, on every rank alike."""

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from bigtrain.zero import gathered
from tests.ranks.test_engine_loops import MICRO, _module, _one_by_one, _x
from tests.ranks.tiny import TinyLM, config, rows, share

LLAMA = {"vocab_size": 64, "num_hidden_layers": 1}


def _resized_live(stage):
    cfg = config(stage, bf16=False)
    model = build_model("preset:llama-tiny", ds_config=cfg, dtype=torch.float32, **LLAMA)
    model.resize_token_embeddings()  # returns the embedding
    engine = Engine(model, ds_config=cfg, learning_rate=1e-3)
    batch = {"input_ids": torch.full((1, 4), engine.rank), "labels": torch.ones(1, 4, dtype=torch.long)}
    try:
        engine.module.resize_token_embeddings(70)
        return "nothing"
    except BigtrainError as error:
        engine.train_step([batch])  # nothing has happened to the model
        return str(error)
    finally:
        engine.close()
        assert "resize_token_embeddings" not in model.__dict__


@pytest.mark.parametrize("stage", [0, 3])
def test_a_vocabulary_is_not_resized_under_an_engine(rank_pool, stage):
    assert all("--resize_vocab" in said for said in rank_pool(2).run(_resized_live, stage))


def _notes(call):
    try:
        call()
        return "nothing"
    except Exception as error:
        return "".join(getattr(error, "__notes__", []))


def _bare_forwards():
    cfg = config(3, bf16=False, micro=4, accumulation=MICRO)
    teacher = build_model(_module, ds_config=cfg, dtype=torch.float32)
    teacher.requires_grad_(False)
    x = _x(0, 0, 0)
    said = [_notes(lambda: teacher(x))]
    with gathered(list(teacher.parameters())):
        same = torch.equal(teacher(x), _module()(x))
    engine = Engine(_module(), ds_config=cfg, learning_rate=1e-2)
    _one_by_one(engine, 0)
    engine.close()
    said.append(_notes(lambda: engine.module(x)))
    engine = Engine(engine.module, ds_config=cfg, learning_rate=1e-2)
    wrong_input = _notes(lambda: engine(x[:, :3]))
    engine.close()
    return [("no Engine gathers them" in notes and "zero.gathered" in notes) for notes in said], same, wrong_input


def test_a_forward_of_partitioned_weights_without_an_engine_says_what_gathers_them(rank_pool):
    assert rank_pool(2).run(_bare_forwards) == [([True, True], True, "")] * 2


def _broken_on_rank_1(rank, batches):
    yield batches[0]
    if rank == 1:
        raise OSError("the file server is gone")
    yield batches[1]


class _Unreadable:
    def __iter__(self):
        raise OSError("no such shard")


def _evaluated():
    torch.manual_seed(0)
    engine = Engine(TinyLM(), ds_config=config(2, accumulation=2), learning_rate=1e-3)
    batches = share(rows(0), engine.rank, engine.world_size, 2)
    said = []
    for given in (
        _broken_on_rank_1(engine.rank, batches),
        [batches[0], 7] if engine.rank == 1 else batches,
        _Unreadable() if engine.rank == 1 else batches,
    ):
        try:
            engine.evaluate(given)
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    trains = engine.module.training and engine.evaluate(batches).tokens > 0
    engine.close()
    return said, trains


def test_an_evaluation_set_that_fails_on_one_rank_fails_on_all(rank_pool):
    (first, trains), (second, trains_too) = rank_pool(2).run(_evaluated, limit_s=30)
    assert trains and trains_too
    for told, own, words in zip(first, second, ("the file server is gone", "a batch is a mapping", "no such shard")):
        assert told.startswith("RanksDisagreeError") and "rank 1" in told and words in told
        assert not own.startswith("RanksDisagreeError") and words in own


def _kept(folder):
    engine = Engine(_module(), ds_config=config(2, bf16=False, micro=4, accumulation=MICRO), learning_rate=1e-2)
    _one_by_one(engine, 0)
    said = []
    for position, state in (
        (100 + engine.rank, {}),
        (5, {"epoch": engine.rank, "same": 1}),
        (5, {"names": ["a long one"] * 10 + [str(engine.rank)]}),
        (5, {"best": {"loss": [1.0, torch.ones(2)]}}),
        (torch.tensor(3), {}),
        (5, {"b": 1, "a": [1, 2.5, None, "x"]}),
    ):
        engine.data_position = position
        for save in (engine.save_checkpoint, engine.save_deepspeed_checkpoint):
            try:
                save(folder, f"tag-{len(said)}", state)
                said.append("nothing")
            except BigtrainError as error:
                said.append(str(error))
    state = engine.load_checkpoint(folder, "tag-10")
    engine.close()
    return said, list(state.items())


def test_what_a_checkpoint_cannot_keep_for_every_rank_is_refused_by_name(rank_pool, tmp_path):
    for said, state in rank_pool(2).run(_kept, str(tmp_path)):
        for position, epoch, names, best, tensor, fine in (said[::2], said[1::2]):
            assert "rank 0: {'data_position': '100'}" in position and "rank 1: {'data_position': '101'}" in position
            assert "rank 1: {\"state['epoch']\": '1'}" in epoch and "'same'" not in epoch
            assert "state['names']" in names and names.count("characters, hash") == 2
            assert "state['best']['loss'][1] cannot be kept" in best and "torch.Tensor" in best
            assert "data_position cannot be kept" in tensor and "torch.Tensor" in tensor
            assert fine == "nothing"
        assert state == [("b", 1), ("a", [1, 2.5, None, "x"])]
