"""A parameter without elements, such as the weight of nn.Linear(0, n): like any other up to stage 2, refused by name at stage 3."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bigtrain.checkpoint.export import export_checkpoint
from bigtrain.engine import Engine
from bigtrain.errors import ModelError
from bigtrain.models import build_model
from bigtrain.zero import gathered
from tests.ranks.tiny import VOCAB, TinyLM, config, rows, share, whole_weights


class WithEmpty(TinyLM):
    """Adapters of rank 0, as models keep them that were made for other settings."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(32, 0)
        self.up = nn.Linear(0, 32)
        self.table = nn.Parameter(torch.zeros(0, 7))

    def forward(self, input_ids, labels=None):
        zero = self.up(self.down(self.embed(input_ids))).sum() * 0 + self.table.sum()
        out = super().forward(input_ids, labels)
        return out if labels is None else {**out, "loss": out["loss"] + zero.float()}


def _engine(stage, offload):
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    ds_config = config(stage, bf16=True, accumulation=2, **zero)
    model = build_model(WithEmpty, ds_config=ds_config, seed=3)
    return Engine(model, ds_config=ds_config, learning_rate=1e-2, total_steps=10)


def _go(engine, first, last):
    steps = [engine.train_step(share(rows(step), engine.rank, engine.world_size, 2)) for step in range(first, last)]
    return [(result.loss, result.grad_norm) for result in steps]


def _all_of_it(stage, offload, folder):
    engine = _engine(stage, offload)
    _go(engine, 0, 2)
    engine.save_checkpoint(folder, wait=True)
    straight = _go(engine, 2, 4)
    engine.export(f"{folder}/model")
    whole = whole_weights(engine.module)
    engine.close()
    engine = _engine(stage, offload)
    engine.load_checkpoint(folder)
    resumed = _go(engine, 2, 4)
    same = all(torch.equal(w, whole[n]) for n, w in whole_weights(engine.module).items())
    engine.close()
    return straight, resumed, same, {name: tuple(w.shape) for name, w in whole.items()}


@pytest.mark.parametrize("stage, offload", [(0, False), (1, False), (2, False), (2, True)])
def test_an_empty_parameter_is_a_parameter(rank_pool, tmp_path, stage, offload):
    for straight, resumed, same, shapes in rank_pool(2).run(_all_of_it, stage, offload, str(tmp_path)):
        assert straight == resumed and same and all(loss > 0 for loss, _ in straight)
        assert (shapes["down.weight"], shapes["up.weight"], shapes["table"]) == ((0, 32), (32, 0), (0, 7))
    export_checkpoint(tmp_path / "checkpoint-2", tmp_path / "again", dtype="bfloat16")
    files = {name: tensor for file in (tmp_path / "model").glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert files["up.weight"].shape == (32, 0) and files["table"].shape == (0, 7) and files["embed.weight"].shape == (VOCAB, 32)


def _after_stage_3(raw):
    """What torch's linear is for a plain weight and for a partitioned one, once this process has trained at stage 3."""
    ds_config = config(3, bf16=True)
    model = TinyLM() if raw else build_model(TinyLM, ds_config=ds_config, seed=3)
    engine = Engine(model, ds_config=ds_config, learning_rate=1e-2, total_steps=10)
    _go(engine, 0, 1)
    sharded = next(m.weight for m in engine.module.modules() if isinstance(m, nn.Linear))
    plain = torch.ones(3, sharded.ds_shape[1], dtype=torch.bfloat16, requires_grad=True)
    nodes = []
    with gathered([sharded]):
        for weight in (plain, sharded):
            nodes.append(nn.functional.linear(torch.ones(2, 2, weight.shape[1], dtype=torch.bfloat16), weight).grad_fn.name())
    engine.close()
    nn.functional.linear(torch.ones(2, 2, 0, requires_grad=True), torch.ones(3, 0, requires_grad=True)).sum().backward()
    return nodes


@pytest.mark.parametrize("raw", [False, True])
def test_stage_3_leaves_plain_weights_to_torch(rank_pool, raw):
    """A model trained at stage 2 after one at stage 3, in the same process, went through the latter's linear."""
    for plain, sharded in rank_pool(2).run(_after_stage_3, raw):
        assert sharded == "ShardedLinearBackward" != plain


def _refused(raw):
    ds_config = config(3, bf16=True)
    try:
        model = WithEmpty() if raw else build_model(WithEmpty, ds_config=ds_config, seed=3)
        Engine(model, ds_config=ds_config, learning_rate=1e-2, total_steps=10)
    except ModelError as error:
        return str(error)


@pytest.mark.parametrize("raw", [False, True])
def test_stage_3_refuses_it_by_name(rank_pool, raw):
    """DeepSpeed's forward ended with AssertionError: {'id': 28, 'status': 'NOT_AVAILABLE', ...}."""
    for said in rank_pool(2).run(_refused, raw):
        assert said.startswith(
            "4 parameters have no elements: table [0, 7], down.weight [0, 32], down.bias [0], up.weight [32, 0]. At stage 3"
        )
