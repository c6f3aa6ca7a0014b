"""The plan as arithmetic: rows sum, shares add up, more ranks never hold more."""

import itertools
import json

import pytest

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.partition import partition_size
from bigtrain.plan import PlanInput, ZeroSettings, plan_input, predict, settings_from_config
from bigtrain.plan.constants import pieces, pinned_bytes
from bigtrain.plan.device import device_tape
from bigtrain.plan.groups import flat_group, heaviest_rank, split_groups, sub_groups
from bigtrain.plan.parameters import Parameter
from bigtrain.plan.parts import parts_of
from bigtrain.plan.predict import quick
from bigtrain.plan.rows import ROWS
from bigtrain.plan.states import LAYOUTS

PLACEMENTS = [(0, "none"), (1, "none"), (1, "optimizer"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "optimizer"),
              (3, "all")]  # fmt: skip


def tiny(name="llama-tiny", stage=3, offload="none", **values) -> PlanInput:
    zero = ZeroSettings(stage=stage, offload_optimizer=offload != "none", offload_param=offload == "all",
                        reduce_bucket_elems=100_000, overlap_comm=True, sub_group_elems=300_000, prefetch_elems=1000,
                        grad_bytes=values.pop("grad_bytes", 2))  # fmt: skip
    return plan_input(shapes.config_dict(name), settings=zero, seq_len=values.pop("seq_len", 128), **values)


@pytest.mark.parametrize("stage, offload", PLACEMENTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("checkpointing, accumulation, grad", [("none", 1, 2), ("full", 4, 4), ("full", 2, 2)])
def test_rows_sum_exactly_and_everything_is_returned(stage, offload, world, checkpointing, accumulation, grad):
    plan = predict(tiny(stage=stage, offload=offload, world_size=world, checkpointing=checkpointing,
                        accumulation=accumulation, grad_bytes=grad))  # fmt: skip
    for tree in plan.rows:
        assert sum(row.bytes for row in tree.rows) == tree.bytes == max(tree.by_phase.values())
        assert all(row.formula and row.source for row in tree.rows)
    assert plan.gpu_reserved_bytes >= plan.gpu.bytes
    assert plan.gpu_used_bytes > plan.gpu_reserved_bytes


@pytest.mark.parametrize("stage, offload", PLACEMENTS)
@pytest.mark.parametrize("accumulation, grad", [(1, 2), (2, 2), (2, 4)])
def test_the_quick_simulation_finds_the_same_peak(stage, offload, accumulation, grad):
    plan = tiny(stage=stage, offload=offload, world_size=2, accumulation=accumulation, grad_bytes=grad)
    whole, quick = predict(plan), predict(plan, reserve=False)
    assert (quick.gpu.bytes, quick.host.bytes) == (whole.gpu.bytes, whole.host.bytes)
    assert quick.gpu_need_bytes() == whole.gpu_need_bytes()  # or what a search finds would be refused


def test_steady_state_holds_nothing_but_states():
    from bigtrain.plan.device import device_tape

    for (stage, offload), world in itertools.product(PLACEMENTS, (1, 3)):
        plan = tiny(stage=stage, offload=offload, world_size=world, accumulation=2)
        tape = device_tape(plan)
        left = {row for _, row in ((size, row) for row, size in tape.held_rows(len(tape.events)).items())}
        lasting = {"weights, bf16", "weights, persistent", "master", "moments", "offload buffer on the GPU", "cuBLAS workspace"}
        if stage == 3:
            lasting |= {"reduce buckets", "gradients, kept"}  # both are permanent buffers there
        if stage == 0 or (stage == 1 and not offload):  # sums in fp32
            lasting |= {"gradients, kept"}
        assert left <= lasting, (stage, offload, world, left - lasting)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("decay_groups", [True, False])
def test_partitions_of_all_ranks_cover_the_padded_groups_exactly(world, decay_groups):
    items = [Parameter(f"p{i}", shape) for i, shape in enumerate([(7, 3), (5,), (1,), (4, 4), (2, 9), (13,), (1, 1)])]
    total = 0
    for members in split_groups(items, decay_groups):
        group = flat_group(items, members, world)
        assert group.partition * world == group.padded >= sum(items[i].elems for i in members)
        assert group.padded - sum(items[i].elems for i in members) < 2 * world
        for at, i in enumerate(members):
            owned = [group.owned(at, items[i].elems, rank) for rank in range(world)]
            assert sum(owned) == items[i].elems
            assert [rank for rank, n in enumerate(owned) if n] == list(group.owners(at, items[i].elems))
            total += sum(owned)
    assert total == sum(p.elems for p in items)


@pytest.mark.parametrize("world", range(1, 9))
def test_heaviest_rank_touches_most(world):
    items = [Parameter(f"p{i}", (n,)) for i, n in enumerate([50, 3, 3, 8, 1, 1, 40])]
    group = flat_group(items, tuple(range(len(items))), world)
    load = [sum(p.elems for i, p in enumerate(items) if rank in group.owners(i, p.elems)) for rank in range(world)]
    assert load[heaviest_rank(items, [group], world)] == max(load)


@pytest.mark.parametrize("world", range(1, 9))
def test_slices_and_sub_groups_conserve_elements(world):
    items = [Parameter(f"p{i}", (n,)) for i, n in enumerate([50, 3, 3, 8, 1, 1, 40])]
    local = [partition_size(p.elems, world) for p in items]
    assert all(n * world - p.elems in range(world) for n, p in zip(local, items))
    for limit in range(1, 60):
        subs = sub_groups(items, [(0, 1, 2), (3, 4, 5, 6)], world, limit)
        assert sum(subs) == sum(local)
        assert all(subs)


@pytest.mark.parametrize("stage, offload", [p for p in PLACEMENTS if p[0] > 0])
def test_more_ranks_never_hold_more(stage, offload):
    sizes = [predict(tiny(stage=stage, offload=offload, world_size=w)) for w in (2, 4, 8, 16)]
    for fewer, more in itertools.pairwise(sizes):
        # Padding and persistent weights do not shrink: a rank may gain a few elements a parameter.
        slack = 512 * 8 * len(fewer.input.parameters.items)
        assert more.gpu.bytes <= fewer.gpu.bytes + slack
        assert more.host.bytes <= fewer.host.bytes + slack


@pytest.mark.parametrize("change", [{"micro_batch": 2}, {"seq_len": 256}, {"checkpointing": "none"}])
def test_more_work_never_holds_less(change):
    for stage, offload in PLACEMENTS:
        plan = tiny(stage=stage, offload=offload, world_size=2)
        assert predict(plan.but(**change)).gpu.bytes >= predict(plan).gpu.bytes


def test_each_stage_holds_less_than_the_one_before():
    states = [predict(tiny("llama-50m", stage=s, world_size=4, seq_len=16)).gpu.bytes for s in (1, 2, 3)]
    assert states == sorted(states, reverse=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_of_every_optimizer_are_their_bytes_per_parameter(name):
    stage = 2
    plan = predict(tiny("llama-50m", stage=stage, optimizer=name, seq_len=8, decay_groups=False))
    rows = {row.name: row.bytes for row in plan.gpu.rows}
    elems = plan.input.parameters.elems
    layout = LAYOUTS[name]
    assert rows["master"] == pytest.approx(layout.remainder * elems, abs=1024)
    if name == "muon":
        assert layout.matrix_moments * elems < rows["moments"] < layout.moments * elems
    elif layout.moments:
        assert rows["moments"] == pytest.approx(layout.moments * elems, abs=1024)


def test_split_master_saves_what_it_says():
    kept = {name: LAYOUTS[name].remainder + LAYOUTS[name].moments for name in ("adamw", "adamw_split", "adamw_split_8bit")}
    assert kept == {"adamw": 12, "adamw_split": 10, "adamw_split_8bit": pytest.approx(4.03125)}


def test_B46_pinned_blocks_are_rounded_to_powers_of_two():
    assert [pinned_bytes(n) for n in (1, 2, 3, 4, 5, 4095, 4096, 4097)] == [1, 2, 4, 4, 8, 4096, 4096, 8192]
    rows = {row.name for row in predict(tiny(stage=2, offload="optimizer")).host.rows}
    assert "pinned rounding" in rows


@pytest.mark.parametrize("tokens", [1, 7, 1000, 4096, 100_001, 262_144, 262_145, 348_160])
def test_block_inputs_are_pinned_in_pieces_that_waste_little(tokens):
    size = 8192 * tokens
    found = pieces(size)
    assert sum(found) == size and all(n == pinned_bytes(n) for n in found[:-1]) and found == sorted(found, reverse=True)
    assert sum(map(pinned_bytes, found)) <= size * (1 + 1 / 32) + 2**16 and len(found) <= 6
    assert (found == [size]) == (pinned_bytes(size) - size <= max(size // 32, 2**16))
    assert pieces(0) == []


def test_the_plan_counts_the_pieces():
    plan = plan_input(
        shapes.config_dict("llama-8b"), settings=ZeroSettings(stage=2), seq_len=300_000, checkpointing="offload_inputs"
    )
    size = 2 * 4096 * 300_000
    taken = sum(map(pinned_bytes, pieces(size)))
    assert (
        predict(plan, reserve=False).host_pinned_bytes == 32 * taken and taken < 1.03 * size and pinned_bytes(size) > 1.7 * size
    )


def test_fp32_accumulation_under_offload_stays_on_the_gpu_at_stage_2():
    rows = {}
    for grad in (2, 4):
        plan = predict(tiny("llama-50m", stage=2, offload="optimizer", accumulation=4, grad_bytes=grad, decay_groups=False))
        rows[grad] = ({r.name: r.bytes for r in plan.gpu.rows}, {r.name: r.bytes for r in plan.host.rows})
    elems = plan.input.parameters.elems
    assert rows[4][0]["gradients, kept"] == pytest.approx(4 * elems, abs=1024)
    assert "gradients, kept" not in rows[2][0]
    assert "gradients, host accumulated" in rows[2][1] and "gradients, host accumulated" not in rows[4][1]


def test_B45_nothing_that_fills_a_card_is_left_out():
    """6.8 B parameters, 4 ranks, ZeRO-3, both offloads: the official estimate is 0.5 GB a GPU, real use 14-21 GB."""
    zero = ZeroSettings(stage=3, offload_optimizer=True, offload_param=True, overlap_comm=True)
    plan = predict(plan_input(shapes.config_dict("llama-7b"), settings=zero, world_size=4, micro_batch=4, seq_len=2048))
    rows = {row.name for row in plan.gpu.rows}
    assert {"reduce buckets", "weights, gathered", "checkpoints", "log-probabilities, fp32"} <= rows
    assert 5e9 < plan.gpu.bytes < 21e9
    assert 10e9 < plan.gpu_used_bytes < 30e9
    held = {row.name for row in plan.host.rows}
    assert {"master, host", "moments, host", "gradients, host fp32", "gradients, host flat", "weights, host"} <= held


def test_every_row_of_every_plan_is_documented():
    seen = set()
    for (stage, offload), world in itertools.product(PLACEMENTS, (1, 2)):
        plan = predict(tiny(stage=stage, offload=offload, world_size=world, accumulation=2))
        seen |= {row.name for tree in plan.rows for row in tree.rows}
    assert seen <= set(ROWS)


def test_auto_values_follow_the_hugging_face_formulas():
    auto = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                  "stage3_param_persistence_threshold": "auto"}}  # fmt: skip
    found = settings_from_config(auto, hidden=64)
    assert (found.reduce_bucket_elems, found.prefetch_elems, found.persistence_elems) == (4096, 3686, 640)


@pytest.mark.parametrize("config, word", [
    ({"zero_optimization": {"stage": 5}}, "stage is 5"),
    ({"zero_optimization": {"stage": "3"}}, "stage is '3'"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
    ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "needs stage 1, 2 or 3"),
    ({"zero_optimization": {"stage": 3, "reduce_bucket_size": -1}}, "reduce_bucket_size is -1"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "nvme"),
    ({"zero_optimization": {"stage": 0}, "optimizer": {"type": "Lion"}}, "no optimizer 'Lion'"),
])  # fmt: skip
def test_wrong_configs_are_refused_with_the_value(config, word):
    with pytest.raises(UsageError, match=word):
        plan_input(shapes.config_dict("llama-tiny"), ds_config=config)


@pytest.mark.parametrize("values, word", [
    ({"micro_batch": 0}, "micro_batch is 0"), ({"world_size": -1}, "world_size is -1"), ({"seq_len": 1.5}, "seq_len"),
    ({"optimizer": "adamw_split", "settings": ZeroSettings(stage=3, offload_optimizer=True, offload_param=True)}, "offload_param"),
    ({"optimizer": "adamw_split", "settings": ZeroSettings(stage=0)}, "works at ZeRO stages 1, 2, 3"),
])  # fmt: skip
def test_wrong_values_are_refused(values, word):
    with pytest.raises(UsageError, match=word):
        plan_input(shapes.config_dict("llama-tiny"), **values)


@pytest.mark.parametrize("stage, offload", PLACEMENTS)
@pytest.mark.parametrize("frozen", [("model.embed_tokens",), ("model.layers.0", "model.layers.1"), ("model.layers.5.mlp",)])
def test_frozen_parts_have_no_states_and_less_is_held(stage, offload, frozen):
    plan = tiny(stage=stage, offload=offload, world_size=2)
    part = plan.but(frozen=frozen)
    whole, less = predict(plan), predict(part)
    assert part.trained_elems < plan.trained_elems == plan.parameters.elems
    assert less.gpu.bytes + less.host.bytes < whole.gpu.bytes + whole.host.bytes
    for tree in less.rows:
        assert sum(row.bytes for row in tree.rows) == tree.bytes


def test_frozen_names_must_exist_and_leave_something():
    with pytest.raises(UsageError, match=r"frozen names 'model\.layer'"):
        tiny(frozen=("model.layer",))
    with pytest.raises(UsageError, match="leaves no parameter to train"):
        tiny(frozen=("model",))


def test_a_list_of_shapes_is_enough_and_said_to_be_an_estimate():
    pairs = [["embed.weight", [1000, 32]]]
    pairs += [[f"blocks.{i}.{n}.weight", [32, 32]] for i in range(3) for n in ("a", "b")] + [["norm.weight", [32]]]
    plan = predict(plan_input(shapes=pairs, settings=ZeroSettings(stage=2), seq_len=16))
    assert plan.input.parameters.elems == 1000 * 32 + 6 * 32 * 32 + 32
    assert "only a list of shapes" in plan.to_json()["notes"][0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "head"), [("roberta", "lm_head.decoder.weight"), ("gpt2", "lm_head.weight")])
def test_the_head_is_its_matrix_though_a_vocabulary_of_bytes_makes_others_larger(kind, head, tied):
    """Of a tied RoBERTa another layer of the head was taken for it: a traceback. Of GPT-2 it was the table of positions."""
    sizes = dict(hidden_size=384, num_attention_heads=6, num_hidden_layers=2, vocab_size=256, max_position_embeddings=512)
    config = {"model_type": kind, "tie_word_embeddings": tied, **sizes}
    run = plan_input(config, settings=ZeroSettings(stage=2), seq_len=128, accumulation=2)
    assert [run.parameters.items[i].name for i in parts_of(run.parameters).head] == [dict(run.parameters.tied).get(head, head)]
    assert ("gradient of the tied matrix" in device_tape(run).names) is tied


def test_what_a_save_copies_is_what_is_measured_of_one_and_said():
    """3B, adamw_split_8bit on one H200: 19,376,897,376 bytes were copied from the card (docs/results/checkpoint.md)."""
    plan = tiny("llama-3b", optimizer="adamw_split_8bit")
    assert predict(plan).save_copy_bytes == pytest.approx(19_376_897_376, rel=1e-4)
    assert any("18.05 GiB more of the host" in note for note in predict(plan).notes)
    embedding = 128256 * 3072  # frozen, a save has its bf16 weight alone
    frozen = tiny("llama-3b", optimizer="adamw_split_8bit", frozen=("model.embed_tokens",))
    less = predict(plan).save_copy_bytes - predict(frozen).save_copy_bytes
    assert less == pytest.approx((4 + 2 + 8 / 256 - 2) * embedding, abs=1)


@pytest.mark.parametrize("name", shapes.names())
@pytest.mark.parametrize("stage, offload", [(2, "none"), (3, "all")])
def test_every_preset_can_be_planned_and_written_as_json(name, stage, offload):
    plan = predict(tiny(name, stage=stage, offload=offload, world_size=8))
    assert json.loads(json.dumps(plan.to_json()))["gpu_peak_allocated_bytes"] == plan.gpu.bytes > 0


def test_no_more_is_reserved_than_the_card_holds_where_the_plan_fits():
    """At its limit the allocator gives back what is free: 57.6e9 bytes were said to be reserved of a card of 50.9."""
    zero = ZeroSettings(stage=2, offload_optimizer=True, overlap_comm=True, reduce_bucket_elems=200_000_000)
    plan = plan_input(shapes.config_dict("llama-8b"), settings=zero, micro_batch=4, kernels="liger", optimizer="adamw_split_8bit",
                      checkpoint_blocks=21, drawn=True)  # fmt: skip
    card = int(47.4 * 2**30)
    free, held = predict(plan), predict(plan, gpu_memory_bytes=card)
    assert held.fits(card, None) and held.gpu == free.gpu
    assert held.gpu.bytes < held.gpu_reserved_bytes < held.gpu_used_bytes <= card < free.gpu_used_bytes
    assert predict(plan, gpu_memory_bytes=2 * card).gpu_reserved_bytes == free.gpu_reserved_bytes
    assert predict(plan, gpu_memory_bytes=2**30).gpu_used_bytes > 2**30  # what cannot do with it is not said to


def test_more_memory_never_ends_what_fitted():
    """Where memory is given back at the limit leaves other gaps at each: a replay at 11.752e9 B got by, and one at 11.761e9 was short."""
    zero = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    values = {"world_size": 2, "seq_len": 512, "optimizer": "adamw_split_8bit", "checkpointing": "full"}
    plan = predict(plan_input(shapes.config_dict("llama-1b"), ds_config=zero, **values))
    least = plan.gpu_least_bytes()
    cards = [int(least * (1 + at / 2000)) for at in range(25)]
    fits = [plan.fits(card, None) for card in cards]
    assert fits == sorted(fits) and True in fits and False in fits
    assert fits == [card >= plan.gpu_need_bytes() for card in cards]  # which is what the plan says that it needs
    assert [quick(plan.input).fits(card, None) for card in cards] == fits
