"""What a loop written for plain torch does to a model: it gets plain torch's answer, or an error that says what to do instead."""

import copy
import logging

import pytest
import torch
from torch import nn

from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from bigtrain.weights import export_model, load_into
from bigtrain.zero import gathered
from tests.ranks.test_engine_loops import MICRO, _apart, _module, _one_by_one, _plain, _x
from tests.ranks.tiny import config, whole_weights

STAGES = [0, 2, 3]


def _engine(stage, bf16=False, module=None, **zero):
    cfg = config(stage, bf16=bf16, micro=4, accumulation=MICRO, **zero)
    if module is None:
        module = build_model(_module, ds_config=cfg, dtype=torch.bfloat16 if bf16 else torch.float32)
    return Engine(module, ds_config=cfg, learning_rate=1e-2)


class _TwoHeads(nn.Module):
    """Two losses whose graphs share nothing: torch goes through one after the other."""

    def __init__(self):
        super().__init__()
        self.policy, self.value = nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x):
        return self.policy(x).pow(2).mean(), self.value(x).pow(2).mean()


def _one_forward_two_losses(stage):
    engine = _engine(stage, module=_TwoHeads())
    try:
        policy, value = engine(_x(engine.rank, 0, 0))
        engine.backward(policy)
        engine.backward(value)
        return f"a step of one of {MICRO} micro batches: {engine.step()}"
    except BigtrainError as error:
        return str(error)
    finally:
        engine.close()


def test_losses_of_one_forward_are_not_taken_for_micro_batches(rank_pool):
    """A step of two micro batches was made of the first one's two losses, each with half of its weight."""
    for said in rank_pool(2).run(_one_forward_two_losses, 2):
        assert "in which the model ran 1 times" in said and "backward(loss_a + loss_b)" in said


def _built(stage):
    return build_model(_module, ds_config=config(stage, bf16=False, micro=4), dtype=torch.float32)


def _begun(engine):
    loss = engine(_x(engine.rank, 1, 0))
    engine.backward(loss)
    return loss


def _set_gradient(engine):
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, 1, k)))
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, 7.0)  # of no elements at stage 3
    engine.step()


def _converted_in_a_step(engine):
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, 1, k)))
    engine.module.a.half()
    engine.step()


def _reshaped_in_a_step(engine):
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, 1, k)))
    engine.module.a.weight.data = engine.module.a.weight.data.flatten()
    engine.step()
    engine(_x(engine.rank, 2, 0))


def _gradient_of(x, output, **how):
    return torch.autograd.grad(output, x, **how)[0]


# What it does after one whole step, and what the error says.
REFUSED = {
    "clip": (lambda e: (_begun(e), nn.utils.clip_grad_norm_(e.module.parameters(), 1.0)), "max_grad_norm"),
    "clip values": (lambda e: (_begun(e), nn.utils.clip_grad_value_(e.module.a.parameters(), 1.0)), "max_grad_norm"),
    "zero_grad": (lambda e: (_begun(e), e.module.zero_grad()), "Leave zero_grad() out"),
    "optimizer's zero_grad": (lambda e: (_begun(e), e.deepspeed.optimizer.zero_grad()), "Leave zero_grad() out"),
    "optimizer's step": (lambda e: (_begun(e), e.deepspeed.optimizer.step()), "engine.step()"),
    "DeepSpeed's step": (lambda e: (_begun(e), e.deepspeed.step()), "engine.step()"),
    "half": (lambda e: e.module.half(), "torch.float32 on cpu to torch.float16 on cpu"),
    "other device": (lambda e: e.module.to("meta"), "torch.float32 on cpu to torch.float32 on meta"),
    "loss of an old step": (lambda e: (lost := e(_x(0, 1, 0)), _one_by_one(e, 1), e(_x(0, 2, 0)), e.backward(lost)), "before step 2"),
    "another loss": (lambda e: (e(_x(0, 1, 0)), e.backward(torch.ones(2, requires_grad=True).sum())), "does not depend on the model"),
    "gradients set": (_set_gradient, "p.register_hook"),
    "divided": (lambda e: e.backward(e(_x(0, 1, 0)) / MICRO), "without dividing"),
    "detached": (lambda e: e.backward(e(_x(0, 1, 0)).detach()), "carries no gradient"),
    "a number": (lambda e: e.backward(e(_x(0, 1, 0)).item()), "it got float"),
    "a copy": (copy.deepcopy, "engine.module"),
}  # fmt: skip
BELOW_3 = {
    "a layer in another dtype": (_converted_in_a_step, "a.weight, a.bias lie elsewhere or have another dtype or shape"),
    "weights in another shape": (_reshaped_in_a_step, "a.weight lie elsewhere or have another dtype or shape"),
}
AT_3 = {
    "penalty": (lambda e: _gradient_of(x := _x(0, 1, 0), e(x.requires_grad_()), create_graph=True), "Use stage 0, 1 or 2"),
    "state_dict": (lambda e: e.module.state_dict(), "engine.export(dir)"),
    "norm of weights": (lambda e: e.module.a.weight.norm(), "Read it inside `with bigtrain.zero.gathered"),
    "copy of a part": (lambda e: copy.deepcopy(e.module.a), "frozen_module"),
    "average": (lambda e: torch.optim.swa_utils.AveragedModel(e.module), "its copy would be empty"),
    "copy of a model without an engine": (lambda e: copy.deepcopy(_built(e.stage)), "its copy would be empty"),
    "load_state_dict": (lambda e: e.module.load_state_dict(_module().state_dict()), "load_into"),
}


def _refusals(stage):
    said = {}
    for name, (do, _) in {
        **REFUSED,
        **(AT_3 if stage == 3 else {}),
        **(BELOW_3 if stage == 2 else {}),
    }.items():
        engine = _engine(stage)
        try:
            _one_by_one(engine, 0)
            do(engine)
            said[name] = "nothing"
        except (BigtrainError, RuntimeError) as error:
            said[name] = str(error)
        engine.close()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_what_would_do_nothing_or_harm_is_refused_on_the_rank_that_does_it(rank_pool, stage):
    expected = {name: words for name, (_, words) in {**REFUSED, **BELOW_3, **AT_3}.items()}
    for said in rank_pool(2).run(_refusals, stage):
        assert {name: text for name, text in said.items() if expected[name] not in text} == {}


def _harmless(engine, step):
    """What plain loops do between steps, and what changes nothing."""
    engine.module.zero_grad()
    engine.deepspeed.zero_grad()
    engine.module.to(engine.device).float()
    nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    _one_by_one(engine, step)


def _as_plain(stage):
    engine = _engine(stage)
    for step in range(2):
        _harmless(engine, step)
    apart = _apart(engine, _plain(engine.world_size, _module(), range(2)))
    engine.close()
    left = [name for name in ("zero_grad", "_apply") if name in engine.module.__dict__]
    return apart, left


@pytest.mark.parametrize("stage", STAGES)
def test_between_steps_they_are_what_they_are_in_plain_torch(rank_pool, stage):
    for apart, left in rank_pool(2).run(_as_plain, stage):
        assert apart <= 1e-6 and left == []  # fp32, the same sums in another order


class Critic(nn.Module):
    def __init__(self, out=1):
        super().__init__()
        torch.manual_seed(out)
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, out)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def _generator():
    return Critic(12)


def _adversaries(critic, generator, critics, generators, step, ranks):
    """One step of each: the critic on samples moved by their own gradient and on a penalty of it, the generator through the critic.

    `critics(loss)` and `generators(loss)` are backwards, or None between the two for the step of the first, or of the second.
    """
    for k in range(MICRO):
        for rank in ranks:
            x = _x(rank, step, k).requires_grad_()
            scores = critic(x)
            gradient = _gradient_of(x, scores.mean(), retain_graph=True, create_graph=critics.penalty)
            penalty = gradient.pow(2).mean() if critics.penalty else 0.0
            with torch.no_grad():
                made = generator(_x(rank, step, k))
            critics.backward(critic((x + gradient).detach()).mean() + scores.pow(2).mean() - critic(made).mean() + penalty)
        critics.step()
    for k in range(MICRO):
        for rank in ranks:
            for param in critics.params:
                param.requires_grad_(False)
            generators.backward(critic(generator(_x(rank, step, k))).mean())
            for param in critics.params:
                param.requires_grad_(True)
        generators.step()


class _Plain:
    def __init__(self, module, world, penalty):
        self.params, self.share, self.penalty, self.backwards = list(module.parameters()), 1 / (world * MICRO), penalty, 0
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-2, weight_decay=0.0)

    def backward(self, loss):
        (loss * self.share).backward()

    def step(self):
        self.backwards += 1
        if self.backwards % MICRO == 0:
            nn.utils.clip_grad_norm_(self.params, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


class _Under:
    def __init__(self, engine, penalty):
        self.params, self.penalty, self.backward, self.step = (
            list(engine.module.parameters()),
            penalty,
            engine.backward,
            engine.step,
        )


def _two_engines(stage):
    penalty = stage < 3
    critic, generator = (Engine(build_model(cls, ds_config=(cfg := config(stage, bf16=False, micro=4, accumulation=MICRO)), dtype=torch.float32),
                                ds_config=cfg, learning_rate=1e-2) for cls in (Critic, _generator))  # fmt: skip
    world = critic.world_size
    plain = Critic(), _generator()
    theirs = [_Plain(module, world, penalty) for module in plain]
    for step in range(3):
        _adversaries(critic, generator, _Under(critic, penalty), _Under(generator, penalty), step, [critic.rank])
        _adversaries(*plain, *theirs, step, range(world))
    apart = max(_apart(critic, plain[0]), _apart(generator, plain[1]))
    refused = ""
    try:
        generator.backward(critic(generator(_x(critic.rank, 9, 0))).mean())
    except BigtrainError as error:
        refused = str(error)
    critic.close()
    generator.close()
    return apart, refused


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_of_inputs_and_through_another_engines_frozen_model_are_plain_torchs(rank_pool, stage):
    for apart, refused in rank_pool(2).run(_two_engines, stage):
        assert apart <= 1e-6 and "requires_grad_(False)" in refused  # fp32, the same sums in another order


def _wrapped(wrap, stage):
    try:
        _engine(stage, module=wrap(_module())).close()
        return "nothing"
    except BigtrainError as error:
        return str(error)


WRAPS = [
    (torch.compile, "_orig_mod"),
    (nn.parallel.DistributedDataParallel, "model.module"),
    (lambda module: _engine(2, module=module), "not a torch.nn.Module"),
    (lambda module: _engine(2, module=module).deepspeed, "DeepSpeed engine"),
]


def _with_a_compiled_layer(module):
    module.a.compile()
    return module


def _with_a_compiled_grandchild(module):
    module.a = nn.Sequential(torch.compile(module.a))
    return module


def _unfit(index):
    return _wrapped(WRAPS[index][0], 2)


def _compiled_at(stage):
    return [_wrapped(compiled, stage) for compiled in (_with_a_compiled_layer, _with_a_compiled_grandchild)]


def _part_of_another():
    engine = _engine(2)
    try:
        return _wrapped(lambda _: nn.Sequential(engine.module), 2)
    finally:
        engine.close()


def test_what_is_handed_in_wrapped_or_shared_is_refused(rank_pool):
    for index, (_, words) in enumerate(WRAPS):
        assert all(words in said for said in rank_pool(2).run(_unfit, index))
    assert all("engine.close()" in said for said in rank_pool(2).run(_part_of_another))
    for layer, grandchild in rank_pool(2).run(_compiled_at, 3):
        assert "a is compiled" in layer and "a.0 is compiled" in grandchild and "stage 0, 1 or 2" in layer


def _in_place(param):
    param.data.mul_(0.5)


def _elsewhere(param):
    param.data = param.data * 0.5


def _through_data(stage, bf16, write, folder=None, **zero):
    """Every weight is halved in a way that torch does not count; then an update at a rate of 0, and another."""
    engine = _engine(stage, bf16, **zero)
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, 0, k).to(engine.dtype)))
        engine.step()
    before = whole_weights(engine.module)
    for param in engine.module.parameters():
        with gathered([param], modifier_rank=0):
            write(param)
    if folder is not None:
        engine.save_checkpoint(folder)
    rates, engine._rates.peaks[:] = list(engine._rates.peaks), [0.0 for _ in engine._rates.peaks]
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, 1, k).to(engine.dtype)))
        engine.step()
    after = whole_weights(engine.module)
    engine._rates.peaks[:] = rates
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, 2, k).to(engine.dtype)))
        engine.step()
    moved = whole_weights(engine.module)
    engine.close()
    lost = [name for name, w in after.items() if not torch.equal(w, before[name] * 0.5)]
    return lost, [name for name, w in after.items() if torch.equal(w, moved[name])]


def _refused_elsewhere(folder=None):
    try:
        return str(_through_data(1, True, _elsewhere, folder))
    except BigtrainError as error:
        return str(error)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_parameters_written_through_data_are_trained(rank_pool, tmp_path, stage, bf16):
    assert rank_pool(2).run(_through_data, stage, bf16, _in_place) == [([], [])] * 2
    if stage == 1 and bf16:  # DeepSpeed's BF16_Optimizer does not lay them back
        for folder in (None, str(tmp_path)):  # a save must not make it known
            assert all("a.weight" in said and "lie elsewhere" in said for said in rank_pool(2).run(_refused_elsewhere, folder))
    elif stage < 3:
        assert rank_pool(2).run(_through_data, stage, bf16, _elsewhere) == [([], [])] * 2


def _loaded_while_it_trains(folder):
    engine = _engine(3)
    export_model(engine.module, folder, dtype="float32")
    _one_by_one(engine, 0)
    load_into(engine.module, folder)
    engine._rates.peaks[:] = [0.0 for _ in engine._rates.peaks]
    _one_by_one(engine, 1)
    apart = _apart(engine, _module())
    engine.close()
    return apart


def test_files_loaded_into_a_live_model_at_stage_3_are_trained(rank_pool, tmp_path):
    assert rank_pool(2).run(_loaded_while_it_trains, str(tmp_path / "model")) == [0.0, 0.0]


def _written_nowhere():
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("bigtrain.engine.writes").addHandler(handler)
    engine = _engine(3)
    with torch.no_grad():
        engine.module.a.weight.mul_(0.5)  # empty at the moment
        with gathered([engine.module.b.weight], modifier_rank=0):
            engine.module.b.weight.mul_(1.0)
    _one_by_one(engine, 0)
    engine.close()
    logging.getLogger("bigtrain.engine.writes").removeHandler(handler)
    return [text for text in seen if "nothing of it is left" in text]


def test_a_write_into_partitioned_weights_is_told(rank_pool):
    for (text,) in rank_pool(2).run(_written_nowhere):
        assert text.startswith("a.weight were written while ZeRO-3 had them partitioned")


def _called_with_other_weights(stage):
    engine = _engine(stage)
    part = engine.module.a
    weights = {name: torch.zeros(3, 12) if name == "weight" else torch.ones(3) for name, _ in part.named_parameters()}
    try:
        return torch.func.functional_call(part, weights, (torch.ones(2, 12),)).tolist()
    except BigtrainError as error:
        return str(error)
    finally:
        engine.close()


def test_a_functional_call_is_torchs_own_or_says_why_not(rank_pool):
    assert rank_pool(2).run(_called_with_other_weights, 2) == [[[1.0] * 3] * 2] * 2
    assert all("functional_call on a Linear at stage 3" in said for said in rank_pool(2).run(_called_with_other_weights, 3))
