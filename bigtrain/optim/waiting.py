"""Which modules wait for which weights, where an update goes on beside forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

import torch

from bigtrain.errors import BypassError


def who_waits(module: torch.nn.Module) -> list[tuple[torch.nn.Module, list[torch.nn.Parameter]]]:
    """Which module waits for which parameters when it is called.

    A block (a child of an outermost ModuleList) waits for all inside it; a module outside of blocks for its own. Some weights are
    read without a call of the module that owns them (fused kernels read the head's): so the model itself waits for what it
    registered before its first block, and the last block of each list for whatever outside was registered after it began.
    Without blocks the model waits for everything. Blocks that are never called: see `watch_bypassed`.
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
    """The children of each ModuleList that lies in no other, in the order of registration.

    What only holds others (a list in a list, a plain Module that groups a stage's layers) is never called: its children stand for it.
    """
    if isinstance(module, torch.nn.ModuleList):
        blocks = list(_that_compute(module.children()))
        return [blocks] if blocks else []
    return [found for child in module.children() for found in _outermost_lists(child)]


def _that_compute(modules: Iterable[torch.nn.Module]) -> Iterable[torch.nn.Module]:
    for module in modules:
        holds_only = type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__
        if holds_only and next(module.parameters(recurse=False), None) is None:
            yield from _that_compute(module.children())
        else:
            yield module


def _refuse(_: torch.Tensor) -> NoReturn:
    raise BypassError(
        "a block of the model was used without a call of it (its parts or its weights were), for the first time since its weights are updated beside "
        "forward: what was read may be as before the last update. Call the block itself, call it around in the first forward already, or start "
        "again from a checkpoint: the model waits for such blocks if its first forward shows them."
    )


def _owners(
    module: torch.nn.Module, blocks: Collection[torch.nn.Module]
) -> dict[torch.nn.Parameter, set[torch.nn.Module | None]]:
    """The blocks that each parameter is a part of; None stands for what is in no block. Shared ones have several."""
    found: dict[torch.nn.Parameter, set[torch.nn.Module | None]] = {}

    def visit(part: torch.nn.Module, block: torch.nn.Module | None) -> None:
        block = block or (part if part in blocks else None)
        for param in part.parameters(recurse=False):
            found.setdefault(param, set()).add(block)
        for child in part.children():
            visit(child, block)

    visit(module, None)
    return found


def watch_bypassed(
    module: torch.nn.Module, positions: Mapping[torch.nn.Module, int], waited: Callable[[], int]
) -> Callable[[], int]:
    """Up to which position the model has to wait before its forward begins: that of blocks which it uses without calling them.

    A forward that calls a block's parts from outside (`layer.mlp(layer.norm(x))`) passes the block's hook by. The first forward, before
    any update, shows which blocks are not called; from then on the model waits for them, as for those that one forward leaves out.
    A block that is passed by later for the first time may have been read before its update. Left out, as by layer dropout, it gets no
    gradient; if it gets one from that forward, it was read. It may get one from another forward of the same step, which called it, and
    its shared weights may get one from other blocks: neither says anything.

    Args:
        module: the model.
        positions: what its modules wait for when they are called.
        waited: up to which position the update has been waited for already.

    Raises:
        BypassError: later, in backward.
    """
    of = {block: positions[block] for blocks in _outermost_lists(module) for block in blocks if block in positions}
    owners = _owners(module, of)
    left: dict[torch.nn.Module, int] = {}
    found, fresh = [-1], [-1]
    guards: dict[Any, set[torch.nn.Module | None]] = {}  # hooks of parameters, and the blocks that these are parts of

    # Functions, not methods: a deep copy of the model must not copy what they know.
    @torch.compiler.disable
    def begin(which: torch.nn.Module, *_: Any) -> None:
        if which is module:
            left.update(of)
            fresh[0] = max(found[0], waited(), positions.get(module, -1))  # the model waits for the last of these next
            if torch.is_grad_enabled():  # an evaluation says nothing of the forward before it
                trust(None)

    @torch.compiler.disable
    def called(block: torch.nn.Module, *_: Any) -> None:
        left.pop(block, None)
        if guards and torch.is_grad_enabled():  # by itself, behind the model's forward
            trust(block)

    def trust(block: torch.nn.Module | None) -> None:
        for hook in [hook for hook, parts in guards.items() if block is None or block in parts]:
            hook.remove()
            del guards[hook]

    @torch.compiler.disable
    def end(which: torch.nn.Module, *_: Any) -> None:
        if which is module:
            late = {block for block, position in left.items() if position > fresh[0]}
            if late and torch.is_grad_enabled():
                trained = [(p, parts) for p, parts in owners.items() if p.requires_grad and parts <= late]
                guards.update((p.register_hook(_refuse), parts) for p, parts in trained)
            found[0] = max(found[0], *left.values(), -1)
            left.clear()

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)
    for block in of:
        block.register_forward_pre_hook(called)
    return lambda: found[0]
