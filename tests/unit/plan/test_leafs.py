"""Leaf modules of ZeRO-3 in the plan: which they are, what is gathered with them, what their gradients hold."""

import importlib.util
import re
from pathlib import Path

import pytest

from bigtrain import shapes
from bigtrain.errors import UsageError
from bigtrain.plan import Rates, plan_input, predict, step_time
from bigtrain.plan.device import device_tape
from bigtrain.plan.families import model_parameters, supported
from bigtrain.plan.gathered import Gathered, calls_of
from bigtrain.plan.leafs import block_class, is_block_class, leafs_of
from bigtrain.plan.roofline import host_s
from bigtrain.plan.zero_settings import ZeroSettings, settings_from_config
from tests.unit.plan.test_gathered import ITEMS, VISITS, walk
from tests.unit.plan.test_shared import assert_same

TINY = shapes.config_dict("llama-tiny")
BLOCK = "transformers.models.llama.modeling_llama.LlamaDecoderLayer"
BLOCKS = {1: "layers.0", 2: "layers.0", 3: "layers.1", 4: "layers.1"}  # of ITEMS


def test_classes_are_those_of_transformers():
    models = Path(importlib.util.find_spec("transformers").submodule_search_locations[0], "models")
    for kind in supported():
        name = kind.removesuffix("_text").replace("-", "_")
        source = (models / name / f"modeling_{name}.py").read_text(encoding="utf-8")
        blocks = set(re.findall(r"^class (\w+)\(GradientCheckpointingLayer\)", source, re.MULTILINE)) - {
            c for c in re.findall(r"^class (\w+Vision\w*)\(", source, re.MULTILINE)
        }
        inherited = re.findall(rf"^class ({block_class(kind)})\(\w+(?:DecoderLayer|Block|Layer)\)", source, re.MULTILINE)
        assert block_class(kind) in {*blocks, *inherited} or (block_class(kind) is None and not blocks), (kind, blocks)
    assert is_block_class(BLOCK, "llama") and is_block_class("Qwen2VLDecoderLayer", "qwen2_vl_text")
    assert not is_block_class("LlamaDecoderLayer", "mistral") and not is_block_class("x.LlamaDecoderLayer", "llama")


def found(**leaf_module):
    parameters = model_parameters(TINY)
    settings = settings_from_config({"zero_optimization": {"stage": 3, "leaf_module": leaf_module}}, 64)
    path, unknown = leafs_of(parameters, settings)
    return {parameters.items[i].name: leaf for i, leaf in path.items()}, unknown


def test_what_a_ds_config_names():
    inside = [p.name for p in model_parameters(TINY).items if p.block is not None]
    path, unknown = found(classes=BLOCK)
    assert path == {name: ".".join(name.split(".")[:3]) for name in inside} and unknown == ()
    path, unknown = found(names=["model.layers.1.mlp", "model.layers.9"], name_suffixes=["self_attn", "layers"])
    assert set(path.values()) == {f"model.layers.{b}.self_attn" for b in range(TINY["num_hidden_layers"])} | {
        "model.layers.1.mlp"
    }
    assert all(name.startswith(leaf + ".") for name, leaf in path.items())
    assert unknown == ("model.layers.9", "layers")  # one is not there, the other holds all blocks
    # The outermost counts.
    assert found(classes=["LlamaDecoderLayer", "Other"], name_suffixes=["mlp"]) == (found(classes=BLOCK)[0], ("Other",))
    with pytest.raises(UsageError, match=r"leaf_module\.classes is 3"):
        found(classes=3)


def test_a_leaf_is_one_call_and_is_gathered_in_one_group():
    assert calls_of(ITEMS, [1, 2], 10, BLOCKS) == [(1, 2)]
    zero = ZeroSettings(persistence_elems=10, prefetch_elems=0, max_reuse_elems=0)
    assert walk(Gathered(ITEMS, VISITS, frozenset(), zero, BLOCKS)) == [
        ([[0]], [0], [0]), ([[1, 2]], [1, 2], [1, 2]), ([[3, 4]], [3, 4], [3, 4]), ([[6]], [6], [6]),
        ([[3, 4]], [3, 4], [3, 4]), ([[1, 2]], [1, 2], [1, 2]), ([[0]], [0], [0]),
    ]  # fmt: skip


@pytest.mark.parametrize("bucket, ahead", [(99, [1]), (100, [1]), (101, [1, 2]), (300, [1, 2]), (301, [1, 2, 3])])
def test_prefetch_reaches_into_the_next_leaf_as_far_as_the_bucket(bucket, ahead):
    """One call gathers ahead until it has asked for a bucket: the last parameter may go beyond it."""
    zero = ZeroSettings(persistence_elems=10, prefetch_elems=bucket, max_reuse_elems=0)
    trace = Gathered(ITEMS, VISITS, frozenset(), zero, BLOCKS)
    assert trace.fetch() == [[0], ahead]
    trace.release()
    # The block itself is one call: what was not gathered ahead of it comes in one group.
    missing = [i for i in (1, 2) if i not in ahead]
    assert [group for group in trace.fetch() if set(group) & {1, 2}] == ([missing] if missing else [])


def plan(leaf, **values):
    zero = {"stage": 3, "reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 30_000, "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 100, **({"leaf_module": leaf} if leaf else {})}  # fmt: skip
    values = {"world_size": 2, "seq_len": 64, "micro_batch": 1, **values}
    return plan_input(TINY, ds_config={"zero_optimization": zero}, **values)


@pytest.mark.parametrize("leaf", [{"classes": [BLOCK]}, {"name_suffixes": ["mlp"]}])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_ledger_is_that_of_the_whole_tape(leaf, checkpointing):
    assert_same(plan(leaf, checkpointing=checkpointing))
    assert_same(plan(leaf, checkpointing=checkpointing, accumulation=2, frozen=("model.layers.0.mlp.up_proj",)))


def test_gradients_of_a_leaf_are_there_together():
    """All of a block's when the last of them comes; elsewhere each goes into the bucket as it comes."""
    rows = {}
    for leaf in (None, {"classes": [BLOCK]}):
        tape = device_tape(plan(leaf))
        rows[leaf is not None] = max(
            tape.held_rows(at, in_passing=False).get("gradients, fresh from autograd", 0) for at in range(len(tape.kinds))
        )
    block = sum(-(-2 * p.elems // 512) * 512 for p in model_parameters(TINY).items if p.block == 0)  # as the allocator rounds
    assert rows[True] == block > rows[False]


def test_notes_say_what_is_not_counted():
    def notes(leaf=None, **zero):
        return " ".join(predict(plan(leaf).but(**zero) if zero else plan(leaf)).notes)

    assert "leaf" not in notes()
    assert "leaf_module: Other is not counted" in notes({"classes": ["Other"]}) and "LlamaDecoderLayer" in notes(
        {"classes": ["Other"]}
    )
    assert "is not counted" not in notes({"classes": [BLOCK]}) and "leaf" not in notes({"classes": [BLOCK]})
    assert "stage3_module_granularity_threshold 5,000 is not counted" in notes(leaf_threshold=5000)


def test_a_leaf_module_spares_the_host_the_hooks_of_each_weight():
    rates, stage3 = Rates(), plan(None, checkpointing="full")
    stage2 = stage3.but(stage=2)
    layers = stage3.block_count
    visits = 4 * layers  # forward, backward as two, recompute
    assert host_s(stage3) - host_s(stage2) == pytest.approx(visits * 9 * rates.stage3_s_per_tensor, rel=1e-9)
    whole, feed = (plan({"classes": [BLOCK]}), plan({"name_suffixes": ["mlp"]}))
    whole, feed = whole.but(checkpointing="full"), feed.but(checkpointing="full")
    assert host_s(whole) - host_s(stage2) == pytest.approx(visits * rates.stage3_s_per_leaf, rel=1e-9)
    assert host_s(feed) == pytest.approx(host_s(stage3), rel=1e-9)  # three weights by themselves take less than a leaf module
    assert step_time(whole).total_s < step_time(feed).total_s
