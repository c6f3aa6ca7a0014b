"""Feed-forward parts in tiles: what they hold and cost, and the longest sequence that fits."""

import json
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from bigtrain import shapes
from bigtrain.bench.grid import expand
from bigtrain.bench.machine import Machine
from bigtrain.bench.prediction import planned
from bigtrain.cli import main
from bigtrain.config import RunValues
from bigtrain.errors import UsageError
from bigtrain.models import tile_mlp
from bigtrain.plan import plan_input, predict, step_time
from bigtrain.plan.activations import block_bytes
from bigtrain.plan.device import Run, sharding
from bigtrain.plan.gathered import calls_of
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.longest import STEP_TOKENS
from bigtrain.plan.parameters import Parameter
from bigtrain.plan.roofline import Rates
from bigtrain.plan.tape import Tape
from bigtrain.plan.zero_settings import ZeroSettings
from bigtrain.run.auto import flags, pick
from tests.unit.plan.test_shared import assert_same

GIB = 2**30


def base(name="llama-3b", stage=2, **values):
    settings = ZeroSettings(stage=stage, reduce_bucket_elems=50_000_000, grad_bytes=2)
    values = {"micro_batch": 1, "seq_len": 32768, "kernels": "liger", "optimizer": "adamw_split_8bit", **values}
    return plan_input(shapes.config_dict(name), settings=settings, **values)


def test_one_tile_is_none():
    plan = base()
    for tokens in (32768, 10**6):
        same = plan.but(mlp_tile_tokens=tokens)
        assert same.tile_tokens == 0 and predict(same).gpu == predict(plan).gpu and step_time(same) == step_time(plan)
    assert plan.but(mlp_tile_tokens=4096, micro_batch=2).tile_tokens == 4096


@pytest.mark.parametrize("kernels", ["hf", "liger"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "attention", "selective", "offload"])
def test_smaller_tiles_hold_less_and_take_longer(checkpointing, kernels):
    plans = [base(checkpointing=checkpointing, kernels=kernels, mlp_tile_tokens=tokens) for tokens in (0, 16384, 4096, 1024)]
    held = [predict(plan).gpu.by_phase["backward"] for plan in plans]
    assert held == sorted(held, reverse=True) and len(set(held)) >= 3  # of the smallest tiles attention's backward holds more
    times = [step_time(plan).total_s for plan in plans]
    assert times == sorted(times) and len(set(times)) == 4


def test_what_a_tile_holds_in_backward_by_hand():
    """8B, 8,192 tokens, liger: nothing of tokens by intermediate size but of one tile; fp32 sums and one tile's gradients.

    With more tokens attention's backward holds more than that.
    """
    plan = base("llama-8b", checkpointing="full", mlp_tile_tokens=2048, seq_len=8192)
    rows = {row.name: row.bytes for row in predict(plan).gpu.rows}
    feed = 3 * 4096 * 14336
    assert rows["gradients of tiles, fp32 sums"] == 4 * feed and rows["gradients of one tile"] == 2 * feed
    assert rows["activations, feed-forward"] == 2 * 2 * 2048 * 14336  # gate and up: what they made went into down's gradient
    cost = block_bytes(plan.geometry, plan.tokens, "liger", tile=2048)
    assert (cost.product, cost.middle, cost.gate) == (0, 0, 0)
    whole = block_bytes(plan.geometry, plan.tokens, "liger")
    assert whole.kept - cost.kept == 3 * 2 * 8192 * 14336
    assert whole.results - cost.results == 2 * 8192 * (2 * 14336 + 4096)


class Held(TorchDispatchMode):
    """Bytes of the storages that operators make and that are still there, and the most of them at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _freed(self, place, size):
        self.known.discard(place)
        self.now -= size


@pytest.mark.parametrize("shape", [(48, 1024), (768, 1024)])
def test_backward_of_a_part_in_tiles_holds_what_the_plan_says(shape):
    """On a CPU, storage by storage: once the sums are most of it, once a tile is."""
    hidden, inner = shape
    config = {**shapes.config_dict("llama-tiny"), "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1}
    plan = plan_input(config, settings=ZeroSettings(stage=0), seq_len=4096, micro_batch=1, device="cpu", mlp_tile_tokens=1024)
    part = LlamaMLP(AutoConfig.for_model(**config)).bfloat16()
    own = [p.untyped_storage().data_ptr() for p in part.parameters()]
    tile_mlp(torch.nn.ModuleList([part]), 1024, LlamaMLP)
    x = torch.randn(1, 4096, hidden, dtype=torch.bfloat16, requires_grad=True)
    out, grad = part(x), torch.randn(1, 4096, hidden, dtype=torch.bfloat16)
    held = Held()
    held.known.update(own, [t.untyped_storage().data_ptr() for t in (x, out, grad)])
    with held:
        out.backward(grad)
    tape = Tape()
    run = Run(plan, tape, sharding(plan, Tape()))
    run._grad = lambda i: None
    tape.phase("backward")
    run._tiles_backward(0, run.parts.of_block[0][0])
    assert tape.ledger().peak_bytes == pytest.approx(held.most, rel=0.05)  # an elementwise temporary of the tile more or less


def test_time_of_the_tiles_by_hand():
    rates = Rates()
    feed, down = 28 * 3 * 3072 * 8192, 28 * 3072 * 8192
    sums = 8 * 10 * feed / rates.device_bytes_s
    again = 2 * feed * 32768 / (rates.matmul_flops * rates.products_share)
    for checkpointing, more in (("full", sums + again * down / feed), ("none", sums + again), ("selective", None)):
        whole, tiled = (step_time(base(checkpointing=checkpointing, mlp_tile_tokens=n), rates) for n in (0, 4096))
        if more is not None:  # a recompute of the block runs all of the part but its last product; in tiles it ends before them
            assert tiled.compute_s - whole.compute_s == pytest.approx(more)
        else:
            assert tiled.compute_s > whole.compute_s


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_ledger_is_that_of_the_whole_tape(stage):
    optimizer = "adamw_split_8bit" if stage else "adamw"
    for world, checkpointing in ((1, "full"), (2, "none"), (2, "selective")):
        plan = base("llama-tiny", stage, seq_len=128, optimizer=optimizer, world_size=world, checkpointing=checkpointing)
        assert_same(plan.but(mlp_tile_tokens=32))
        assert_same(plan.but(mlp_tile_tokens=32, accumulation=2, frozen=("model.layers.0.mlp.up_proj",)))


def test_a_leaf_module_is_one_call():
    items = [Parameter(f"layers.0.{name}.weight", (100, 1), block=0) for name in ("attn.q", "mlp.up", "mlp.down")]
    assert calls_of(items, [0, 1, 2], 10, {1: "layers.0.mlp", 2: "layers.0.mlp"}) == [
        (),
        (),
        (0,),
        (1, 2),
    ]  # layers.0, attn, attn.q, mlp


def test_what_cannot_be_tiled_has_no_plan():
    with pytest.raises(UsageError, match="mlp_tile_tokens 64: a block of 'mixtral' routes tokens to experts"):
        base("mixtral-tiny", mlp_tile_tokens=64)
    with pytest.raises(UsageError, match="mlp_tile_tokens is -1"):
        base(mlp_tile_tokens=-1)


WORDS = [
    "plan", "--model", "preset:llama-8b-1m", "--gpu_memory", "80GiB", "--host_memory", "126GiB", "--ds_config",
    "ds_configs/zero2_offload.json", "--optim", "adamw_split_8bit", "--micro_batch", "1", "--checkpointing", "offload",
    "--calibration", "none",
]  # fmt: skip


def test_the_longest_sequence_fits_and_a_longer_one_does_not(tmp_path, capsys):
    config = {**shapes.config_dict("llama-50m"), "max_position_embeddings": 2**22}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {}
    for tile in ("0", "8192"):
        words = [*WORDS[:2], str(tmp_path), *WORDS[3:], "--gpu_memory", "16GiB", "--mlp_tile_tokens", tile]
        assert main([*words, "--json", "--seq_len", "max"]) == 0
        told = json.loads(capsys.readouterr().out)
        found[tile] = told["seq_len"]
        assert told["fits"] and told["seq_len"] % STEP_TOKENS == 0 and told["mlp_tile_tokens"] == int(tile)
        assert main([*words, "--seq_len", str(told["seq_len"] + STEP_TOKENS)]) == 3
        capsys.readouterr()
    assert found["8192"] > 1.3 * found["0"]


def test_the_longest_sequence_at_its_ends(capsys):
    words = [*WORDS[:2], "preset:llama-tiny", *WORDS[3:], "--mlp_tile_tokens", "64", "--json", "--seq_len", "max"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["seq_len"] == shapes.config_dict("llama-tiny")["max_position_embeddings"]
    words = [*WORDS, "--seq_len", "max", "--json", "--gpu_memory", "16GiB"]
    assert main(words) == 3
    assert json.loads(capsys.readouterr().out)["seq_len"] == STEP_TOKENS
    assert main(["plan", "--model", "preset:llama-8b", "--auto", "--seq_len", "max"]) == 2
    assert "--seq_len max asks how long a sequence one configuration can take" in capsys.readouterr().err


def test_sweeps_and_auto_know_tiles():
    machine = Machine(device="cuda", card="x", gpu_bytes=80 * GIB, host_bytes=500 * GIB)
    grid = {
        "model": "preset:llama-3b",
        "ds_config": "zero2",
        "optim": "adamw_split_8bit",
        "micro_batch": 1,
        "accumulation": 1,
        "seq_len": 8192,
    }
    whole, tiled = expand({**grid, "mlp_tile_tokens": [0, 1024]})
    assert planned(tiled, machine).input == planned(whole, machine).input.but(mlp_tile_tokens=1024)
    for wrong in (-1, "some", True):
        with pytest.raises(UsageError, match=r"grid: (--)?mlp_tile_tokens "):
            expand({**grid, "mlp_tile_tokens": wrong})
    with pytest.raises(UsageError, match="mlp_tile_tokens is bigtrain's own"):
        expand({**grid, "mlp_tile_tokens": 8, "runner": "raw_deepspeed"})
    base = plan_input(shapes.config_dict("llama-3b"), seq_len=8192, kernels="liger", mlp_tile_tokens=1024)
    run = RunValues(micro_batch=1, accumulation=1)
    picked = pick(base, run, Hardware(80 * GIB, 500 * GIB))
    assert picked.candidate.input.tile_tokens == 1024 and flags(picked.candidate.input)["mlp_tile_tokens"] == 1024
    assert "feed-forward in tiles of 1024" in picked.candidate.describe()
