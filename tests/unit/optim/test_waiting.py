"""Blocks that nothing calls: what holds others only, and blocks whose parts the model calls from outside."""

from __future__ import annotations

import pytest
import torch

from bigtrain.optim.waiting import ForwardWaits


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.b(self.a(x))


class Model(torch.nn.Module):
    """Two stages, made by `make` and run by `run`, and a head."""

    def __init__(self, make, run):
        super().__init__()
        self.stages = torch.nn.ModuleList(make() for _ in range(2))
        self.head = torch.nn.Linear(2, 2)
        self.run = run

    def forward(self, x):
        for stage in self.stages:
            x = self.run(stage, x)
        return self.head(x)


def _group():
    stage = torch.nn.Module()
    stage.blocks, stage.down = torch.nn.ModuleList([Block()]), torch.nn.Linear(2, 2)
    return stage


def _held():
    stage = _group()
    stage.scale = torch.nn.Parameter(torch.ones(2))
    return stage


# How stages are made and run, and how far the model waits before anything else (its parameters are counted from 0).
SORTS = {
    "called": (Block, lambda stage, x: stage(x), -1),
    "lists": (lambda: torch.nn.ModuleList([Block(), Block()]), lambda stage, x: stage[1](stage[0](x)), -1),
    "groups": (_group, lambda stage, x: stage.down(stage.blocks[0](x)), -1),
    "dicts": (lambda: torch.nn.ModuleDict({"a": Block()}), lambda stage, x: stage["a"](x), -1),
    "held": (_held, lambda stage, x: stage.down(stage.blocks[0](x * stage.scale)), 15),
    "parts": (Block, lambda stage, x: stage.b(stage.a(x)), 9),
}


@pytest.mark.parametrize("sort", SORTS)
def test_weights_of_blocks_that_are_not_called_are_waited_for(sort):
    make, run, begins = SORTS[sort]
    read, root = _second_forward(Model(make, run))
    assert len(read) >= 5 and min(read) >= 0
    assert root == [begins]


def _second_forward(model):
    """How far beyond a layer's own weights was waited as each was called, and how far as the model was."""
    number = {p: i for i, p in enumerate(model.parameters())}
    asked, read, root = [], [], []

    def wait(position):
        asked.append(position)
        return max(asked)

    ForwardWaits(model, number, wait).register()
    model.register_forward_pre_hook(lambda *_: root.append(max(asked)))

    def reads(module, *_):
        read.append(max(asked) - max(number[p] for p in module.parameters()))

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(reads)
    model(torch.ones(1, 2))  # no update is under way yet
    asked.clear(), read.clear(), root.clear()
    model(torch.ones(1, 2))
    return read, root


def test_a_part_of_a_block_that_the_model_calls_by_itself_too_is_waited_for():
    """`Model.head` was read as before its update: it counted as the block's alone."""
    model = Model(Block, lambda stage, x: stage(model.head(x)))
    model.stages[1].b = model.head
    read, root = _second_forward(model)
    assert len(read) == 7 and min(read) >= 0
    assert root == [7]
