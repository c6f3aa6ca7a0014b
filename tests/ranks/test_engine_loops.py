"""Loops that users write themselves, beside the same loop in plain torch; and what such a loop must not do unnoticed."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from tests.ranks.tiny import Branched, TinyLM, config, whole_weights

STAGES = [0, 1, 2, 3]
STEPS, MICRO = 3, 2
BOUND = 1e-6  # fp32, the same sums in another order


class Strided(nn.Module):
    """Parameters whose elements do not lie in the order of their dimensions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x):
        return (self.conv(x.view(4, 3, 2, 2)[:, :3]).flatten(1) @ self.turned).pow(2).mean()


class Scaled(Branched):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__(12)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x * self.scale)


class Shared(nn.Module):
    """One layer in two checkpoints."""

    def __init__(self, reentrant=True):
        super().__init__()
        self.layer, self.head, self.reentrant = nn.Linear(12, 12), nn.Linear(12, 1), reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda z: torch.tanh(self.layer(z)), x, use_reentrant=self.reentrant)
        return self.head(x).pow(2).mean()


class Told(nn.Module):
    """A module without parameters that has told DeepSpeed which one of another's it uses."""

    def __init__(self):
        import deepspeed

        super().__init__()
        self.layer, self.head = nn.Linear(12, 12), nn.Module()
        weight = self.layer.weight
        self.head.forward = lambda x: nn.functional.linear(x, weight)
        deepspeed.zero.register_external_parameter(self.head, weight)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x))).pow(2).mean()


def _x(rank, step, k):
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + 10 * k + rank))


def _module(cls=Branched):
    torch.manual_seed(0)
    return cls(12) if cls is Branched else cls()


def _engine(stage, module=None, **zero):
    cfg = config(stage, bf16=False, micro=4, accumulation=MICRO, **zero)
    return Engine(_module() if module is None else module, ds_config=cfg, learning_rate=1e-2)


def _plain(world, module, steps=range(STEPS)):
    """The weights that plain torch comes to, on one process."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    for step in steps:
        for k in range(MICRO):
            for rank in range(world):
                (module(_x(rank, step, k)) / (world * MICRO)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module


def _one_by_one(engine, step):
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, step, k)))
        result = engine.step()
    return result


def _forwards_first(engine, step):
    for loss in [engine(_x(engine.rank, step, k)) for k in range(MICRO)]:
        engine.backward(loss)
    engine.step()


def _in_eval_mode(engine, step):
    engine.eval()
    _one_by_one(engine, step)


def _looking_between(engine, step):
    for k in range(MICRO):
        engine.backward(engine(_x(engine.rank, step, k)))
        engine(_x(0, 9, 9))  # its loss is dropped
        with torch.no_grad():
            engine(_x(0, 9, 8))
        engine.evaluate([{"x": _x(0, 9, 7)}])
        engine.step()


def _gradient_of_inputs_first(engine, step):
    for k in range(MICRO):
        x = _x(engine.rank, step, k).requires_grad_()
        loss = engine(x)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert gradient.abs().max() > 0
        engine.backward(loss)
        engine.step()


LOOPS = [_one_by_one, _forwards_first, _in_eval_mode, _looking_between, _gradient_of_inputs_first]


def _apart(engine, module):
    mine = whole_weights(engine.module)
    return max(float((mine[n] - p.detach()).abs().max()) for n, p in module.named_parameters())


def _run(stage, cls, loop, **zero):
    engine = None
    try:
        engine = _engine(stage, _module(cls), **zero)
        for step in range(STEPS):
            loop(engine, step)
        return _apart(engine, _plain(engine.world_size, _module(cls)))
    except BigtrainError as error:
        return str(error)
    finally:
        if engine is not None:
            engine.close()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stage", STAGES)
def test_loops_of_all_kinds_are_plain_torch(rank_pool, stage, loop):
    assert max(rank_pool(2).run(_run, stage, Branched, loop)) <= BOUND


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_with_strides_of_their_own(rank_pool, stage):
    """DeepSpeed's broadcast of the model refuses them."""
    assert max(rank_pool(2).run(_run, stage, Strided, _one_by_one)) <= BOUND


def test_a_module_without_parameters_that_has_told_of_anothers(rank_pool):
    assert max(rank_pool(2).run(_run, 3, Told, _one_by_one)) <= BOUND


def test_parameters_without_dimensions_of_a_finished_model_are_named_at_stage_3(rank_pool):
    assert max(rank_pool(2).run(_run, 2, Scaled, _one_by_one)) <= BOUND
    assert all("scale" in message and "build_model" in message for message in rank_pool(2).run(_run, 3, Scaled, _one_by_one))


def _scaled_on_at_another_stage(folder, first, second):
    engine = _engine(first, _module(Scaled))
    for step in (0, 1):
        _one_by_one(engine, step)
    engine.save_checkpoint(folder)
    engine.close()
    engine = _engine(second, _module(Scaled))
    engine.load_checkpoint(folder)
    _one_by_one(engine, 2)
    apart = _apart(engine, _plain(engine.world_size, _module(Scaled)))
    engine.close()
    return apart


@pytest.mark.parametrize(("first", "second"), [(0, 2), (0, 0), (2, 0)])
def test_moments_without_dimensions_go_on_at_another_stage(rank_pool, tmp_path, first, second):
    """Those of stage 0 were kept as counts of steps are, and no other stage found them."""
    assert max(rank_pool(2).run(_scaled_on_at_another_stage, str(tmp_path), first, second)) <= BOUND


def test_a_gradient_that_comes_in_two_parts_is_summed_or_refused(rank_pool):
    """DeepSpeed's stage 3 kept the last part where buckets are small, without a word."""
    for stage in (0, 1):
        assert max(rank_pool(2).run(_run, stage, Shared, _one_by_one)) <= BOUND
    for stage in (2, 3):
        for message in rank_pool(2).run(_run, stage, Shared, _one_by_one, reduce_bucket_size=10):
            # Weight or bias, whichever autograd reaches first.
            assert "of shape (12," in message and "use_reentrant=False" in message


def _one_after_another(stage):
    first = _engine(stage)
    _one_by_one(first, 0)
    refused = ""
    try:
        _engine(stage, first.module)
    except BigtrainError as error:
        refused = str(error)
    first.close()
    first.close()
    second = _engine(stage, first.module)
    _one_by_one(second, 1)
    world, plain = second.world_size, _module()
    apart = _apart(second, _plain(world, _plain(world, plain, [0]), [1]))
    second.close()
    return refused, apart


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_lets_go_of_its_module_when_it_is_closed(rank_pool, stage):
    for refused, apart in rank_pool(2).run(_one_after_another, stage):
        assert "engine.close()" in refused and apart <= BOUND


def _closed_in_a_step(stage):
    first = _engine(stage)
    first.backward(first(_x(first.rank, 9, 9)))
    first.close()
    if stage < 3:
        first.module(_x(0, 9, 8)).backward()  # plain torch in between, and no zero_grad
    second = _engine(stage, first.module)
    norm = _one_by_one(second, 0).grad_norm
    fresh = _engine(stage)
    expected = _one_by_one(fresh, 0).grad_norm
    second.close()
    fresh.close()
    return norm, expected


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_from_before_an_engine_are_not_in_its_first_step(rank_pool, stage):
    for norm, expected in rank_pool(2).run(_closed_in_a_step, stage):
        assert norm == expected


def _copied(stage):
    engine = _engine(stage)
    alone = copy.deepcopy(engine.module)
    _plain(1, alone)
    _one_by_one(engine, 0)
    apart = _apart(engine, _plain(engine.world_size, _module(), [0]))
    engine.close()
    return apart


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_copy_of_the_module_is_the_users_own(rank_pool, stage):
    assert max(rank_pool(2).run(_copied, stage)) <= BOUND


def _unnoticed(what, stage):
    engine = _engine(stage)
    try:
        _one_by_one(engine, 0)
        if what == "rate":
            engine.deepspeed.optimizer.param_groups[0]["lr"] = 0.5
        elif what == "put in":
            engine.module.c = nn.Linear(12, 1)
        elif what == "taken out":
            engine.module.a.weight = nn.Parameter(torch.eye(12), requires_grad=False)
        else:
            engine.backward(engine(_x(engine.rank, 1, 0)))
            engine.module.a.weight.requires_grad_(False)
            engine.backward(engine(_x(engine.rank, 1, 1)))
        _one_by_one(engine, 1)
    except (BigtrainError, AttributeError) as error:
        return "".join([str(error), *getattr(error, "__notes__", [])])
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("what", "said"), [("rate", "0.5"), ("put in", "c.weight"), ("taken out", "a.weight left"), ("frozen between", "a.weight")]
)
def test_what_would_do_nothing_is_an_error(rank_pool, what, said):
    for stage in (0, 2):
        assert all(said in message for message in rank_pool(2).run(_unnoticed, what, stage))


def test_a_parameter_put_in_the_place_of_another_at_stage_3_says_what_to_do(rank_pool):
    assert all("one came into it since" in message for message in rank_pool(2).run(_unnoticed, "taken out", 3))


def _failing(where):
    """A step that fails in its first forward is begun again; one that fails in a backward cannot be."""
    engine = _engine(2)
    armed = [True]

    def fail(*_):
        if armed:
            armed.clear()
            raise ValueError("said by the test")

    batches = [{"x": _x(engine.rank, 0, k)} for k in range(MICRO)]
    module = engine.module.b
    hook = module.register_forward_hook(fail) if where == "forward" else module.weight.register_hook(fail)
    with pytest.raises(ValueError, match="said by the test"):
        engine.train_step(batches)
    hook.remove()
    try:
        return engine.train_step(batches).tokens, _apart(engine, _plain(engine.world_size, _module(), [0])) <= BOUND
    except BigtrainError as error:
        return str(error)
    finally:
        engine.close()


def test_a_step_that_failed_counts_nothing_twice(rank_pool):
    assert rank_pool(2).run(_failing, "forward") == [(16, True)] * 2
    assert all("cannot be taken back" in message for message in rank_pool(2).run(_failing, "backward"))


def _built_for(stage, other):
    model = build_model(_module, ds_config=config(stage, bf16=False), dtype=torch.float32)
    try:
        _engine(other, model)
    except BigtrainError as error:
        return str(error)


def test_a_model_partitioned_for_stage_3_is_refused_at_others(rank_pool):
    for stage in (0, 2):
        assert all("the same ds_config" in message for message in rank_pool(2).run(_built_for, 3, stage))


def _built_in(dtype, stage, bf16):
    cfg = config(stage, bf16=bf16)
    model = build_model(_module, ds_config=cfg, dtype=dtype)
    try:
        Engine(model, ds_config=cfg, learning_rate=1e-2).close()
        return {p.dtype for p in model.parameters()}
    except BigtrainError as error:
        return str(error)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_weights_in_another_dtype_than_the_ds_config_says_are_refused(rank_pool, stage):
    for said in rank_pool(2).run(_built_in, torch.bfloat16, stage, False):
        assert "a.weight is bfloat16 and the ds_config has no bf16" in said and '{"bf16": {"enabled": true}}' in said
    for said in rank_pool(2).run(_built_in, torch.float32, stage, True):  # DeepSpeed rounds whole weights, no partitioned ones
        assert "a.weight is float32 and the ds_config has bf16" in said if stage == 3 else said == {torch.bfloat16}


def _float_inputs(stage):
    engine = Engine(nn.Linear(4, 2), ds_config=config(stage, bf16=True), learning_rate=1e-3, hang_s=None)
    try:
        engine(torch.ones(1, 4))
    except RuntimeError as error:
        right = engine(torch.ones(1, 4).to(engine.device, engine.dtype))
        return error.__notes__, right.dtype
    finally:
        engine.close()


def test_inputs_of_another_dtype_say_what_to_convert_them_to(rank_pool):
    (notes, dtype), *_ = rank_pool(1).run(_float_inputs, 2)
    assert "x.to(engine.device, engine.dtype)" in notes[0] and dtype == torch.bfloat16


def _asked_for(name):
    engine = Engine(nn.Linear(4, 2), ds_config=config(2), learning_rate=1e-3, hang_s=None)
    try:
        return str(getattr(engine, name))
    except AttributeError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("optimizer", ": the engine builds and steps them itself (optimizer=, lr_scheduler="),
        ("get_lr", ": use engine.lr"),
        ("save_16bit_model", ": use engine.export(DIR)"),
        ("parameters", ": use engine.module.parameters"),
        ("forward", ": call the engine itself"),
        ("cuda", ": the engine has its rank's device"),
        ("no_such_thing", ""),
    ],
)
def test_names_that_an_engine_does_not_have_say_what_there_is(rank_pool, name, instead):
    said = rank_pool(1).run(_asked_for, name)[0]
    assert said.startswith(f"'Engine' object has no attribute '{name}'{instead}") and (
        instead or said.endswith("'no_such_thing'")
    )


def _ended_early(folder):
    """An export after three of the four micro batches that two steps take; and after the fourth."""
    engine, said = Engine(Branched(), ds_config=config(2, bf16=False, accumulation=2), learning_rate=1e-3, hang_s=None), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bigtrain.engine.accumulation").addHandler(handler)
    for i in range(4):
        engine.backward(engine(torch.ones(2, 16)))
        engine.step()
        if i > 1:
            engine.export(f"{folder}/{i}")
    logging.getLogger("bigtrain.engine.accumulation").removeHandler(handler)
    engine.close()
    return said


def test_micro_batches_that_no_step_used_are_told(rank_pool, tmp_path):
    """A loop over a number of batches that accumulation does not divide; its last ones were left out of the model without a word."""
    first, second = rank_pool(2).run(_ended_early, str(tmp_path))
    assert len(first) == 1 and first[0].startswith("the last 1 of 2 micro batches of a step were not applied") and not second


def _used_up():
    """What a loop of one's own hands in by mistake, and what it is told."""
    engine = Engine(
        TinyLM(), ds_config=config(2, micro=2), learning_rate=0.5, lr_scheduler=lambda step: 0.1 / (step + 1), hang_s=None
    )
    rows = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, 8, dtype=torch.long)}
    generator, said = iter([rows]), {"first": engine.evaluate(batches := iter([rows])).tokens}
    engine.train_step(generator)
    for name, call in {
        "evaluated twice": lambda: engine.evaluate(batches),
        "no target": lambda: engine.evaluate([{**rows, "labels": torch.full((2, 8), -100)}]),
        "step without a batch": lambda: engine.train_step(generator),
        "rate": lambda: setattr(engine, "lr", 1e-3),
        "ids": lambda: engine.train_step([{**rows, "input_ids": torch.full((2, 8), 1000)}]),
        "tokenizer": lambda: engine.export("nowhere", tokenizer="a/folder"),
    }.items():
        try:
            said[name] = f"nothing: {call()}"
        except (BigtrainError, IndexError) as error:
            said[name] = " ".join([str(error), *getattr(error, "__notes__", ())])
    said["rates"] = [engine.lr, engine.train_step([rows]).lr, engine.summary()["scheduler"]]
    engine.close()
    try:
        said["closed"] = f"nothing: {engine.train_step([rows])}"
    except BigtrainError as error:
        said["closed"] = str(error)
    return said


def test_what_a_loop_hands_in_by_mistake_is_told(rank_pool):
    """An evaluation of a generator that was used up gave NaN, and a step without a batch spoke of labels and chat templates."""
    for said in rank_pool(2).run(_used_up):
        assert said["first"] == 28 and "a generator that an earlier evaluation has used up" in said["evaluated twice"]
        assert "every label is -100" in said["no target"] and "got no micro batch" in said["step without a batch"]
        assert "engine.lr = 0.001" in said["rate"] and "lr_scheduler=f" in said["rate"]
        assert "resize_vocab_to" in said["ids"] and "AutoTokenizer.from_pretrained" in said["tokenizer"]
        assert said["rates"] == [0.025, 0.025, "a function"] and "this Engine is closed" in said["closed"]


def _without_dropout():
    """Three steps of a model in evaluation mode, then of one whose frozen part alone is in it."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("bigtrain.engine.bypass").addHandler(handler)
    for module in (Branched().eval(), Branched()):
        module.b.eval()
        engine = Engine(module, ds_config=config(2, bf16=False), learning_rate=1e-3, hang_s=None)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 16)))
            engine.step()
        engine.close()
    logging.getLogger("bigtrain.engine.bypass").removeHandler(handler)
    return said


def test_training_in_evaluation_mode_is_told_once(rank_pool):
    """As `from_pretrained` returns a model: dropout was off, and recomputation of blocks, without a word."""
    first, second = rank_pool(2).run(_without_dropout)
    assert len(first) == 1 and first[0].startswith("step 1 trains a model in evaluation mode") and second == []
