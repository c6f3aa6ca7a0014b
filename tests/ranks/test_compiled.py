"""Blocks compiled by torch: the same loss and weights, whatever is recomputed; what cannot be compiled is named.

The backend is aot_eager: everything but the last stage, which writes code that only a card or minutes of g++ would run.
"""

import copy

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.errors import ModelError
from bigtrain.models import build_model, compile_blocks, enable_activation_checkpointing
from tests.ranks.tiny import config, whole_weights

PACKED = torch.cat([torch.arange(9), torch.arange(7)])


def _model(ds_config):
    from transformers import LlamaConfig

    shape = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    return build_model(shape, ds_config=ds_config, seed=1, dtype=torch.float32, attn_implementation="sdpa")


def _batches(step, rank):
    g = torch.Generator().manual_seed(10 * step + rank)
    ids = [torch.randint(0, 64, (2, 16), generator=g) for _ in range(2)]
    return [{"input_ids": x, "labels": x, "position_ids": PACKED.expand(2, -1)} for x in ids]


def _trained(stage, compiles, recomputes):
    ds_config = config(stage, bf16=False, micro=2, accumulation=2)
    model = _model(ds_config)
    if recomputes:
        enable_activation_checkpointing(model, None, 2)  # of three, so that both kinds are there
    torch._dynamo.reset()  # an earlier test of this process may have left graphs
    torch._dynamo.utils.counters.clear()
    if compiles:
        assert compile_blocks(model, backend="aot_eager") == 3
    engine = Engine(model, ds_config=ds_config, learning_rate=1e-2, total_steps=10)
    losses = [engine.train_step(_batches(step, engine.rank)).loss for step in range(2)]
    losses.append(engine.evaluate(_batches(9, engine.rank)).loss)
    weights = whole_weights(engine.module)
    counters = torch._dynamo.utils.counters
    seen = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    alone = copy.deepcopy(engine.module)
    with torch.no_grad():
        for param in alone.parameters():
            param.zero_()
        zeroed = float(alone(**_batches(0, 0)[0]).loss)
    engine.close()
    return losses, weights, seen, zeroed


@pytest.mark.parametrize(("stage", "recomputes"), [(0, False), (2, True)])
def test_the_same_training_as_without(rank_pool, stage, recomputes):
    plain = rank_pool(2).run(_trained, stage, False, recomputes)
    for (losses, weights, *_), (ours, moved, (graphs, breaks), zeroed) in zip(
        plain, rank_pool(2).run(_trained, stage, True, recomputes)
    ):
        assert breaks == {} and 0 < graphs <= 4  # in training with and without recomputing, in evaluation; not one a block
        assert ours == pytest.approx(losses, rel=1e-6)  # fp32; torch's decompositions round in another order
        assert max(float((moved[n] - w).abs().max()) for n, w in weights.items()) <= 1e-5  # a hundredth of a step or less
        assert zeroed == pytest.approx(4.158883, abs=1e-5)  # log(64): the copy computes with its own weights


def _refused(kind):
    ds_config = config(3 if kind == "stage 3" else 2, bf16=False, micro=2, accumulation=2)
    model = _model(ds_config)
    if kind == "untraceable":
        layer = model.model.layers[1].mlp
        layer.forward = lambda x: (torch._dynamo.graph_break(), type(layer).forward(layer, x))[1]
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    try:
        compile_blocks(model, backend="aot_eager")
        if kind == "many lengths":
            torch._dynamo.config.recompile_limit = 1
        for length in (16, 15):
            model(**{name: value[:, :length] for name, value in _batches(0, 0)[0].items()})
        return "nothing"
    except ModelError as error:
        return str(error)
    finally:
        torch._dynamo.config.recompile_limit = limit


def test_what_cannot_be_compiled_is_named(rank_pool):
    assert "at ZeRO stage 3" in rank_pool(1).run(_refused, "stage 3")[0]
    said = rank_pool(1).run(_refused, "untraceable")[0]
    assert "block model.layers.1 (LlamaDecoderLayer) cannot be compiled" in said
    said = rank_pool(1).run(_refused, "many lengths")[0]
    assert "block model.layers.0 (LlamaDecoderLayer) has met more than 1 shapes" in said


def _generated(caches):
    """Tokens and loss of a compiled model and of a plain one with the same weights, and what else is compiled with many shapes."""
    ds_config = config(2, bf16=False, micro=2, accumulation=2)
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        model = _model(ds_config)
        if compiles:
            compile_blocks(model, backend="aot_eager")
        with torch.no_grad():
            tokens = model.generate(
                torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False, use_cache=caches, eos_token_id=None
            )
        found.append((tokens.tolist(), float(model(**_batches(0, 0)[0]).loss.detach())))
    other = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    return found, [int(other(torch.zeros(n)).sum()) for n in range(1, 20)]


@pytest.mark.parametrize("caches", [True, False])
def test_tokens_are_generated_and_other_compiled_functions_are_left_alone(rank_pool, caches):
    for ((tokens, loss), (ours, our_loss)), others in rank_pool(1).run(_generated, caches):
        assert ours == tokens and our_loss == pytest.approx(loss, rel=1e-6)  # torch's decompositions round in another order
        assert others == list(range(1, 20))


class _Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class _Net(torch.nn.Module):
    """The last block is used twice, and the head's forward is a function of its own instance."""

    def __init__(self, compiles):
        super().__init__()
        torch.manual_seed(0)
        made = [_Block(), _Block()]
        head = torch.nn.Linear(8, 1)
        head.forward = lambda x: torch.nn.functional.linear(x, head.weight, head.bias)
        if compiles:
            made = [torch.compile(block, backend="aot_eager", dynamic=False) for block in made]
            head = torch.compile(head, backend="aot_eager")
        self.blocks, self.head = torch.nn.ModuleList([*made, made[1]]), head

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return (torch.nn.functional.mse_loss(self.head(x), y),)


def _own_layers(stage, compiles, folder, start=None, built=False):
    """A loss after two steps, names, and whether torch compiled anything and a copy has weights of its own."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ds_config = config(stage, bf16=False, micro=4)
    model = build_model(_Net, ds_config=ds_config, dtype=torch.float32, compiles=compiles) if built else _Net(compiles)
    engine = Engine(model, ds_config=ds_config, learning_rate=1e-2, total_steps=10)
    if start is not None:
        engine.load_checkpoint(start)
    g = torch.Generator().manual_seed(engine.rank)
    for _ in range(2):
        loss = engine(torch.randn(4, 8, generator=g), torch.randn(4, 1, generator=g))[0]
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder)
    engine.checkpoints.wait()
    names = sorted(name for name, _ in engine.module.named_parameters())
    x = torch.randn(4, 8, generator=g)
    block = copy.deepcopy(engine.module.blocks[0])
    with torch.no_grad():
        block.fc.weight.zero_()
        block.fc.bias.zero_()
        own = torch.equal(block(x), x)
    engine.close()
    return float(loss.detach()), names, torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, own


NAMES = ["blocks.0.fc.bias", "blocks.0.fc.weight", "blocks.1.fc.bias", "blocks.1.fc.weight", "head.bias", "head.weight"]


@pytest.mark.parametrize(("stage", "built"), [(0, True), (2, False)])
def test_layers_that_a_script_compiles_keep_their_names(rank_pool, tmp_path, stage, built):
    run = rank_pool(2).run
    compiled, plain = (str(tmp_path / name) for name in ("compiled", "plain"))
    first = run(_own_layers, stage, True, compiled, None, built), run(_own_layers, stage, False, plain)
    second = (
        run(_own_layers, stage, False, str(tmp_path / "a"), compiled),
        run(_own_layers, stage, True, str(tmp_path / "b"), plain),
    )
    for with_it, without in (first, second[::-1]):
        for (ours, names, is_compiled, own), (loss, plain_names, is_not, _) in zip(with_it, without):
            assert ours == pytest.approx(loss, rel=1e-6) and names == plain_names == NAMES
            assert is_compiled and not is_not and own


def _hooked():
    model = _Net(True)
    model.blocks[0].register_forward_hook(lambda *_: None)
    try:
        Engine(model, ds_config=config(2), learning_rate=1e-2)
        return "nothing"
    except ModelError as error:
        return str(error)


def test_a_hook_that_would_be_lost_is_refused(rank_pool):
    assert "a hook is on torch.compile(...) of 0" in rank_pool(1).run(_hooked)[0]
