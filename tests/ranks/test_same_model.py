"""What an engine makes of models that ranks did not build alike: rank 0's values for all, or an error that names what differs."""

import types

import pytest
import torch
from torch import nn

from bigtrain.engine import Engine, buffers
from bigtrain.errors import RanksDisagreeError
from tests.ranks.tiny import TinyLM, config, rows, share


class Drawn(TinyLM):
    """With buffers of several dtypes, of no element, shared, laid out apart, and one that no checkpoint keeps; all of this rank's seed."""

    def __init__(self):
        super().__init__()
        self.register_buffer("drawn", torch.randn(3, 5).t())
        self.register_buffer("in_bf16", torch.randn(7, dtype=torch.float64).bfloat16())
        self.register_buffer("spread", torch.randn(4, 1, dtype=torch.float64).expand(4, 3))
        self.register_buffer("numbers", torch.randint(0, 2**40, (9,)))
        self.register_buffer("chosen", torch.rand(21) < 0.5)
        self.register_buffer("one", torch.randn(()))
        self.register_buffer("none", torch.randn(0, 4))
        self.register_buffer("own", torch.randn(6), persistent=False)
        self.blocks[0].register_buffer("again", self.numbers)
        self.norm_of = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        if self.embed.weight.dtype == torch.float32:  # as what goes in
            out["loss"] = out["loss"] + self.norm_of(self.drawn.new_ones(6)).mean()
        return out


def _engine(model, stage, bf16):
    return Engine(model, ds_config=config(stage, bf16=bf16), learning_rate=1e-2, agree_every=1)


def _values(module):
    """Dtype, shape and bits of each buffer."""
    return {
        name: (str(b.dtype), tuple(b.shape), b.contiguous().view(-1).view(torch.uint8).tolist())
        for name, b in module.named_buffers()
    }


def _taken(stage, bf16, folder, piece_bytes):
    """Buffers before, under an engine, after a step, and in another engine that went on from that step's checkpoint."""
    pieces, buffers.PIECE_BYTES = buffers.PIECE_BYTES, piece_bytes
    try:
        torch.manual_seed(torch.distributed.get_rank())
        model = Drawn()
        before = _values(model)
        engine = _engine(model, stage, bf16)
        begun = _values(engine.module)
        engine.train_step(share(rows(0), engine.rank, engine.world_size, 1))
        stepped = _values(engine.module)
        engine.save_checkpoint(folder)
        engine.close()
        torch.manual_seed(100 + torch.distributed.get_rank())
        again = _engine(Drawn(), stage, bf16)
        again.load_checkpoint(folder)
        loaded = _values(again.module)
        again.close()
        return before, begun, stepped, loaded
    finally:
        buffers.PIECE_BYTES = pieces


@pytest.mark.parametrize("stage,bf16,piece_bytes", [(0, False, 2**26), (1, True, 50), (3, False, 2**26)])
def test_every_rank_begins_with_the_persistent_buffers_of_rank_0(rank_pool, tmp_path, stage, bf16, piece_bytes):
    """spectral_norm's vectors and other buffers that a rank draws were its own until the comparison of step 100."""
    first, second = rank_pool(2).run(_taken, stage, bf16, str(tmp_path), piece_bytes)
    kept = first[0].keys() - {"own", "scale"}
    assert {n for n in kept if first[0][n] != second[0][n]} == kept - {"none"} and any("parametrizations" in n for n in kept)
    for mine in (first, second):
        assert {n: mine[1][n] for n in kept} == {n: first[0][n] for n in kept}
        assert mine[1]["own"] == mine[0]["own"]
    for when in (2, 3):
        assert {n: second[when][n] for n in kept} == {n: first[when][n] for n in kept}
    assert {n: first[3][n] for n in kept} == {n: first[2][n] for n in kept}
    assert bf16 or first[2] != first[1]  # spectral_norm's power iteration


def _sent(persistent):
    """How many broadcasts take the buffers of a model."""
    model, counted, broadcast = nn.Linear(2, 2), [], torch.distributed.broadcast
    model.register_buffer("table", torch.zeros(8), persistent=persistent)
    try:
        torch.distributed.broadcast = lambda *args, **kwargs: counted.append(broadcast(*args, **kwargs))
        buffers.take_from_rank_0(model, torch.device("cpu"))
    finally:
        torch.distributed.broadcast = broadcast
    return len(counted)


def test_nothing_is_sent_that_need_not_be(rank_pool):
    assert rank_pool(2).run(_sent, False) == [0, 0]
    assert rank_pool(2).run(_sent, True) == [1, 1]
    assert rank_pool(1).run(_sent, True) == [0]


def _apart(stage, how):
    model, odd = TinyLM(), torch.distributed.get_rank() == 1
    if how == "order":
        for name in ("b", "a") if odd else ("a", "b"):
            model.register_buffer(name, torch.zeros(2))
    elif how == "absent" and odd:
        model.register_buffer("table", torch.zeros(2))
    elif how == "shape":
        model.register_buffer("table", torch.zeros(2 + odd))
    elif how == "dtype":
        model.register_buffer("table", torch.zeros(2, dtype=torch.int32 if odd else torch.int64))
    elif how == "parameter":
        model.more = nn.Linear(2, 2 + odd)
    elif how == "frozen" and odd:
        model.head.weight.requires_grad_(False)
    elif how == "kind" and odd:
        model.more = nn.LazyLinear(2)
    with pytest.raises(Exception) as told:
        _engine(model, stage, True)
    return isinstance(told.value, RanksDisagreeError), str(told.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "how,words",
    [
        ("absent", "table: rank 0 None, rank 1 buffer (2,) torch.float32"),
        ("shape", "table: rank 0 buffer (2,) torch.float32, rank 1 buffer (3,) torch.float32"),
        ("dtype", "table: rank 0 buffer (2,) torch.int64, rank 1 buffer (2,) torch.int32"),
        ("order", ": rank 0 a, rank 1 b"),
        ("parameter", "more.bias: rank 0 (2,) torch.float32, rank 1 (3,) torch.float32"),
        ("frozen", "head.weight: rank 0 (64, 32) torch.float32, rank 1 (64, 32) torch.float32 frozen"),
    ],
)
def test_models_that_differ_are_told_on_all_ranks(rank_pool, stage, how, words):
    for disagree, said in rank_pool(2).run(_apart, stage, how, limit_s=60.0):
        assert disagree and "built different models" in said and words in said


def test_a_model_that_is_refused_on_one_rank_is_told_to_the_others(rank_pool):
    (disagree, there), (_, here) = rank_pool(2).run(_apart, 2, "kind", limit_s=60.0)
    assert disagree and "rank 1: ModelError: parameter more.weight is lazy" in there and "more.weight is lazy" in here


class Activated(nn.BatchNorm1d):
    """As timm's BatchNormAct2d."""

    def forward(self, x):
        return super().forward(x).relu() + 7.0


def _plus_two(layer, x):
    return type(layer).forward(layer, x) * 0.0 + x + 2.0


def _statistics():
    norms = nn.InstanceNorm1d(2, affine=True, track_running_stats=True), Activated(2), nn.BatchNorm1d(2)
    model = nn.Sequential(*norms).bfloat16()
    norms[2].forward = types.MethodType(_plus_two, norms[2])
    engine = _engine(model, 0, True)
    out = engine(torch.full((1, 2, 4), 3.0, dtype=torch.bfloat16))
    found = {name: (b.dtype, b.flatten()[:1].item()) for name, b in engine.module.named_buffers() if "mean" in name}
    engine.close()
    return found, out.dtype, out.mean().item()


def test_running_statistics_of_a_model_that_was_built_in_bf16_are_fp32(rank_pool):
    mean = torch.tensor(0.1) * 3.0  # not a number of bf16
    found, dtype, own = rank_pool(1).run(_statistics)[0]
    assert found["0.running_mean"] == (torch.float32, pytest.approx(mean.item(), rel=1e-6))
    assert found["1.running_mean"][0] == torch.float32
    assert (dtype, own) == (torch.bfloat16, 9.0)  # plain BatchNorm's forward was put in the place of a layer's own


def _other_dtype():
    engine = _engine(Mixed(), 0, True)
    with pytest.raises(RuntimeError) as told:
        engine.train_step([{"x": torch.ones(1, 2)}])
    engine.close()
    return "".join(told.value.__notes__)


class Mixed(nn.Module):
    """A product of bf16 weights with a buffer in fp32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2))

    def forward(self, x):
        return (self.layer.weight @ self.table).sum() + x.sum()


def test_a_buffer_of_another_dtype_than_the_weights_is_thought_of(rank_pool):
    """train_step was named as the remedy for what happened in it."""
    assert "Buffers keep the dtype they were built with" in rank_pool(1).run(_other_dtype)[0]
