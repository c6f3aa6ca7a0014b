"""What a part in tiles keeps, makes and refuses."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigtrain.errors import ModelError
from bigtrain.models import compile_blocks, enable_activation_checkpointing, feed_forwards, skeleton, tile_mlp
from tests.ranks import families, zoo


class Feed(nn.Module):
    def __init__(self, width=16, inner=64, dropout=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Centred(Feed):
    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class Block(nn.Module):
    def __init__(self, feed=None):
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(16), feed or Feed()

    def forward(self, x):
        return x + self.feed(self.norm(x))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator made."""

    def __init__(self):
        super().__init__()
        self.elems = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elems = max([self.elems, *made])
        return out


@pytest.mark.parametrize("policy", [None, "full", "attention", "selective", "offload"])
def test_nothing_as_large_as_all_tokens_by_the_inner_width_is_ever_made(policy):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    whole = copy.deepcopy(model)
    tile_mlp(model, 8, "Feed")
    model[0].feed.runs = 0  # the trial
    if policy:
        enable_activation_checkpointing(model, "Block", policy=policy)
    x = torch.randn(2, 50, 16)
    with Largest() as seen:
        model(x).square().sum().backward()
    with Largest() as before:
        whole(x).square().sum().backward()
    assert before.elems == 2 * 50 * 64 and seen.elems == 2 * 50 * 16
    for mine, theirs in zip(model.parameters(), whole.parameters()):
        # fp32: 100 terms in another order
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.abs().max()))
    # 13 tiles in forward and as many in backward: a recompute of the block ends where the part begins.
    assert [block.feed.runs for block in model] == [26, 26]


class AddsInPlace(Block):
    def forward(self, x):
        out = self.feed(self.norm(x))
        out += x  # as Falcon's blocks do
        return out


def test_a_block_may_add_in_place_to_what_its_tiles_gave():
    torch.manual_seed(0)
    model = nn.Sequential(AddsInPlace(), AddsInPlace())
    whole = copy.deepcopy(model)
    tile_mlp(model, 8, "Feed")
    x = torch.randn(2, 50, 16)
    out, expected = model(x), whole(x)
    assert torch.allclose(out, expected, atol=1e-6)  # products of other sizes
    for one in (out, expected):
        one.square().sum().backward()
    for mine, theirs in zip(model.parameters(), whole.parameters()):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5 * float(theirs.grad.abs().max()))


def test_weight_gradients_of_many_bf16_tiles_are_as_good_as_of_the_whole():
    torch.manual_seed(0)
    exact = Feed(16, 48).double()
    low = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({k: v.double() for k, v in low.state_dict().items()})
    tiled = copy.deepcopy(low)
    tile_mlp(nn.ModuleList([tiled]), 16, "Feed")
    x = torch.randn(1, 2048, 16).bfloat16()
    for module, given in ((exact, x.double()), (low, x), (tiled, x)):
        module(given).sum().backward()

    def error(module, name):
        right = exact.get_parameter(name).grad
        return float((module.get_parameter(name).grad.double() - right).norm() / right.norm())

    for name, _ in exact.named_parameters():
        # 128 tiles: each product is rounded (2^-9 at most, at random), their fp32 sum once more. In bf16 sums it would be ten times that.
        assert error(tiled, name) <= error(low, name) + 2**-9, name


def test_without_gradients_and_in_evaluation_the_values_are_the_same_and_nothing_is_kept():
    torch.manual_seed(0)
    block = Block().eval()
    x = torch.randn(3, 11, 16)
    want = block(x)
    tile_mlp(block, 4, Feed)
    with torch.no_grad():
        out = block(x)
    assert torch.allclose(out, want, atol=1e-6) and not out.requires_grad
    assert torch.allclose(block(x), want, atol=1e-6) and block(x).requires_grad
    block.requires_grad_(False)
    assert not block(x).requires_grad and block(x.requires_grad_()).requires_grad
    assert [name for name, _ in block.named_parameters()] == [n for n, _ in Block().named_parameters()]
    again = copy.deepcopy(block)
    nn.init.zeros_(again.feed.down.weight)
    assert not torch.equal(again(x), block(x))  # a copy computes with its own weights


def test_autocast_of_forward_holds_in_backward():
    torch.manual_seed(0)
    whole = Block()
    tiled = copy.deepcopy(whole)
    tile_mlp(tiled, 8, "Feed")
    x = torch.randn(1, 16, 16)
    for block in (whole, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            out = block.feed(x)
        out.float().sum().backward()
    for mine, theirs in zip(tiled.feed.parameters(), whole.feed.parameters()):
        # Products of bf16 numbers: one rounding of 2^-9 for each of two tiles, and of their terms.
        assert torch.allclose(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2 * float(theirs.grad.abs().max()))


def test_a_weight_changed_before_backward_and_dropout_added_later_are_errors():
    block = Block()
    tile_mlp(block, 4, "Feed")
    out = block(torch.randn(1, 9, 16))
    with torch.no_grad():
        block.feed.up.weight.add_(1)
    with pytest.raises(ModelError, match="changed in place between forward and backward"):
        out.sum().backward()
    block.feed.drop.p = 0.1
    with pytest.raises(ModelError, match=r"drop is a Dropout of 0.1: in tiles"):
        block(torch.randn(1, 9, 16))
    block.eval()(torch.randn(1, 9, 16))


@pytest.mark.parametrize(
    ("model", "classes", "text"),
    [
        (lambda: Block(Centred()), "Centred", r"feed \(Centred\) .* depends on other tokens"),
        (lambda: Block(Feed(dropout=0.1)), "Feed", r"feed \(Feed\) .* drop is a Dropout of 0.1"),
        (lambda: Block(nn.Bilinear(16, 16, 16)), "Bilinear", r"feed \(Bilinear\)"),
        (lambda: Block(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))), "Sequential", "another shape"),
        (Block, "Fed", "no module of class Fed"),
        (Block, None, "Block declares no blocks"),
        (lambda: families.make("mixtral"), None, r"model.layers.0.mlp \(MixtralSparseMoeBlock\) .* routes tokens to experts"),
        (lambda: families.make("deepseek_v3"), None, r"model.layers.1.mlp \(DeepseekV3MoE\) .* routes tokens"),
        (lambda: families.make("opt"), None, r"model.decoder.layers.0 \(OPTDecoderLayer\) has no feed-forward module"),
        (lambda: families.make("gpt2"), None, r"transformer.h.0.mlp \(GPT2MLP\) .* dropout is a Dropout of 0.1"),
    ],
)
def test_what_cannot_be_tiled_is_refused_by_name(model, classes, text):
    with pytest.raises(ModelError, match=text):
        tile_mlp(model(), 4, classes)


def test_a_tile_has_at_least_one_token():
    for tokens in (0, -1, True, 2.0):
        with pytest.raises(ModelError, match="mlp_tile_tokens is"):
            tile_mlp(Block(), tokens, "Feed")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "llava"])
def test_families_whose_parts_are_found(family):
    model = families.make(family)
    found = feed_forwards(model)
    assert len(found) == (4 if family == "llava" else 2) and all(name.endswith(".mlp") for name in found)


def test_compiled_and_in_tiles_do_not_go_together():
    from transformers import AutoConfig, AutoModelForCausalLM

    made = [AutoModelForCausalLM.from_config(AutoConfig.for_model(**zoo.source("llama"))) for _ in range(2)]
    compile_blocks(made[0])
    with pytest.raises(ModelError, match=r"model\.layers\.0 is compiled"):
        tile_mlp(made[0], 4)
    tile_mlp(made[1], 4)
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp runs in tiles"):
        compile_blocks(made[1])


def test_a_model_without_values_tells_as_well():
    from transformers import AutoConfig

    for name, parts in (("llama", 2), ("gpt2", 2)):
        assert len(feed_forwards(skeleton(AutoConfig.for_model(**zoo.source(name))))) == parts
