"""Where the parameters of a model stand in a step."""

from __future__ import annotations

from typing import NamedTuple

from bigtrain.plan.families import ModelParameters
from bigtrain.plan.family_others import HEADS


class Parts(NamedTuple):
    """Indices of the parameters by where they stand in a step.

    Attributes:
        before, after: outside of the blocks, in model order.
        head: the matrix that makes the logits: by its name, or (of a list of shapes) the largest outside of the blocks, the last of
            two equals.
        of_block: feed-forward, attention and other parameters of each block.
    """

    before: list[int]
    after: list[int]
    head: list[int]
    of_block: dict[int, tuple[list[int], list[int], list[int]]]


def parts_of(parameters: ModelParameters) -> Parts:
    """Of a model."""
    items, blocks = parameters.items, parameters.blocks
    outside = [i for i, p in enumerate(items) if p.block is None]
    last_block = max((i for members in blocks.values() for i in members), default=-1)
    matrices = [i for i in outside if len(items[i].shape) == 2]
    kept = {one for _, one in parameters.tied} or {HEADS.get(parameters.kind, "lm_head.weight")}
    # With a vocabulary of bytes a table of positions or another layer of the head is larger.
    named = [i for i in matrices if items[i].name in kept]
    head = named or ([max(matrices, key=lambda i: (items[i].elems, i))] if matrices else [])
    of_block = {block: _parts_of_block(parameters, members) for block, members in blocks.items()}
    return Parts([i for i in outside if i < last_block], [i for i in outside if i >= last_block], head, of_block)


def _parts_of_block(parameters: ModelParameters, members: list[int]) -> tuple[list[int], list[int], list[int]]:
    """By the names that all families use."""
    feed: list[int] = []
    attention: list[int] = []
    rest: list[int] = []
    for i in members:
        name = parameters.items[i].name.lower()
        if "norm" in name or ".ln_" in name:
            rest.append(i)
        else:
            (attention if "attn" in name or "attention" in name else feed).append(i)
    return feed, attention, rest


def feed_forward(parameters: ModelParameters) -> list[list[int]]:
    """The feed-forward parameters of each block."""
    return parameters.fact("feed-forward", lambda: [feed for feed, _, _ in parts_of(parameters).of_block.values()])
