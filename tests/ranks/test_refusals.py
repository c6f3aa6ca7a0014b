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
