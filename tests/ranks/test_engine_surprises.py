"""Loops that torch takes and an engine once failed at, or passed over in silence: now right, or told by name."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bigtrain import ranks, zero
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from bigtrain.optim import schedules
from tests.ranks import families
from tests.ranks.test_engine_loops import BOUND, MICRO, _apart, _engine, _module, _one_by_one, _plain, _x
from tests.ranks.tiny import TinyLM, config, rows, whole_weights


def _shaped(stage):
    """A loss of one element and one dimension, backward under no_grad, and micro batches that can be gone through once."""
    engine = _engine(stage)
    try:
        for k in range(MICRO):
            loss = engine(_x(engine.rank, 0, k)).reshape(1)
            with torch.set_grad_enabled(k > 0):
                engine.backward(loss)
        first = engine.step()
        second = engine.train_step({"x": _x(engine.rank, 1, k)} for k in range(MICRO))
        return first.step, second.step, _apart(engine, _plain(engine.world_size, _module(), range(2)))
    finally:
        engine.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_with_a_dimension_and_batches_from_a_generator(rank_pool, stage):
    for first, second, apart in rank_pool(2).run(_shaped, stage):
        assert (first, second) == (1, 2) and apart <= BOUND


class _Bf16Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).pow(2).mean().bfloat16()


def _reported(stage):
    """The mean of three losses, and the one that the step reports."""
    torch.manual_seed(0)
    engine = Engine(_Bf16Loss(12, 3), ds_config=config(stage, bf16=False, accumulation=3), learning_rate=1e-3, hang_s=None)
    try:
        losses = [engine.backward(engine(_x(0, 0, k))).item() for k in range(3)]
        return sum(losses) / 3, engine.step().loss
    finally:
        engine.close()


def test_a_bf16_loss_is_reported_without_a_rounding_of_its_shares(rank_pool):
    """Each third of it was rounded to bf16 once more: the reported loss followed the number of micro batches."""
    ((mean, reported),) = rank_pool(1).run(_reported, 2)
    assert reported == pytest.approx(mean, rel=1e-12)  # fp64


def _with_buffer(values):
    module = nn.Linear(2, 2)
    module.register_buffer("wide", values)
    return module


def _of_other_kinds(stage):
    with torch.inference_mode():
        untrainable = nn.Linear(2, 2)
    made = {
        "inference": untrainable,
        "lazy": nn.LazyLinear(1),
        "complex": nn.ParameterList([torch.ones(2, dtype=torch.complex64)]),
        "integers": nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False), torch.ones(2)]),
        "unsaved": _with_buffer(torch.ones(2, dtype=torch.complex128)),
        "sparse": nn.Sequential(nn.Embedding(4, 2, sparse=True)),
        "rescaled": nn.Sequential(nn.EmbeddingBag(4, 2, max_norm=1.0)),
    }
    said = {}
    for name, module in made.items():
        try:
            _engine(stage, module).close()
        except BigtrainError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_that_would_part_or_stop_at_an_assertion_are_named(rank_pool, stage):
    words = {
        "inference": "weight was made under torch.inference_mode()",
        "lazy": "weight is lazy",
        "complex": "0 is complex64",
        "unsaved": "buffer wide is complex128, which a checkpoint cannot hold",
        "rescaled": "0 was built with max_norm=1.0",
    }
    words |= {"sparse": "0 was built with sparse=True"} if stage else {}
    words |= {"integers": "0 is int8"} if stage == 3 else {}
    for said in rank_pool(2).run(_of_other_kinds, stage):
        assert said.keys() == words.keys() and all(words[name] in said[name] for name in words)


class _Parametrized(nn.Module):
    """Weights made by maps that torch has no bf16 for, or that have fp32 vectors and bases of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        orthogonal = parametrizations.orthogonal
        self.layers = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(4, 4)),
            *(orthogonal(nn.Linear(4, 4), orthogonal_map=m) for m in ("matrix_exp", "cayley", "householder")),
            parametrizations.weight_norm(nn.Linear(4, 1)),
        )  # fmt: skip

    def forward(self, x):
        assert all(layer.weight.dtype == x.dtype for layer in self.layers)
        return self.layers(x).float().square().mean()


def _parametrized(stage):
    cfg = config(stage, micro=2)
    engine = Engine(_Parametrized(), ds_config=cfg, learning_rate=1e-2, hang_s=None)
    try:
        losses = [float(engine.train_step([{"x": torch.eye(4)[:2].bfloat16()}]).loss) for _ in range(3)]
    finally:
        engine.close()
    try:
        Engine(nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2))), ds_config=cfg, learning_rate=1e-2, hang_s=None).close()
    except BigtrainError as error:
        return losses, str(error)
    return losses, ""


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parametrizations_compute_in_fp32_under_bf16(rank_pool, stage):
    """They failed in forward, at a product of two dtypes or at lu_cpu."""
    (losses, old), (same, _) = rank_pool(2).run(_parametrized, stage)
    assert losses == same and losses[0] > losses[1] > losses[2]
    assert old.startswith("0: torch.nn.utils.spectral_norm multiplies bf16 weights with fp32 vectors")


def _generated():
    """Texts of different lengths, before any step: what was gathered once may still be there later."""
    cfg = config(3, bf16=False, micro=2)
    model = build_model("preset:llama-tiny", ds_config=cfg, dtype=torch.float32, vocab_size=64)
    engine = Engine(model, ds_config=cfg, learning_rate=1e-3, hang_s=None)
    prompt = torch.arange(5)[None]
    try:
        with torch.no_grad():
            texts = [
                engine.module.generate(prompt, max_new_tokens=n, do_sample=False, pad_token_id=0)
                for n in (3 + 3 * engine.rank, 6)
            ]
        return [text.tolist()[0] for text in texts]
    finally:
        engine.close()


def test_ranks_generate_texts_of_different_lengths_at_stage_3(rank_pool):
    (short, whole), (long, _) = rank_pool(2).run(_generated)
    assert short == whole[:8] and long == whole and len(whole) == 11


def _beyond_its_schedule(name):
    engine = Engine(
        _module(),
        ds_config=config(2, micro=4, accumulation=MICRO, bf16=False),
        learning_rate=1e-2,
        lr_scheduler=name,
        total_steps=2,
    )
    said = []
    schedules.log.warning = lambda text, *values: said.append(text % values)
    try:
        rates = [_one_by_one(engine, step).lr for step in range(4)]
        return rates, said
    finally:
        del schedules.log.warning
        engine.close()


def test_a_loop_that_goes_on_after_its_schedule_is_told_once_that_nothing_moves(rank_pool):
    ((rates, said),) = rank_pool(1).run(_beyond_its_schedule, "linear")
    assert rates == [1e-2, 5e-3, 0.0, 0.0] and len(said) == 1 and said[0].startswith("step 3 has the learning rate 0")
    assert rank_pool(1).run(_beyond_its_schedule, "constant") == [([1e-2] * 4, [])]


def _penalised(stage):
    engine = _engine(stage)
    try:
        engine.backward(engine(_x(0, 0, 0)) + sum((p**2).sum() for p in engine.module.parameters()))
    except RuntimeError as error:
        return error.__notes__
    finally:
        engine.close()


def test_a_penalty_on_weights_that_are_partitioned_says_what_to_do(rank_pool):
    assert "weight_decay=" in rank_pool(1).run(_penalised, 3)[0][0]
    assert rank_pool(1).run(_penalised, 2) == [None]


class Wide(nn.Module):
    """A parameter of so many elements that their squares do not add up in fp32."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2**21))

    def forward(self, x):
        return (self.w.float() * x).sum()


def _norm_of_many(stage, bf16):
    engine = Engine(Wide(), ds_config=config(stage, bf16=bf16), learning_rate=1e-3)
    try:
        engine.backward(engine(torch.full((2**21,), 0.1)))
        return engine.step().grad_norm
    finally:
        engine.close()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_norm_of_many_elements_is_as_exact_at_every_stage(rank_pool, stage, bf16):
    """Squares added up in fp32: 1 % of the norm of 1e8 elements was lost on CPUs, at stage 0, and at stage 1 in bf16."""
    truth = float(torch.tensor(0.1, dtype=torch.bfloat16 if bf16 else torch.float32)) * 2**10.5
    assert max(abs(norm / truth - 1) for norm in rank_pool(2).run(_norm_of_many, stage, bf16)) <= 1e-6  # fp32's last digit


def _hooked(stage):
    """Hooks that are registered after the engine, and take the gradients of biases away as they arrive."""

    def away(param):
        param.grad.zero_()

    engine, plain = _engine(stage), _module()
    for bias in (p for p in engine.module.parameters() if p.dim() == 1):
        bias.register_post_accumulate_grad_hook(away)
    for bias in (p for p in plain.parameters() if p.dim() == 1):
        bias.register_post_accumulate_grad_hook(away)
    try:
        for step in range(2):
            _one_by_one(engine, step)
        return _apart(engine, _plain(engine.world_size, plain, range(2)))
    finally:
        engine.close()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_hooks_that_come_after_the_engine_find_each_gradient(rank_pool, stage):
    assert max(rank_pool(2).run(_hooked, stage)) <= BOUND


class Turned(nn.Module):
    """Buffers of complex numbers, as rotary frequencies may be."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.register_buffer("still", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)).conj())

    def forward(self, x):
        return self.a(x).pow(2).mean()


def _compares_complex(stage):
    engine = _engine(stage, Turned())
    try:
        engine.check_agreement()
        if engine.rank == 1:
            engine.module.turns[2] += 1e-5j
        engine.check_agreement()
        return "nothing"
    except BigtrainError as error:
        return str(error)
    finally:
        engine.close()


def test_complex_buffers_are_compared_over_ranks(rank_pool):
    assert all("turns" in said and "still" not in said for said in rank_pool(2).run(_compares_complex, 2))


def _one_folder(stage, folder):
    """Two engines that train in turns, then a third in the place of one that nobody closed."""
    said = []
    engines = [_engine(stage), _engine(stage)]
    for engine in engines:
        _one_by_one(engine, 0)
    engines[0].save_checkpoint(folder)
    for again in range(2):
        try:
            engines[1].save_checkpoint(folder)
            said.append("saved")
        except BigtrainError as error:
            said.append(str(error))
        engines[1].save_checkpoint(folder, tag="mine")
        if not again:
            engines[0].close()
    del engine, engines[:]
    engine = _engine(stage)
    _one_by_one(engine, 0)
    engine.save_checkpoint(folder)
    engine.close()
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_engine_does_not_replace_what_another_saved(rank_pool, tmp_path, stage):
    for said in rank_pool(2).run(_one_folder, stage, str(tmp_path)):
        assert "another Engine of this process" in said[0] and "checkpoint-1" in said[0] and said[1] == "saved"


def _gathers_after_an_evaluation():
    cfg = config(3, stage3_max_reuse_distance=500, stage3_prefetch_bucket_size=300)
    torch.manual_seed(0)
    engine = Engine(TinyLM(), ds_config=cfg, learning_rate=1e-3, hang_s=None)
    for step in range(4):
        engine.train_step([rows(step)[engine.rank]])
    before = {name: zero.partition_of(p)[2].clone() for name, p in engine.module.named_parameters()}
    engine.evaluate([rows(9)[engine.rank]])
    in_flight = [name for name, p in engine.module.named_parameters() if p.ds_status.name == "INFLIGHT"]
    gathered = whole_weights(engine.module)
    wrong = []
    for name, part in before.items():
        whole = torch.cat([torch.as_tensor(other) for other in ranks.all_gather_object(part.float().tolist())])
        wrong += [name] if not torch.equal(whole[: gathered[name].numel()], gathered[name].reshape(-1)) else []
    loss = engine.train_step([rows(5)[engine.rank]]).loss
    engine.close()
    return in_flight, wrong, loss


def test_weights_that_an_evaluation_was_fetching_can_be_gathered(rank_pool):
    """What it fetched ahead, for a backward that did not come, is still on its way."""
    for in_flight, wrong, _ in rank_pool(2).run(_gathers_after_an_evaluation):
        assert in_flight and not wrong


def _a_kept_head(tied, chunked):
    """Loss of the first step, and of plain torch in fp32 with the same weights as bf16 holds them but for the kept one."""
    from bigtrain.kernels.attach import use_chunked_loss

    model = families.make("llama" if tied else "llama_untied", dtype=torch.float32)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    plain = copy.deepcopy(model)
    for other, p in plain.named_parameters():
        p.data = p.data if other == name else p.data.bfloat16().float()
    ids = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(3))
    if chunked:
        use_chunked_loss(model)
    engine = Engine(model, ds_config=config(0), keep_in_fp32=[name], learning_rate=1e-3, hang_s=None)
    loss = engine.train_step([{"input_ids": ids, "labels": ids}]).loss
    kept = engine.summary()["dtypes"]["keep_in_fp32"]
    engine.close()
    return loss, float(plain(input_ids=ids, labels=ids).loss), kept == [name]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_stays_in_fp32_may_be_tied_and_make_the_loss(rank_pool, tied, chunked):
    ((loss, plain, alone),) = rank_pool(1).run(_a_kept_head, tied, chunked)
    assert alone and loss == pytest.approx(plain, rel=2e-3)  # bf16 activations
