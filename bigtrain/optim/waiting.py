"""Which modules wait for which weights, where an update goes on beside forward."""

from __future__ import annotations

import torch


def who_waits(module: torch.nn.Module) -> list[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """Which module waits for which parameters when it is called.

    A block (a child of an outermost ModuleList) waits for all inside it; a module outside of blocks for its own. Some weights are
    read without a call of the module that owns them (fused kernels read the head's): so the model itself waits for what it
    registered before its first block, and the last block of each list for whatever outside was registered after it began.
    Without blocks the model waits for everything.
    """
    lists = _outermost_lists(module)
    inside = {id(p) for blocks in lists for b in blocks for p in b.parameters()}
    within = {id(m) for blocks in lists for b in blocks for m in b.modules()}
    named = list(module.parameters())
    place = {id(p): i for i, p in enumerate(named)}
    outside = [p for p in named if id(p) not in inside]
    first = min((place[i] for i in inside), default=len(named))
    found = [(m, list(m.parameters(recurse=False))) for m in module.modules() if id(m) not in within]
    found.append((module, [p for p in outside if place[id(p)] < first]))
    for blocks in lists:
        found += [(b, list(b.parameters())) for b in blocks]
        begin = min((place[id(p)] for b in blocks for p in b.parameters()), default=len(named))
        found.append((blocks[-1], [p for p in outside if place[id(p)] > begin]))
    return [(m, params) for m, params in found if params]


def _outermost_lists(module: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """The children of each ModuleList that lies in no other, in the order of registration."""
    if isinstance(module, torch.nn.ModuleList):
        return [list(module)] if len(module) else []
    return [found for child in module.children() for found in _outermost_lists(child)]
