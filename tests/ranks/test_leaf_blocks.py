"""Transformer blocks as ZeRO-3 leaf modules, gathered whole: the bits of training without."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from bigtrain import shapes
from bigtrain.errors import ModelError
from tests.ranks import zoo
from tests.ranks.test_checkpoint_blocks import ZERO3
from tests.ranks.tiny import config

BLOCKS = {
    "gpt2": ["GPT2Block"],
    "mixtral": ["MixtralDecoderLayer", "MixtralSparseMoeBlock"],
    "qwen2": ["Qwen2DecoderLayer"],
    "t5": ["transformers.models.t5.modeling_t5.T5Block"],
}
FROZEN = {
    "frozen": ["model.embed_tokens", "model.layers.0.self_attn"],
    "frozen block": ["model.embed_tokens", "model.layers.0"],
    "parts": ["model.embed_tokens", "model.layers.0.input_layernorm"],
    "t5": ["shared"],
}


def _leafs(kind):
    if kind == "parts":  # whose hidden states come by keyword
        return {"leaf_module": {"name_suffixes": ["self_attn", "mlp"]}}
    return {"leaf_module": {"classes": BLOCKS.get(kind, ["LlamaDecoderLayer"])}}


def _model(kind, cfg, policy, tile):
    from bigtrain.models import build_model, edit_model, enable_activation_checkpointing, set_moe_leaf_modules, tile_mlp

    source = zoo.source(kind if kind in zoo.CONFIGS else "llama")
    if kind == "t5":
        source |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    model = build_model(source, ds_config=cfg, seed=5, freeze=FROZEN.get(kind, ()),
                        dtype=torch.bfloat16 if cfg["bf16"]["enabled"] else torch.float32)  # fmt: skip
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = edit_model(model, lambda m: get_peft_model(m, adapters))
    if tile:
        tile_mlp(model, tile)
    if policy is not None:
        assert enable_activation_checkpointing(model, policy=policy) >= 2
    set_moe_leaf_modules(model)
    return model.train()


def _batches(rank, step):
    for micro in range(2):
        ids = torch.randint(0, 59, (2, 9), generator=torch.Generator().manual_seed(10 * step + 3 * micro + rank))
        yield {"input_ids": ids, "labels": ids}


def _content(module):
    from bigtrain import zero

    content = hashlib.sha256()
    for p in module.parameters():
        with zero.gathered([p]):
            content.update(p.detach().float().numpy().tobytes())
    return content.hexdigest()


def _trained(kind, leaf, bf16=True, policy=None, tile=None, folder=None, stage=3, **own):
    """(losses, norms and evaluation, what all weights are in the end, whole-weight gathers that a block asks for)."""
    from bigtrain.engine import Engine

    torch.manual_seed(1)
    zero3 = {name: value for name, value in {**ZERO3, **own}.items() if name != "stage"}
    cfg = config(stage, bf16=bf16, micro=2, accumulation=2, **(zero3 if stage == 3 else {}), **(_leafs(kind) if leaf else {}))
    engine = Engine(_model(kind, cfg, policy, tile), ds_config=cfg, learning_rate=1e-2)
    marked = {id(p.ds_z3_leaf_module) for p in engine.module.parameters() if hasattr(p, "ds_z3_leaf_module")}
    assert len(marked) == {"t5": 4, "parts": 4}.get(kind, 2) * leaf or tile or kind == "mixtral"
    numbers = []
    for step in range(3):  # ZeRO-3 gathers by its trace from the third on
        result = engine.train_step(list(_batches(engine.rank, step)))
        numbers += [result.loss, result.grad_norm]
        if step == 1:
            numbers.append(engine.evaluate(_batches(engine.rank, 7)).loss)
            if kind != "t5":
                with torch.no_grad():
                    engine.module.eval()
                    out = engine.module.generate(
                        input_ids=torch.tensor([[1, 2, 4 + engine.rank]]), max_new_tokens=3 + engine.rank
                    )
                    engine.module.train()
                numbers.append(out.tolist())
    if folder is not None:
        save = Path(folder, "leaf" if leaf else "plain")
        engine.save_checkpoint(save)
        engine.export(save / "model")
        numbers.append(hashlib.sha256((save / "model" / "model.safetensors").read_bytes()).hexdigest())
        engine.load_checkpoint(Path(folder, "plain"))
        numbers.append(engine.train_step(list(_batches(engine.rank, 3))).loss)
    content = _content(engine.module)
    engine.close()
    return numbers, content


def _both(kind, *args, plain_stage=3, **kwargs):
    return [_trained(kind, False, *args, stage=plain_stage, **kwargs), _trained(kind, True, *args, **kwargs)]


@pytest.mark.parametrize(
    ("kind", "world", "how"),
    [
        ("llama", 1, {"policy": "full"}),
        ("llama", 2, {"policy": "selective", "folder": True}),
        ("llama", 2, {"policy": "full", "tile": 8}),
        ("frozen", 2, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        ("frozen", 2, {"tile": 8}),
        ("frozen block", 2, {}),
        ("parts", 2, {}),
        ("parts", 2, {"policy": "full"}),
        ("gpt2", 2, {}),
        ("llama_tied", 2, {}),
        ("llama", 3, {"policy": "offload"}),
        ("mixtral", 3, {"policy": "full"}),
        ("qwen2", 3, {"policy": "attention"}),
        # Plain stage 3 has other last digits than stage 2 here; blocks without hooks inside have stage 2's.
        ("lora", 2, {"plain_stage": 2}),
    ],
)
def test_the_bits_are_those_without(rank_pool, tmp_path, kind, world, how):
    folder = {"folder": str(tmp_path)} if how.get("folder") else {}
    for plain, leaf in rank_pool(world).run(_both, kind, **{**how, **folder}):
        assert leaf == plain


def test_blocks_with_two_inputs(rank_pool):
    """T5's decoder, in fp32: the last digits differ from plain stage 3's, as these do from stage 2's."""
    for plain, leaf in rank_pool(2).run(_both, "t5", bf16=False):
        assert leaf[0] == pytest.approx(plain[0], rel=1e-5)


class Keyword(nn.Module):
    """A block that takes what it is told to take."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)

    def forward(self, scale=None, hidden=None, *, only=None, packed=None):
        x = next(x for x in (hidden, only, *(packed or ())) if x is not None)
        return x + torch.tanh(self.inner(x)) * scale


class Net(nn.Module):
    """`carried`: something before the blocks trains."""

    def __init__(self, how, carried):
        super().__init__()
        self.how, self.carried, self.forwards = how, carried, 0
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Keyword() for _ in range(2))

    def run(self, block, x, scale):
        if self.how == "keyword":
            return block(hidden=x, scale=scale)
        if self.how in ("behind", "skipped"):
            return block(scale, hidden=x)
        return block(scale=2, only=x) if self.how == "only" else block(2, packed=[x])

    def forward(self, x):
        x = self.first(x) if self.carried else x
        self.forwards += 1
        for block in self.blocks[: 1 if self.how == "skipped" and self.forwards in (2, 5) else 2]:
            x = self.run(block, x, torch.ones(8, dtype=x.dtype))
        return x.float().square().mean() + (0 if self.carried else 0 * self.first.weight.sum())


def _by_keyword(how, carried):
    """Weights with blocks as leafs and without; what was refused instead."""
    from bigtrain.engine import Engine

    found = []
    for leafs in ((), (Keyword,)):
        torch.manual_seed(3)
        # Nothing is let go of: a reduction that comes too early would not fail, but reduce zeros.
        engine = Engine(Net(how, carried), ds_config=config(3, bf16=False, micro=2), learning_rate=1e-2, leaf_modules=leafs)
        norms = []
        try:
            for step in range(6):
                x = torch.randn(2, 8, generator=torch.Generator().manual_seed(step + 10 * engine.rank))
                engine.backward(engine(x))
                norms.append(engine.step().grad_norm)
            found.append((norms, _content(engine.module)))
        except ModelError as error:
            found.append(str(error))
        finally:
            engine.close()
    return found


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("how", ["keyword", "behind", "skipped"])
def test_hidden_states_by_keyword(rank_pool, how, carried):
    """`other` is in the block and not used: its gradient is zero. `skipped`: some steps do not run the second block."""
    for plain, leaf in rank_pool(2).run(_by_keyword, how, carried):
        assert leaf[0] == pytest.approx(plain[0], rel=1e-6) and min(plain[0]) > 0


@pytest.mark.parametrize(
    "how, words",
    [("only", "was given only by keyword only"), ("packed", "was given no floating tensor by itself")],
)
def test_what_no_hook_can_see_is_refused_by_name(rank_pool, how, words):
    for _, leaf in rank_pool(2).run(_by_keyword, how, True):
        assert f"leaf module blocks.0 (Keyword) {words}" in leaf and "leaf_modules" in leaf
        assert ("name modules within it, such as its blocks" in leaf) == (how == "packed")


SMALL = {**shapes.config_dict("llama-tiny"), "num_hidden_layers": 3}


def _zero3(prefetch):
    return {"stage3_prefetch_bucket_size": prefetch, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 1000,
            "leaf_module": {"classes": ["LlamaDecoderLayer"]}}  # fmt: skip


def _gathers(prefetch, policy):
    """Names of what DeepSpeed gathers together, in the order of a micro step, once it has its trace."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    from bigtrain.engine import Engine
    from bigtrain.models import build_model, enable_activation_checkpointing

    cfg = config(3, **_zero3(prefetch))
    model = build_model(SMALL, ds_config=cfg, seed=5)
    if policy is not None:
        enable_activation_checkpointing(model, policy=policy)
    engine = Engine(model.train(), ds_config=cfg, learning_rate=1e-2)
    names = {id(p): n for n, p in engine.module.named_parameters()}
    owner, name = coordinator.PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__all_gather_params_"
    gather, seen = getattr(owner, name), []

    def watched(self, params, forward, quantize=False):
        if group := sorted(names[id(p)] for p in params if p.ds_status == coordinator.ZeroParamStatus.NOT_AVAILABLE):
            seen.append(group)
        return gather(self, params, forward, quantize)

    setattr(owner, name, watched)
    try:
        for _ in range(3):
            seen.clear()
            ids = torch.arange(9).view(1, 9)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    finally:
        setattr(owner, name, gather)
    engine.close()
    return list(seen)


@pytest.mark.parametrize(("prefetch", "policy", "first"), [(0, None, 0), (0, "full", 0), (100_000, "full", 2)])
def test_the_plan_gathers_what_deepspeed_does(rank_pool, prefetch, policy, first):
    """In blocks; `first`: the modules around them gather ahead too, which the plan does not know."""
    from bigtrain.plan import plan_input
    from bigtrain.plan.device import Run, sharding
    from bigtrain.plan.tape import Tape

    plan = plan_input(SMALL, ds_config={"zero_optimization": {"stage": 3, **_zero3(prefetch)}}, world_size=2, seq_len=9,
                      micro_batch=1, device="cpu", checkpointing=policy or "none")  # fmt: skip
    shards = sharding(plan, Tape())
    Run(plan, Tape(), shards)
    groups = [group for stop in shards.trace.micro_step(1) for group in stop.gathered]
    planned = [sorted(plan.parameters.items[i].name for i in group) for group in groups]
    real = rank_pool(2).run(_gathers, prefetch, policy)[0]

    def of_blocks(found):
        return [inside for group in found[first:] if (inside := [name for name in group if ".layers." in name])]

    assert of_blocks(real) == of_blocks(planned) and len(of_blocks(real)) >= 6
