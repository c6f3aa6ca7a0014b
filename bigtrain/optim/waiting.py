"""Which modules wait for which weights, where an update goes on beside forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from bigtrain.errors import BypassError


class ForwardWaits:
    """Lets the modules of a model wait for their own weights as they are called.

    A forward that calls a block's parts from outside (`layer.mlp(layer.norm(x))`) passes the block's hook by. The first forward, before
    any update, shows which blocks are not called; from then on the model waits for them as its forward begins, as for those that one
    forward leaves out. A block that is passed by later for the first time may have been read before its update. Left out, as by layer
    dropout, it gets no gradient; if it gets one from that forward, it was read. It may get one from another forward of the same step,
    which called it, and its shared weights may get one from other blocks: neither says anything.

    Args:
        module: the model.
        last: the position after which a parameter is updated; of those that are updated at all.
        wait: waits up to a position, if nothing has; returns up to which has been waited.

    Raises:
        BypassError: later, in backward.
    """

    def __init__(self, module: torch.nn.Module, last: Mapping[torch.nn.Parameter, int], wait: Callable[[int], int]):
        self._module, self._wait = module, wait
        self._positions = {m: max((last[p] for p in ps if p in last), default=-1) for m, ps in who_waits(module).items()}
        self._blocks = {block: self._positions[block] for blocks in _outermost_lists(module) for block in blocks}
        self._owners = _owners(module, self._blocks)
        self._left: dict[torch.nn.Module, int] = {}  # blocks that the forward under way has not called yet
        self._waited = -1  # up to where that forward waited as it began
        self._bypassed = -1  # up to where blocks that some forward did not call reach
        self._suspects: frozenset[torch.nn.Module] = frozenset()  # blocks that the last forward may have read too early
        self._guards: list[Any] = []  # hooks of their parameters

    def register(self) -> None:
        """Put the hooks on. A compiled block waits before its graph; a deep copy of the model, which has these functions too, is ignored."""
        for part, position in self._positions.items():
            if part is not self._module and position >= 0:
                part.register_forward_pre_hook(torch.compiler.disable(self._calling(position)))
        self._module.register_forward_pre_hook(torch.compiler.disable(self._begin))
        self._module.register_forward_hook(torch.compiler.disable(self._end))

    def _begin(self, module: torch.nn.Module, *_: Any) -> None:
        if module is not self._module:
            return
        self._left = dict(self._blocks)
        self._waited = self._wait(max(self._bypassed, self._positions[module]))
        if torch.is_grad_enabled():  # an evaluation says nothing of the forward before it
            self._suspect(frozenset())

    def _calling(self, position: int) -> Callable[..., None]:
        def called(part: torch.nn.Module, *_: Any) -> None:
            self._left.pop(part, None)
            if torch.is_grad_enabled():  # by itself, behind the model's forward
                self._suspect(self._suspects - {part})
            self._wait(position)

        return called

    def _end(self, module: torch.nn.Module, *_: Any) -> None:
        if module is not self._module:
            return
        if torch.is_grad_enabled():
            self._suspect(frozenset(block for block, position in self._left.items() if position > self._waited))
        self._bypassed = max(self._bypassed, *self._left.values(), -1)
        self._left = {}

    def _suspect(self, blocks: frozenset[torch.nn.Module]) -> None:
        """Refuse gradients of what is a part of these blocks only."""
        if blocks != self._suspects:
            for hook in self._guards:
                hook.remove()
            self._guards = [p.register_hook(_refuse) for p, of in self._owners.items() if p.requires_grad and of <= blocks]
            self._suspects = blocks


def _refuse(_: torch.Tensor) -> NoReturn:
    raise BypassError(
        "a block of the model was used without a call of it (its parts or its weights were), for the first time since its weights are updated beside "
        "forward: what was read may be as before the last update. Call the block itself, call it around in the first forward already, or start "
        "again from a checkpoint: the model waits for such blocks if its first forward shows them."
    )


def who_waits(module: torch.nn.Module) -> dict[torch.nn.Module, list[torch.nn.Parameter]]:
    """Which module waits for which parameters when it is called.

    A block (a child of an outermost ModuleList) waits for all inside it; a module outside of blocks for its own. Some weights are
    read without a call of the module that owns them (fused kernels read the head's): so the model itself waits for what it
    registered before its first block, and the last block of each list for whatever outside was registered after it began.
    Without blocks the model waits for everything. What is registered both in a block and outside is waited for by the model: a hook
    on it would lie in the middle of a compiled block.
    """
    lists = _outermost_lists(module)
    blocks = {block for listed in lists for block in listed}
    within = {part for block in blocks for part in block.modules()}
    named = list(module.parameters())
    place = {p: i for i, p in enumerate(named)}
    inside = {p for block in blocks for p in block.parameters()}
    outside = [p for p in named if p not in inside]
    waiting: dict[torch.nn.Module, list[torch.nn.Parameter]] = {block: list(block.parameters()) for block in blocks}
    for part in _outside(module, blocks):
        waiting.setdefault(module if part in within else part, []).extend(part.parameters(recurse=False))
    first = min((place[p] for p in inside), default=len(named))
    waiting[module] += [p for p in outside if place[p] < first]
    for listed in lists:
        begin = min((place[p] for block in listed for p in block.parameters()), default=len(named))
        waiting[listed[-1]] += [p for p in outside if place[p] > begin]
    return waiting


def _outside(module: torch.nn.Module, blocks: Collection[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """What is registered in no block, or outside of blocks too."""
    if module not in blocks:
        yield module
        for child in module.children():
            yield from _outside(child, blocks)


def _owners(module: torch.nn.Module, blocks: Collection[torch.nn.Module]) -> dict[torch.nn.Parameter, set[torch.nn.Module]]:
    """The blocks that have a part in each parameter, but for those of what is called outside of blocks."""
    outside = {p for part in _outside(module, blocks) for p in part.parameters(recurse=False)}
    found: dict[torch.nn.Parameter, set[torch.nn.Module]] = {}
    for block in blocks:
        for param in block.parameters():
            if param not in outside:
                found.setdefault(param, set()).add(block)
    return found


def _outermost_lists(module: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """The children of each ModuleList that lies in no other, in the order of registration.

    What only holds others (a list in a list, a plain Module that groups a stage's layers) is never called: its children stand for it.
    """
    if isinstance(module, torch.nn.ModuleList):
        blocks = list(_that_compute(module.children()))
        return [blocks] if blocks else []
    return [found for child in module.children() for found in _outermost_lists(child)]


def _that_compute(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for module in modules:
        holds_only = type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__
        if holds_only and next(module.parameters(recurse=False), None) is None:
            yield from _that_compute(module.children())
        else:
            yield module
