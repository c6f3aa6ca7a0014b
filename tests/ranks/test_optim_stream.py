"""Streamed updates inside the engine: late work is waited for by forward, evaluation, checkpoints, exports and gathered access.

`Late` does nothing until somebody waits for it: whoever reads a weight without waiting sees an old one. On a GPU the same code runs
on streams (tests/gpu/test_optim_stream.py).
"""

import pytest
import torch

from bigtrain import zero
from bigtrain.engine import Engine
from bigtrain.errors import BypassError
from bigtrain.models import build_model
from bigtrain.zero import flat
from tests.ranks.late import Late, stream_late
from tests.ranks.tiny import Block, TinyLM, config, rows

SAMPLES = 6


def _engine(stage, optimizer, late, seed=1, kind=TinyLM):
    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = build_model(lambda: kind(width=34), ds_config=cfg, seed=seed)
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-2, max_grad_norm=0.5, hang_s=None)
    if late:
        stream_late(engine, late)
    return engine


def _whole(engine):
    """Weights as anybody might read them."""
    params = list(engine._ds.module.parameters())
    with zero.gathered(params):
        return torch.cat([p.detach().clone().flatten() for p in params])


def _story(root, stage, optimizer, late):
    """Train, evaluate, read, save, train, load, train; everything seen on the way."""
    engine = _engine(stage, optimizer, late)
    seen = []

    def step(number):
        result = engine.train_step(rows(number, SAMPLES)[engine.rank :: engine.world_size])
        seen.append((result.loss, result.grad_norm))

    step(0)
    stream = engine._reduction.stream
    pending = stream is not None and any(p.waited + 1 < len(p.chunks) for p in stream._plans.values())
    step(1)
    seen.append(engine.evaluate(rows(50, SAMPLES)[engine.rank :: engine.world_size]).loss)
    step(2)
    seen.append(_whole(engine).double().sum().item())
    step(3)
    engine.save_checkpoint(root)
    step(4)
    engine.save_checkpoint(root, wait=False)
    step(5)
    engine.load_checkpoint(root, 4)
    step(4)
    step(5)
    engine.export(f"{root}/model-{late is not None}")
    inner = engine.deepspeed.basic_optimizer
    masters = [inner.master(p) for p in inner.state]
    states = [t.clone() for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    waits = late.waits if late else 0
    engine.close()
    return seen, masters, states, pending, waits


def _both(root, stage, optimizer):
    plain, late = _story(f"{root}/plain", stage, optimizer, None), _story(f"{root}/late", stage, optimizer, Late())
    same = [torch.equal(a, b) for i in (1, 2) for a, b in zip(plain[i], late[i], strict=True)]
    return plain[0], late[0], all(same), late[3], late[4]


@pytest.mark.parametrize("optimizer", ["adamw_split", "adamw_split_8bit"])
@pytest.mark.parametrize("world, stage", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_nothing_is_read_before_its_update(rank_pool, tmp_path, world, stage, optimizer):
    for plain, late, same, pending, waits in rank_pool(world).run(_both, str(tmp_path), stage, optimizer):
        assert plain == late and same
        assert pending == (stage < 3)  # at stage 3 the step itself waits
        assert waits > 0


def _past_the_engine(late):
    """Model and optimizer as their owner holds them, saved after a step without a word to the engine."""
    engine = _engine(2, "adamw_split", late)
    model, inner = engine.module, engine.deepspeed.basic_optimizer
    engine.train_step(rows(0, SAMPLES))
    head = model.head.state_dict()["weight"].clone()
    engine.train_step(rows(1, SAMPLES))
    weights = [t.clone() for t in model.state_dict().values()]
    state = [t.clone() for s in inner.state_dict()["state"].values() for t in s.values() if isinstance(t, torch.Tensor)]
    engine.close()
    return [head, *weights, *state]


def _both_past_the_engine():
    return [torch.equal(a, b) for a, b in zip(_past_the_engine(None), _past_the_engine(Late()), strict=True)]


def test_state_dicts_wait_for_the_update(rank_pool):
    (same,) = rank_pool(1).run(_both_past_the_engine)
    assert all(same)


def _reshard(root, stage, optimizer):
    """Load into a fresh engine, at another size; its state lies in the stream's own host memory at once."""
    engine = _engine(stage, optimizer, Late(), seed=99)
    engine.load_checkpoint(root)
    inner = engine.deepspeed.basic_optimizer
    homes = inner.stream._memory
    at_home = [inner.state[p]["low"] is homes[p].tensors["low"] for p in inner.state]
    loss = engine.train_step(rows(3, SAMPLES)[engine.rank :: engine.world_size]).loss
    masters = sum(float(inner.master(p).double().sum()) for p in inner.state)
    engine.close()
    return all(at_home) and len(at_home) > 0, loss, masters


def _begin(root, stage, optimizer):
    engine = _engine(stage, optimizer, None)
    for step in range(3):
        engine.train_step(rows(step, SAMPLES)[engine.rank :: engine.world_size])
    engine.save_checkpoint(root)
    engine.close()


def _plain(root, stage, optimizer):
    engine = _engine(stage, optimizer, None, seed=99)
    engine.load_checkpoint(root)
    loss = engine.train_step(rows(3, SAMPLES)[engine.rank :: engine.world_size]).loss
    inner = engine.deepspeed.basic_optimizer
    masters = sum(float(inner.master(p).double().sum()) for p in inner.state)
    engine.close()
    return loss, masters


@pytest.mark.parametrize("optimizer", ["adamw_split", "adamw_split_8bit"])
def test_a_checkpoint_of_another_size_fills_host_memory_in_place(rank_pool, tmp_path, optimizer):
    rank_pool(2).run(_begin, str(tmp_path), 3, optimizer)
    want = rank_pool(1).run(_plain, str(tmp_path), 2, optimizer)[0]
    for at_home, loss, masters in rank_pool(1).run(_reshard, str(tmp_path), 2, optimizer):
        assert at_home and (loss, masters) == want


def _overlap():
    """How far the update had got as each block was called after a step: only as far as that block needs."""
    late = Late()
    engine = _engine(2, "adamw_split", late)
    engine.train_step(rows(0, SAMPLES)[engine.rank :: engine.world_size])
    plan = engine._reduction.stream._first
    seen = []
    module = engine._ds.module
    for child in (module.embed, *module.blocks, module.head):
        child.register_forward_pre_hook(lambda *_: seen.append(sum(c.seen in late.reached for c in plan.chunks)))
    engine.train_step(rows(1, SAMPLES)[engine.rank :: engine.world_size])
    engine.close()
    return seen, len(plan.chunks)


def test_forward_begins_while_later_layers_are_still_to_be_updated(rank_pool):
    ((seen, total),) = rank_pool(1).run(_overlap)
    assert seen == sorted(seen) and 0 < seen[0] < seen[1] < total and seen[-1] == total


def test_forward_of_several_ranks_begins_while_each_updates_its_part(rank_pool):
    """Each rank's first chunk holds the begin of its own part: what forward needs first is there with a part of all chunks."""
    found = rank_pool(2).run(_overlap)
    seen, total = found[0]
    assert found[1] == found[0]
    assert seen == sorted(seen) and 0 < seen[0] < total and seen[-1] == total


class Around(TinyLM):
    """Its first block is called, passed by (`around`), or left out."""

    how = "called"

    def forward(self, input_ids, labels=None):
        first, last = self.blocks
        x = self.embed(input_ids) * self.scale.to(self.embed.weight.dtype)
        if self.how != "left":
            x = first(x) if self.how == "called" else Block.forward(first, x)
        logits = self.head(self.norm(last(x))).float()
        return {
            "loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        }


def _passed_by(late, story):
    engine = _engine(2, "adamw_split", late, kind=Around)
    seen = []
    try:
        for number, how in enumerate(story):
            engine._ds.module.how = how  # `engine.module` waits for the update
            seen.append(engine.train_step(rows(number, SAMPLES)[engine.rank :: engine.world_size]).loss)
    except BypassError as error:
        seen.append("Call the block itself" in str(error))
    engine.close()
    return seen


def _both_passed_by(*story):
    return _passed_by(None, story), _passed_by(Late(), story)


def test_a_block_that_is_passed_by_is_read_after_its_update_or_refused(rank_pool):
    run = rank_pool(1).run
    for story in (("around",) * 3, ("called", "left", "called", "left"), ("around", "called", "around")):
        ((plain, late),) = run(_both_passed_by, *story)
        assert plain == late and len(plain) == len(story)
    ((plain, late),) = run(_both_passed_by, "called", "around")
    assert len(plain) == 2 and late == [plain[0], True]  # before, late[1] was the loss of weights that miss an update


class Shared(Around):
    """Its blocks have one up-projection, and one weight that two modules hold."""

    def __init__(self, width):
        super().__init__(width)
        first, last = self.blocks
        last.up, last.down.weight = first.up, first.down.weight


def _forwards(kind, *told):
    """One step, then one whose loss is the sum over several forwards; without a gradient where `told` says "eval"."""
    engine = _engine(2, "adamw_split", Late(), kind=kind)
    engine.train_step(rows(0, 1))
    losses = []
    for word, batch in zip(told, rows(1, len(told))):
        engine._ds.module.how = word.removesuffix(" eval")
        with torch.set_grad_enabled(not word.endswith("eval")):
            losses.append(engine(**batch)["loss"])
    try:
        engine.backward(sum(loss for loss in losses if loss.requires_grad))
        return "updated" if engine.step().applied else "skipped"
    except BypassError:
        return "refused"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "told", "ends"),
    [
        (Around, ("called", "left"), "updated"),  # layers dropped anew in each forward of a step
        (Around, ("left", "called"), "updated"),
        (Around, ("called", "left eval"), "updated"),
        (Around, ("called", "around"), "updated"),  # the first one waited
        (Around, ("called eval", "around"), "updated"),
        (Around, ("around", "called eval"), "refused"),
        (Shared, ("left",), "updated"),  # what the other block uses, too
        (Shared, ("around",), "refused"),
    ],
)
def test_only_the_forward_that_passes_a_block_by_can_be_refused_for_it(rank_pool, kind, told, ends):
    assert rank_pool(1).run(_forwards, kind, *told) == [ends]


def _gathers():
    """Calls of DeepSpeed's own gather of all weights: none in a step, one where weights are made from masters."""
    from deepspeed.runtime.zero import stage_1_and_2

    calls, gather = [], stage_1_and_2.all_gather_dp_groups
    stage_1_and_2.all_gather_dp_groups = lambda *args, **kwargs: (calls.append(1), gather(*args, **kwargs))[1]
    try:
        engine = _engine(2, "adamw_split", Late())
        before = len(calls)
        engine.train_step(rows(0, SAMPLES)[engine.rank :: engine.world_size])
        in_step = len(calls) - before
        engine._reduction.finish_update(states=True)
        weights = _whole(engine)
        flat.refresh_weights(engine._ds.optimizer)
        same = torch.equal(weights, _whole(engine))
        engine.close()
        return in_step, len(calls) - before, same
    finally:
        stage_1_and_2.all_gather_dp_groups = gather


def test_weights_are_not_gathered_twice(rank_pool):
    assert rank_pool(2).run(_gathers) == [(0, 1, True)] * 2
