"""The search: what it drops, what it prefers, what it says when nothing fits."""

import functools
import importlib
import json

import pytest

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.plan import Rates, ZeroSettings, choose, plan_input, predict, rates_from, step_time
from bigtrain.plan.choose import _SPARED, _families
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.judge import judge, state_bytes
from bigtrain.plan.launched import launched
from bigtrain.plan.moved import moved_bytes
from bigtrain.plan.roofline import host_s
from bigtrain.plan.settled import filled
from bigtrain.plan.states import LAYOUTS

GIB = 2**30
search = importlib.import_module("bigtrain.plan.choose")  # the package exports a function of that name


def base(name="llama-8.36b", world=1, **values):
    return plan_input(shapes.config_dict(name), world_size=world, gpus_per_node=min(world, 8), **values)


@functools.cache
def pick(name="llama-8.36b", world=1, gpu=47.4, host=256, batch=None, wanted=3, **values):
    return choose(base(name, world), Hardware(int(gpu * GIB), int(host * GIB)),
                  global_batch=batch or 4 * world, wanted=wanted, **values)  # fmt: skip


def test_the_public_case_gets_a_ladder_for_one_two_and_eight_cards():
    """8.36 B parameters on 47.4 GB cards: bf16 and 8-bit Adam alone needed 53 GB and died in the first step."""
    one, two, eight = (pick(world=w, host=h) for w, h in ((1, 128), (2, 256), (8, 1024)))
    for choice in (one, two, eight):
        assert choice.best and choice.best.fits
        assert choice.best.plan.fits(int(47.4 * GIB), choice.hardware.host_bytes)
        assert all(c.why for c in choice.rejected)
    assert one.options["offload"] != "none"
    assert eight.options["offload"] == "none"
    # The author's own attempt, all on one card, is on the ladder with what it lacks.
    tried = [c for c in one.rejected if c.options["offload"] == "none" and c.options["optimizer"] == "adamw_8bit"]
    assert tried and all("GPU short by" in c.why for c in tried)


def test_chosen_is_the_fastest_of_the_fitting_and_all_fit():
    choice = pick(world=2)
    times = [c.time.total_s for c in choice.fitting]
    assert choice.best is choice.fitting[0]
    assert times[0] <= min(times) + 1e-3
    for c in choice.fitting:
        assert c.plan.gpu_need_bytes() <= int(47.4 * GIB)
        assert c.plan.host_need_bytes() <= 256 * GIB
        assert c.input.micro_batch * c.input.accumulation * 2 == choice.global_batch


@pytest.mark.parametrize(
    "name, world, gpu, host",
    [
        ("llama-1b", 1, 12, 32),
        ("llama-50m", 1, 5, 8),
        ("llama-8b", 1, 8, 16),
        ("llama-8b", 1, 47.4, 64),
        ("llama-3b", 2, 24, 128),
    ],
)
def test_what_is_not_planned_would_not_have_been_chosen(name, world, gpu, host):
    every = pick(name, world, gpu, host, 8 * world, wanted=None)
    for wanted in (1, 3, 99):
        found = pick(name, world, gpu, host, 8 * world, wanted=wanted)
        assert [c.input for c in found.fitting] == [c.input for c in every.fitting[:wanted]]
        assert found.advice == every.advice


def test_what_has_to_sum_gradients_in_bf16_is_planned_although_it_would_be_slow_in_fp32():
    """Stage 1 in fp32 does not fit and would be slower than three others; in bf16 it is the fastest that fits."""
    start = base("llama-1b", 4, seq_len=2048)
    start = start.but(settings=search.search_settings(start.geometry.hidden))
    limits = {"hardware": Hardware(24 * GIB, 500 * GIB), "global_batch": 32, "recompute": False}
    every, found = choose(start, **limits), choose(start, **limits, wanted=3)
    assert every.best.input.settings.stage == 1 and every.best.input.settings.grad_bytes == 2
    assert [c.input for c in found.fitting] == [c.input for c in every.fitting[:3]]


def test_what_a_run_leaves_open_is_settled_for_few(monkeypatch):
    """It takes plans and replays each time: only where it decides which are the fastest."""
    seen = []
    monkeypatch.setattr(search, "filled", lambda plan, *args, **how: seen.append(plan) or filled(plan, *args, **how))
    found = choose(base(world=2), Hardware(int(47.4 * GIB), 256 * GIB), global_batch=16, wanted=3)
    assert len(found.fitting) == 3 and len(seen) <= 6


def test_search_agrees_with_brute_force_on_a_small_model():
    choice = pick("llama-50m", gpu=5, host=8, batch=4)
    start, found = base("llama-50m"), []
    for optimizer in ("adamw", "adamw_8bit", "adamw_split", "adamw_split_8bit"):
        for stage in (2, 3):
            for checkpointing in ("none", "full"):
                for micro in (1, 2, 4):
                    plan = start.but(stage=stage, overlap_comm=True, optimizer=optimizer, checkpointing=checkpointing,
                                     micro_batch=micro, accumulation=4 // micro)  # fmt: skip
                    if predict(plan).fits(5 * GIB, 8 * GIB):
                        found.append(step_time(plan).total_s)
    assert choice.best.time.total_s <= min(found) + 1e-3


@pytest.mark.parametrize("gpu, host", [(12, 32), (24, 64)])
def test_more_memory_is_never_slower(gpu, host):
    small, large = pick("llama-1b", gpu=gpu, host=host), pick("llama-1b", gpu=gpu * 2, host=host * 2)
    if small.best:
        assert large.best.time.total_s <= small.best.time.total_s + 1e-3


def test_nothing_fits_says_what_would():
    choice = pick("llama-70b", gpu=24, host=64)
    assert choice.best is None and choice.options is None
    text = " ".join(choice.advice)
    assert "more ranks:" in text and "fewer tokens:" in text and "least GPU memory:" in text and "nearest:" in text


def test_fewer_tokens_help_where_activations_are_what_is_short():
    choice = choose(base("llama-1b", seq_len=131072), Hardware(40 * GIB, 128 * GIB))
    assert choice.best is None
    assert any(line.startswith("fewer tokens: sequences of") for line in choice.advice)


def test_gradients_are_summed_in_bf16_only_where_fp32_does_not_fit():
    asked = base(world=1, settings=ZeroSettings(grad_bytes=4))
    tight = choose(asked, Hardware(int(47.4 * GIB), 128 * GIB), global_batch=4)
    assert tight.best.options["grad_accum_dtype"] == "bf16"
    roomy = {"hardware": Hardware(80 * GIB, 2000 * GIB), "global_batch": 16, "wanted": 1}
    for accumulation, dtype in ((2, "fp32"), (1, "bf16")):  # one micro step sums nothing
        best = choose(base("llama-3b", 8, settings=ZeroSettings(grad_bytes=4)), accumulation=accumulation, **roomy).best
        assert best.options["grad_accum_dtype"] == dtype


def test_only_allowed_optimizers_are_chosen():
    choice = pick(world=2, optimizers=("adamw",))
    assert {c.options["optimizer"] for c in (*choice.fitting, *choice.rejected)} == {"adamw"}


def test_optimizers_keep_to_their_stages_and_places():
    choice = pick("llama-50m", world=2, gpu=80)
    for c in (*choice.fitting, *choice.rejected):
        layout = LAYOUTS[c.input.optimizer]
        assert c.options["stage"] in layout.stages


def test_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(UsageError, match="global batch of 7 sequences cannot be divided by 2 ranks"):
        pick(world=2, batch=7)


@pytest.mark.parametrize("stage, offload, param", [(2, False, False), (2, True, False), (3, False, False),
                                                   (3, True, False), (3, True, True)])  # fmt: skip
@pytest.mark.parametrize("name", ["llama-50m", "llama-1b", "mixtral-tiny"])
def test_state_bytes_are_a_lower_bound(name, stage, offload, param):
    zero = ZeroSettings(stage=stage, offload_optimizer=offload, offload_param=param)
    for world in (1, 2, 3):
        plan = base(name, world, settings=zero, seq_len=64)
        gpu, host = state_bytes(plan)
        found = predict(plan)
        assert gpu <= found.gpu.bytes
        assert host <= found.host.bytes


def test_no_limit_means_everything_fits():
    assert judge(base("llama-405b"), Hardware()).fits


def test_choice_can_be_written_as_json():
    choice = json.loads(json.dumps(pick(world=2).to_json()))
    assert choice["chosen"]["micro_batch"] and choice["fitting"]


def test_calibration_replaces_rates_and_unknown_keys_are_refused():
    plan = base("llama-1b")
    assert step_time(plan, rates_from({"matmul_flops": 784e11})).compute_s > 5 * step_time(plan).compute_s
    with pytest.raises(UsageError, match="unknown key 'matmul'"):
        rates_from({"matmul": 1})
    with pytest.raises(UsageError, match="h2d_bytes_s is -1"):
        rates_from({"h2d_bytes_s": -1})


@pytest.mark.parametrize("change", [{"checkpointing": "full"}, {"accumulation": 2}, {"seq_len": 8192}])
def test_more_work_takes_longer(change):
    plan = base("llama-1b", checkpointing="none")
    assert step_time(plan.but(**change)).total_s > step_time(plan).total_s


def test_offload_costs_time():
    plan = base("llama-1b", settings=ZeroSettings(stage=3))
    times = [step_time(plan.but(offload_optimizer=o, offload_param=p)).total_s for o, p in
             ((False, False), (True, False))]  # fmt: skip
    assert times == sorted(times)


def test_sparse_models_count_active_parameters_only():
    plan = base("mixtral-8x7b")
    from bigtrain.plan.roofline import active_elems

    assert 12e9 < active_elems(plan) < 14e9 < plan.parameters.elems


def test_a_recompute_is_a_forward_of_the_blocks():
    """Neither embedding nor head, which are not recomputed, nor each block's last product, whose result backward does not ask for."""
    plan, rates = base("llama-1b", checkpointing="full", micro_batch=64, kernels="liger"), Rates()
    blocks = sum(p.elems for p in plan.parameters.items if p.block is not None)
    products = 2 * (blocks - 16 * 2048 * 8192) / rates.products_share
    attention = 2 * 16 * plan.seq_len * 2048 / 0.477  # heads of 64, forward
    passes = moved_bytes(plan) / 3 / rates.device_bytes_s
    again = plan.tokens * (products + attention) / rates.matmul_flops + passes
    none = plan.but(checkpointing="none")
    assert step_time(plan).compute_s - step_time(none).compute_s == pytest.approx(again, rel=1e-9)
    assert step_time(plan.but(checkpoint_blocks=4)).compute_s - step_time(none).compute_s == pytest.approx(again / 4, rel=1e-9)


def test_a_small_micro_batch_takes_what_its_launches_take():
    plan = base("llama-1b", checkpointing="full", micro_batch=1, seq_len=16, kernels="liger", settings=ZeroSettings(stage=2))
    rates = Rates()
    one = launched(plan)
    assert (one.kernels, one.calls) == (58, 4)
    launches = 16 * (1 + 1 / 3) * (82 + 0.74 * 58 + 16.5 * 4) * rates.operation_s  # a recompute is the forward's third again
    assert host_s(plan) == pytest.approx(launches, rel=1e-9)
    assert step_time(plan).total_s - step_time(plan).optimizer_s == pytest.approx(launches, rel=1e-3)
    assert host_s(plan, Rates(operation_s=2 * rates.operation_s)) == pytest.approx(2 * launches, rel=1e-9)


def test_embeddings_take_no_products():
    tied, untied = ({**shapes.config_dict("llama-1b"), "tie_word_embeddings": tie} for tie in (True, False))
    times = [
        step_time(plan_input(c, settings=ZeroSettings(stage=1), seq_len=4096, kernels="liger")).compute_s
        for c in (tied, untied)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-12)


@pytest.mark.parametrize("name", ["llama-50m", "mixtral-tiny"])
def test_what_other_buckets_and_gradients_could_spare_is_a_bound(name):
    """`_first_fitting` looks at none of them where the rest of the plan alone is too large."""
    start = base(name, settings=ZeroSettings(grad_bytes=4, overlap_comm=True), seq_len=256)
    for family in _families(start, ("adamw", "adamw_split_8bit")):
        for plan in (family.but(micro_batch=1, accumulation=2), family.but(micro_batch=8), family.but(world_size=2)):
            bound = predict(plan, reserve=False).gpu_least_bytes(_SPARED)
            changes = [{"reduce_bucket_elems": 10**5}, {"reduce_bucket_elems": 10**5, "grad_bytes": 2}, {"grad_bytes": 2}]
            changes += [{"grad_bytes": 2, "offload_gradients": s} for s in (0.3, 1.0) if plan.but(grad_bytes=2).alone]
            for change in changes:
                assert bound <= predict(plan.but(**change), reserve=False).gpu_least_bytes(), change


def test_on_cpus_a_card_that_is_there_too_limits_nothing():
    """A plan for CPUs was "GPU short by 0.39 GiB" on a machine with a small card."""
    cpu = base("llama-50m", device="cpu", seq_len=256)
    on_host, beside_a_card = (choose(cpu, Hardware(gpu, 64 * GIB), optimizers=("adamw",)) for gpu in (None, GIB))
    assert beside_a_card.options == on_host.options and beside_a_card.best
    card, host = state_bytes(on_host.best.input)  # one memory
    assert (card, 12 * cpu.parameters.elems <= host <= on_host.best.plan.host.bytes) == (0, True)


def test_that_nothing_fits_is_said_after_few_plans():
    """405B on eight cards: 25 were made, most to find out what would hold least, which weights and states tell of most."""
    quick = importlib.import_module("bigtrain.plan.predict").quick
    before = quick.cache_info().misses
    choice = choose(base("llama-405b", 8, seq_len=2048), Hardware(80 * GIB, 512 * GIB), global_batch=8)
    assert choice.advice[0].startswith("least GPU memory") and quick.cache_info().misses - before < 15
